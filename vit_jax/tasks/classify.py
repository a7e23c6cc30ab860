"""Classification: targets, mixing, losses and evaluation metrics."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from vit_jax.tasks.task import Batch, Inputs


@dataclasses.dataclass(frozen=True)
class Classify:
    """Classification by cross-entropy with softmax, or with one sigmoid per class summed over classes.

    Attributes:
        num_classes: K.
        loss: "softmax" or "sigmoid".
        label_smoothing: s. Softmax targets are (1 - s) onehot + s / K. Sigmoid targets are 1 - s for the classes of the
            image and s for the others, as in the authors' ImageNet recipe (s = 1e-4).
        mixup: alpha of MixUp (arXiv 1710.09412); 0 for none.
        mixup_probability: the fraction of steps that mix.
        cutmix: alpha of CutMix (arXiv 1905.04899); 0 for none. With MixUp, each is used in half of the mixing steps.
        mixed_labels: "share": the target of each class of a mixed image is its share of the image. "one": every target
            that is not 0 becomes 1, as with DeiT III's binary cross-entropy (arXiv 2204.07118).
    """

    kind: ClassVar[str] = "classify"
    num_classes: int
    loss: str = "softmax"
    label_smoothing: float = 0.0
    mixup: float = 0.0
    mixup_probability: float = 1.0
    cutmix: float = 0.0
    mixed_labels: str = "share"

    @property
    def output(self) -> str:
        """The logits."""
        return "logits"

    @property
    def head(self) -> dict[str, Any]:
        """The head: a logit for each class."""
        return {"num_classes": self.num_classes}

    def describe(self, class_names: tuple[str, ...] | None) -> dict[str, Any]:
        """Returns the names of the classes, and the loss, which turns logits into probabilities."""
        return {"class_names": class_names, "loss": self.loss}

    def train_examples(self, key: PRNGKeyArray, batch: Batch) -> tuple[Inputs, Float[Array, "batch classes"]]:
        """Returns mixed images and targets."""
        images, targets = self.mix(key, batch["image"], self.targets(batch["label"]))
        if self.mixed_labels == "one":
            targets = (targets > 0).astype(targets.dtype)
        return {"images": images}, targets

    def test_examples(self, batch: Batch) -> tuple[Inputs, Int[Array, " batch"] | Int[Array, "batch labels"]]:
        """Returns the images of a batch of an evaluation, and their labels as the data have them, not yet one-hot."""
        return {"images": batch["image"]}, batch["label"]

    def targets(self, labels: Int[Array, " batch"] | Int[Array, "batch labels"]) -> Float[Array, "batch classes"]:
        """Returns the smoothed targets of a batch. Negative labels pad images that have fewer labels than others."""
        s, onehot = self.label_smoothing, jax.nn.one_hot(labels, self.num_classes)
        if labels.ndim == 2:
            onehot = onehot.sum(axis=1)
        if self.loss == "softmax":
            return (1 - s) * onehot + s / self.num_classes
        return (1 - s) * onehot + s * (1 - onehot)

    def mix(
        self,
        key: PRNGKeyArray,
        images: Float[Array, "batch height width 3"],
        targets: Float[Array, "batch classes"],
    ) -> tuple[Float[Array, "batch height width 3"], Float[Array, "batch classes"]]:
        """Mixes each row of the global batch with the row before it, and the first row with the last.

        There is one ratio (MixUp) or box (CutMix) per step. Returns the images and the targets.
        """
        if not (self.mixup or self.cutmix):
            return images, targets
        ratio_key, box_key, kind_key, chance_key = jax.random.split(key, 4)
        own = 1.0  # the weight of a row's own pixels: a number, or one per pixel
        if self.mixup:
            ratio = jax.random.beta(ratio_key, self.mixup, self.mixup)
            own = jnp.maximum(ratio, 1 - ratio)
        if self.cutmix:
            cuts = jax.random.bernoulli(kind_key, 0.5 if self.mixup else 1.0)
            own = jnp.where(cuts, 1 - cutmix_box(box_key, self.cutmix, images.shape[1:3]), own)
        own = jnp.where(jax.random.uniform(chance_key) < self.mixup_probability, own, 1.0)
        images = own * images + (1 - own) * jnp.roll(images, 1, axis=0)
        ratio = own.mean()
        return images, ratio * targets + (1 - ratio) * jnp.roll(targets, 1, axis=0)

    def losses(
        self, logits: Float[Array, "batch classes"], targets: Float[Array, "batch classes"]
    ) -> Float[Array, " batch"]:
        """Returns the loss of each example."""
        return cross_entropy(self.loss, logits, targets)

    def metric_sums(
        self,
        logits: Float[Array, "batch classes"],
        labels: Int[Array, " batch"] | Int[Array, "batch labels"],
        mask: Float[Array, " batch"],
    ) -> dict[str, Float[Array, ""]]:
        """Returns `n`, `accuracy`, `top5` and `loss`, each summed over the rows whose `mask` is 1.

        The loss is computed from the labels without smoothing or mixing. For an image with several labels, any of them
        counts as correct. A negative label means none; the row of an image without a label is left out. A row with a
        logit that is NaN counts as wrong.
        """
        mask = mask * (labels >= 0).reshape(len(labels), -1).any(axis=1)
        plain = dataclasses.replace(self, label_smoothing=0.0)
        _, best = jax.lax.top_k(logits, min(5, self.num_classes))
        hits = best == labels[:, None] if labels.ndim == 1 else (best[..., None] == labels[:, None]).any(axis=-1)
        hits &= ~jnp.isnan(logits).any(axis=1, keepdims=True)
        losses = cross_entropy(self.loss, logits, plain.targets(labels))
        return {
            "n": mask.sum(),
            "accuracy": (hits[:, 0] * mask).sum(),
            "top5": (hits.any(axis=1) * mask).sum(),
            "loss": jnp.where(mask > 0, losses, 0.0).sum(),
        }


def cross_entropy(
    loss: str, logits: Float[Array, "batch classes"], targets: Float[Array, "batch classes"]
) -> Float[Array, " batch"]:
    """Returns the cross-entropy of each example: with softmax, or with one sigmoid per class summed over classes."""
    if loss == "softmax":
        return optax.losses.softmax_cross_entropy(logits, targets)
    return optax.losses.sigmoid_binary_cross_entropy(logits, targets).sum(axis=-1)


def cutmix_box(key: PRNGKeyArray, alpha: float, size: tuple[int, ...]) -> Float[Array, "height width 1"]:
    """Returns 1 inside a random box and 0 outside: CutMix's box of area 1 - Beta(alpha, alpha), clipped to the image.

    Args:
        key: the random key.
        alpha: the parameter of the area's distribution.
        size: (height, width) of the image, in pixels.
    """
    area_key, *place_keys = jax.random.split(key, 3)
    side = jnp.sqrt(1 - jax.random.beta(area_key, alpha, alpha))
    inside = []
    for length, place_key in zip(size, place_keys, strict=True):
        half, centre = side * length / 2, jax.random.uniform(place_key) * length
        pixel = jnp.arange(length) + 0.5
        inside.append(((pixel > centre - half) & (pixel < centre + half)).astype(jnp.float32))
    return (inside[0][:, None] * inside[1])[..., None]
