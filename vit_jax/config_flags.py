"""Reads a configuration from a command line: --config=FILE.py:ARGUMENT, --config.KEY=VALUE, --workdir=FOLDER."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Callable, Iterator
from operator import getitem
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from vit_jax import UserError, choose, nearest, nearest_path
from vit_jax.config import current_name, flatten_config, rename_fields, unset_other_durations
from vit_jax.recipe_errors import recipe_errors
from vit_jax.synonyms import SYNONYMS

# Type of a field -> the function that converts its text, and the type in words.
KINDS: dict[type, tuple[Callable[[str], Any], str]] = {
    bool: (flags.BooleanParser().parse, "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    tuple: (lambda text: parse_numbers(text), "numbers with commas between them"),
}
PACKAGE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """What a command line asks for.

    Attributes:
        config: the recipe with the overrides.
        workdir: the run's folder.
        file: of the recipe.
        recipe: the file and, after a colon, its argument if one is given.
        given: names of the fields that the command line sets.
    """

    config: ConfigDict
    workdir: str
    file: Path
    recipe: str
    given: frozenset[str]


def parse_command_line(argv: list[str]) -> tuple[ConfigDict, str]:
    """Returns the configuration and the workdir that a command line asks for; raises as `read_command_line`."""
    line = read_command_line(argv)
    return line.config, line.workdir


def read_command_line(argv: list[str]) -> CommandLine:
    """Parses a command line.

    Args:
        argv: the arguments; the first is the program's name.

    Raises:
        UserError: no config file, an unknown flag or field, or a value of the wrong type.
    """
    file, argument = _find_recipe(argv)
    recipe = f"{file}{argument}"
    overrides = [word for word in argv if word.startswith("--config.")]
    others = [word for word in argv if word not in overrides and not word.startswith("--config=")]
    others.insert(1, f"--config={recipe}")
    config = _parse_flags(others, file, argument).config
    with config.unlocked():
        rename_fields(config)
    fields = flatten_config(config)
    given, read = dict[str, Any](), list[str]()
    for word in overrides:
        key, _, text = word.removeprefix("--config.").partition("=")
        key = choose("config field", current_name(key), fields, "configs/base.py", SYNONYMS)
        given[key] = parse_value(config, key, text)
        read += [word] if given[key] not in (None, ()) else []  # which the library does not read as meant
    values = _parse_flags([*others, *read], file, argument)
    with values.config.unlocked():
        rename_fields(values.config)
    values.config.update_from_flattened_dict({key: value for key, value in given.items() if value in (None, ())})
    unset_other_durations(values.config, set(given))
    workdir = values.workdir or f"workdirs/{file.stem}"
    return CommandLine(values.config, workdir, file, recipe, frozenset(given))


def read_grid(argv: list[str]) -> dict[str, dict[str, Any]]:
    """Returns the grid of the recipe that a command line names: name of a point -> the fields that it sets.

    It is what the recipe's function `get_grid` returns for the argument of the recipe; empty without that function.

    Raises:
        UserError: there is no such recipe.
    """
    file, argument = _find_recipe(argv)
    with _configs_importable(file), recipe_errors(file, _default_fields):
        found = importlib.util.spec_from_file_location(file.stem, file)
        assert found and found.loader
        recipe = importlib.util.module_from_spec(found)
        found.loader.exec_module(recipe)
        if not hasattr(recipe, "get_grid"):
            return {}
        return recipe.get_grid(argument[1:]) if argument else recipe.get_grid()


def shipped_recipes() -> Path:
    """Returns the folder of the recipes that come with the package: inside it in a wheel, beside it in a checkout."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def find_base(file: Path) -> Path:
    """Returns the base.py beside a recipe, or else the one that comes with the package."""
    beside = file.parent / "base.py"
    return beside if beside.is_file() else shipped_recipes() / "base.py"


def default_config() -> ConfigDict:
    """Returns the fields with the defaults of the base.py that comes with the package."""
    return parse_command_line(["", f"--config={shipped_recipes() / 'base.py'}"])[0]


def _default_fields() -> list[str]:
    return list(flatten_config(default_config()))


def default_evaluation(kind: str) -> ConfigDict:
    """Returns an evaluation of a kind with the defaults of that base.py."""
    with _configs_importable(shipped_recipes() / "base.py"):
        return importlib.import_module("configs.base").evaluation(kind)


def parse_value(config: ConfigDict, key: str, text: str, where: str = "--config.") -> Any:
    """Returns the value of a field from its text on the command line, which has it after `where`.

    Raises:
        UserError: the text is not one of the field's type.
    """
    *groups, field = key.split(".")
    kind = functools.reduce(getitem, groups, config).get_type(field)
    if text == "None":
        return None
    if kind not in KINDS or (kind is bool and not text):  # a bare flag of a boolean field has no value
        return text
    try:
        return KINDS[kind][0](text)
    except ValueError:
        raise UserError(f"{where}{key}={text}: the value must be {KINDS[kind][1]}.") from None


