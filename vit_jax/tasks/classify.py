"""Classification: targets, mixing, losses and evaluation metrics."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from vit_jax.tasks.task import Batch, Inputs, Targets


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
        focal_gamma: gamma of the focal loss (arXiv 1708.02002, equation 4), by which well classified images count less:
            each logarithm is multiplied by (1 - p)^gamma, where p is the probability of the target; 0 for none.
        class_weights: the weight of each class. The loss of an image is multiplied by the weight of its class; if it
            has several classes or is mixed, by their mean. None: all images count alike.
        log_priors: what is added to the logits in training, tau times the logarithm of each class's share of the images
            (logit adjustment, arXiv 2007.07314, equation 10); None for none.
        multi_label: whether an image may have several classes, or none of them.
    """

    kind: ClassVar[str] = "classify"
    num_classes: int
    loss: str = "softmax"
    label_smoothing: jax.typing.ArrayLike = 0.0
    mixup: float = 0.0
    mixup_probability: float = 1.0
    cutmix: float = 0.0
    mixed_labels: str = "share"
    focal_gamma: float = 0.0
    class_weights: tuple[float, ...] | None = None
    log_priors: tuple[float, ...] | None = None
    multi_label: bool = False

    @property
    def output(self) -> str:
        """The logits."""
        return "logits"

    @property
    def head(self) -> dict[str, Any]:
        """The head: a logit for each class."""
        return {"num_classes": self.num_classes}

    def describe(self, class_names: tuple[str, ...] | None) -> dict[str, Any]:
        """Returns the names of the classes, the loss, which turns logits into probabilities, and `multi_label`."""
        return {"class_names": class_names, "loss": self.loss, "multi_label": self.multi_label}

    def train_examples(self, key: PRNGKeyArray, batch: Batch) -> tuple[Inputs, Targets]:
        """Returns mixed images, and targets [batch, classes] or, with class weights, a pair of these and [batch]."""
        labels = batch["label"]
        if self.class_weights is None:
            images, targets = self.mix(key, batch["image"], self.targets(labels))
            return {"images": images}, self._finish_targets(targets)
        images, (targets, weights) = self.mix(key, batch["image"], (self.targets(labels), self.image_weights(labels)))
        return {"images": images}, (self._finish_targets(targets), weights)

    def _finish_targets(self, targets: Float[Array, "batch classes"]) -> Float[Array, "batch classes"]:
        return (targets > 0).astype(targets.dtype) if self.mixed_labels == "one" else targets

    def image_weights(self, labels: Int[Array, " batch"] | Int[Array, "batch labels"]) -> Float[Array, " batch"]:
        """Returns the mean weight of the classes of each image; 1 for an image without a label."""
        labels, weights = labels.reshape(len(labels), -1), jnp.asarray(self.class_weights)
        known = labels >= 0
        total, count = jnp.where(known, weights[labels], 0.0).sum(axis=1), known.sum(axis=1)
        return jnp.where(count > 0, total / jnp.maximum(count, 1), 1.0)

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
        targets: Targets,
    ) -> tuple[Float[Array, "batch height width 3"], Targets]:
        """Mixes each row of the global batch with the row before it, and the first row with the last.

        There is one ratio (MixUp) or box (CutMix) per step. Returns the images and the targets, arrays with the rows of
        the batch.
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
        return images, jax.tree.map(lambda rows: ratio * rows + (1 - ratio) * jnp.roll(rows, 1, axis=0), targets)

    def losses(self, logits: Float[Array, "batch classes"], targets: Targets) -> Float[Array, " batch"]:
        """Returns the loss of each example; `targets` is as `train_examples` returns it."""
        targets, weights = (targets, None) if self.class_weights is None else targets
        if self.log_priors is not None:
            logits += jnp.asarray(self.log_priors)
        losses = focal_loss(self.loss, logits, targets, self.focal_gamma)
        return losses if weights is None else weights * losses

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


def focal_loss(
    loss: str, logits: Float[Array, "batch classes"], targets: Float[Array, "batch classes"], gamma: float
) -> Float[Array, " batch"]:
    """Returns the focal loss of each example, of its softmax or summed over the sigmoids of all classes.

    It is the sum of -(1 - p)^gamma t log(p) over targets t, with the probability p of what is the target: of a class
    or, with sigmoids, also that an image is not of a class. With gamma 0 it is `cross_entropy`.
    """
    if not gamma:
        return cross_entropy(loss, logits, targets)
    if loss == "softmax":
        logs = jax.nn.log_softmax(logits)
        others = jnp.maximum(-jnp.expm1(logs), 1e-7)  # 1 - p; at 0 a power below 1 has no slope
        return -(targets * others**gamma * logs).sum(axis=-1)
    on, off = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    terms = targets * jnp.exp(gamma * off) * on + (1 - targets) * jnp.exp(gamma * on) * off
    return -terms.sum(axis=-1)


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
