"""Errors that a run may end with, told in one sentence."""

import difflib
from collections.abc import Iterable

# What no store and no file says, whatever library speaks with it: these keep their traceback.
BUGS = (AssertionError, AttributeError, KeyError, TypeError)


class UserError(Exception):
    """Wrong usage: command lines print the sentence and exit with code 2."""


class NoAnswer(UserError):
    """A server did not answer in time; what it was asked to do it may still do."""


class LostHosts(Exception):
    """Hosts did not come where the others waited: command lines print the sentence and exit with code 134."""


class Preempted(Exception):
    """The machine is wanted back; what was learnt is saved: command lines print the sentence and exit with code 42."""


class NonFiniteLoss(Exception):
    """More non-finite losses in a row than allowed: command lines print the sentence and exit with code 1."""


CODES: dict[type[BaseException], int] = {
    UserError: 2,
    NonFiniteLoss: 1,
    Preempted: 42,
    LostHosts: 134,  # as SIGABRT: infrastructure
    KeyboardInterrupt: 130,
}


def exit_code(error: BaseException) -> int:
    """Returns the exit code of a command that an error ends; 1 for a bug."""
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), 1)


def shown(text: object, most: int = 20_000) -> str:
    """Returns a text that may be a stranger's as one line that does nothing to a terminal, cut to `most` characters."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(text)[:most])[:most]


def choose(what: str, word: str, options: Iterable[str], where: str = "") -> str:
    """Returns `word` if it is one of `options`; `where` says where they are listed, if they are many.

    Raises:
        UserError: `word` is none of them; names the nearest, or all of them if none is near.
    """
    options = list(options)
    if word in options:
        return word
    folded = {option.lower(): option for option in options}
    near = [folded[found] for found in difflib.get_close_matches(str(word).lower(), folded, n=1)]
    otherwise = f"{where} lists them." if where else f"choose from {', '.join(sorted(options))}."
    hint = f"did you mean {near[0]!r}?" if near else otherwise
    raise UserError(f"unknown {what} {word!r}; {hint}")
