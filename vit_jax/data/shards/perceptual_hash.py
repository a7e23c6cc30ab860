"""A perceptual hash, which hardly changes when an image is encoded again, resized or brightened."""

import cv2
import numpy as np
from jaxtyping import Float32, UInt8, UInt64

HASH_NAME = "dct255 of coefficients above 4"  # changes when hashes or distances do
SIDE = 32  # pixels on a side to which images are shrunk
LOWEST = 16  # frequencies of each axis that are kept
BITS = LOWEST**2 - 1  # without the mean
SIGNIFICANT = 4.0  # the least such coefficient: a wave of a quarter of a grey level; smaller ones are mostly noise
WORDS = LOWEST**2 // 64  # 64-bit words of the signs of all frequencies; as many follow with their significances


def perceptual_hash(image: UInt8[np.ndarray, "height width 3"]) -> UInt64[np.ndarray, "2 8"]:
    """Returns the hash of an image (row 0) and of its mirror image (row 1).

    The grey image is shrunk to 32x32 pixels (area) and transformed by the discrete cosine transform. Each of the 16x16
    lowest frequencies except the mean has two bits: the sign of its coefficient, and whether the coefficient is
    significant. Mirroring from left to right changes the sign of the odd horizontal frequencies.
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
    """Returns the distance of each of the other hashes from one hash, in bits: 0 to 255.

    The distance between unrelated images is about 127.5. Only frequencies that are significant in both images count. If
    there are n of them and d of their signs differ, the distance is 127.5 - (n / 2 - d) sqrt(255 / n). Random signs are
    as unlikely to have this distance as if all 255 frequencies counted (the normal approximation).

    So symmetric images, which have no odd frequencies, must agree better in the frequencies that they have. Images of
    few significant frequencies, such as flat images, are near to no other image: with fewer than 72 frequencies that
    count, the distance is never 60 or less.

    Args:
        one: a hash.
        others: the other hashes, one a column.
    """
    count = np.zeros(others.shape[1], np.float32)
    differ = np.zeros(others.shape[1], np.float32)
    for word in range(WORDS):
        both = others[WORDS + word] & one[WORDS + word]
        count += np.bitwise_count(both)
        differ += np.bitwise_count((others[word] ^ one[word]) & both)
    return BITS / 2 - (count / 2 - differ) * np.sqrt(BITS / np.maximum(count, 1))
