"""Reads an example of a source and preprocesses its image, or reads another in place of one that is unreadable."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vit_jax import UserError, encode_text
from vit_jax.data.images import DecodeError
from vit_jax.data.mixed_order import TrainStream
from vit_jax.data.preprocess import Preprocessor

MAX_SKIPPED = 100  # unreadable images in a row
FAULT_BYTES = 500  # of the sentence on an unreadable image


@runtime_checkable
class ExampleSource(Protocol):
    """The part of a `sources.Source` that the loader needs."""

    @property
    def max_labels(self) -> int | None:
        """The most labels of an image in multi-label data, or None."""

    def __len__(self) -> int:
        """Returns the number of examples."""

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """Returns `{"image": RGB or EncodedImage, "label": int or array}`."""


@dataclasses.dataclass(frozen=True)
class ExampleReader:
    """Reads an example and preprocesses its image. The result is a function of the index and a random generator.

    Attributes:
        source: the source of the examples.
        preprocess: the preprocessing of the image. Its last op is not applied, since uint8 is a quarter of the bytes to
            transfer.
        on_bad: what to do with an unreadable image: `fail`, `replace` it by the next readable example, or `raise`: fail
            without suggesting `replace`.
        order: the order in which the examples are streamed; the next readable example is then looked for in the same
            shard first. None: the examples are not streamed.
    """

    source: ExampleSource
    preprocess: Preprocessor
    on_bad: str
    order: TrainStream | None = None

    def __call__(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns one row: `image` uint8 [height, width, 3], `label` int32, `mask` 1, `bad` and `fault`.

        `bad` is the index of an unreadable example that was replaced, and `fault` says why it is unreadable; without a
        replacement, they are -1 and empty. A negative `index` gives `blank`.

        Raises:
            UserError: an image is unreadable and may not be replaced, or `MAX_SKIPPED` images in a row are unreadable.
        """
        if index < 0:
            return self.blank
        fault = ""
        most = min(MAX_SKIPPED, len(self.source))
        for skipped in range(most):
            try:
                source_index = (
                    self.order.neighbour(index, skipped) if self.order else (index + skipped) % len(self.source)
                )
                example = self.source[source_index]
                image, label = self.preprocess.apply_ops(example["image"], rng), np.asarray(example["label"], np.int32)
                return _row(image, label, 1, index if skipped else -1, fault)
            except DecodeError as error:
                fault = fault or str(error)
                if self.on_bad == "raise":
                    raise UserError(f"{error}; repair or remove it: an evaluation skips no image") from error
                if self.on_bad == "fail":
                    raise UserError(f"{error}; repair it, or set --config.data.bad_images=replace") from error
        raise UserError(f"{most} images in a row are unreadable; the data may be damaged")

    @property
    def blank(self) -> dict[str, np.ndarray]:
        """The row that stands for no example: zeros, with `mask` 0."""
        most = self.source.max_labels
        return _row(np.zeros(self.preprocess.shape, np.uint8), np.zeros(() if most is None else most, np.int32), 0)


def _row(image: np.ndarray, label: np.ndarray, mask: int, bad: int = -1, fault: str = "") -> dict[str, np.ndarray]:
    told = np.array(encode_text(fault), f"S{FAULT_BYTES}")
    return {"image": image, "label": label, "mask": np.array(mask, np.float32), "bad": np.array(bad), "fault": told}
