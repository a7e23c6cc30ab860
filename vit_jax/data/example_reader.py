"""Reads an example of a source and preprocesses its image, or reads another in place of one that is unreadable."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vit_jax import UserError
from vit_jax.data.images import DecodeError
from vit_jax.data.mixed_order import TrainStream
from vit_jax.data.preprocess import Preprocessor

MAX_SKIPPED = 100  # unreadable images in a row
FAULT_BYTES = 500  # of the sentence on an unreadable image


@runtime_checkable
class ExampleSource(Protocol):
    """What the loader needs of a `sources.Source`."""

    @property
    def max_labels(self) -> int | None:
        """The most labels of an image in multi-label data, or None."""

    def __len__(self) -> int:
        """Returns the number of examples."""

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """Returns `{"image": RGB or EncodedImage, "label": int or array}`."""


@dataclasses.dataclass(frozen=True)
class ExampleReader:
    """Reads an example and preprocesses its image; a function of its index and a random generator.

    Attributes:
        source: of the examples.
        preprocess: applied to the image, except for its last op: uint8 is a quarter of the bytes to transfer.
        on_bad: what to do with an unreadable image: `fail`, `replace` it by the next readable example, or `raise`: fail
            without suggesting `replace`.
        order: in which the examples are streamed, where they are; then the next example is one of the same shard.
    """

    source: ExampleSource
    preprocess: Preprocessor
    on_bad: str
    order: TrainStream | None = None

    def __call__(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns `image` uint8 [height, width, 3], `label` int32, `mask` 1, `bad`: the index that was replaced, or -1,
        and `fault`: why. Instead of an example number -1 there are zeros, whose `mask` is 0.

        Raises:
            UserError: the image is unreadable, or `MAX_SKIPPED` in a row are.
        """
        if index < 0:
            return self.blank
        fault = ""
        for skipped in range(min(MAX_SKIPPED, len(self.source))):
            try:
                place = self.order.neighbour(index, skipped) if self.order else (index + skipped) % len(self.source)
                example = self.source[place]
                image, label = self.preprocess.apply_ops(example["image"], rng), np.asarray(example["label"], np.int32)
                return _row(image, label, 1, index if skipped else -1, fault)
            except DecodeError as error:
                fault = fault or str(error)
                if self.on_bad == "raise":
                    raise UserError(f"{error}; repair or remove it: an evaluation skips no image") from error
                if self.on_bad == "fail":
                    raise UserError(f"{error}; repair it, or set --config.data.bad_images=replace") from error
        raise UserError(f"{MAX_SKIPPED} images in a row are unreadable; the data may be damaged")

    @property
    def blank(self) -> dict[str, np.ndarray]:
        """The row that stands for no example."""
        most = self.source.max_labels
        return _row(np.zeros(self.preprocess.shape, np.uint8), np.zeros(() if most is None else most, np.int32), 0)


def _row(image: np.ndarray, label: np.ndarray, mask: int, bad: int = -1, fault: str = "") -> dict[str, np.ndarray]:
    told = np.array(fault.encode(), f"S{FAULT_BYTES}")
    return {"image": image, "label": label, "mask": np.array(mask, np.float32), "bad": np.array(bad), "fault": told}
