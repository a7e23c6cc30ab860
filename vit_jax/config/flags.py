"""Reads a configuration from a command line: --config=FILE.py:ARGUMENT, --config.KEY=VALUE, --workdir=FOLDER."""

import dataclasses
import functools
import re
from collections.abc import Callable
from operator import getitem
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from vit_jax import UserError, choose, hint
from vit_jax.config.fields import EVAL_KINDS, SYNONYMS, current_name, eval_rows
from vit_jax.config.make_config import evaluation, flatten_config
from vit_jax.config.recipes import Recipe, find_recipe
from vit_jax.config.resolve import unset_other_durations

# Type of a field -> (function from the text of a flag to the value, name of the type in messages).
KINDS: dict[type, tuple[Callable[[str], Any], str]] = {
    bool: (flags.BooleanParser().parse, "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    object: (lambda text: text if text == "auto" else int(text), "a whole number, or auto"),
    tuple: (lambda text: parse_numbers(text), "numbers with commas between them"),
}


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """The run that a command line asks for.

    Attributes:
        config: the configuration of the recipe, with the fields that the command line sets.
        workdir: the run's folder; by default `workdirs/<name of the recipe's file>`.
        recipe: the recipe itself, without the fields that the command line sets.
        given: the names of the fields that the command line sets.
    """

    config: ConfigDict
    workdir: str
    recipe: Recipe
    given: frozenset[str]


def parse_command_line(argv: list[str]) -> tuple[ConfigDict, str]:
    """Returns the configuration and the workdir that a command line asks for.

    Takes and raises what `read_command_line` does.
    """
    line = read_command_line(argv)
    return line.config, line.workdir


def read_command_line(argv: list[str]) -> CommandLine:
    """Parses a command line.

    Args:
        argv: the arguments; the first is the program's name.

    Raises:
        UserError: there is no config file, a flag or field is unknown, or a value has the wrong type.
    """
    recipe = find_recipe(argv)
    config = recipe.make_config()
    change_kinds(config, argv)
    fields = flatten_config(config)
    workdir = _parse_workdir([word for word in argv if not word.startswith(("--config.", "--config="))], fields)
    given = dict[str, Any]()
    for word in argv:
        if word.startswith("--config."):
            key, equals, text = word.removeprefix("--config.").partition("=")
            key = choose("config field", current_name(key), fields, "vit_jax/config/fields.py", SYNONYMS)
            bare = not equals and isinstance(fields[key], bool)
            given[key] = parse_value(config, key, "true" if bare else text)
    config.update_from_flattened_dict(given)
    unset_other_durations(config, given)
    return CommandLine(config, workdir or f"workdirs/{recipe.file.stem}", recipe, frozenset(given))


def change_kinds(config: ConfigDict, argv: list[str]) -> None:
    """Gives evaluations the kinds that a command line states, with the fields of these kinds, in place.

    A field that the kind before has too keeps its value. A kind that does not exist is left to be refused later.
    """
    for word in argv:
        match = re.fullmatch(r"--config\.evals\.(\w+)\.kind=(\w+)", word)
        if match and match[1] in config.evals and match[2] in EVAL_KINDS:
            before, rows = config.evals[match[1]], eval_rows(match[2])
            kept = {field: value for field, value in before.items() if field in rows and field != "kind"}
            with config.unlocked():
                config.evals[match[1]] = evaluation(match[2], **kept)


def read_grid(argv: list[str]) -> dict[str, dict[str, Any]]:
    """Returns the grid of the recipe that a command line names; see `Recipe.make_grid`."""
    return find_recipe(argv).make_grid()


def parse_value(config: ConfigDict, key: str, text: str, where: str = "--config.") -> Any:
    """Returns the value of a field from its text on the command line; None for the text "None".

    Args:
        config: the configuration, which knows the type of the field.
        key: the dotted name of the field.
        text: the text.
        where: what precedes KEY=VALUE in error messages.

    Raises:
        UserError: the text is not a value of the field's type.
    """
    *groups, field = key.split(".")
    kind = functools.reduce(getitem, groups, config).get_type(field)
    if text == "None":
        return None
    if kind not in KINDS:
        return text
    try:
        return KINDS[kind][0](text)
    except ValueError:
        raise UserError(f"{where}{key}={text}: the value must be {KINDS[kind][1]}.") from None


def parse_numbers(text: str) -> tuple[int | float, ...]:
    """Returns the numbers in a text such as "1,5" or "(1, 5)"; an empty tuple for an empty text.

    Raises:
        ValueError: one of them is not a number.
    """
    inside = text.strip("(), ")
    return tuple(map(parse_number, inside.split(","))) if inside else ()


def parse_number(text: str) -> int | float:
    """Returns the number in a text, as an int if it is written as one, else as a float.

    Raises:
        ValueError: the text is not a number.
    """
    try:
        return int(text)
    except ValueError:
        return float(text)


def _parse_workdir(argv: list[str], fields: dict[str, Any]) -> str | None:
    """Returns the value of --workdir, or None without that flag.

    Args:
        argv: the command line without --config and --config.KEY, which may contain no other flag than --workdir.
        fields: dotted name -> value of the configuration's fields, for hints in messages.

    Raises:
        UserError: there is another word or flag.
    """
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    try:
        rest = values(argv)[1:]
    except flags.Error as error:
        what = str(error).partition(". Did you mean:")[0].rstrip(":.")
        if not isinstance(error, flags.UnrecognizedFlagError):
            raise UserError(f"{what}.") from error
        otherwise = "fields are written --config.KEY=VALUE."
        advice = hint(error.flagname, fields, otherwise, SYNONYMS, "--config.{}=VALUE")
        raise UserError(f"{what}; {advice}") from error
    if rest:
        raise UserError(f"unexpected {rest[0]!r}; flags are written --workdir=FOLDER and --config.KEY=VALUE.")
    return values.workdir
