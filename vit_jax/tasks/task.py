"""The one signature of all tasks."""

from typing import Any, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Array, Float, PRNGKeyArray

Batch: TypeAlias = dict[str, Array]
Inputs: TypeAlias = dict[str, Array]  # arguments of `Model.apply` by name, each with the rows of the batch
Targets: TypeAlias = Any  # arrays with the rows of the batch, of which only the task knows more


@runtime_checkable
class Task(Protocol):
    """The objective of a training. Training, evaluation, resuming, planning and export use only this interface."""

    @property
    def kind(self) -> str:
        """A word for what the head predicts, such as `classify`. It decides which evaluations suit the task."""

    @property
    def output(self) -> str:
        """The model output that `losses` takes in training: `logits`, or the name of an intermediate of the model."""

    @property
    def num_classes(self) -> int | None:
        """The number of classes: labels of the data are from 0 to num_classes - 1. None: the task reads no labels."""

    @property
    def head(self) -> dict[str, Any]:
        """The fields of the model's spec, by flat keyword, that the task decides."""

    def describe(self, class_names: tuple[str, ...] | None) -> dict[str, Any]:
        """Returns attribute of `Model` -> value, for the attributes that describe the outputs of an exported model.

        Args:
            class_names: the names of the classes of the data; None if they are unknown.
        """

    def train_examples(self, key: PRNGKeyArray, batch: Batch) -> tuple[Inputs, Targets]:
        """Returns the inputs of the model and the targets for a training batch.

        Args:
            key: a random key that depends on the seed and the step.
            batch: `image` [batch, height, width, 3] in [-1, 1] and `label` [batch].
        """

    def test_examples(self, batch: Batch) -> tuple[Inputs, Targets]:
        """Returns inputs and targets for a batch of an evaluation. Those of a row do not depend on other rows."""

    def losses(self, outputs: Array, targets: Targets) -> Float[Array, " batch"]:
        """Returns the loss of each row of a training batch, given the model's outputs.

        With a teacher, the targets are a pair: what `train_examples` returned, and the teacher's logits.
        """

    def metric_sums(self, outputs: Array, targets: Targets, mask: Float[Array, " batch"]) -> dict[str, Array]:
        """Returns metrics of a batch of an evaluation, and `n`, each summed over the rows whose `mask` is 1.

        The metric of a whole split is the sum of the metric divided by the sum of `n`.
        """
