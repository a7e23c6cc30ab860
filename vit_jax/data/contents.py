"""A sample of what images contain: fingerprints cover names and labels, which stay where files are replaced."""

import hashlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vit_jax.data.images import DecodeError, EncodedImage
from vit_jax.data.sources import Source

STRETCHES, LENGTH = 8, 32  # of consecutive examples, so that few shards are opened
READERS = 16


def sample_contents(source: Source, stretches: int = STRETCHES) -> str:
    """Returns a short text that differs between data of the same fingerprint if one of 256 examples differs.

    They are the same ones each time, and all if there are no more; of less than 8 `stretches`, fewer. Copies of the
    data give the same text, whatever their times and places. It is empty for data whose fingerprint covers the
    contents.

    Raises:
        UserError: a file or a store cannot be read.
    """
    if source.file_stamp is None:
        return ""
    with source.opened() as readable, ThreadPoolExecutor(READERS) as pool:
        digests = pool.map(lambda index: digest_example(readable, index), sample_indices(len(source), stretches))
        return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


def sample_indices(count: int, stretches: int = STRETCHES) -> list[int]:
    """Returns which of `count` examples are sampled: stretches at fixed random places, one in each part."""
    if count <= stretches * LENGTH:
        return list(range(count))
    ends = [count * number // stretches for number in range(stretches + 1)]
    random = np.random.default_rng(count)
    starts = [random.integers(start, max(end - LENGTH, start) + 1) for start, end in itertools.pairwise(ends)]
    return [int(start) + offset for start in starts for offset in range(LENGTH)]


def digest_example(source: Source, index: int) -> bytes:
    """Returns a digest of the bytes of an image, as stored, and of its label; an unreadable one has its own."""
    try:
        example = source[index]
    except DecodeError:
        return hashlib.sha256(b"unreadable").digest()
    image = example["image"]
    stored = image.data if isinstance(image, EncodedImage) else np.ascontiguousarray(image).tobytes()
    return hashlib.sha256(repr(np.asarray(example["label"]).tolist()).encode() + b" " + stored).digest()