def parse_numbers(text: str) -> tuple[int | float, ...]:
    """Returns numbers with commas between them, in parentheses or not; none of an empty text.

    Raises:
        ValueError: one is not a number.
    """
    inside = text.strip("(), ")
    return tuple(map(parse_number, inside.split(","))) if inside else ()


def parse_number(text: str) -> int | float:
    """Returns a whole number, or else a number.

    Raises:
        ValueError: the text is neither.
    """
    try:
        return int(text)
    except ValueError:
        return float(text)


def _parse_flags(argv: list[str], file: Path, argument: str) -> flags.FlagValues:
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    try:
        with _configs_importable(file), recipe_errors(file, _default_fields):
            rest = values(argv)[1:]
    except flags.Error as error:
        message = str(error).replace("Error whilst parsing config file: ValueError: ", "")
        message = message.partition(". Did you mean:")[0]
        if "TypeError: get_config() takes 0 positional arguments" in message:
            raise UserError(f"the recipe {file} takes no argument, but was given {argument[1:]!r}.") from error
        first, *_, last = [line for line in message.splitlines() if line.strip(" .")] * 2
        hint = _hint_field(error.flagname, values) if isinstance(error, flags.UnrecognizedFlagError) else "."
        raise UserError(f"{first.rstrip(':.')}{'' if first == last else f': {last}'}{hint}") from error
    except AttributeError as error:
        if error.name != "get_config":
            raise
        raise UserError(f"{file} is not a recipe: it defines no get_config().") from error
    if not isinstance(values.config, ConfigDict):
        raise UserError(f"get_config() of {file} returns {values.config!r}; it must end with `return config`.")
    if rest:
        raise UserError(f"unexpected {rest[0]!r}; flags are written --workdir=FOLDER and --config.KEY=VALUE.")
    return values


@contextlib.contextmanager
def _configs_importable(file: Path) -> Iterator[None]:
    """Lets a recipe import `configs.base` and its like: from the folder `configs` above it, or its own."""
    folders, before = file.resolve().parents, list(sys.path)
    own = next((folder for folder in folders if folder.name == "configs"), folders[0])
    if PACKAGE not in own.parents:
        sys.path[:0] = dict.fromkeys((str(own.parent), str(folders[0].parent)))
    try:
        configs = importlib.import_module("configs")
    except ModuleNotFoundError:
        configs = sys.modules["configs"] = types.ModuleType("configs")
        configs.__path__ = []
    if hasattr(configs, "__path__"):  # a user's folder `configs` need not hold base.py
        first = [str(own)] if own.name == "configs" else []
        configs.__path__ = list(dict.fromkeys([*first, *configs.__path__, str(shipped_recipes())]))
    try:
        yield
    finally:
        sys.path[:] = before


def _hint_field(flag: str, values: flags.FlagValues) -> str:
    """Returns what to write instead of an unknown flag, as the end of a sentence."""
    config = values["config"].value
    near = nearest(flag, flatten_config(config) if config else (), SYNONYMS)
    if near is None:
        return "; fields are written --config.KEY=VALUE."
    return f"; {near}" if " " in near else f"; did you mean --config.{near}=VALUE?"


def _find_recipe(argv: list[str]) -> tuple[Path, str]:
    """Returns the file of the recipe that a command line names, and its argument after a colon, or nothing.

    A file of `configs/` that is not here is looked up among the recipes of the package.
    """
    words = [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]
    if "--config" in argv:
        raise UserError("write --config=FILE, with an equals sign.")
    if not words:
        if given := [word for word in argv[1:] if re.match(r"[^-].*\.py(:|$)", word)]:
            raise UserError(f"{given[0]!r} is not a flag; did you mean --config={given[0]}?")
        raise UserError("add --config=FILE, the recipe to train, for example --config=configs/digits.py.")
    path, colon, argument = words[-1].partition(":")
    file = Path(path)
    if file.is_file():
        return file, colon + argument
    shipped = shipped_recipes().parent / file
    if file.parts[:1] == ("configs",) and shipped.is_file():
        return shipped, colon + argument
    raise UserError(f"there is no config file {file}{_hint_file(file)}")


def _hint_file(file: Path) -> str:
    """Returns the nearest recipe to one that does not exist, as the end of a sentence."""
    among = Path("configs", file.name)
    places = [file, among] if len(file.parts) > 1 else [among, file]  # a bare name is first looked up among the recipes
    for place in places:
        if (near := nearest_path(place)) and near.suffix == ".py":
            return f"; did you mean {str(near)!r}?"
    near = nearest_path(shipped_recipes() / file.name)
    if near and near.suffix == ".py" and (len(file.parts) == 1 or file.parts[0] == "configs"):
        return f"; did you mean {str(Path('configs', near.name))!r}?"
    return "."
