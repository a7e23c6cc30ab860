"""The one signature of all tasks."""

from typing import Any, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Array, Float, PRNGKeyArray

Batch: TypeAlias = dict[str, Array]
Inputs: TypeAlias = dict[str, Array]  # arguments of `Model.apply` by name, each with the rows of the batch
Targets: TypeAlias = Any  # arrays with the rows of the batch, of which only the task knows more


@runtime_checkable
class Task(Protocol):
    """An objective. Whoever trains, evaluates, resumes, plans or exports knows of the targets what is said here."""

    @property
    def kind(self) -> str:
        """What its head is for, by which evaluations know it."""

    @property
    def output(self) -> str:
        """What the losses of training are of: `logits`, or the name of an intermediate of the model."""

    @property
    def num_classes(self) -> int | None:
        """The labels that the data must have, 0 to num_classes - 1; None: it reads none."""

    @property
    def head(self) -> dict[str, Any]:
        """The fields of the model's spec, by flat keyword, that the task decides."""

    def describe(self, class_names: tuple[str, ...] | None) -> dict[str, Any]:
        """Returns what an exported model states of its outputs, by attribute of `Model`.

        Args:
            class_names: of the data.
        """

    def train_examples(self, key: PRNGKeyArray, batch: Batch) -> tuple[Inputs, Targets]:
        """Returns what the model is given for a batch of training, and what it should make of it.

        Args:
            key: of the seed and the step.
            batch: `image` [batch, height, width, 3] in [-1, 1] and `label` [batch].
        """

    def test_examples(self, batch: Batch) -> tuple[Inputs, Targets]:
        """Returns the same for a batch of an evaluation; of each row the same in any batch."""

    def losses(self, outputs: Array, targets: Targets) -> Float[Array, " batch"]:
        """Returns the loss of each row of a batch of training, given what the model makes of its inputs.

        With a teacher, the targets are a pair: what `train_examples` returned, and the teacher's logits.
        """

    def metric_sums(self, outputs: Array, targets: Targets, mask: Float[Array, " batch"]) -> dict[str, Array]:
        """Returns metrics of a batch of an evaluation, and `n`, each summed over the rows whose `mask` is 1.

        The metric of a split is its sum divided by that of `n`.
        """
