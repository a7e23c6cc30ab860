"""Masked patch prediction (section 4.6, appendix B.1.2)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from vit_jax.tasks.corruption import Corruption, Keys, cut_patches, draw_corruption, join_patches, keys_of_images
from vit_jax.tasks.patch_targets import TARGETS, WHITE
from vit_jax.tasks.task import Batch, Inputs

PatchTargets = dict[str, Array]  # `pixels` int32 [batch, patches, rows, columns, 3] and `corrupted` [batch, patches]


@dataclasses.dataclass(frozen=True)
class MaskedPatches:
    """Predicts each corrupted patch from the model's output for its token. Labels are not read.

    Embeddings are replaced before the positions are added. So replacing the pixels of a patch by those of another patch
    is the same as replacing its embedding. In training, the corruption is a function of seed, step and row. In an
    evaluation, it is a function of the image alone.

    UNCONFIRMED in the paper, so chosen here: half of the patches of each image, not of the batch, is corrupted; another
    patch is one of the same image; the [mask] embedding starts at 0, as the class token does; the bias of the patch
    embedding is added to it too; the head is linear (`model.pre_logits` puts a tanh layer before it).

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
