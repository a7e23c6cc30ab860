"""Which checkpoints are kept when another is finished: the newest, and the best by one score."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

Evaluations = Mapping[str, Mapping[str, str]]  # name of an evaluation -> fields of `ScoreDefinition` but `metric`


@dataclasses.dataclass(frozen=True)
class ScoreDefinition:
    """The definition of a score. Scores with different definitions cannot be compared.

    Attributes:
        metric: the name of the metric, with its evaluation: `test/accuracy`.
        split: the split of the evaluation.
        preprocess: the preprocessing of the evaluation, with the resolution filled in.
        contents: a fingerprint of the names and labels of the images; empty: not known.
        sample: a digest of the stored bytes of some images; empty if `contents` covers all bytes, and in older runs.
    """

    metric: str
    split: str
    preprocess: str
    contents: str
    sample: str = ""


UNNAMED = ScoreDefinition("", "", "", "")  # version 0.1.0 did not say what its scores measured


@dataclasses.dataclass(frozen=True)
class CheckpointScores:
    """The scores of a checkpoint.

    Attributes:
        by: the score by which the run ranked its checkpoints when this one was saved.
        values: score -> value. Values that are not finite are left out.
        lowest: whether the smallest value of `by` was the best; otherwise it was the largest.
    """

    by: ScoreDefinition
    values: dict[ScoreDefinition, float]
    lowest: bool = False


def define_score(evaluations: Evaluations, metric: str) -> ScoreDefinition:
    """Returns what a metric says, whose name is EVALUATION/METRIC."""
    return ScoreDefinition(metric, **evaluations[metric.partition("/")[0]])


def to_json(
    evaluations: Evaluations, best_metric: str, metrics: Mapping[str, float], lowest: bool = False
) -> dict[str, Any]:
    """Returns what a manifest holds of the evaluation of a checkpoint: all metrics, what each says, and the best."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return {
        "evaluated": bool(metrics),
        "metrics": finite,
        "evals": {name: {**one} for name, one in evaluations.items()},
        "best_metric": best_metric,
        "best_is": "lowest" if lowest else "highest",
        "score": finite.get(best_metric),
    }


def from_json(manifest: Mapping[str, Any]) -> CheckpointScores:
    """Returns the scores of a checkpoint, from its manifest. In version 0.1.0 it is a score without a name."""
    if "metrics" not in manifest:
        return CheckpointScores(UNNAMED, {} if manifest["score"] is None else {UNNAMED: manifest["score"]})
    values = {
        define_score(manifest["evals"], name): value for name, value in manifest["metrics"].items() if value is not None
    }
    lowest = manifest.get("best_is") == "lowest"  # an earlier version ranked by the largest values alone
    return CheckpointScores(define_score(manifest["evals"], manifest["best_metric"]), values, lowest)


def evaluations_of(config: ConfigDict) -> Evaluations:
    """Returns the evaluations as far as a configuration states them: their contents are not known."""
    return {name: {"split": e.split, "preprocess": e.preprocess, "contents": ""} for name, e in config.evals.items()}


def name_score(manifest: Mapping[str, Any], evaluations: Evaluations, best_metric: str) -> dict[str, Any]:
    """Returns a manifest of version 0.1.0 with its score named `best_metric`; a copy of any later manifest."""
    if "metrics" in manifest:
        return dict(manifest)
    metrics = {} if manifest["score"] is None else {best_metric: manifest["score"]}
    return {**manifest, **to_json(evaluations, best_metric, metrics), "evaluated": manifest["evaluated"]}


def add_samples(manifest: Mapping[str, Any], evaluations: Evaluations) -> dict[str, Any]:
    """Returns a manifest with a sample added to those evaluations that differ from the present ones in nothing else."""
    saved = manifest.get("evals", {})
    same = {name: now for name, now in evaluations.items() if name in saved and is_sampled_only_now(saved[name], now)}
    return {**manifest, "evals": {**saved, **same}} if same else dict(manifest)


def is_sampled_only_now(saved: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Returns whether an evaluation differs from the one in a checkpoint only in having a sample."""
    return "sample" not in saved and saved == {key: value for key, value in now.items() if key != "sample"}


class Retention:
    """The rule by which checkpoints are kept, as a preservation policy of Orbax.

    Attributes:
        scores: step -> the scores of the checkpoint. A checkpoint without any is never best.
    """

    def __init__(self, last: int, best: int, definition: ScoreDefinition, lowest: bool = False):
        """Keeps the newest `last` checkpoints and the best `best`. Of equally good checkpoints, the newer is better."""
        self._last, self._best, self._definition, self._lowest = last, best, definition, lowest
        self.scores: dict[int, CheckpointScores] = {}

    def kept(self, steps: Iterable[int]) -> set[int]:
        """Returns the subset of `steps` whose checkpoints are kept."""
        steps = sorted(steps)
        known = {step: self.scores[step] for step in steps if step in self.scores}
        return set(steps[-self._last :]) | set(ranked(known, self._definition, self._lowest)[: self._best])

    def best_first(self) -> list[int]:
        """Returns the steps that have scores, the best first, whether their checkpoints are kept or not."""
        return ranked(self.scores, self._definition, self._lowest)

    def ranks_like(self, scores: CheckpointScores) -> bool:
        """Returns whether the run ranked its checkpoints as now when a checkpoint was saved."""
        return (scores.by, scores.lowest) == (self._definition, self._lowest)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns whether each checkpoint is kept, in their order."""
        kept = self.kept(checkpoint.step for checkpoint in checkpoints)
        return [checkpoint.step in kept for checkpoint in checkpoints]


def ranked(scores: Mapping[int, CheckpointScores], definition: ScoreDefinition, lowest: bool = False) -> list[int]:
    """Returns the steps that have scores, the best first. Of equally good steps, the newest comes first.

    Steps with a value of `definition` come first. The others follow, ranked by the score `by` of the newest of them,
    and so on. So while no checkpoint has a value of `definition` yet, the best checkpoint so far remains the best.
    """
    rest, order = dict(scores), []
    while rest:
        values = {step: one.values[definition] for step, one in rest.items() if definition in one.values}
        sign = -1 if lowest else 1
        order += sorted(values, key=lambda step: (sign * values[step], step), reverse=True)
        rest = {step: one for step, one in rest.items() if step not in values and one.by in one.values}
        if rest:
            definition, lowest = rest[max(rest)].by, rest[max(rest)].lowest
    return order
