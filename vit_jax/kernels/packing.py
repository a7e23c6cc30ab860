"""How the tokens of images lie in the rows of one matrix."""

import math
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from vit_jax.kernels.tpu_kinds import NARROW, Division

Tokens: TypeAlias = Float[Array, "batch tokens width"]
PackedRows: TypeAlias = Float[Array, "rows width"]

# Rows of a tile of memory; those of a tile of bfloat16 in VMEM, at which the kernels begin to read an image.
ROW_TILE, BFLOAT16_TILE = 8, 16


class Packing(NamedTuple):
    """The placement of images in packs of rows.

    In a pack, the tokens of `images` images follow one another without a gap. Empty rows complete the pack to `rows`.
    """

    tokens: int  # of an image
    images: int  # of a pack
    rows: int  # of a pack, with the empty ones
    division: Division = NARROW  # for the attention kernels

    def pack(self, x: Tokens, empty: float = 0.0) -> PackedRows:
        """Returns the rows of all packs, given the tokens of each image; `empty` is the value in empty rows."""
        return self.complete(x.reshape(-1, x.shape[-1]), empty)

    def complete(self, x: Shaped[Array, "tokens width"], empty: float = 0.0) -> Shaped[Array, "rows width"]:
        """Returns the rows of all packs, given one row for each token; `empty` is the value in empty rows."""
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
        """The packing of the same tokens with one image in each pack."""
        return self if self.images == 1 else self._replace(images=1, rows=round_up(self.tokens, ROW_TILE))

    def repack(self, x: PackedRows, other: "Packing") -> Float[Array, "other_rows width"]:
        """Returns rows that are in this packing in the packing `other`."""
        return x if other == self else other.pack(self.unpack(x))

    @property
    def longest_window(self) -> int:
        """The number of rows of the longest window of an image."""
        return max(len(self.window(image)) for image in range(self.images))

    def count_blocks(self, queries: int) -> int:
        """Returns the number of blocks of queries of the image that has most of them; the last block may be partial."""
        return math.ceil(self.longest_window / queries)

    def window(self, image: int) -> range:
        """Returns the rows that hold an image of a pack, extended to whole tiles of memory."""
        start, stop = image * self.tokens, (image + 1) * self.tokens
        return range(start // BFLOAT16_TILE * BFLOAT16_TILE, round_up(stop, ROW_TILE))


def round_up(rows: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `rows`."""
    return math.ceil(rows / multiple) * multiple
