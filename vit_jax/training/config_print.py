"""Prints a resolved recipe: each field's value, where the value came from, and what the field means."""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, data, without_queries
from vit_jax.config import (
    DURATIONS,
    FIELDS,
    OPTIMIZERS,
    CommandLine,
    Recipe,
    check_config,
    declared_name,
    flatten_config,
    get_config,
    read_command_line,
    resolve_config,
)
from vit_jax.program import model_without_data
from vit_jax.training.initial_weights import take_model

SHAPE = ("width", "depth", "mlp_dim", "num_heads", "stages")  # fields of the model that follow from its name if unset
ABSENT = object()


@dataclasses.dataclass(frozen=True)
class FieldLine:
    """A field of a resolved recipe.

    Attributes:
        name: the dotted name, such as data.source.
        value: the resolved value; None: unset.
        origin: where the value comes from: base, recipe, argument (of the recipe), command line or derived (from other
            fields).
        changed: whether the value differs from the default.
        meaning: one line of text.
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
    """Prints the resolved recipe that a command line asks for, one line per field.

    Args:
        argv: the program's name, then its flags.

    Raises:
        UserError: the command line or the recipe is wrong.
    """
    line = read_command_line(argv)
    lines = [f"{line.recipe.file}, resolved; * differs from configs/base.py", *map(str, explain_config(line))]
    if line.config.data.num_examples is None:
        lines.append("data.num_examples is unset: durations in epochs become steps when the data are opened.")
    print(without_queries("\n".join(lines)))


def explain_config(line: CommandLine) -> list[FieldLine]:
    """Returns the fields that result from the recipe and the flags, in the order of their declaration.

    No data is opened.

    Raises:
        UserError: the recipe is wrong.
    """
    check_config(line.config)
    line = dataclasses.replace(line, config=take_model(line.config))
    base, recipe = flatten_config(get_config()), _flat_recipe(line.recipe)
    plain = _flat_recipe(dataclasses.replace(line.recipe, argument=None))
    final = flatten_config(line.config) | derive_values(line.config)

    def find_origin(name: str, value: Any) -> str:
        if name in line.given:
            return "command line"
        if value != recipe.get(name, ABSENT):
            return "derived"
        if plain and value != plain.get(name, ABSENT):
            return "argument"
        return "base" if value == base.get(name, ABSENT) else "recipe"

    order = list(FIELDS)
    lines = []
    for name, value in final.items():
        field = FIELDS.get(declared_name(name))
        place, meaning = (order.index(field.name), field.meaning) if field else (len(order), "-")
        changed = value != base.get(name, ABSENT)
        lines.append((place, FieldLine(name, value, find_origin(name, value), changed, meaning)))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def _flat_recipe(recipe: Recipe) -> dict[str, Any]:
    """Returns dotted name -> value of a recipe's fields; empty if the recipe raises a UserError."""
    try:
        return flatten_config(recipe.make_config())
    except UserError:
        return {}


def derive_values(config: ConfigDict) -> dict[str, Any]:
    """Returns dotted name -> value of the fields whose values follow from other fields.

    These are the images per evaluation step, unset fields of the optimizer, unset fields of the model's shape and, if
    `data.num_examples` is set, the durations in steps.

    Raises:
        UserError: the model or the preprocessing is wrong.
    """
    derived: dict[str, Any] = {"batch_eval": data.eval_batch_size(config)}
    own = OPTIMIZERS[config.optim.name].defaults.items()
    derived |= {f"optim.{name}": value for name, value in own if config.optim[name] is None}
    model = model_without_data(config)
    if config.data.num_examples is not None:
        resolved = resolve_config(config)
        derived |= {name: resolved[name] for name in DURATIONS}
    unset = [name for name in SHAPE if config.model[name] is None]
    return derived | {f"model.{name}": value for name, value in model.values.items() if name in unset}
