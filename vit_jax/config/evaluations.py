"""Properties of a configuration's evaluations that follow from their kinds."""

import itertools
import re
from collections.abc import Mapping

from ml_collections import ConfigDict

from vit_jax.config.fields import EVAL_KINDS, FIELDS, Field


def eval_rows(kind: str) -> Mapping[str, Field]:
    """Returns name -> declaration of the fields of a kind of evaluation, with names without `evals.*.`."""
    rows = {name.removeprefix("evals.*."): row for name, row in FIELDS.items() if name.startswith("evals.*.")}
    return {name: row for name, row in rows.items() if not row.kinds or kind in row.kinds}


def eval_fields(kind: str) -> list[str]:
    """Returns the names of the fields of a kind of evaluation."""
    return list(eval_rows(kind))


def kinds_of_task(task: str) -> list[str]:
    """Returns the kinds of evaluations for a model that was trained on a kind of task.

    Those that evaluate the head come first, then those that evaluate the features.
    """
    return [kind for wanted in (task, "") for kind, rules in EVAL_KINDS.items() if rules.task == wanted]


def has_classes_of_head(eval_config: ConfigDict) -> bool:
    """Returns whether the data of an evaluation must have the classes of the model's head."""
    others = [field for field in ("labels", "class_map") if eval_config.get(field)]
    return EVAL_KINDS[eval_config.kind].task == "classify" and not others


def best_metrics(eval_config: ConfigDict) -> list[str]:
    """Returns the metrics of an evaluation that may choose the best checkpoint, without the evaluation's name."""
    kind, names = EVAL_KINDS[eval_config.kind], []
    for pattern in kind.best:
        if kind.grid and len(eval_config[kind.grid]) > 1:
            pattern = f"{pattern}_{kind.grid}_{{{kind.grid}:g}}"
        fields = re.findall(r"{(\w+):g}", pattern)
        values = itertools.product(*(eval_config[field] for field in fields))
        names += [pattern.format(**dict(zip(fields, combination, strict=True))) for combination in values]
    return names


def first_evaluation(config: ConfigDict) -> str:
    """Returns the name of the evaluation that represents a run where only one number is shown.

    It is the first of those that evaluate the head or, if there is none, the first of all. Evaluations are ordered by
    name.
    """
    return min(config.evals, key=lambda name: not EVAL_KINDS[config.evals[name].kind].task)
