"""What is wrong in the file of a recipe, as a sentence: the user wrote it, and a traceback would hide the line."""

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from vit_jax import UserError, nearest, reason
from vit_jax.config.base import get_config
from vit_jax.config.names import flatten_config
from vit_jax.config.synonyms import SYNONYMS

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
def recipe_errors(file: Path) -> Iterator[None]:
    """Turns what the code of a recipe raises into a sentence with its file and line.

    Raises:
        UserError: in place of any error that passes through the recipe's file, or one beside it, but for its own
            ValueErrors, by which a recipe refuses an argument.
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
    """Returns `FILE, line N`: the last line that was executed in the recipe's folder, or that cannot be parsed."""
    folder = file.resolve().parent
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames += [(error.filename or "", error.lineno)] if isinstance(error, SyntaxError) else []
    own = [(Path(name), line) for name, line in frames if Path(name).resolve().is_relative_to(folder)]
    return f"{own[-1][0]}, line {own[-1][1]}" if own else None


def describe(error: BaseException) -> str:
    """Returns what is wrong, without what ConfigDict adds to it, as the end of a sentence."""
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
