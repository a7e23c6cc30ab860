"""Turns errors in the file of a recipe into one sentence with the line, because the user may have written the file."""

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from vit_jax import UserError, nearest, reason
from vit_jax.config.base import get_config
from vit_jax.config.field_names import flatten_config
from vit_jax.config.synonyms import SYNONYMS

TYPES = {"int": "a whole number", "float": "a number", "bool": "True or False", "str": "a text", "tuple": "a tuple"}
# The messages of ConfigDict for an unknown field, and for a value of another type than the field's.
UNKNOWN = re.compile(r'(?:Key|instead of) "(\w+)"')
NEAR = re.compile(r'Did you mean "(\w+)" instead of')
WRONG_TYPE = re.compile(
    r"""override field ['"](?P<field>[\w.]+).*?\. (?P<value>.*) is of original type <class '\w+'> .*"""
    r"""to type <class '(?P<type>\w+)'>""",
    re.S,
)


@contextlib.contextmanager
def recipe_errors(file: Path) -> Iterator[None]:
    """Turns an exception in the code of a recipe into a UserError with the file and the line.

    A ValueError passes unchanged, because a recipe raises it to refuse its argument. So do exceptions whose traceback
    does not lead through the recipe's folder.

    Args:
        file: the file of the recipe.

    Raises:
        UserError: in place of any other exception.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        line = find_line(error, file)
        if not line or type(error) is ValueError:
            raise
        raise UserError(f"{line}: {describe(error)}") from error


def find_line(error: BaseException, file: Path) -> str | None:
    """Returns `FILE, line N` for the last line that was executed in the recipe's folder, or that has a syntax error.

    Returns None if the error did not pass through that folder or its subfolders.
    """
    folder = file.resolve().parent
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames += [(error.filename or "", error.lineno)] if isinstance(error, SyntaxError) else []
    own = [(Path(name), line) for name, line in frames if Path(name).resolve().is_relative_to(folder)]
    return f"{own[-1][0]}, line {own[-1][1]}" if own else None


def describe(error: BaseException) -> str:
    """Returns what is wrong, as the end of a sentence; shorter than the message for known errors of ConfigDict."""
    text = str(error.args[0]) if error.args else ""
    if isinstance(error, SyntaxError):
        return f"{error.msg}."
    if isinstance(error, ImportError) and error.name == "configs" and error.path:
        return f"{text.partition(' (')[0]}; delete {error.path}, which hides the recipes of the package."
    if isinstance(error, AttributeError | KeyError) and (match := UNKNOWN.search(text)):
        word, same_group = match[1], NEAR.search(text)
        near = (
            same_group[1]
            if same_group and word not in SYNONYMS
            else nearest(word, flatten_config(get_config()), SYNONYMS)
        )
        hint = (
            near
            if near and " " in near
            else f"did you mean {near!r}?"
            if near
            else "vit_jax/config/fields.py lists them."
        )
        return f"unknown config field {word!r}; {hint}"
    if isinstance(error, TypeError) and (match := WRONG_TYPE.search(text)):
        wanted = TYPES.get(match["type"], match["type"])
        return f"the value {match['value']!r} of {match['field']} must be {wanted}."
    return f"{type(error).__name__}: {reason(error)}."
