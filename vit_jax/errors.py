"""Errors that a run may end with, each stated in one sentence."""

import contextlib
import errno
import math
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence

# What no storage library raises because of a store or a file: these are bugs and keep their traceback.
BUGS = (AssertionError, AttributeError, KeyError, TypeError)
# What NumPy raises when it reads a damaged .npz file.
NPZ_ERRORS = (OSError, ValueError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error)

# What follows the question mark of an address in a text, up to a space or a quotation mark, without final punctuation.
END = r"""[;:,.)\]'"]*(?:[\s"]|$)"""
QUERY = re.compile(rf"""(https?://[^\s?"]*\?)(?!\.\.\.{END})[^\s"]+?(?={END})""", re.IGNORECASE)


def without_queries(text: str) -> str:
    """Returns a text with `?...` in place of `?` and what follows it in addresses, which may grant access to a file."""
    return QUERY.sub(r"\1...", text)


class UserError(Exception):
    """A fault that the user can mend, in usage, data, disk or store: commands print the sentence and exit with 2."""

    def __init__(self, sentence: str):
        """Keeps the sentence, `without_queries`."""
        super().__init__(without_queries(sentence))


class MissingData(UserError):
    """Data that a configuration names are not here; the sentence says how to prepare them."""


class WrongText(UserError):
    """A text of a configuration cannot be read.

    Attributes:
        texts: the text as it was written, and the part of it that is wrong.
    """

    def __init__(self, sentence: str, *texts: str):
        """Takes the sentence and the texts."""
        super().__init__(sentence)
        self.texts = texts


class NoAnswer(UserError):
    """A server did not answer in time; it may still do what it was asked to."""


class LostHosts(Exception):
    """Hosts did not arrive where the others waited: command lines print the sentence and exit with code 134."""


class Preempted(Exception):
    """The run was asked to end, and has saved what there was: commands print the sentence and exit with code 42."""


class NonFiniteLoss(Exception):
    """Too many losses, or a state, that are not finite: commands print the sentence and exit with code 1."""


def refuse(*cases: tuple[object, str]) -> None:
    """Raises UserError with the sentence of the first case whose condition is true."""
    for applies, sentence in cases:
        if applies:
            raise UserError(sentence)


CODES: dict[type[BaseException], int] = {
    UserError: 2,
    NonFiniteLoss: 1,
    Preempted: 42,
    LostHosts: 134,  # that of SIGABRT: a fault of the infrastructure
    KeyboardInterrupt: 130,
}


def exit_code(error: BaseException) -> int:
    """Returns the exit code of a command that ends with an error; 1 for a bug."""
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), 1)


@contextlib.contextmanager
def user_errors(what: str, *kinds: type[Exception], advice: str = "") -> Iterator[None]:
    """Turns errors of libraries into a `UserError`: "`what`: reason; `advice`".

    A `UserError` passes as it is. If `kinds` contains `Exception`, `BUGS` pass unchanged too, unless `kinds` names
    them.

    Args:
        what: what failed, such as "cannot read FILE".
        *kinds: the errors to turn; `OSError` if none is given.
        advice: what the user can do about it.

    Raises:
        UserError: in place of an error of these kinds.
    """
    kinds = kinds or (OSError,)
    try:
        yield
    except kinds as error:
        is_bug = Exception in kinds and isinstance(error, BUGS) and type(error) not in kinds
        if is_bug or isinstance(error, UserError):
            raise
        helps = advice and not out_of_files(error)
        raise UserError(f"{what}: {reason(error)}" + (f"; {advice}" if helps else "")) from error


@contextlib.contextmanager
def errors_of(subject: str) -> Iterator[None]:
    """Puts a subject before the sentence of a `UserError` that is raised inside: "`subject`: sentence".

    If the subject is NAME=VALUE and the sentence begins with "VALUE: ", this beginning is removed first.

    Raises:
        UserError: in place of the one that is raised inside.
    """
    subject = without_queries(subject)
    try:
        yield
    except UserError as error:
        value = subject.partition("=")[2]
        raise UserError(f"{subject}: {str(error).removeprefix(f'{value}: ')}") from error


def reason(error: BaseException) -> str:
    """Returns the first line of an error's message; of an `OSError`, the text without its number and path.

    If this process has too many files open, the reason says so with the limit, whatever the error says in addition.
    """
    text = str(getattr(error, "strerror", None) or error).strip().partition("\n")[0]
    return out_of_files(error) or text.rstrip(".") or type(error).__name__


def out_of_files(error: BaseException) -> str | None:
    """Returns the reason of an error because this process has too many files open; None: it is another error.

    The reason states the limit. Libraries have messages of their own, which all contain the words of the system.
    """
    words = os.strerror(errno.EMFILE)
    if not re.search(rf"{words}(?! in system)", str(error)):
        return None
    import resource  # which Windows does not have

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"this process has as many files open as it may, {limit:,}; raise this limit with ulimit -n"


def format_rounded_up(value: float, digits: int) -> str:
    """Returns a positive number rounded up to `digits` significant digits, for amounts that must suffice."""
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    rounded = math.ceil(value * scale * (1 - 1e-12))  # 0.1 is 0.1, not 0.11
    return f"{rounded / scale:.{digits + 1}g}"


def printable(text: object, most: int = 20_000) -> str:
    """Returns text from an unknown source as one line without control characters, of at most `most` characters."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(text)[:most])[:most]


def first_names(names: Sequence[str]) -> str:
    """Returns the first five of some names and the number of the others, for a message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def encode_text(text: str) -> bytes:
    """Returns text as UTF-8, to be written or hashed; bytes of names that are not UTF-8 are escaped, as `\\udce9`."""
    return text.encode(errors="backslashreplace")
