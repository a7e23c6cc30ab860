"""Pixels of the pictures: photographs seen through attention, and many small pictures as one."""

import numpy as np
from jaxtyping import Float, UInt8

GAP = 2  # pixels between small pictures
GAMMA = 2.2  # of screens: the light that a pixel gives is its value to this power


def spread(values: Float[np.ndarray, "rows columns"], height: int, width: int) -> Float[np.ndarray, "height width"]:
    """Returns values of patches as a smooth picture with values from 0 to 1.

    Each pixel is the average of the patches, weighted by a Gaussian of their distance whose standard deviation is a
    patch. The smallest value becomes 0 and the largest 1; equal values become 1.
    """
    weights = []
    for new, old in ((height, values.shape[0]), (width, values.shape[1])):
        places = (np.arange(new) + 0.5) * old / new - 0.5  # in patches
        near = np.exp(-((places[:, None] - np.arange(old)) ** 2) / 2)
        weights.append(near / near.sum(axis=1, keepdims=True))
    return stretch(weights[0] @ values.astype(np.float64) @ weights[1].T)


def stretch(values: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Returns values scaled so that the smallest is 0 and the largest 1; equal values become 1."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.ones_like(values)


def attended(
    pixels: UInt8[np.ndarray, "height width 3"], rollout: Float[np.ndarray, "rows columns"]
) -> UInt8[np.ndarray, "height width 3"]:
    """Returns a photograph that is darkened where the attention is low (Figures 6 and 14).

    The light of each pixel is multiplied by a factor that is linear in the attention to its place: 0 where the
    attention is lowest, and 1 where it is highest.
    """
    light = spread(rollout, *pixels.shape[:2])[..., None]
    return (pixels * light ** (1 / GAMMA)).round().astype(np.uint8)


def mosaic(tiles: np.ndarray, columns: int, gap: int = GAP) -> np.ndarray:
    """Returns tiles [number, height, width, *channels] as one picture, row by row; gaps and missing tiles are NaN."""
    number, height, width, *channels = tiles.shape
    rows = -(-number // columns)
    picture = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, *channels), np.nan)
    for index, tile in enumerate(tiles):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        picture[top : top + height, left : left + width] = tile
    return picture
