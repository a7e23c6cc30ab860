"""What a configuration means: checks, durations in steps, and its form on disk."""

import json
import math
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, choose

CHOICES = {
    "resample": ("linear", "bicubic", "flexi"),
    "decay_type": ("cosine", "linear", "rsqrt", "constant"),
    "data.bad_images": ("fail", "replace"),
    "task.loss": ("softmax", "sigmoid"),
    "optim.name": ("adamw", "sgd"),
    "optim.moment_dtype": ("float32", "bfloat16"),
    "optim.decays": ("kernels", "all"),
    "optim.decay_factor": ("rate", "schedule"),
    "model.dtype": ("auto", "float32", "bfloat16"),
}
# Field -> least and largest value.
RANGES = {
    "seed": (0, 2**32 - 1),
    "batch": (1, math.inf),
    "batch_eval": (1, math.inf),
    "resolution": (1, math.inf),
    "accum_steps": (1, math.inf),
    "total_steps": (0, math.inf),
    "total_epochs": (0, math.inf),
    "warmup_steps": (0, math.inf),
    "warmup_epochs": (0, math.inf),
    "base_lr": (0, math.inf),
    "rsqrt_timescale": (1, math.inf),
    "cooldown_steps": (0, math.inf),
    "grad_norm_clip": (0, math.inf),
    "log_every": (1, math.inf),
    "eval_every": (1, math.inf),
    "eval_every_epochs": (0, math.inf),
    "checkpoint_every": (1, math.inf),
    "checkpoint_every_minutes": (0, math.inf),
    "stall_limit": (1, math.inf),
    "profile_steps": (0, math.inf),
    "data.max_labels": (1, math.inf),
    "data.workers": (0, math.inf),
    "data.max_bad": (0, 1),
    "task.label_smoothing": (0, 1),
    "task.mixup": (0, math.inf),
    "task.cutmix": (0, math.inf),
    "task.mixup_probability": (0, 1),
    "optim.beta1": (0, 1),
    "optim.beta2": (0, 1),
    "optim.eps": (0, math.inf),
    "optim.momentum": (0, 1),
    "optim.weight_decay": (0, math.inf),
    "optim.ema_decay": (0, 1),
    "optim.max_nonfinite_skips": (0, math.inf),
    "mesh.slice": (1, math.inf),
    "mesh.tensor": (1, math.inf),
    "checkpoint.keep_last": (1, math.inf),
    "checkpoint.keep_best": (0, math.inf),
}
# Fields that may be unset.
OPTIONAL = {"batch_eval", "total_steps", "total_epochs", "warmup_steps", "warmup_epochs", "eval_every"}
OPTIONAL |= {"eval_every_epochs", "init_from", "grad_norm_clip", "data.data_dir", "data.num_classes"}
OPTIONAL |= {"data.num_examples", "data.max_labels", "model.width", "model.depth", "model.mlp_dim", "model.num_heads"}
OPTIONAL |= {"model.representation_size"}
# Metrics by which a checkpoint may be the best: the larger the better.
BEST = ("accuracy", "top5")
DURATIONS = ("total_steps", "warmup_steps", "eval_every")

CONFIG_VERSION = 1  # of config.json; it rises when what is written there changes its meaning. Version 0.1.0 wrote none
# Field that is younger than some config.json -> the value with which a run does what it did without the field. Of each
# evaluation: `evals.*.field`.
YOUNGER: dict[str, Any] = {"model.representation_size": None}

ACCEPT = ", or go on with other data by --config.data.accept_change=True"

# Fields that a resumed run must share with the run that it continues: what makes its numbers, or its state's shapes.
IDENTITY = {"seed", "batch", "resolution", "model", "data", "task"}
IDENTITY |= {"optim.name", "optim.moment_dtype", "optim.ema_decay"}
# Of these, what only says how the machine computes it, or where the data lie: their fingerprint is compared.
FREE = {"model.dtype", "model.attention", "model.mlp", "model.remat", "model.scan"}
FREE |= {"data.source", "data.data_dir", "data.workers", "data.bad_images", "data.max_bad", "data.accept_change"}
# Not a matter of the data alone, whatever `data.accept_change` says.
FIXED = {"data.num_classes", "seed", "batch"}


def check_config(config: ConfigDict) -> None:
    """Checks what can be checked before data or devices are touched.

    Raises:
        UserError: a word that is no choice, a number out of its range, or a duration given twice or not at all.
    """
    flat = flatten_config(config)
    for key, value in flat.items():
        if value is None and key not in OPTIONAL:
            raise UserError(f"{key} must be set.")
    for key, options in CHOICES.items():
        choose(key, flat[key], options)
    for key, (least, most) in RANGES.items():
        if flat[key] is not None and not least <= flat[key] <= most:
            bounds = f"at least {least}" + (f" and at most {most}" if most < math.inf else "")
            raise UserError(f"{key}={flat[key]} must be {bounds}.")
    if not len(config.evals):
        raise UserError("config.evals is empty: declare an evaluation, as configs/base.py does.")
    choose("checkpoint.best_metric", flat["checkpoint.best_metric"], [f"{n}/{m}" for n in config.evals for m in BEST])
    if flat["keep_head"] and flat["init_from"] is None:
        raise UserError("keep_head=True keeps the head of init_from; set --config.init_from too.")
    for key in DURATIONS:
        if flat[key] is not None and flat[epochs(key)] is not None:
            raise UserError(f"set {key} or {epochs(key)}, not both.")
    if flat["total_steps"] is None and flat["total_epochs"] is None:
        raise UserError("set total_steps or total_epochs: the length of training.")


