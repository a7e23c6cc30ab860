"""Search for near-duplicates of images that packed data must not contain, such as a test set, by a perceptual hash.

The hash hardly changes when an image is encoded again, resized or brightened.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import cv2
import numpy as np
from jaxtyping import Float32, UInt8, UInt64

from vit_jax import UserError
from vit_jax.data.images import RGB, EncodedImage
from vit_jax.data.shards import Duplicate
from vit_jax.data.sources import Source, SourceConfig, locate_example, open_split, sample_contents
from vit_jax.data.thread_pool import open_thread_pool

CHUNK = 100  # images that a thread hashes at a time
MAX_DISTANCE = 60  # between near-duplicates, by default; docs/data.md has what was measured

HASH_NAME = "dct255 of coefficients above 4"  # changes when hashes or distances do
SIDE = 32  # pixels on a side to which images are shrunk
LOWEST = 16  # frequencies of each axis that are kept
BITS = LOWEST**2 - 1  # without the mean
SIGNIFICANT = 4.0  # the least such coefficient: a wave of a quarter of a grey level; smaller ones are mostly noise
WORDS = LOWEST**2 // 64  # 64-bit words of the signs of all frequencies; as many follow with their significances


@dataclasses.dataclass(frozen=True)
class KnownImages:
    """Hashes of the images of some splits.

    Attributes:
        splits: split as the user writes it, such as `tfds:cifar10,split=test` -> its examples.
        hashes: two columns for each image, in the order of the splits: its hash, then the hash of its mirror image.
        max_distance: the largest distance between near-duplicates, in bits; see `hash_distances`.
    """

    splits: dict[str, Source]
    hashes: UInt64[np.ndarray, "8 hashes"]
    max_distance: int

    def find(self, index: int, image: RGB | EncodedImage) -> Duplicate | None:
        """Returns the nearest of the known images if `image` is a near-duplicate of it, else None.

        Args:
            index: the `index` of the result.
            image: the image to look for, decoded or not.

        Raises:
            DecodeError: the image is unreadable.
        """
        distances = hash_distances(_hash(image)[0], self.hashes)
        nearest = int(np.argmin(distances))
        if distances[nearest] > self.max_distance:
            return None
        parts = [(name, range(len(source))) for name, source in self.splits.items()]
        split, row = locate_example(parts, nearest // 2)
        return Duplicate(index, split, self.splits[split].example_name(row), math.ceil(distances[nearest]))

    def describe(self) -> dict[str, object]:
        """Returns, as JSON values, all that decides which images are found."""
        # Each split has a sample of its contents too, since images may be replaced by others of the same names.
        identities = {
            name: f"{source.fingerprint} {sample_contents(source)}".strip() for name, source in self.splits.items()
        }
        return {"splits": identities, "hash": HASH_NAME, "max_distance": self.max_distance}


def hash_splits(
    names: Sequence[str], like: SourceConfig, packed: Mapping[str, Source], max_distance: int, workers: int
) -> KnownImages:
    """Returns the hashes of all images of some splits.

    Args:
        names: for each split, its data source as in the config, followed by `,split=SPLIT` unless the split is test.
        like: the config whose fields other than `source` all these sources have.
        packed: split to pack -> its examples, which must not be among the images of the named splits.
        max_distance: the largest distance between near-duplicates, in bits.
        workers: number of threads that read and decode.

    Raises:
        UserError: a source or a split is missing, its images are among those to pack, or an image is unreadable.
    """
    splits = {}
    for name in names:
        source, _, split = name.partition(",split=")
        splits[name] = other = open_split(dataclasses.replace(like, source=source), split or "test")
        for to_pack, examples in packed.items():
            if (examples.name, examples.digest) == (other.name, other.digest) and examples.overlaps(other):
                raise UserError(
                    f"split {to_pack} contains the images of --without={name}; list only the other splits in --splits"
                )

    places = [(source, row) for source in splits.values() for row in range(len(source))]
    with open_thread_pool(workers) as pool:
        hashes = list(pool.imap(lambda one: _hash(one[0][one[1]]["image"]), places, CHUNK))
    return KnownImages(splits, np.ascontiguousarray(np.concatenate(hashes).T), max_distance)


def _hash(image: RGB | EncodedImage) -> UInt64[np.ndarray, "2 8"]:
    return perceptual_hash(image if isinstance(image, np.ndarray) else image.decode())


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
