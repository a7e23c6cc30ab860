"""Search for near-duplicates of images that packed data must not contain, such as a test set, by perceptual hashes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import UInt64

from vit_jax import UserError
from vit_jax.data.contents import sample_contents
from vit_jax.data.images import RGB, EncodedImage
from vit_jax.data.shards.perceptual_hash import HASH_NAME, hash_distances, perceptual_hash
from vit_jax.data.shards.shard_manifest import Duplicate
from vit_jax.data.sources import Source, SourceConfig, locate_example, open_split
from vit_jax.data.thread_pool import open_thread_pool

CHUNK = 100  # images that a thread hashes at a time
MAX_DISTANCE = 60  # between near-duplicates, by default; docs/data.md has what was measured


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
