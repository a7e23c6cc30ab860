"""Reads a configuration from a command line: --config=FILE.py:ARGUMENT, --config.KEY=VALUE, --workdir=FOLDER."""

import functools
import sys
from collections.abc import Callable
from operator import getitem
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from vit_jax import UserError, choose, nearest, nearest_path
from vit_jax.config import flatten_config, rename_fields, unset_other_durations
from vit_jax.config_fields import RENAMED
from vit_jax.synonyms import SYNONYMS

# Type of a field -> the function that converts its text, and the type in words.
KINDS: dict[type, tuple[Callable[[str], Any], str]] = {
    bool: (flags.BooleanParser().parse, "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
}


def parse_command_line(argv: list[str]) -> tuple[ConfigDict, str]:
    """Returns the configuration and the workdir that a command line asks for.

    Raises:
        UserError: no config file, an unknown flag or key, or a value of the wrong type.
    """
    overrides = [word for word in argv if word.startswith("--config.")]
    config = _parse_flags([word for word in argv if word not in overrides]).config
    with config.unlocked():
        rename_fields(config)
    fields = flatten_config(config)
    given = {}
    for word in overrides:
        key, _, value = word.removeprefix("--config.").partition("=")
        key = choose("config field", RENAMED.get(key, key), fields, "configs/base.py", SYNONYMS)
        given[key] = value
        _check_type(config, key, value)
    values = _parse_flags([word for word in argv if word not in overrides or not word.endswith("=None")])
    with values.config.unlocked():
        rename_fields(values.config)
    values.config.update_from_flattened_dict({key: None for key, value in given.items() if value == "None"})
    unset_other_durations(values.config, set(given))
    return values.config, values.workdir or f"workdirs/{_config_file(argv).stem}"


def _check_type(config: ConfigDict, key: str, value: str) -> None:
    *groups, field = key.split(".")
    kind = functools.reduce(getitem, groups, config).get_type(field)
    if value in ("None", "") or kind not in KINDS:  # a bare flag of a boolean field has no value
        return
    try:
        KINDS[kind][0](value)
    except ValueError:
        raise UserError(f"--config.{key}={value}: the field takes {KINDS[kind][1]}.") from None


def _parse_flags(argv: list[str]) -> flags.FlagValues:
    file = _config_file(argv)
    # Configs find `configs.base` from whatever directory they are run.
    sys.path.insert(0, str(file.resolve().parent.parent))
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    try:
        rest = values(argv)[1:]
    except flags.Error as error:
        told = str(error).replace("Error whilst parsing config file: ValueError: ", "").partition(". Did you mean:")[0]
        if "TypeError: get_config() takes 0 positional arguments" in told:
            argument = [word for word in argv if word.startswith("--config=")][-1].partition(":")[2]
            raise UserError(f"the recipe {file} takes no argument, but was given {argument!r}.") from error
        first, *_, last = [line for line in told.splitlines() if line.strip(" .")] * 2
        hint = _field(error.flagname, values) if isinstance(error, flags.UnrecognizedFlagError) else "."
        raise UserError(f"{first.rstrip(':.')}{'' if first == last else f': {last}'}{hint}") from error
    except AttributeError as error:
        if error.name != "get_config":
            raise
        raise UserError(f"{file} is no recipe: it defines no get_config().") from error
    finally:
        sys.path.pop(0)
    if rest:
        raise UserError(f"{rest[0]!r} stands alone; flags are written --workdir=FOLDER and --config.KEY=VALUE.")
    return values


def _field(flag: str, values: flags.FlagValues) -> str:
    """Returns what to write instead of a flag that is none, as the end of a sentence."""
    config = values["config"].value
    near = nearest(flag, flatten_config(config) if config else (), SYNONYMS)
    if near is None:
        return "; fields are written --config.KEY=VALUE."
    return f"; {near}" if " " in near else f"; did you mean --config.{near}=VALUE?"


def _config_file(argv: list[str]) -> Path:
    words = [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]
    if "--config" in argv:
        raise UserError("write --config=FILE, with an equals sign.")
    if not words:
        raise UserError("say what to train with --config=FILE, for example --config=configs/digits.py.")
    file = Path(words[-1].partition(":")[0])
    if not file.is_file():
        places = [file, Path("configs", file.name)]  # a bare name is first sought among the recipes
        near = next(filter(None, map(nearest_path, places if len(file.parts) > 1 else reversed(places))), None)
        hint = f"; did you mean {str(near)!r}?" if near and near.suffix == ".py" else "."
        raise UserError(f"there is no config file {file}{hint}")
    return file