def unset_rivals(config: ConfigDict, given: set[str]) -> None:
    """Lets a duration given in steps on the command line win over the recipe's in epochs, and the other way round."""
    for key in DURATIONS:
        for one, other in ((key, epochs(key)), (epochs(key), key)):
            if one in given and other not in given:
                config[other] = None


def duration(config: ConfigDict, key: str) -> int | None:
    """Returns a duration in steps: `key` as it stands, else that of `<key>` in epochs, else None if neither is set.

    An epoch is `data.num_examples / batch` steps; the product is rounded down, and is at least 1 if positive.
    """
    flat = flatten_config(config)
    passes = flat[epochs(key)]
    if passes is None:
        return flat[key]
    steps = int(passes * config.data.num_examples / config.batch)
    return max(steps, 1) if passes > 0 else 0


def resolve_config(config: ConfigDict) -> ConfigDict:
    """Returns a copy in which every duration is in steps (`config.data.num_examples` is known).

    Raises:
        UserError: the warm-up is longer than the run.
    """
    config = config.copy_and_resolve_references()
    with config.unlocked():
        passes = config.eval_every_epochs
        steps = {key: duration(config, key) for key in DURATIONS}
        for key, value in steps.items():
            config[key], config[epochs(key)] = value, None
        config.warmup_steps = config.warmup_steps or 0
        config.eval_every = config.eval_every or max(config.total_steps, 1)
        if passes:  # an epoch of few images is no reason to fill disk and log
            config.eval_every = max(config.eval_every, config.log_every)
    if config.warmup_steps > config.total_steps > 0:
        excess = f"{config.warmup_steps} steps of warm-up are more than the run's {config.total_steps}"
        raise UserError(f"{excess}; set --config.warmup_steps or --config.warmup_epochs.")
    return config.lock()


def flatten_config(config: ConfigDict) -> dict[str, Any]:
    """Returns the fields by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            flat |= {f"{key}.{inner}": leaf for inner, leaf in flatten_config(value).items()}
        else:
            flat[key] = value
    return flat


def save_config(config: ConfigDict, path: Path) -> None:
    """Writes the configuration as JSON, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"version": CONFIG_VERSION, **config.to_dict()}, indent=2) + "\n")
    partial.replace(path)


def load_config(path: Path) -> ConfigDict:
    """Reads a configuration that `save` wrote, now or in an earlier version of this package.

    Raises:
        UserError: it cannot be read, is damaged, or of a later version.
    """
    try:
        return parse_config(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from error


def parse_config(text: bytes, path: str) -> ConfigDict:
    """Returns the configuration in the text of a file; raises as `load`."""
    try:
        fields = json.loads(text)
        later = fields.pop("version", 0) > CONFIG_VERSION
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{path} is damaged: it is not a JSON object. Put an intact copy in its place.") from error
    if later:
        raise UserError(f"{path} was written by a later version of vit_jax; install that one to go on with the run.")
    for key, value in YOUNGER.items():
        *groups, field = key.split(".")
        _fill(fields, groups, field, value)
    return ConfigDict(fields).lock()


def _fill(fields: dict[str, Any], groups: list[str], field: str, value: Any) -> None:
    """Gives a field its value where it has none; a group `*` stands for all that there are."""
    if not groups:
        fields.setdefault(field, value)
    elif groups[0] == "*":
        for inner in fields.values():
            _fill(inner, groups[1:], field, value)
    else:
        _fill(fields.setdefault(groups[0], {}), groups[1:], field, value)


def check_resumes(old: ConfigDict, new: ConfigDict, place: str) -> list[str]:
    """Returns how the configuration of a resumed run differs from the one of the run that it continues.

    Raises:
        UserError: a field differs that would make it another run: model, task, data (unless `data.accept_change`),
            seed, batch or optimizer.
    """
    before, after = flatten_config(old), flatten_config(new)
    changed = [key for key in sorted(before | after) if not _same(before.get(key), after.get(key))]
    lines = [f"{key}: {_told(before.get(key))} -> {_told(after.get(key))}" for key in changed]
    told = dict(zip(changed, lines, strict=True))
    fatal = {key for key in changed if _identifies(key)}
    acceptable = {key for key in fatal - FIXED if key.startswith("data.")}
    if new.data.accept_change:
        fatal -= acceptable
    if fatal:
        what = "; ".join(line for key, line in told.items() if key in fatal)
        hint = ACCEPT if fatal <= acceptable else ""
        ways = f"change it back or choose a new workdir{hint}."
        raise UserError(f"the workdir {place} holds another run ({what}); {ways}")
    return lines


def check_data(saved: dict[str, Any], now: dict[str, Any], accepts: bool, place: str) -> list[str]:
    """Returns how the data of a resumed run differ from those that a checkpoint was trained on, in words.

    Args:
        saved: `data.DataInfo.fingerprint` as it was.
        now: as it is.
        accepts: `data.accept_change`.
        place: the workdir.

    Raises:
        UserError: they differ, and that is not accepted or is more than the data.
    """
    told = {
        key: f"{key}: {_told(saved.get(key))} -> {_told(now.get(key))}"
        for key in saved | now
        if saved.get(key) != now.get(key)
    }
    if told and not (accepts and told.keys().isdisjoint(FIXED)):
        hint = ACCEPT if told.keys().isdisjoint(FIXED) else ""
        raise UserError(f"{place} was trained on other data ({'; '.join(told.values())}); choose a new workdir{hint}.")
    return list(told.values())


def _told(value: Any) -> str:
    return "unset" if value is None else str(value)


def _identifies(key: str) -> bool:
    return key not in FREE and any(key == field or key.startswith(f"{field}.") for field in IDENTITY)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return a == b


def epochs(key: str) -> str:
    """Returns the field that gives a duration in epochs instead."""
    return f"{key.removesuffix('_steps')}_epochs"
