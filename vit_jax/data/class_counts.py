"""How many images of each class a run trains on."""

import collections
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Float64, Int64

from vit_jax import printable
from vit_jax.data.sources import Rows, Source, locate_split

PerClass: TypeAlias = Int64[np.ndarray, " classes"]
UNEQUAL = 10  # where the largest class has so many times the images of the smallest, a run says what helps
SHOWN_NAMES, SHOWN_CHARACTERS = 3, 40  # of the smallest and of the largest classes


def drawn_counts(source: Source, balance: float = 0.0) -> Float64[np.ndarray, " classes"] | None:
    """Returns the images of each class in an epoch of training, on average; None if `source.class_counts()` is.

    The parts of a mixture have their shares of an epoch, which are not those of their images.

    Args:
        source: the training images.
        balance: `data.balance`, see `order.ClassDraws`.
    """
    counts = source.class_counts()
    if counts is None or source.mixture is None:
        return None if counts is None else balanced_counts(counts, balance)
    lengths, weights = source.mixture
    rows = collections.defaultdict[int, list[tuple[str, Rows]]](list)
    for split, rows_of_split in source.parts:
        rows[locate_split(split)[0]].append((split, rows_of_split))
    drawn = np.zeros(len(counts))
    for part, (length, weight) in enumerate(zip(lengths, weights, strict=True)):
        share = len(source) * weight / sum(weights) / length
        drawn += share * balanced_counts(np.sum([source.count_rows(*one) for one in rows[part]], axis=0), balance)
    return drawn


def balanced_counts(counts: PerClass, balance: float) -> Float64[np.ndarray, " classes"]:
    """Returns the draws of each class in an epoch of as many draws as there are images; see `order.ClassDraws`."""
    weights = np.where(counts > 0, counts ** (1.0 - balance), 0.0)
    return weights * (counts.sum() / max(weights.sum(), 1.0))


def describe_draws(counts: PerClass, drawn: Float64[np.ndarray, " classes"], balance: float, streamed: bool) -> str:
    """Returns a line on how often `data.balance` shows images of the smallest and of the largest class.

    Args:
        counts: the number of images of each class.
        drawn: the images of each class in an epoch.
        balance: `data.balance`, not 0.
        streamed: whether the images are streamed from shards.
    """
    often = drawn[counts > 0] / counts[counts > 0]
    copies = "; the copies of an image are read within data.window shards" if streamed else ""
    return (
        f"Classes balanced by {balance:g}: an epoch has an image of the smallest class {often.max():.3g} times, one of "
        f"the largest {often.min():.3g} times{copies}."
    )


def describe_counts(counts: PerClass, names: Sequence[str] | None) -> list[str]:
    """Returns a line on the smallest and the largest classes and, where they differ much, one on what helps.

    Args:
        counts: the number of images of each class.
        names: the names of the classes; None: they are named by their labels.
    """
    if len(counts) < 2:  # of images without labels there are none
        return []
    low, high = int(counts.min()), int(counts.max())
    if low == high:
        return [f"Classes: {low:,} images each."]

    def name(count: int) -> str:
        labels = np.flatnonzero(counts == count)
        shown = "; ".join(  # names in words may contain commas
            printable(names[label], SHOWN_CHARACTERS) if names else f"label {label}" for label in labels[:SHOWN_NAMES]
        )
        return f"{shown}{'; ...' if len(labels) > SHOWN_NAMES else ''}"

    line = f"Classes: from {low:,} image{'' if low == 1 else 's'} ({name(low)}) to {high:,} ({name(high)})."
    if high < UNEQUAL * low:
        return [line]
    times = f"{high / low:.3g} times as many images as" if low else "images, but there are none of"
    return [
        line,
        f"The largest class has {times} the smallest: docs/recipes.md#classes-that-are-not-equal-in-number says what "
        "helps (task.class_weights, task.logit_adjustment, data.balance), and how to judge it (class_accuracy).",
    ]
