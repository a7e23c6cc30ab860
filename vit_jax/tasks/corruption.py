"""Which patches are corrupted, and how: a function of one random key for each image."""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, UInt32

Keys: TypeAlias = Key[Array, " batch"]


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
