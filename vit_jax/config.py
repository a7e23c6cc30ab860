"""A configuration: checked, with durations in steps, compared, and as a file."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, choose
from vit_jax.config_fields import (
    DURATIONS,
    FIELDS,
    RENAMED,
    Field,
    OnResume,
    best_metrics,
    epochs_field,
    eval_fields,
    find_field,
)
from vit_jax.storage import atomic_write

# Of config.json; it rises when the meaning or a name in it changes. Version 0.1.0 at first wrote none.
CONFIG_VERSION = 2
WORDS = {"contents": "names and labels"}  # what an entry of a stored fingerprint is called in messages
ACCEPT = ", or accept the other data with --config.data.accept_change=True"


def check_config(config: ConfigDict) -> None:
    """Checks what can be checked before data or devices are used.

    Raises:
        UserError: a field has an unknown word or a number outside its range, or is unset; or a duration is given
            twice or not at all.
    """
    flat = flatten_config(config)
    for name, value in flat.items():
        _check_value(name, value, find_field(name))
    if not len(config.evals):
        raise UserError("config.evals is empty; declare an evaluation, as configs/base.py does.")
    check_evaluations(config)
    measures = [f"{name}/{metric}" for name in config.evals for metric in best_metrics(config.evals[name])]
    choose("checkpoint.best_metric", flat["checkpoint.best_metric"], measures)
    if flat["keep_head"] and flat["init_from"] is None:
        raise UserError("keep_head=True needs --config.init_from, the checkpoint whose head is kept.")
    for name in DURATIONS:
        if flat[name] is not None and flat[epochs_field(name)] is not None:
            raise UserError(f"set {name} or {epochs_field(name)}, not both.")
    if flat["total_steps"] is None and flat["total_epochs"] is None:
        raise UserError("set the length of training with total_steps or total_epochs.")


def check_evaluations(config: ConfigDict) -> None:
    """Checks the fields of every evaluation.

    Raises:
        UserError: one is missing, of another kind of evaluation, or outside its range.
    """
    for name, eval_config in config.evals.items():
        known = eval_fields(eval_config.kind)
        for field in eval_config:
            choose(f"field of evals.{name}, whose kind is {eval_config.kind},", field, known)
        if missing := [field for field in known if field not in eval_config]:
            raise UserError(f"evals.{name} lacks {', '.join(missing)}; configs/base.py has evaluation() to make one.")
        for field, value in eval_config.items():
            _check_value(f"evals.{name}.{field}", value, find_field(f"evals.{name}.{field}"))


def _check_value(name: str, value: Any, field: Field) -> None:
    if value is None:
        if not field.optional:
            raise UserError(f"{name} must be set.")
        return
    if field.choices:
        choose(name, value, field.choices)
    numbers = value if isinstance(value, tuple) else (value,)
    bounded = field.least > -math.inf or field.most < math.inf
    if bounded and not all(field.least <= number <= field.most for number in numbers):
        bounds = f"at least {field.least}" + (f" and at most {field.most}" if field.most < math.inf else "")
        raise UserError(f"{name}={value} must be {bounds}.")
    if field.whole and not all(isinstance(number, int) for number in numbers):
        raise UserError(f"{name}={value} must be whole numbers.")


def unset_other_durations(config: ConfigDict, given: set[str]) -> None:
    """Unsets a duration in epochs where the command line gives it in steps, and the other way round."""
    for name in DURATIONS:
        for one, other in ((name, epochs_field(name)), (epochs_field(name), name)):
            if one in given and other not in given:
                config[other] = None


def count_steps(config: ConfigDict, name: str) -> int | None:
    """Returns a duration in steps: the field `name` if it is set, else its field in epochs, else None.

    An epoch is `data.num_examples / batch` steps; the product is rounded down, and is at least 1 if positive.
    """
    flat = flatten_config(config)
    epochs = flat[epochs_field(name)]
    if epochs is None:
        return flat[name]
    steps = int(epochs * config.data.num_examples / config.batch)
    return max(steps, 1) if epochs > 0 else 0


def resolve_config(config: ConfigDict) -> ConfigDict:
    """Returns a copy in which every duration is in steps (`config.data.num_examples` is known).

    Raises:
        UserError: the warm-up is longer than the run.
    """
    config = config.copy_and_resolve_references()
    with config.unlocked():
        rename_fields(config)
        epochs = config.eval_every_epochs
        steps = {name: count_steps(config, name) for name in DURATIONS}
        for name, value in steps.items():
            config[name], config[epochs_field(name)] = value, None
        config.warmup_steps = config.warmup_steps or 0
        config.eval_every = config.eval_every or max(config.total_steps, 1)
        if epochs:  # an epoch of few images would fill disk and log
            config.eval_every = max(config.eval_every, config.log_every)
    if config.warmup_steps > config.total_steps > 0:
        excess = f"the warm-up of {config.warmup_steps} steps is longer than the run of {config.total_steps}"
        raise UserError(f"{excess}; set --config.warmup_steps or --config.warmup_epochs.")
    return config.lock()


def flatten_config(config: ConfigDict) -> dict[str, Any]:
    """Returns the fields by dotted name, without earlier names of fields."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            flat |= {f"{key}.{inner}": leaf for inner, leaf in flatten_config(value).items()}
        else:
            flat[key] = value
    return {name: value for name, value in flat.items() if name not in RENAMED}


