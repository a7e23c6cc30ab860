"""Checks of a configuration that need neither data nor devices."""

import math
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, choose, refuse
from vit_jax.config.fields import (
    FIELDS,
    FROM_WEIGHTS,
    OF_OPTIMIZERS,
    OPTIMIZERS,
    REGRESSION_LOSSES,
    Field,
    best_metrics,
    eval_rows,
)
from vit_jax.config.make_config import flatten_config
from vit_jax.config.resolve import DURATIONS, epochs_field

WITH_COOLDOWN = ("rsqrt", "constant")  # the values of `decay_type` to which `cooldown_steps` belongs
DEFAULTS_OF_TASK = {name.removeprefix("task."): row.default for name, row in FIELDS.items() if name.startswith("task.")}
SCALE = ("target_means", "target_deviations")
OF_CLASSES = ("label_smoothing", "mixup", "cutmix", "class_weights", "focal_gamma", "logit_adjustment")
TEACHER_FIELDS = ("teacher", "teacher_weight", "teacher_targets", "temperature")


def check_config(config: ConfigDict) -> None:
    """Checks what can be checked before data or devices are used.

    Raises:
        UserError: a field has an unknown word or a number outside its range, lacks a value that it needs, belongs to
            another optimizer, or contradicts another field; or a duration is given in both units or not at all.
    """
    flat = flatten_config(config)
    for name, value in flat.items():
        if name in FIELDS:  # those of evaluations are checked below
            check_value(name, value, FIELDS[name])
    _check_optimizer(config.optim)
    if not len(config.evals):
        raise UserError("config.evals is empty; declare an evaluation, as configs/base.py does.")
    check_evaluations(config)
    measures = [f"{name}/{metric}" for name in config.evals for metric in best_metrics(config.evals[name])]
    choose("checkpoint.best_metric", flat["checkpoint.best_metric"], measures)
    adapts, freezes = config.adapt.rank, config.optim.frozen_blocks
    refuse(
        (
            flat["keep_head"] and flat["init_from"] is None,
            "keep_head=True needs --config.init_from, the checkpoint whose head is kept.",
        ),
        (
            config.model.name == FROM_WEIGHTS and flat["init_from"] is None,
            "model.name=init_from is the model of the weights that --config.init_from names; set that too.",
        ),
        (
            adapts and freezes,
            "adapt.rank freezes all but the adapters and the head: set optim.frozen_blocks to 0.",
        ),
        (
            (adapts or freezes) and OPTIMIZERS[config.optim.name].averages,
            f"optim.name={config.optim.name} needs optim.frozen_blocks=0 and adapt.rank=0, since it averages all "
            "parameters; freeze parameters with optim.lr_multipliers instead, or choose another optim.name.",
        ),
        (
            flat["total_steps"] is None and flat["total_epochs"] is None,
            "set the length of training with total_steps or total_epochs.",
        ),
        (
            flat["cooldown_steps"] and flat["decay_type"] not in WITH_COOLDOWN,
            f"decay_type={flat['decay_type']} has no cooldown; set cooldown_steps=0, or decay_type to "
            f"{' or '.join(WITH_COOLDOWN)}.",
        ),
    )
    _check_regression(config.task)
    _check_teacher(config)
    _check_stop(config)
    beta = config.task.effective_beta
    if beta != DEFAULTS_OF_TASK["effective_beta"] and config.task.class_weights != "effective":
        raise UserError(f"task.effective_beta={beta:g} needs --config.task.class_weights=effective; leave it out.")
    if config.data.group_column is not None and config.data.groups is None:
        raise UserError("data.group_column needs --config.data.groups, the file that has this column; leave it out.")
    for name in DURATIONS:
        if flat[name] is not None and flat[epochs_field(name)] is not None:
            raise UserError(f"set {name} or {epochs_field(name)}, not both.")


def _check_optimizer(optim: ConfigDict) -> None:
    """Checks that the fields fit the chosen optimizer and each other.

    Raises:
        UserError: a field belongs to another optimizer, or two fields contradict each other.
    """
    kind = OPTIMIZERS[optim.name]
    for field in OF_OPTIMIZERS:
        if optim[field] is not None and field not in kind.defaults:
            owners = ", ".join(name for name, other in OPTIMIZERS.items() if field in other.defaults)
            raise UserError(
                f"optim.{field}={optim[field]} is not used by optim.name={optim.name}, only by {owners}; leave it out "
                f"or, if the recipe sets it, add --config.optim.{field}=None."
            )
    refuse(
        (
            kind.scales_decay and optim.decay_factor != "rate",
            f"{optim.name} scales the weight decay together with the update; set --config.optim.decay_factor=rate, and "
            "divide optim.weight_decay by base_lr to keep the strength of the decay.",
        ),
        (
            kind.averages and optim.ema_decay,
            f"{optim.name} already averages the parameters that are evaluated; set --config.optim.ema_decay=0.",
        ),
        (
            kind.averages and optim.beta1 == 0,
            f"{optim.name} divides by optim.beta1, which must be above 0; set --config.optim.beta1=0.9.",
        ),
        (
            not optim.sam_rho and (optim.sam_alpha or optim.sam_rho_min is not None),
            "optim.sam_alpha and optim.sam_rho_min need optim.sam_rho above 0; set optim.sam_rho, or leave both out.",
        ),
        (
            (optim.sam_rho_min or 0) > optim.sam_rho,
            f"optim.sam_rho_min={optim.sam_rho_min} must be at most optim.sam_rho={optim.sam_rho}.",
        ),
    )


