"""Distillation: classification by labels and by what a frozen teacher makes of the same images."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from vit_jax.tasks.classify import Classify, cross_entropy
from vit_jax.tasks.task import Targets


@dataclasses.dataclass(frozen=True)
class Distill(Classify):
    """Classification by labels and a teacher: the loss is `(1 - teacher_weight)` times the loss against the labels plus
    `teacher_weight` times the loss against the teacher.

    The teacher is given the same images as the student, cropped and mixed (the consistent teaching of arXiv 2106.05237;
    with `teacher_weight=1`, its function matching). Soft targets are the teacher's probabilities at a temperature T.
    Their loss is T^2 times the divergence of the student's probabilities at the same T from them (arXiv 1503.02531).
    Hard targets are the teacher's best class (arXiv 2012.12877).

    Attributes, besides those of `Classify`:
        teacher_weight: the weight of the loss against the teacher, 0 to 1.
        teacher_targets: "soft" or "hard".
        temperature: T of soft targets.
        two_heads: whether the model has a second head. The second head then learns from the teacher alone, and the
            first from the labels alone (arXiv 2012.12877).
    """

    teacher_weight: float = 0.5
    teacher_targets: str = "soft"
    temperature: float = 1.0
    two_heads: bool = False

    @property
    def output(self) -> str:
        """The logits, or those of both heads."""
        return "head_logits" if self.two_heads else "logits"

    def losses(self, outputs: Array, targets: Targets) -> Float[Array, " batch"]:
        """Returns the loss of each example.

        Args:
            outputs: logits [batch, classes], or [batch, 2, classes] of two heads.
            targets: (the targets from the labels, the teacher's logits), each [batch, classes].
        """
        labels, taught = targets
        own, copied = (outputs[:, 0], outputs[:, 1]) if self.two_heads else (outputs, outputs)
        by_labels = super().losses(own, labels)
        return (1 - self.teacher_weight) * by_labels + self.teacher_weight * self.teacher_losses(copied, taught)

    def teacher_losses(
        self, logits: Float[Array, "batch classes"], taught: Float[Array, "batch classes"]
    ) -> Float[Array, " batch"]:
        """Returns the loss of each example's `logits` against the teacher's logits, `taught`."""
        if self.teacher_targets == "hard":
            return cross_entropy(self.loss, logits, jax.nn.one_hot(taught.argmax(axis=1), self.num_classes))
        student, teacher = logits / self.temperature, taught / self.temperature
        if self.loss == "softmax":
            divergence = optax.losses.kl_divergence_with_log_targets(
                jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)
            )
        else:
            targets = jax.nn.sigmoid(teacher)
            of_classes = optax.losses.sigmoid_binary_cross_entropy(student, targets)
            least = optax.losses.sigmoid_binary_cross_entropy(teacher, targets)
            divergence = jnp.sum(of_classes - least, axis=-1)
        return self.temperature**2 * divergence
