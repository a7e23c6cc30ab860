"""The kernel that projects patches, resized to patches of another size as FlexiViT does (arXiv 2212.08013)."""

import numpy as np
from jaxtyping import Array, Float


def bilinear(old: int, new: int) -> np.ndarray:
    """Returns the [new, old] matrix of `tf.image.resize`, bilinear without antialias: two neighbours for each sample,
    half-pixel centres, the edges repeated.
    """
    places = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(old)))


def resize_patches(
    kernel: Float[Array | np.ndarray, "rows columns channels width"], size: int
) -> Float[np.ndarray, "new_rows new_columns channels width"]:
    """Returns the kernel for patches of `size` x `size` pixels, by the pseudo-inverse of the resize of patches (section
    3.4): where that loses nothing, a resized patch gets the embedding that the patch had.

    Each resize back and forth loses something: start from the kernel as it was trained.
    """
    kernel = np.asarray(kernel)
    if kernel.shape[:2] == (size, size):
        return kernel
    # The pseudo-inverse of a Kronecker product is that of its factors: one for the rows, one for the columns.
    down, across = (np.linalg.pinv(bilinear(old, size).T) for old in kernel.shape[:2])
    resized = np.einsum("yr,xc,rcio->yxio", down, across, kernel.astype(np.float64), optimize=True)
    return resized.astype(kernel.dtype)
