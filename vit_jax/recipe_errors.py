"""What is wrong in the file of a recipe, as a sentence: the user wrote it, and a traceback would hide the line."""

import contextlib
import re
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from vit_jax.errors import UserError, nearest, reason
from vit_jax.synonyms import SYNONYMS

TYPES = {"int": "a whole number", "float": "a number", "bool": "True or False", "str": "a text", "tuple": "a tuple"}
# What ConfigDict says of a field that it does not have, and of a value of another type than the field's.
UNKNOWN = re.compile(r'(?:Key|instead of) "(\w+)"')
NEAR = re.compile(r'Did you mean "(\w+)" instead of')
WRONG_TYPE = re.compile(
    r"""override field ['"](?P<field>[\w.]+).*?\. (?P<value>.*) is of original type <class '\w+'> .*"""
    r"""to type <class '(?P<type>\w+)'>""",
    re.S,
)


@contextlib.contextmanager
def recipe_errors(file: Path, fields: Callable[[], Collection[str]]) -> Iterator[None]:
    """Turns what the code of a recipe raises into a sentence with its file and line.

    Args:
        file: of the recipe.
        fields: returns the names of all fields, for a misspelt one.

    Raises:
        UserError: in place of any error that passes through the recipe's file, or one beside it, but for its own
            ValueErrors, by which a recipe refuses an argument.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as raised:
        # The parser of flags replaces some errors; the first that passed through the file is the recipe's.
        found = [(error, find_line(error, file)) for error in list_replaced(raised)]
        own = [(error, line) for error, line in found if line]
        if not own or type(own[-1][0]) is ValueError:
            raise
        error, line = own[-1]
        raise UserError(f"{line}: {describe(error, fields)}") from raised


def list_replaced(error: BaseException | None) -> list[BaseException]:
    """Returns an error and those that were being handled when it was raised, the first that was raised last."""
    return [] if error is None else [error, *list_replaced(error.__context__)]


def find_line(error: BaseException, file: Path) -> str | None:
    """Returns `FILE, line N`: the last line that was executed in the recipe's folder, or that cannot be parsed."""
    folder = file.resolve().parent
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames += [(error.filename or "", error.lineno)] if isinstance(error, SyntaxError) else []
    own = [(Path(name), line) for name, line in frames if Path(name).resolve().is_relative_to(folder)]
    return f"{own[-1][0]}, line {own[-1][1]}" if own else None


def describe(error: BaseException, fields: Callable[[], Collection[str]]) -> str:
    """Returns what is wrong, without what ConfigDict adds to it, as the end of a sentence."""
    text = str(error.args[0]) if error.args else ""
    if isinstance(error, SyntaxError):
        return f"{error.msg}."
    if isinstance(error, AttributeError | KeyError) and (match := UNKNOWN.search(text)):
        word, same_group = match[1], NEAR.search(text)
        near = same_group[1] if same_group and word not in SYNONYMS else nearest(word, fields(), SYNONYMS)
        hint = near if near and " " in near else f"did you mean {near!r}?" if near else "configs/base.py lists them."
        return f"unknown config field {word!r}; {hint}"
    if isinstance(error, TypeError) and (match := WRONG_TYPE.search(text)):
        wanted = TYPES.get(match["type"], match["type"])
        return f"the value {match['value']!r} of {match['field']} must be {wanted}."
    return f"{type(error).__name__}: {reason(error)}."
