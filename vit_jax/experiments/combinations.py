"""The combinations of values that a command line asks for, each with its configuration and its folder."""

import dataclasses
import fnmatch
import itertools
import re
import shlex
from collections.abc import Sequence

from ml_collections import ConfigDict

from vit_jax import UserError, without_queries
from vit_jax.config import parse_command_line, read_grid
from vit_jax.data.sources import Fold, divide_folds
from vit_jax.storage import check_workdir, filesystem, short_name
from vit_jax.training import take_model

FieldValues = dict[str, list[str]]  # field -> its values, as written; `fold` -> the numbers of the folds
MAX_FOLDS = 1000


@dataclasses.dataclass(frozen=True)
class Combination:
    """One run of a sweep: a point of the recipe's grid, if there is a grid, and one value of each varied field.

    Attributes:
        name: the name of the point, if any, and KEY=VALUE for each varied field, joined by commas.
        words: the flags of `vit_jax.main` that train with this configuration.
        config: the configuration.
        folder: the folder in which this combination trains.
        workdir: the folder of the sweep, which contains `folder`.
        fold: those of `words` that choose a fold, in a sweep over folds.
    """

    name: str
    words: list[str]
    config: ConfigDict
    folder: str
    workdir: str
    fold: tuple[str, ...] = ()


def list_combinations(argv: list[str]) -> list[Combination]:
    """Returns the combinations that a command line asks for.

    If two combinations have equal configurations, as with the values 0.1 and 1e-1, only the first is returned.

    Args:
        argv: the program's name, then its flags: --config, --config.KEY, --workdir, and --sweep.KEY=VALUE,VALUE for the
            varied fields, --sweep.fold=NUMBER for as many folds, and --only=PATTERN for points of the recipe's grid.

    Raises:
        UserError: no field or an unknown field is varied, a field is varied twice, two combinations would share a
            folder, the workdir cannot be written to, or see `parse_command_line` and `take_model`.
    """
    words = [word for word in argv if not word.startswith(("--sweep.", "--only=")) and word != "--json"]
    values_by_field = _parse_values(argv, words)
    points = _parse_points(argv, words, values_by_field)
    by_folder: dict[str, Combination] = {}
    for point, *values in itertools.product(points, *values_by_field.values()):
        chosen = [f"{key}={value}" for key, value in zip(values_by_field, values, strict=True)]
        fields = [f"--config.{pair}" for pair in chosen if not pair.startswith("fold=")]
        given = [*words, *points[point], *fields]
        config, workdir = parse_command_line(given)
        fold = tuple(_fold_words(config, given, values_by_field, chosen))
        if fold:
            given += fold
            config, workdir = parse_command_line(given)
        config = take_model(config)
        pairs = [without_queries(pair) for pair in chosen]
        name = ",".join([point, *sorted(pairs)] if point else sorted(pairs))
        inside = "/".join(
            short_name(re.sub(r"[^\w.,=+-]", "_", part)) for part in (name.split("/", 1) if point else [name])
        )
        workdir = check_workdir(workdir)
        folder = filesystem.join_path(workdir, inside)
        if any(other.config == config for other in by_folder.values()):
            continue
        if folder in by_folder:
            raise UserError(
                f"{by_folder[folder].name} and {name} would both use {folder}; run them as two sweeps with different "
                "--workdir."
            )
        by_folder[folder] = Combination(name, given[1:], config, folder, workdir, fold)
    return list(by_folder.values())


def _parse_points(argv: list[str], words: list[str], values_by_field: FieldValues) -> dict[str, list[str]]:
    """Returns name -> flags for the points of the recipe's grid that match --only, or for all points without --only.

    Without a grid there is a single point that has an empty name and no flags.
    """
    parse_command_line(words)  # whose errors come first
    grid, patterns = read_grid(words), [word.removeprefix("--only=") for word in argv if word.startswith("--only=")]
    if not grid and not values_by_field:
        raise UserError("add --sweep.KEY=VALUE,VALUE, the values to try, for example --sweep.base_lr=0.003,0.01.")
    given = {word.removeprefix("--config.").partition("=")[0] for word in words} | set(values_by_field)
    for key in (key for fields in grid.values() for key in fields if key in given):
        raise UserError(f"{key} is a field of the recipe's grid; leave it out, or choose points with --only=PATTERN.")
    points = {name: [f"--config.{key}={value}" for key, value in fields.items()] for name, fields in grid.items()}
    chosen = {name: flags for name, flags in points.items() if any(fnmatch.fnmatch(name, one) for one in patterns)}
    if patterns and not chosen:
        names = ", ".join(points) or "none"
        raise UserError(f"no point of the grid matches --only={patterns[-1]}; choose from {names}.")
    return (chosen if patterns else points) or {"": []}


