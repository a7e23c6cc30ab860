"""The targets of masked patch prediction (appendix B.1.2): a patch's mean colour, 4 x 4 colours, or its pixels.

A colour has 3 bits a channel. UNCONFIRMED in the paper, so chosen here: a channel's 3 bits are floor(8 x) of its mean x
in [0, 1], 1 becoming 7; a patch is downsized to 4 x 4 by the mean of each part; the losses of the 16 colours, and of
the pixels' channels, are averaged.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol, TypeAlias

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

LEVELS = 8  # of a channel of a colour
COLORS = LEVELS**3
WHITE = 255

Pixels: TypeAlias = Int[Array, "batch patches rows columns 3"]  # 0 to 255, of square patches
Outputs: TypeAlias = Float[Array, "batch patches outputs"]
OfPatches: TypeAlias = Float[Array, "batch patches"]


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
