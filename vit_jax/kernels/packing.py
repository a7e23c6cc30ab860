"""How the tokens of images lie in the rows of one matrix."""

import math
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

Tokens: TypeAlias = Float[Array, "batch tokens width"]
PackedRows: TypeAlias = Float[Array, "rows width"]

LANES = 128  # of a vector register
# Rows of a tile of memory; those of a tile of bfloat16 in VMEM, at which the kernels begin to read an image.
ROW_TILE, BFLOAT16_TILE = 8, 16


class Packing(NamedTuple):
    """The tokens of `images` images follow one another, without a gap; empty rows complete them to `rows`."""

    tokens: int  # of an image
    images: int
    rows: int

    def pack(self, x: Tokens, empty: float = 0.0) -> PackedRows:
        """Returns the rows of all images, with a value in the empty ones."""
        return self.complete(x.reshape(-1, x.shape[-1]), empty)

    def complete(self, x: Shaped[Array, "tokens width"], empty: float = 0.0) -> Shaped[Array, "rows width"]:
        """Returns rows with a value in the empty ones, given those of all tokens."""
        width, used = x.shape[-1], self.images * self.tokens
        packs = x.reshape(-1, used, width)
        packs = jnp.pad(packs, ((0, 0), (0, self.rows - used), (0, 0)), constant_values=empty)
        return packs.reshape(-1, width)

    def unpack(self, x: PackedRows) -> Tokens:
        """Returns the tokens of each image."""
        packs = x.reshape(-1, self.rows, x.shape[-1])
        return packs[:, : self.images * self.tokens].reshape(-1, self.tokens, x.shape[-1])

    @property
    def unshared(self) -> "Packing":
        """The packing in which no image shares rows."""
        return self if self.images == 1 else Packing(self.tokens, 1, round_up(self.tokens, ROW_TILE))

    def repack(self, x: PackedRows, other: "Packing") -> Float[Array, "other_rows width"]:
        """Returns the rows in another packing."""
        return x if other == self else other.pack(self.unpack(x))

    def window(self, image: int) -> range:
        """Returns the rows that hold an image of a pack, extended to whole tiles of memory."""
        start, stop = image * self.tokens, (image + 1) * self.tokens
        return range(start // BFLOAT16_TILE * BFLOAT16_TILE, round_up(stop, ROW_TILE))


def round_up(rows: int, multiple: int) -> int:
    """Returns the smallest multiple that is not smaller."""
    return math.ceil(rows / multiple) * multiple
