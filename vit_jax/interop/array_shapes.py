"""What the names and shapes of a file's arrays tell of its model, in every layout."""

import collections
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from vit_jax import UserError

Kind = TypeVar("Kind")


def shape_of(archive: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Returns the shape of an array.

    Raises:
        UserError: it has fewer than two dimensions, or no elements.
    """
    shape = archive[name].shape
    if len(shape) < 2 or not min(shape):
        raise UserError(f"{name} has the shape {list(shape)}, from which no field can be inferred")
    return shape


def matches(names: Iterable[str], pattern: str) -> set[tuple[str, ...]]:
    """Returns the different groups that a pattern matches at the beginning of names."""
    optional_matches = (re.match(pattern, name) for name in names)
    return {match.groups() for match in optional_matches if match}


def count_units(names: Iterable[str], pattern: str) -> tuple[int, ...]:
    """Returns the number of units of each stage of a ResNet; the groups of the pattern are a stage and a unit."""
    counts = collections.Counter(int(stage) for stage, _ in matches(names, pattern))
    return tuple(counts[stage] for stage in sorted(counts))


def image_sizes(
    rows: int, kinds: Mapping[Kind, int], patch_size: int, sizes: Sequence[tuple[int, int] | None]
) -> Iterator[tuple[Kind, tuple[int, int]]]:
    """Yields the (height, width) of the images whose position table may have so many rows, with the kind of rows.

    Args:
        rows: of the table.
        kinds: kind of rows -> how many of them are of no patch.
        patch_size: in pixels.
        sizes: of the images, the likeliest first; None: any square.
    """
    for size in sizes:
        for kind, others in kinds.items():
            patches = rows - others
            side = math.isqrt(max(patches, 0))
            height, width = (size[0] // patch_size, size[1] // patch_size) if size else (side, side)
            if height * width == patches > 0:
                yield kind, (height * patch_size, width * patch_size)
