"""Prints a resolved recipe: each field's value, where the value came from, and what the field means."""

import dataclasses
import re
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, data
from vit_jax.config import check_config, flatten_config, resolve_config
from vit_jax.config_fields import DURATIONS
from vit_jax.config_flags import CommandLine, find_base, parse_command_line, read_command_line
from vit_jax.program import model_without_data

SHAPE = ("width", "depth", "mlp_dim", "num_heads", "stages")  # fields of the model that its name may determine
ABSENT = object()


@dataclasses.dataclass(frozen=True)
class FieldLine:
    """A field of a resolved recipe.

    Attributes:
        name: dotted.
        value: None: unset.
        origin: base, recipe, argument (of the recipe), command line or derived (from other fields).
        changed: whether the value differs from configs/base.py.
        meaning: the comment in configs/base.py.
    """

    name: str
    value: Any
    origin: str
    changed: bool
    meaning: str

    def __str__(self) -> str:
        value = "unset" if self.value is None else str(self.value) or "''"
        return f"{'*' if self.changed else ' '} {self.name:26} {self.origin:12} {value:12} # {self.meaning}"


def print_config(argv: list[str]) -> None:
    """Prints the recipe that a command line asks for, a line a field.

    Raises:
        UserError: the command line or the recipe is wrong.
    """
    line = read_command_line(argv)
    lines = [f"{line.file}, resolved; * differs from configs/base.py", *map(str, explain_config(line))]
    if line.config.data.num_examples is None:
        lines.append("data.num_examples is unset: durations in epochs become steps when the data are opened.")
    print(*lines, sep="\n")


def explain_config(line: CommandLine) -> list[FieldLine]:
    """Returns the fields that result from the recipe and the flags, in the order of configs/base.py; opens no data.

    Raises:
        UserError: the recipe is wrong.
    """
    check_config(line.config)
    base_file = find_base(line.file)
    meanings = read_meanings(base_file.read_text())
    base, recipe = (_flat_recipe(path) for path in (str(base_file), line.recipe))
    plain = _flat_recipe(str(line.file)) if line.recipe != str(line.file) else recipe
    final = flatten_config(line.config) | derive_values(line.config)

    def find_origin(name: str, value: Any) -> str:
        if name in line.given:
            return "command line"
        if value != recipe.get(name, ABSENT):
            return "derived"
        if plain and value != plain.get(name, ABSENT):
            return "argument"
        return "base" if value == base.get(name, ABSENT) else "recipe"

    order = list(meanings)
    lines = []
    for name, value in final.items():
        known = re.sub(r"^evals\.[^.]+\.", "evals.*.", name)
        place = order.index(known) if known in order else len(order)
        changed = value != base.get(name, ABSENT)
        lines.append((place, FieldLine(name, value, find_origin(name, value), changed, meanings.get(known, "-"))))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def _flat_recipe(recipe: str) -> dict[str, Any]:
    """Returns the fields of a recipe, FILE.py or FILE.py:ARGUMENT; none if it does not do without an argument."""
    try:
        return flatten_config(parse_command_line(["", f"--config={recipe}"])[0])
    except UserError:
        return {}


def derive_values(config: ConfigDict) -> dict[str, Any]:
    """Returns what follows from other fields: durations in steps, images per evaluation step, the model's shape.

    Raises:
        UserError: the model or the preprocessing is wrong.
    """
    derived: dict[str, Any] = {"batch_eval": data.eval_batch_size(config)}
    model = model_without_data(config)
    if config.data.num_examples is not None:
        resolved = resolve_config(config)
        derived |= {name: resolved[name] for name in DURATIONS}
    unset = [name for name in SHAPE if config.model[name] is None]
    return derived | {f"model.{name}": value for name, value in model.values.items() if name in unset}


def read_meanings(source: str) -> dict[str, str]:
    """Returns, from the source of configs/base.py, the comment on each field, which may go on on the next line.

    Those of the function `evaluation` are named `evals.*.FIELD`.
    """
    meanings: dict[str, str] = {}
    name = group = ""
    for line in source.splitlines():
        group = "evals.*." if line.startswith("def evaluation(") else group
        code, _, comment = line.partition("# ")
        if code.strip() or not comment:
            field = re.match(r"\s+config\.([\w.]+) = (?!ConfigDict|evaluation)", code)
            name = f"{group}{field[1]}" if field else ""
        if name:
            meanings[name] = f"{meanings.get(name, '')} {comment}".strip()
    return meanings