def _parse_values(argv: list[str], words: list[str]) -> FieldValues:
    given: FieldValues = {}
    for word in argv:
        if word.startswith("--sweep."):
            key, _, values = word.removeprefix("--sweep.").partition("=")
            if not all(values.split(",")):
                raise UserError(f"{word} gives no values; write --sweep.base_lr=0.003,0.01.")
            if key in given or any(other.startswith(f"--config.{key}=") for other in words):
                raise UserError(f"{key} is given twice; write all its values in one --sweep.{key}=VALUE,VALUE.")
            given[key] = _number_folds(values) if key == "fold" else list(dict.fromkeys(values.split(",")))
    return given


def _number_folds(text: str) -> list[str]:
    """Returns the numbers of as many folds as a text says; raises UserError if it is not a whole number from 2 on."""
    if not (text.isdecimal() and 2 <= int(text) <= MAX_FOLDS):
        raise UserError(
            f"--sweep.fold={text} must be the number of folds, from 2 to {MAX_FOLDS:,}, as in --sweep.fold=5."
        )
    return [str(number + 1) for number in range(int(text))]


def _fold_words(config: ConfigDict, given: list[str], values_by_field: FieldValues, chosen: list[str]) -> list[str]:
    """Returns the flags that train without the chosen fold of the training split, and evaluate on it.

    It is evaluated by the evaluation of `checkpoint.best_metric`. Without a fold among the chosen values there are no
    such flags.

    Raises:
        UserError: that evaluation reads a split that was given, other data or a second split, or the training split has
            folds already.
    """
    if "fold" not in values_by_field:
        return []
    number, folds = int(dict(pair.split("=", 1) for pair in chosen)["fold"]), len(values_by_field["fold"])
    plain, divided = divide_folds(config.data.split)
    if any(divided):
        raise UserError(f"data.split={config.data.split} has folds already; leave them to --sweep.fold={folds}.")
    name = config.checkpoint.best_metric.partition("/")[0]
    if name not in config.evals:
        return []  # which is refused when the config is checked
    evaluated = config.evals[name]
    split = f"--config.evals.{name}.split="
    if any(word.startswith(split) for word in given) or f"evals.{name}.split" in values_by_field:
        raise UserError(f"evals.{name} reads the folds of data.split, by --sweep.fold={folds}; leave out {split}SPLIT.")
    if evaluated.source not in (None, config.data.source) or "train_split" in evaluated:
        raise UserError(
            f"--sweep.fold={folds} evaluates the head on a part of the training images, but evals.{name} reads others; "
            "set checkpoint.best_metric to the metric of another evaluation."
        )

    def write(fold: Fold) -> str:
        return "+".join(f"{part.strip()}[{fold}]" for part in plain.split("+"))

    return [f"--config.data.split={write(Fold(number, folds, True))}", split + write(Fold(number, folds))]


def full_split_words(combination: Combination) -> list[str] | None:
    """Returns the flags of a combination, without --workdir, changed to train on the whole training split.

    That is, split=dev in the recipe's argument becomes split=full, and no fold is left out. Returns None if nothing was
    held out.
    """
    words = [word for word in combination.words if not word.startswith("--workdir=")]
    whole = [re.sub(r"^(--config=.*)\bsplit=dev\b", r"\1split=full", word) for word in words]
    whole = [word for word in whole if word not in combination.fold]
    return None if whole == words else whole


def full_split_command(combination: Combination, seeds: Sequence[int] = ()) -> str | None:
    """Returns a shell command that trains with `full_split_words`, or None if that is None.

    With `seeds` the command is a sweep over these seeds, otherwise a single run with the seed of the combination.
    """
    words, module = full_split_words(combination), "main"
    if words is None:
        return None
    if seeds:
        words, module = [*without_seed(words), f"--sweep.seed={','.join(map(str, seeds))}"], "sweep"
    workdir = f"--workdir={filesystem.join_path(combination.workdir, 'full')}"
    return without_queries(f"python -m vit_jax.{module} {shlex.join([*words, workdir])}")


def without_seed(words: list[str]) -> list[str]:
    """Returns the flags without --config.seed."""
    return [word for word in words if not word.startswith("--config.seed=")]
