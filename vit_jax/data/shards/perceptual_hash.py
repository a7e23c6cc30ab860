"""A perceptual hash: nearly equal for an image that was encoded again, resized or brightened."""

import cv2
import numpy as np
from jaxtyping import Float32, UInt8, UInt64

HASH_NAME = "dct255"  # changes when hashes do
SIDE = 32  # pixels on a side to which images are shrunk
LOWEST = 16  # frequencies of each axis that are kept


def perceptual_hash(image: UInt8[np.ndarray, "height width 3"]) -> UInt64[np.ndarray, "2 4"]:
    """Returns the 255-bit hashes of an image and of its mirror image.

    The grey image is shrunk to 32x32 pixels (area) and transformed by the discrete cosine transform. Of the 16x16
    lowest frequencies but the mean, a bit states whether the coefficient is above their median. Mirroring from left to
    right changes the sign of the odd horizontal frequencies.
    """
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY).astype(np.float32)
    lowest = cv2.dct(cv2.resize(grey, (SIDE, SIDE), interpolation=cv2.INTER_AREA))[:LOWEST, :LOWEST]
    mirrored = lowest * np.where(np.arange(LOWEST) % 2, -1, 1).astype(np.float32)
    return np.stack([_bits(lowest), _bits(mirrored)])


def _bits(coefficients: Float32[np.ndarray, "16 16"]) -> UInt64[np.ndarray, "4"]:
    values = coefficients.ravel()
    above = values > np.median(values[1:])
    above[0] = False  # the mean
    return np.packbits(above).view(np.uint64)


def hash_distances(
    one: UInt64[np.ndarray, "4"], others: UInt64[np.ndarray, "4 images"]
) -> UInt8[np.ndarray, " images"]:
    """Returns in how many bits each of other hashes, one a column, differs from one."""
    distances = np.bitwise_count(others[0] ^ one[0])
    for word in (1, 2, 3):
        distances += np.bitwise_count(others[word] ^ one[word])  # 255 bits at most
    return distances