def _check_regression(task: ConfigDict) -> None:
    losses = ", ".join(f"--config.task.loss={loss}" for loss in REGRESSION_LOSSES)
    changed = [f"task.{name}" for name in OF_CLASSES if task[name] != DEFAULTS_OF_TASK[name]]
    learns, is_regression = task.kind == "regress", task.loss in REGRESSION_LOSSES
    refuse(
        (
            learns and not is_regression,
            f"task.kind=regress learns numbers: choose {losses} instead of {task.loss}.",
        ),
        (
            is_regression and not learns,
            f"task.loss={task.loss} is for numbers, which --config.task.kind=regress learns; set that too.",
        ),
        (
            learns and changed,
            f"{', '.join(changed)} {'is' if len(changed) == 1 else 'are'} for classes; task.kind=regress needs the "
            "default.",
        ),
        (
            task.huber_delta != DEFAULTS_OF_TASK["huber_delta"] and task.loss != "huber",
            f"task.huber_delta={task.huber_delta:g} needs --config.task.loss=huber; leave it out.",
        ),
        (not task.huber_delta, "task.huber_delta=0 makes every loss 0; choose a number above 0."),
        (
            not learns and any(task[name] for name in SCALE),
            "task.target_means and task.target_deviations need --config.task.kind=regress; leave them out.",
        ),
        (
            len(task.target_means or ()) != len(task.target_deviations or ()),
            f"task.target_means has {len(task.target_means or ())} numbers and task.target_deviations "
            f"{len(task.target_deviations or ())}; give both as many, or leave out both.",
        ),
    )


def _check_stop(config: ConfigDict) -> None:
    measure = config.checkpoint.best_metric.partition("/")[0]
    is_repeated = config.eval_every or config.eval_every_epochs or config.evals[measure].every
    refuse(
        (
            config.stop_after is None and (config.stop_cooldown or config.stop_difference),
            "stop_cooldown and stop_difference need stop_after; set --config.stop_after, or leave both out.",
        ),
        (
            config.stop_after and not is_repeated,
            f"stop_after={config.stop_after} counts evaluations during the training, but there is only one at its end; "
            "set --config.eval_every or --config.eval_every_epochs.",
        ),
        (
            config.stop_after and not config.checkpoint.keep_best,
            "stop_after exports the best checkpoint; set --config.checkpoint.keep_best=1 or more.",
        ),
    )


def _check_teacher(config: ConfigDict) -> None:
    task = config.task
    if task.kind == "distill":
        refuse(
            (
                task.teacher is None,
                "task.kind=distill needs a teacher: set --config.task.teacher to its weights.",
            ),
            (
                task.teacher_targets == "hard" and task.temperature != 1,
                "task.temperature changes only soft targets; set --config.task.temperature=1, or "
                "--config.task.teacher_targets=soft.",
            ),
        )
        return
    set_fields = [name for name in TEACHER_FIELDS if task[name] != DEFAULTS_OF_TASK[name]]
    if set_fields:
        need = "needs" if len(set_fields) == 1 else "need"
        names = " and ".join(f"task.{name}" for name in set_fields)
        raise UserError(f"{names} {need} --config.task.kind=distill; add that flag, or leave out {names}.")


def check_evaluations(config: ConfigDict) -> None:
    """Checks the fields of every evaluation.

    Raises:
        UserError: a field is missing, belongs to another kind of evaluation, or has a value outside its range.
    """
    for name, eval_config in config.evals.items():
        rows = eval_rows(eval_config.kind)
        check_value(f"evals.{name}.kind", eval_config.kind, rows["kind"])
        for field in eval_config:
            choose(f"field of evals.{name} (kind {eval_config.kind})", field, rows)
        if missing := [field for field in rows if field not in eval_config]:
            advice = "evaluation() in configs/base.py makes an evaluation with all its fields"
            raise UserError(f"evals.{name} lacks {', '.join(missing)}; {advice}.")
        for field, value in eval_config.items():
            check_value(f"evals.{name}.{field}", value, rows[field])


def check_value(name: str, value: Any, field: Field) -> None:
    """Raises UserError if a field, called `name` in the message, may not have a value by its declaration."""
    if value is None:
        if not field.optional:
            raise UserError(f"{name} must be set.")
        return
    if field.choices:
        choose(name, value, field.choices)
    if field.auto and not isinstance(value, int):
        if value != "auto":
            raise UserError(f"{name}={value} must be a whole number, or auto.")
        return
    numbers = value if isinstance(value, tuple) else (value,)
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        raise UserError(f"{name}={value} must be finite.")
    bounded = field.minimum > -math.inf or field.maximum < math.inf
    if bounded and not all(field.minimum <= number <= field.maximum for number in numbers):
        bounds = f"at least {field.minimum}" + (f" and at most {field.maximum}" if field.maximum < math.inf else "")
        raise UserError(f"{name}={value} must be {bounds}.")
    if field.is_integer and not all(isinstance(number, int) for number in numbers):
        raise UserError(f"{name}={value} must be whole numbers.")
