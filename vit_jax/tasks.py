"""Objectives: what a batch and the logits for it cost."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class Classify:
    """Classification by cross-entropy with softmax, or with one sigmoid per class summed over classes.

    Attributes:
        num_classes: K.
        loss: "softmax" or "sigmoid".
        label_smoothing: s. Softmax targets are (1 - s) onehot + s / K; sigmoid targets are 1 - s and s, the smoothing
            of the authors' ImageNet recipe (s = 1e-4).
        mixup: alpha of MixUp (arXiv 1710.09412), 0 for none.
        mixup_probability: share of the steps that mix.
    """

    num_classes: int
    loss: str = "softmax"
    label_smoothing: float = 0.0
    mixup: float = 0.0
    mixup_probability: float = 1.0

    def targets(self, labels: Int[Array, " batch"]) -> Float[Array, "batch classes"]:
        """Returns the smoothed targets of a batch."""
        s, onehot = self.label_smoothing, jax.nn.one_hot(labels, self.num_classes)
        if self.loss == "softmax":
            return (1 - s) * onehot + s / self.num_classes
        return (1 - s) * onehot + s * (1 - onehot)

    def mix(
        self,
        key: PRNGKeyArray,
        images: Float[Array, "batch height width 3"],
        targets: Float[Array, "batch classes"],
    ) -> tuple[Float[Array, "batch height width 3"], Float[Array, "batch classes"]]:
        """Mixes every row of the global batch with the row before it, by one lambda a step (MixUp)."""
        if not self.mixup:
            return images, targets
        beta_key, chance_key = jax.random.split(key)
        share = jax.random.beta(beta_key, self.mixup, self.mixup)
        share = jnp.maximum(share, 1 - share)  # the larger part stays the row's own
        share = jnp.where(jax.random.uniform(chance_key) < self.mixup_probability, share, 1.0)
        images, targets = (share * x + (1 - share) * jnp.roll(x, 1, axis=0) for x in (images, targets))
        return images, targets

    def losses(
        self, logits: Float[Array, "batch classes"], targets: Float[Array, "batch classes"]
    ) -> Float[Array, " batch"]:
        """Returns the loss of each example."""
        if self.loss == "softmax":
            return optax.losses.softmax_cross_entropy(logits, targets)
        return optax.losses.sigmoid_binary_cross_entropy(logits, targets).sum(axis=-1)


def make(config: ConfigDict, num_classes: int) -> Classify:
    """Returns the objective of `config.task`."""
    return Classify(
        num_classes=num_classes,
        loss=config.task.loss,
        label_smoothing=config.task.label_smoothing,
        mixup=config.task.mixup,
        mixup_probability=config.task.mixup_probability,
    )
