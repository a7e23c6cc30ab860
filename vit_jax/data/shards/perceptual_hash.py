"""A perceptual hash: nearly equal for an image that was encoded again, resized or brightened."""

import cv2
import numpy as np
from jaxtyping import Float32, UInt8, UInt64

HASH_NAME = "dct255 of coefficients above 4"  # changes when hashes or distances do
SIDE = 32  # pixels on a side to which images are shrunk
LOWEST = 16  # frequencies of each axis that are kept
BITS = LOWEST**2 - 1  # without the mean
SIGNIFICANT = 4.0  # a coefficient: a wave of a quarter of a grey level; smaller ones are mostly noise of encoders
WORDS = LOWEST**2 // 64  # of a sign, and of a significance, for each frequency


def perceptual_hash(image: UInt8[np.ndarray, "height width 3"]) -> UInt64[np.ndarray, "2 8"]:
    """Returns the hashes of an image and of its mirror image.

    The grey image is shrunk to 32x32 pixels (area) and transformed by the discrete cosine transform. Of the 16x16
    lowest frequencies but the mean, one bit is the sign of the coefficient, and another whether it is significant.
    Mirroring from left to right changes the sign of the odd horizontal frequencies.
    """
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY).astype(np.float32)
    lowest = cv2.dct(cv2.resize(grey, (SIDE, SIDE), interpolation=cv2.INTER_AREA))[:LOWEST, :LOWEST]
    lowest[0, 0] = 0  # the mean
    mirrored = lowest * np.where(np.arange(LOWEST) % 2, -1, 1).astype(np.float32)
    return np.stack([_bits(lowest), _bits(mirrored)])


def _bits(coefficients: Float32[np.ndarray, "16 16"]) -> UInt64[np.ndarray, "8"]:
    values = coefficients.ravel()
    return np.packbits(np.concatenate([values > 0, np.abs(values) >= SIGNIFICANT])).view(np.uint64)


def hash_distances(
    one: UInt64[np.ndarray, "8"], others: UInt64[np.ndarray, "8 images"]
) -> Float32[np.ndarray, " images"]:
    """Returns the distance of each of other hashes, one a column, from one: 0 to 255 bits, 127.5 of unrelated images.

    Only frequencies that are significant in both images count. If d signs of n differ, the distance is 127.5 - (n / 2 -
    d) sqrt(255 / n): random signs are as unlikely to agree so well as in as many of 255 (the normal approximation). So
    symmetric images, without odd frequencies, must agree better in those that they have, and images of few significant
    frequencies, such as flat ones, are near to none: fewer than 72 never have a distance of at most 60.
    """
    count = np.zeros(others.shape[1], np.float32)
    differ = np.zeros(others.shape[1], np.float32)
    for word in range(WORDS):
        both = others[WORDS + word] & one[WORDS + word]
        count += np.bitwise_count(both)
        differ += np.bitwise_count((others[word] ^ one[word]) & both)
    return BITS / 2 - (count / 2 - differ) * np.sqrt(BITS / np.maximum(count, 1))