def current_name(field: str) -> str:
    """Returns the name of a field that may be given by an earlier name."""
    return RENAMED.get(field, field)


def rename_fields(fields: Any) -> None:
    """Replaces earlier names of fields, in nested dicts or an unlocked configuration; the new name wins."""
    for old, new in RENAMED.items():
        *groups, name = old.split(".")
        inner = fields
        for group in groups:
            inner = inner.get(group, {})
        if name in inner:
            value = inner[name]
            del inner[name]
            name = new.rpartition(".")[2]
            inner[name] = inner.get(name, value)


def save_config(config: ConfigDict, path: Path) -> None:
    """Writes the configuration as JSON, whole or not at all."""
    text = json.dumps({"version": CONFIG_VERSION, **config.to_dict()}, indent=2) + "\n"
    with atomic_write(path) as temporary:
        temporary.write_text(text)


def load_config(path: Path) -> ConfigDict:
    """Reads a configuration that this or an earlier version of the package wrote by `save_config`.

    Raises:
        UserError: the file cannot be read, is damaged, or was written by a later version.
    """
    try:
        return parse_config(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from error


def parse_config(text: bytes, path: str, known: Mapping[str, Field] = FIELDS) -> ConfigDict:
    """Returns the configuration in the text of a file; raises as `load_config`. `known` are the fields of now."""
    try:
        fields = json.loads(text)
        if fields.pop("version", 0) > CONFIG_VERSION:
            advice = "install that version to continue the run."
            raise UserError(f"{path} was written by a later version of vit_jax; {advice}")
        rename_fields(fields)
        for name, field in known.items():
            for value in field.when_missing:
                _set_missing(fields, name.split("."), value)
        evaluations = fields["evals"].values() if "evals" in fields else ()
        for group in (fields, fields["model"], *evaluations):
            group |= {name: tuple(value) for name, value in group.items() if isinstance(value, list)}
        return ConfigDict(fields).lock()
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{path} is damaged: it is not a configuration. Replace it with an intact copy.") from error


def _set_missing(fields: dict[str, Any], path: list[str], value: Any) -> None:
    """Sets a field that is absent; a group `*` stands for every group there."""
    first, *rest = path
    if not rest:
        fields.setdefault(first, value)
    elif first == "*":
        for inner in fields.values():
            _set_missing(inner, rest, value)
    else:
        _set_missing(fields.setdefault(first, {}), rest, value)


def check_resumes(old: ConfigDict, new: ConfigDict, place: str) -> list[str]:
    """Returns how the configuration of a resumed run differs from that of the run which it continues, a line a field.

    Raises:
        UserError: a field differs that would make it another run: model, task, data (unless `data.accept_change`),
            seed, batch or optimizer.
    """
    lines = _describe_changes(flatten_config(old), flatten_config(new))
    refused = {name for name in lines if find_field(name).on_resume is OnResume.REFUSED}
    data = {name for name in lines if find_field(name).on_resume is OnResume.DATA}
    if new.data.accept_change:
        data = set()
    if refused | data:
        changes = "; ".join(line for name, line in lines.items() if name in refused | data)
        hint = "" if refused else ACCEPT
        advice = f"restore them or choose a new --workdir{hint}."
        raise UserError(f"the workdir {place} contains a run with other settings ({changes}); {advice}")
    return list(lines.values())


def check_data(saved: dict[str, Any], now: dict[str, Any], accepts: bool, place: str) -> list[str]:
    """Returns how the data of a resumed run differ from those that a checkpoint was trained on, a line a difference.

    Args:
        saved: `data.DataInfo.fingerprint` of the checkpoint.
        now: `data.DataInfo.fingerprint` of the resumed run.
        accepts: `data.accept_change`.
        place: the workdir.

    Raises:
        UserError: they differ, and either this is not accepted or more than the data differs.
    """
    lines = _describe_changes(saved, now)
    acceptable = all(find_field(name).on_resume is not OnResume.REFUSED for name in lines)  # not seed and batch
    if lines and not (accepts and acceptable):
        hint = ACCEPT if acceptable else ""
        changes = "; ".join(lines.values())
        raise UserError(f"{place} was trained on other data ({changes}); choose a new --workdir{hint}.")
    return list(lines.values())


def _describe_changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """Returns what differs: name -> `name: old value -> new value`."""
    return {
        name: f"{WORDS.get(name, name)}: {_in_words(old.get(name))} -> {_in_words(new.get(name))}"
        for name in old | new
        if not _equal(old.get(name), new.get(name))
    }


def _in_words(value: Any) -> str:
    return "unset" if value is None else str(value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return a == b


def source_label(source: str) -> str:
    """Returns a data source as a part of a name: `tfds:cifar100` -> cifar100, `folder:data/pets` -> pets."""
    kind, colon, rest = source.partition(":")
    rest = rest.rstrip("/").rpartition("/")[2] if kind in ("folder", "array_record") else rest
    return re.sub(r"\W+", "_", rest if kind.isidentifier() and colon else source).strip("_")
