"""What a configuration accepts: one row for each field. Defaults and meanings are in configs/base.py."""

import dataclasses
import enum
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

MOST = math.inf
DURATIONS = ("total_steps", "warmup_steps", "eval_every")  # each is in steps; `epochs_field` gives the one in epochs


class OnResume(enum.Enum):
    """What happens when a run is resumed with another value of a field."""

    ACCEPTED = "the run continues; the change is logged"
    DATA = "the run continues if data.accept_change is set"
    REFUSED = "it would be another run"


@dataclasses.dataclass(frozen=True)
class Field:
    """The rules of one field.

    Attributes:
        least: of a number.
        most: of a number.
        choices: the words that it may be; empty: any value of the type.
        optional: it may be unset.
        on_resume: None: as its group, see `GROUPS`.
        renamed_from: its name in earlier versions, which recipes, command lines and `config.json` may still use.
        whole: a number that must have no fraction.
        kinds: the kinds of evaluations that have the field; empty: all of them, or no field of an evaluation.
        when_missing: (value,) with which a run does what it did before the field existed; for a `config.json` that is
            older than the field. Empty: every `config.json` has the field.
    """

    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()
    optional: bool = False
    on_resume: OnResume | None = None
    renamed_from: str | None = None
    whole: bool = False
    kinds: tuple[str, ...] = ()
    when_missing: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class EvalKind:
    """What is known of a kind of evaluation before anything is opened.

    Attributes:
        best: metrics by which a checkpoint may be the best, where larger is better; {FIELD} stands for each value of a
            field.
        grid: a field that, where it has several values, is added to these names: 5shot_l2_1024.
        task: the kind of task whose head it evaluates; empty: it evaluates the features of any model.
    """

    best: tuple[str, ...]
    grid: str = ""
    task: str = ""


EVAL_KINDS: Mapping[str, EvalKind] = {
    "classify": EvalKind(("accuracy", "top5"), task="classify"),
    "predictions": EvalKind(("accuracy", "top5"), task="classify"),
    "masked_patches": EvalKind(("accuracy",), task="masked_patches"),
    "fewshot": EvalKind(("{shots:g}shot",), grid="l2"),
    "knn": EvalKind(("{k:g}nn",)),
    "probe": EvalKind(("accuracy",)),
    "probe_sgd": EvalKind(("accuracy",)),
}
FROZEN = tuple(kind for kind, rules in EVAL_KINDS.items() if not rules.task)  # which learn from frozen features

# Group -> the rule for its fields that state none, and for fields of other versions. Others: ACCEPTED.
GROUPS = {"model": OnResume.REFUSED, "task": OnResume.REFUSED, "data": OnResume.DATA}

