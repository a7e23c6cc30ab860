"""Sources that need no files of a user: handwritten digits, and synthetic images.

`digits.npz` holds the digits that scikit-learn comes with: the test part of "Optical Recognition of Handwritten Digits"
by E. Alpaydin and C. Kaynak, UCI Machine Learning Repository 1998 (doi 10.24432/C50P49, CC BY 4.0).
"""

import zlib
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from vit_jax import UserError
from vit_jax.data.sources import splits
from vit_jax.data.sources.source import Source, SourceConfig

DIGITS = Path(__file__).with_name("digits.npz")  # values uint8 [images, 8, 8], 0 to 16, and labels uint8 [images]
SYNTHETIC_EVAL = 1000  # the most images of a synthetic split that is not for training, unless a slice names more


class Digits:
    """The digits in memory."""

    def __init__(self):
        """Loads the digits and divides them into splits."""
        with np.load(DIGITS) as arrays:
            values, labels = arrays["values"].astype(int), arrays["labels"].astype(int)
        pixels = np.rint(values[..., None] * 255 / 16).astype(np.uint8).repeat(3, axis=3)
        random = np.random.RandomState(0)  # its stream never changes; that of a Generator may
        by_class = [random.permutation(np.flatnonzero(labels == label)) for label in range(10)]
        held_out = np.isin(np.arange(len(labels)), np.concatenate([rows[: round(len(rows) / 5)] for rows in by_class]))
        self.splits = {
            "train": (pixels[~held_out], labels[~held_out]),
            "test": (pixels[held_out], labels[held_out]),
        }

    def read_example(self, split: str, index: int) -> tuple[UInt8[np.ndarray, "rows columns 3"], int]:
        """Returns (image, label) number `index` of a split."""
        pixels, labels = self.splits[split]
        return pixels[index], int(labels[index])

    def split_labels(self, split: str) -> Int64[np.ndarray, " n"]:
        """Returns the labels of all images of a split."""
        return self.splits[split][1]


def open_digits(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens the 1,797 handwritten digits of scikit-learn: 8 x 8 pixels, grey repeated to RGB, 10 classes.

    The data has no test split of its own. `test` is a fifth of each class, drawn once with a fixed seed; `train` is the
    rest. A pixel is `round(value * 255 / 16)`.
    """
    digits = Digits()
    counts = {split: len(labels) for split, (_, labels) in digits.splits.items()}
    parts = tuple(splits.select_examples(split, counts))
    names = tuple("0123456789")
    return Source("digits", parts, digits.read_example, 10, names, split_labels=digits.split_labels, sizes=counts)


class Synthetic:
    """Images computed from their index."""

    def __init__(self, resolution: int, num_classes: int):
        """Makes the noise that all images are cut from."""
        self.resolution, self.num_classes = resolution, num_classes
        random = np.random.RandomState(0)
        noise = random.randint(0, 128, (2 * resolution, 2 * resolution, 3), np.uint8)
        self.noise = noise.reshape(2 * resolution, -1)  # one row of numbers a row of pixels: added 40 times as fast

    def read_example(self, split: str, index: int) -> tuple[UInt8[np.ndarray, "rows columns 3"], int]:
        """Returns (image, label) number `index` of a split."""
        mixed = zlib.crc32(f"{split} {index}".encode())
        label = mixed % self.num_classes
        top, left = (mixed >> 8) % self.resolution, (mixed >> 20) % self.resolution
        colour = np.frombuffer(zlib.crc32(b"%d" % label).to_bytes(4, "little"), np.uint8)[:3] >> 1
        rows = self.noise[top : top + self.resolution, 3 * left : 3 * (left + self.resolution)]
        pixels = rows + np.tile(colour, self.resolution)
        return pixels.reshape(self.resolution, self.resolution, 3), label


def open_synthetic(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens random images of one size: noise around a colour that depends on the class.

    Any split exists. The split of training, written exactly as in the configuration, has `num_examples` images, also
    if it is written as a slice. Any other whole split has `num_examples` images, but at most `SYNTHETIC_EVAL`, unless
    the largest number in a slice of it is more.

    Raises:
        UserError: `num_classes`, `num_examples` or `resolution` is unset.
    """
    num_classes, count, resolution = source_config.num_classes, source_config.num_examples, source_config.resolution
    if not num_classes or not count or not resolution:
        raise UserError("the data source synthetic needs --config.data.num_classes and --config.data.num_examples")
    parsed, parts = splits.parse_split(split), [(split, range(count))]
    if split != source_config.train_split:
        counts = {name: min(count, SYNTHETIC_EVAL) for name, *_ in parsed}
        for name, *bounds in parsed:
            named = [abs(int(bound)) for bound in bounds if bound and not bound.endswith("%")]
            counts[name] = max(counts[name], *named, 0)
        parts = splits.select_examples(split, counts)
    synthetic = Synthetic(resolution, num_classes)
    return Source(f"synthetic {resolution}", tuple(parts), synthetic.read_example, num_classes)
