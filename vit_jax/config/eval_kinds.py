"""The kinds of evaluations, and what is known of each kind before data or models are opened."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class EvalKind:
    """A kind of evaluation.

    Attributes:
        best: the metrics that may choose the best checkpoint; larger is better. {FIELD} in a name stands for each value
            of a field.
        grid: the name of a field. If it has several values, the name and a value are appended to the metrics of `best`,
            as in 5shot_l2_1024. Empty: there is no such field.
        task: the kind of task whose head is evaluated; empty: the features of any model are evaluated.
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
FROZEN = tuple(kind for kind, rules in EVAL_KINDS.items() if not rules.task)  # kinds that learn from frozen features
