"""Regression: one or several numbers of each image, standardised, and their losses."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from vit_jax.tasks.task import Batch, Inputs


@dataclasses.dataclass(frozen=True)
class Regress:
    """Regression to standardised numbers, (number - mean) / deviation. The loss is the mean over an image's numbers.

    Attributes:
        num_classes: how many numbers an image has, and the head outputs.
        loss: "l1", the absolute error; "l2", the squared error; or "huber", half the squared error up to `huber_delta`
            and linear beyond, with the same slope (Huber, 1964).
        huber_delta: the error at which "huber" becomes linear, in deviations.
        scale: the (mean, deviation) of each number; None: they are not known, or the numbers need none.
    """

    kind: ClassVar[str] = "regress"
    output: ClassVar[str] = "logits"
    num_classes: int
    loss: str = "l2"
    huber_delta: float = 1.0
    scale: tuple[tuple[float, float], ...] | None = None

    @property
    def head(self) -> dict[str, Any]:
        """The head: an output for each number."""
        return {"num_classes": self.num_classes}

    def describe(self, class_names: tuple[str, ...] | None) -> dict[str, Any]:
        """Returns the names of the numbers, the loss, and the means and deviations, which undo the standardisation."""
        return {"class_names": class_names, "loss": self.loss, "target_scale": self.scale}

    def train_examples(self, key: PRNGKeyArray, batch: Batch) -> tuple[Inputs, Float[Array, "batch targets"]]:
        """Returns the images and their standardised numbers."""
        return self.test_examples(batch)

    def test_examples(self, batch: Batch) -> tuple[Inputs, Float[Array, "batch targets"]]:
        """Returns the images and their standardised numbers."""
        means, deviations = jnp.array(self.scale or [(0.0, 1.0)] * self.num_classes, jnp.float32).T
        return {"images": batch["image"]}, (batch["label"] - means) / deviations

    def losses(
        self, outputs: Float[Array, "batch targets"], targets: Float[Array, "batch targets"]
    ) -> Float[Array, " batch"]:
        """Returns the loss of each image."""
        errors = outputs - targets
        if self.loss == "l1":
            return jnp.abs(errors).mean(axis=1)
        if self.loss == "l2":
            return (errors**2).mean(axis=1)
        return optax.losses.huber_loss(outputs, targets, delta=self.huber_delta).mean(axis=1)

    def metric_sums(
        self,
        outputs: Float[Array, "batch targets"],
        targets: Float[Array, "batch targets"],
        mask: Float[Array, " batch"],
    ) -> dict[str, Float[Array, ""]]:
        """Returns `n` and `loss`, summed over the rows whose `mask` is 1; rows without numbers (NaN) are left out."""
        mask = mask * jnp.isfinite(targets).all(axis=1)
        return {"n": mask.sum(), "loss": jnp.where(mask > 0, self.losses(outputs, targets), 0.0).sum()}
