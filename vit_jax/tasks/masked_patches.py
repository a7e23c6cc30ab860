"""Masked patch prediction (section 4.6, appendix B.1.2).

Three parts follow each other: the targets (a patch's mean colour, 4 x 4 colours, or its pixels), the corruption (which
patches are masked or swapped) and the task.

UNCONFIRMED in the paper, so chosen here. Targets: a colour has 3 bits a channel, which are floor(8 x) of the channel's
mean x in [0, 1], 1 becoming 7; a patch is downsized to 4 x 4 by the mean of each part; the losses of the 16 colours,
and of the pixels' channels, are averaged. Corruption: half of the patches of each image, not of the batch, is
corrupted; another patch is one of the same image. Model: the [mask] embedding starts at 0, as the class token does; the
bias of the patch embedding is added to it too; the head is linear (`model.pre_logits` puts a tanh layer before it).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, UInt32

from vit_jax.tasks.task import Batch, Inputs

LEVELS = 8  # of a channel of a colour
COLORS = LEVELS**3
WHITE = 255

Pixels: TypeAlias = Int[Array, "batch patches rows columns 3"]  # 0 to 255, of square patches
Outputs: TypeAlias = Float[Array, "batch patches outputs"]
OfPatches: TypeAlias = Float[Array, "batch patches"]
Keys: TypeAlias = Key[Array, " batch"]
PatchTargets: TypeAlias = dict[str, Array]  # `pixels`: Pixels; `corrupted`: Bool [batch, patches]


class PatchTarget(Protocol):
    """The target that a model predicts for a masked patch. `TARGETS` has the three forms."""

    def outputs(self, patch_size: int) -> int:
        """Returns the number of outputs for a patch of `patch_size` pixels on a side."""

    def losses(self, outputs: Outputs, pixels: Pixels) -> OfPatches:
        """Returns the loss of every patch."""

    def accuracies(self, outputs: Outputs, pixels: Pixels) -> OfPatches:
        """Returns, for every patch, the fraction of its colours that are predicted correctly."""

    def picture(self, outputs: Outputs, patch_size: int) -> Float[Array, "batch patches rows columns 3"]:
        """Returns the predicted patches as pixels in [-1, 1]."""


@dataclasses.dataclass(frozen=True)
class Colors:
    """The mean colours of the parts of a patch, cut into `side` x `side` parts; each colour is one of 512 classes."""

    side: int

    def outputs(self, patch_size: int) -> int:
        """Returns the number of logits; 0 if the parts are no whole pixels."""
        return 0 if patch_size % self.side else self.side**2 * COLORS

    def classes(self, pixels: Pixels) -> Int[Array, "batch patches colors"]:
        """Returns the class of each colour: 64 red + 8 green + blue, each from 0 to 7."""
        *start, size, _, _ = pixels.shape
        part = size // self.side
        sums = pixels.reshape(*start, self.side, part, self.side, part, 3).sum(axis=(3, 5))
        # In whole numbers: a mean on the border of two classes is in the same one on every machine.
        digits = jnp.minimum(LEVELS * sums // (WHITE * part * part), LEVELS - 1)
        red, green, blue = jnp.moveaxis(digits, -1, 0)
        return (red * LEVELS**2 + green * LEVELS + blue).reshape(*start, -1)

    def losses(self, outputs: Outputs, pixels: Pixels) -> OfPatches:
        """Returns the mean cross-entropy of the colours of each patch."""
        return optax.losses.softmax_cross_entropy_with_integer_labels(self._logits(outputs), self.classes(pixels)).mean(
            axis=-1
        )

    def accuracies(self, outputs: Outputs, pixels: Pixels) -> OfPatches:
        """Returns, for each patch, the fraction of its colours whose class has the largest logit.

        A colour with a logit that is not finite counts as wrong.
        """
        logits = self._logits(outputs)
        hits = (logits.argmax(axis=-1) == self.classes(pixels)) & jnp.isfinite(logits).all(axis=-1)
        return hits.mean(axis=-1)

    def picture(self, outputs: Outputs, patch_size: int) -> Float[Array, "batch patches rows columns 3"]:
        """Returns patches whose parts have the middle colour of the class with the largest logit."""
        best = self._logits(outputs).argmax(axis=-1).reshape(*outputs.shape[:2], self.side, self.side)
        digits = jnp.stack([best // LEVELS**2, best // LEVELS % LEVELS, best % LEVELS], axis=-1)
        colors = (digits + 0.5) / LEVELS * 2 - 1
        return colors.repeat(patch_size // self.side, axis=2).repeat(patch_size // self.side, axis=3)

    def _logits(self, outputs: Outputs) -> Float[Array, "batch patches colors classes"]:
        return outputs.reshape(*outputs.shape[:2], -1, COLORS)


@dataclasses.dataclass(frozen=True)
class Whole:
    """The pixels of the patch in [-1, 1]. The loss is the mean squared difference."""

    def outputs(self, patch_size: int) -> int:
        """Returns the number of values of a patch."""
        return 3 * patch_size**2

    def losses(self, outputs: Outputs, pixels: Pixels) -> OfPatches:
        """Returns the mean squared difference of each patch."""
        wanted = pixels.reshape(outputs.shape) / (WHITE / 2) - 1
        return ((outputs - wanted) ** 2).mean(axis=-1)

    def accuracies(self, outputs: Outputs, pixels: Pixels) -> OfPatches:
        """Returns 1 for each patch whose predicted mean colour is the right one of 512, and 0 for the others."""
        drawn = self.picture(outputs, pixels.shape[2])
        levels = jnp.rint((drawn + 1) * (WHITE / 2)).astype(jnp.int32)
        hits = Colors(1).classes(levels) == Colors(1).classes(pixels)
        return (hits[..., 0] & jnp.isfinite(outputs).all(axis=-1)).astype(jnp.float32)

    def picture(self, outputs: Outputs, patch_size: int) -> Float[Array, "batch patches rows columns 3"]:
        """Returns the predicted pixels, cut off at black and white."""
        return outputs.reshape(*outputs.shape[:2], patch_size, patch_size, 3).clip(-1, 1)


TARGETS: Mapping[str, PatchTarget] = {"mean_color": Colors(1), "patch4": Colors(4), "full": Whole()}


class Corruption(NamedTuple):
    """The corruption of each patch of each image, in raster order.

    Attributes:
        corrupted: the patch is to be predicted.
        masked: its embedding is replaced by the [mask] embedding.
        source: the number of the patch whose pixels it gets; its own number, unless it is swapped.
    """

    corrupted: Bool[Array, "batch patches"]
    masked: Bool[Array, "batch patches"]
    source: Int[Array, "batch patches"]


def draw_corruption(keys: Keys, patches: int, corrupted: float, masked: float, swapped: float) -> Corruption:
    """Draws the corruption of each image from its own key, so that it does not depend on the images beside it.

    Args:
        keys: random keys [batch].
        patches: the number of patches of an image.
        corrupted: the fraction of the patches that are corrupted: in each image the same number, rounded, at least 1.
        masked: the probability that a corrupted patch is masked.
        swapped: the probability that a corrupted patch gets the pixels of another patch.
    """
    count = max(1, round(corrupted * patches))

    def draw(key: PRNGKeyArray) -> Corruption:
        order_key, kind_key, source_key = jax.random.split(key, 3)
        chosen = jax.random.permutation(order_key, patches) < count
        kind = jax.random.uniform(kind_key, (patches,))
        own = jnp.arange(patches)
        other = (own + jax.random.randint(source_key, (patches,), 1, max(patches, 2))) % patches
        is_swapped = chosen & (kind >= masked) & (kind < masked + swapped)
        return Corruption(chosen, chosen & (kind < masked), jnp.where(is_swapped, other, own))

    return jax.vmap(draw)(keys)


def keys_of_images(levels: Int[Array, "batch patches rows columns 3"]) -> Keys:
    """Returns a random key for each image that is a function of its pixels alone.

    It is a checksum in whole numbers, in which the order of additions does not matter: an image has the same key in any
    batch, on any mesh.
    """
    flat = levels.reshape(len(levels), -1).astype(jnp.uint32)
    weights = (2 * jnp.arange(flat.shape[1], dtype=jnp.uint32) + 1) * jnp.uint32(2_654_435_761)
    checksums: UInt32[Array, " batch"] = (flat * weights).sum(axis=1, dtype=jnp.uint32)
    return jax.vmap(lambda checksum: jax.random.fold_in(jax.random.key(0), checksum))(checksums)


def cut_patches(
    images: Float[Array, "batch height width 3"], size: int
) -> Float[Array, "batch patches rows columns 3"]:
    """Returns the patches of images in raster order, each of `size` x `size` pixels."""
    rows, columns = images.shape[1] // size, images.shape[2] // size
    cut = images.reshape(-1, rows, size, columns, size, 3).swapaxes(2, 3)
    return cut.reshape(-1, rows * columns, size, size, 3)


def join_patches(
    patches: Float[Array, "batch patches rows columns 3"], height: int
) -> Float[Array, "batch height width 3"]:
    """Returns the images of a height in pixels that consist of these patches."""
    size = patches.shape[2]
    rows = height // size
    cut = patches.reshape(len(patches), rows, -1, size, size, 3).swapaxes(2, 3)
    return cut.reshape(len(patches), height, -1, 3)


@dataclasses.dataclass(frozen=True)
class MaskedPatches:
    """Predicts each corrupted patch from the model's output for its token. Labels are not read.

    Embeddings are replaced before the positions are added. So replacing the pixels of a patch by those of another patch
    is the same as replacing its embedding. In training, the corruption is a function of seed, step and row. In an
    evaluation, it is a function of the image alone.

    Attributes:
        patch_size: pixels on a side.
        target: one of `TARGETS`.
        corrupted: the fraction of the patches that are corrupted.
        masked: the fraction of the corrupted patches whose embedding is replaced by [mask].
        swapped: the fraction of the corrupted patches that get the pixels of another patch. The rest stay as they are.
    """

    kind: ClassVar[str] = "masked_patches"
    output: ClassVar[str] = "logits"
    num_classes: ClassVar[None] = None
    patch_size: int
    target: str = "mean_color"
    corrupted: float = 0.5
    masked: float = 0.8
    swapped: float = 0.1

    @property
    def head(self) -> dict[str, Any]:
        """The head: outputs for every patch."""
        return {"num_classes": TARGETS[self.target].outputs(self.patch_size), "head": "patches"}

    def describe(self, class_names: tuple[str, ...] | None) -> dict[str, Any]:
        """Returns no class names, as the outputs are not classes of the data."""
        return {"class_names": None}

    def train_examples(self, key: PRNGKeyArray, batch: Batch) -> tuple[Inputs, PatchTargets]:
        """Returns inputs (corrupted images, which patches are masked) and targets (`PatchTargets` of the originals)."""
        images = batch["image"]
        return self._examples(jax.random.split(key, len(images)), images)

    def test_examples(self, batch: Batch) -> tuple[Inputs, PatchTargets]:
        """Returns inputs and targets as `train_examples` does; the corruption depends on each image's pixels alone."""
        images = batch["image"]
        return self._examples(keys_of_images(self._levels(images)), images)

    def losses(self, outputs: Float[Array, "batch patches outputs"], targets: PatchTargets) -> Float[Array, " batch"]:
        """Returns the mean loss of the corrupted patches of each image."""
        return mean_of(TARGETS[self.target].losses(outputs, targets["pixels"]), targets["corrupted"])

    def metric_sums(
        self, outputs: Float[Array, "batch patches outputs"], targets: PatchTargets, mask: Float[Array, " batch"]
    ) -> dict[str, Float[Array, ""]]:
        """Returns `n`, `accuracy` and `loss`, summed over the rows whose `mask` is 1.

        The accuracy and the loss of a row are means over its corrupted patches.
        """
        accuracies = TARGETS[self.target].accuracies(outputs, targets["pixels"])
        losses = self.losses(outputs, targets)
        return {
            "n": mask.sum(),
            "accuracy": (mean_of(accuracies, targets["corrupted"]) * mask).sum(),
            "loss": jnp.where(mask > 0, losses, 0.0).sum(),
        }

    def pictures(
        self, inputs: Inputs, targets: PatchTargets, outputs: Float[Array, "batch patches outputs"]
    ) -> dict[str, Float[Array, "batch height width 3"]]:
        """Returns two pictures of each image, with values in [-1, 1].

        `corrupted` is the image as the model is given it, with masked patches grey. `predicted` is the original image
        with the model's predictions in place of the corrupted patches.
        """
        height, given = inputs["images"].shape[1], cut_patches(inputs["images"], self.patch_size)
        drawn = TARGETS[self.target].picture(outputs, self.patch_size)
        masked, corrupted = (rows[..., None, None, None] for rows in (inputs["masked"], targets["corrupted"]))
        whole = targets["pixels"] / (WHITE / 2) - 1
        return {
            "corrupted": join_patches(jnp.where(masked, 0.0, given), height),
            "predicted": join_patches(jnp.where(corrupted, drawn, whole), height),
        }

    def _levels(self, images: Float[Array, "batch height width 3"]) -> Int[Array, "batch patches rows columns 3"]:
        """Returns the patches of images in [-1, 1] with the whole numbers, 0 to 255, that their pixels once were."""
        return jnp.rint((cut_patches(images, self.patch_size) + 1) * (WHITE / 2)).astype(jnp.int32)

    def _examples(self, keys: Keys, images: Float[Array, "batch height width 3"]) -> tuple[Inputs, PatchTargets]:
        own = cut_patches(images, self.patch_size)
        drawn: Corruption = draw_corruption(keys, own.shape[1], self.corrupted, self.masked, self.swapped)
        moved = jnp.take_along_axis(own, drawn.source[..., None, None, None], axis=1)
        is_swapped = drawn.source != jnp.arange(own.shape[1])
        given = jnp.where(is_swapped[..., None, None, None], moved, own)
        inputs = {"images": join_patches(given, images.shape[1]), "masked": drawn.masked}
        return inputs, {"pixels": self._levels(images), "corrupted": drawn.corrupted}


def mean_of(values: Float[Array, "batch patches"], chosen: Array) -> Float[Array, " batch"]:
    """Returns the mean of the chosen values of each row, of which there is at least one."""
    return jnp.where(chosen, values, 0.0).sum(axis=1) / chosen.sum(axis=1)
