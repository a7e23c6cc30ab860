"""A check of a sample of the contents of images.

Fingerprints of sources cover only names and labels, which stay the same when files are replaced.
"""

import hashlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vit_jax.data.images import DecodeError, EncodedImage
from vit_jax.data.sources import Source

STRETCHES, LENGTH = 8, 32  # stretches of as many consecutive examples, so that few shards are opened
SAMPLE_THREADS = 16


def sample_contents(source: Source, stretches: int = STRETCHES) -> str:
    """Returns a short text that differs between data of the same fingerprint if a sampled example differs.

    The sample has 32 examples for each of the `stretches`, always the same ones, or all examples if there are no more.
    Copies of the data give the same text, whatever their times and places. The text is empty for data whose fingerprint
    covers the contents.

    Raises:
        UserError: a file or a store cannot be read.
    """
    if source.file_stamp is None:
        return ""
    with source.opened() as readable, ThreadPoolExecutor(SAMPLE_THREADS) as pool:
        digests = pool.map(lambda index: digest_example(readable, index), sample_indices(len(source), stretches))
        return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


def sample_indices(count: int, stretches: int = STRETCHES) -> list[int]:
    """Returns the indices of the examples that are sampled from `count` examples; all of them if there are few.

    The examples are divided into `stretches` equal parts. In each part a stretch of `LENGTH` consecutive examples is
    sampled, at a random place that depends only on `count` and `stretches`.
    """
    if count <= stretches * LENGTH:
        return list(range(count))
    ends = [count * number // stretches for number in range(stretches + 1)]
    random = np.random.default_rng(count)
    starts = [random.integers(start, max(end - LENGTH, start) + 1) for start, end in itertools.pairwise(ends)]
    return [int(start) + offset for start in starts for offset in range(LENGTH)]


def digest_example(source: Source, index: int) -> bytes:
    """Returns a digest of the stored bytes of an image and of its label; all unreadable images have the same digest."""
    try:
        example = source[index]
    except DecodeError:
        return hashlib.sha256(b"unreadable").digest()
    image = example["image"]
    stored = image.data if isinstance(image, EncodedImage) else np.ascontiguousarray(image).tobytes()
    return hashlib.sha256(repr(np.asarray(example["label"]).tolist()).encode() + b" " + stored).digest()
