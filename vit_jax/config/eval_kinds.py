"""The kinds of evaluations: what is known of each before anything is opened."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class EvalKind:
    """A kind of evaluation.

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
