"""Helpers, for every layout, that infer fields of a model from the names and shapes of a file's arrays."""

import collections
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from vit_jax import UserError
from vit_jax.models import image_size

Kind = TypeVar("Kind")


def given_size(given: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns (height, width) of the images if the fields that the user gave state it, else None."""
    return image_size(given["resolution"]) if "resolution" in given else None


def shape_of(archive: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Returns the shape of an array.

    Raises:
        UserError: the array has fewer than two dimensions, or no elements.
    """
    shape = archive[name].shape
    if len(shape) < 2 or not min(shape):
        raise UserError(f"{name} has the shape {list(shape)}, from which no field can be inferred")
    return shape


def matches(names: Iterable[str], pattern: str) -> set[tuple[str, ...]]:
    """Returns the set of the groups, as tuples, with which a pattern matches the beginning of a name."""
    optional_matches = (re.match(pattern, name) for name in names)
    return {match.groups() for match in optional_matches if match}


def count_units(names: Iterable[str], pattern: str) -> tuple[int, ...]:
    """Returns the number of units in each stage of a ResNet.

    The two groups of the pattern match the number of a stage and the number of a unit.
    """
    counts = collections.Counter(int(stage) for stage, _ in matches(names, pattern))
    return tuple(counts[stage] for stage in sorted(counts))


def image_sizes(
    rows: int, kinds: Mapping[Kind, int], patch_size: int, sizes: Sequence[tuple[int, int] | None]
) -> Iterator[tuple[Kind, tuple[int, int]]]:
    """Yields each (kind, (height, width)) for which a position table has this number of rows.

    Args:
        rows: the number of rows in the table.
        kinds: kind of table -> the number of its rows that belong to no patch.
        patch_size: the side of a patch in pixels.
        sizes: the sizes (height, width) of images to try, in pixels, the likeliest first. None: a square of any size.
    """
    for size in sizes:
        for kind, others in kinds.items():
            patches = rows - others
            side = math.isqrt(max(patches, 0))
            height, width = (size[0] // patch_size, size[1] // patch_size) if size else (side, side)
            if height * width == patches > 0:
                yield kind, (height * patch_size, width * patch_size)