FIELDS: Mapping[str, Field] = {
    "seed": Field(0, 2**32 - 1, on_resume=OnResume.REFUSED),
    "resolution": Field(1, MOST, on_resume=OnResume.REFUSED),
    "batch": Field(1, MOST, on_resume=OnResume.REFUSED),
    "batch_eval": Field(1, MOST, optional=True),
    "accum_steps": Field(1, MOST),
    "total_steps": Field(0, MOST, optional=True),
    "total_epochs": Field(0, MOST, optional=True),
    "init_from": Field(optional=True),
    "keep_head": Field(),
    "resample": Field(choices=("linear", "bicubic", "flexi")),
    "base_lr": Field(0, MOST),
    "warmup_steps": Field(0, MOST, optional=True),
    "warmup_epochs": Field(0, MOST, optional=True),
    "decay_type": Field(choices=("cosine", "linear", "rsqrt", "step", "constant")),
    "decay_at": Field(0, 1, when_missing=((0.3, 0.6, 0.9),)),
    "linear_end": Field(),
    "rsqrt_timescale": Field(1, MOST),
    "cooldown_steps": Field(0, MOST),
    "grad_norm_clip": Field(0, MOST, optional=True),
    "log_every": Field(1, MOST),
    "eval_every": Field(1, MOST, optional=True),
    "eval_every_epochs": Field(0, MOST, optional=True),
    "checkpoint_every": Field(1, MOST),
    "checkpoint_every_minutes": Field(0, MOST),
    "stall_limit": Field(1, MOST),
    "profile_steps": Field(0, MOST),
    "wandb": Field(optional=True, when_missing=(None,)),
    "report": Field(when_missing=(False,)),
    "compiler_options": Field(when_missing=("",)),
    # The model's numbers are checked by models.create.
    "model.name": Field(),
    "model.width": Field(optional=True),
    "model.depth": Field(optional=True),
    "model.mlp_dim": Field(optional=True),
    "model.num_heads": Field(optional=True),
    "model.pooling": Field(),
    "model.final_norm": Field(when_missing=("tokens",)),
    "model.class_token": Field(when_missing=("auto",)),
    "model.registers": Field(when_missing=(0,)),
    "model.pre_logits": Field(),
    "model.representation_size": Field(optional=True, when_missing=(None,)),
    "model.head_bias": Field(),
    "model.position": Field(),
    "model.position_rows": Field(when_missing=("all",)),
    "model.position_place": Field(when_missing=("stem",)),
    "model.position_std": Field(when_missing=(0.02,)),
    "model.relative_tables": Field(when_missing=("block",)),
    "model.relative_clip": Field(when_missing=(0,)),
    "model.rotary": Field(when_missing=("none",)),
    "model.rotary_grid": Field(when_missing=(0,)),
    "model.qk_norm": Field(when_missing=(False,)),
    "model.activation": Field(when_missing=("gelu_tanh",)),
    "model.norm_epsilon": Field(when_missing=(1e-6,)),
    "model.layer_scale": Field(when_missing=(0.0,)),
    "model.embed_bias": Field(when_missing=(True,)),
    "model.stem_epsilons": Field(when_missing=("released",)),
    "model.image_mean": Field(when_missing=((0.5, 0.5, 0.5),)),
    "model.image_std": Field(when_missing=((0.5, 0.5, 0.5),)),
    "model.stages": Field(optional=True, when_missing=(None,)),
    "model.unit": Field(optional=True, when_missing=(None,)),
    "model.border": Field(optional=True, when_missing=(None,)),
    "model.dropout_rate": Field(),
    "model.stochastic_depth": Field(),
    # How devices execute the model, not what it computes.
    "model.dtype": Field(choices=("auto", "float32", "bfloat16"), on_resume=OnResume.ACCEPTED),
    "model.attention": Field(on_resume=OnResume.ACCEPTED),
    "model.mlp": Field(on_resume=OnResume.ACCEPTED),
    "model.remat": Field(on_resume=OnResume.ACCEPTED),
    "model.scan": Field(on_resume=OnResume.ACCEPTED),
    # Where the data are is free: their fingerprint is compared.
    "data.source": Field(on_resume=OnResume.ACCEPTED),
    "data.data_dir": Field(optional=True, on_resume=OnResume.ACCEPTED),
    "data.split": Field(),
    "data.preprocess": Field(),
    "data.num_classes": Field(optional=True, on_resume=OnResume.REFUSED),  # the shape of the head
    "data.num_examples": Field(optional=True),
    "data.max_labels": Field(1, MOST, optional=True),
    "data.workers": Field(0, MOST, on_resume=OnResume.ACCEPTED),
    "data.fast": Field(),
    "data.accept_change": Field(on_resume=OnResume.ACCEPTED),
    "data.bad_images": Field(choices=("fail", "replace"), on_resume=OnResume.ACCEPTED),
    "data.max_bad": Field(0, 1, on_resume=OnResume.ACCEPTED),
    "task.kind": Field(choices=("classify", "masked_patches"), when_missing=("classify",)),
    "task.loss": Field(choices=("softmax", "sigmoid")),
    "task.label_smoothing": Field(0, 1),
    "task.mixup": Field(0, MOST),
    "task.cutmix": Field(0, MOST),
    "task.mixup_probability": Field(0, 1),
    "task.target": Field(choices=("mean_color", "patch4", "full"), when_missing=("mean_color",)),
    "task.corrupted": Field(0, 1, when_missing=(0.5,)),
    "task.masked": Field(0, 1, when_missing=(0.8,)),
    "task.swapped": Field(0, 1, when_missing=(0.1,)),
    "task.swap_from": Field(choices=("image", "batch"), when_missing=("image",)),
    # These three decide which arrays the optimizer's state has.
    "optim.name": Field(choices=("adamw", "sgd"), on_resume=OnResume.REFUSED),
    "optim.moment_dtype": Field(choices=("float32", "bfloat16"), on_resume=OnResume.REFUSED),
    "optim.ema_decay": Field(0, 1, on_resume=OnResume.REFUSED),
    "optim.grad_dtype": Field(choices=("auto", "float32"), when_missing=("auto",)),
    "optim.beta1": Field(0, 1),
    "optim.beta2": Field(0, 1),
    "optim.eps": Field(0, MOST),
    "optim.momentum": Field(0, 1),
    "optim.weight_decay": Field(0, MOST),
    "optim.decays": Field(choices=("kernels", "all")),
    "optim.decay_factor": Field(choices=("rate", "schedule")),
    "optim.lr_multipliers": Field(renamed_from="optim.rates"),
    "optim.max_nonfinite_skips": Field(0, MOST),
    "mesh.slice": Field(1, MOST),
    "mesh.data": Field(),  # the mesh's axes are checked against the devices; -1 is all that are left
    "mesh.fsdp": Field(),
    "mesh.tensor": Field(1, MOST),
    "evals.*.kind": Field(choices=tuple(EVAL_KINDS), when_missing=("classify",)),
    "evals.*.source": Field(optional=True, when_missing=(None,)),
    "evals.*.split": Field(),
    "evals.*.preprocess": Field(),
    "evals.*.every": Field(1, MOST, optional=True, when_missing=(None,)),
    "evals.*.labels": Field(optional=True, kinds=("predictions",)),
    "evals.*.class_map": Field(optional=True, kinds=("predictions",)),
    "evals.*.train_split": Field(kinds=FROZEN),
    "evals.*.shots": Field(1, MOST, whole=True, kinds=("fewshot",)),
    "evals.*.seeds": Field(1, MOST, kinds=("fewshot",)),
    "evals.*.l2": Field(0, MOST, kinds=("fewshot", "probe")),
    "evals.*.rates": Field(0, MOST, kinds=("probe_sgd",)),
    "evals.*.epochs": Field(1, MOST, kinds=("probe_sgd",)),
    "evals.*.validation": Field(0, 1, kinds=("probe", "probe_sgd")),
    "evals.*.k": Field(1, MOST, whole=True, kinds=("knn",)),
    "evals.*.temperature": Field(1e-3, MOST, kinds=("knn",)),
    "checkpoint.keep_last": Field(1, MOST),
    "checkpoint.keep_best": Field(0, MOST),
    "checkpoint.best_metric": Field(),
}
RENAMED: Mapping[str, str] = {row.renamed_from: name for name, row in FIELDS.items() if row.renamed_from}
# Fields of the model that depend on the machine or the training and not on the weights.
EXECUTION = (
    "grad_dtype",
    *(
        name.removeprefix("model.")
        for name, row in FIELDS.items()
        if name.startswith("model.") and row.on_resume is OnResume.ACCEPTED
    ),
)


def find_field(name: str) -> Field:
    """Returns the rules of a field, given its dotted name; of one of another version, those of its group."""
    row = FIELDS.get(re.sub(r"^evals\.[^.]+\.", "evals.*.", name), Field())
    on_resume = row.on_resume or GROUPS.get(name.partition(".")[0], OnResume.ACCEPTED)
    return dataclasses.replace(row, on_resume=on_resume)


def eval_fields(kind: str) -> list[str]:
    """Returns the names of the fields of a kind of evaluation."""
    rows = {name.removeprefix("evals.*."): row for name, row in FIELDS.items() if name.startswith("evals.*.")}
    return [name for name, row in rows.items() if not row.kinds or kind in row.kinds]


def kinds_of_task(task: str) -> list[str]:
    """Returns the kinds of evaluations of a model that has learnt a kind of task: of its head, then of its features."""
    return [kind for kind, rules in EVAL_KINDS.items() if rules.task == task] + list(FROZEN)


def has_classes_of_head(eval_config: ConfigDict) -> bool:
    """Returns whether the data of an evaluation must have the classes of the model's head."""
    other = eval_config.kind == "predictions" and (eval_config.labels or eval_config.class_map)
    return EVAL_KINDS[eval_config.kind].task == "classify" and not other


def best_metrics(eval_config: ConfigDict) -> list[str]:
    """Returns the metrics of an evaluation by which a checkpoint may be the best."""
    kind, names = EVAL_KINDS[eval_config.kind], []
    for pattern in kind.best:
        if kind.grid and len(eval_config[kind.grid]) > 1:
            pattern = f"{pattern}_{kind.grid}_{{{kind.grid}:g}}"
        fields = re.findall(r"{(\w+):g}", pattern)
        values = itertools.product(*(eval_config[field] for field in fields))
        names += [pattern.format(**dict(zip(fields, combination, strict=True))) for combination in values]
    return names


def first_evaluation(config: ConfigDict) -> str:
    """Returns the name of the evaluation that stands for all: the first, by name, of those of the head, if any."""
    return min(config.evals, key=lambda name: not EVAL_KINDS[config.evals[name].kind].task)


def epochs_field(name: str) -> str:
    """Returns the name of the field that gives a duration in epochs instead of steps."""
    return f"{name.removesuffix('_steps')}_epochs"
