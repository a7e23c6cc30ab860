"""Which links of a TPU slice a collective uses, and how much the busiest of them carries."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

Place = tuple[int, ...]  # where a chip is: the number of its slice, then its coordinates in the torus
Groups = Sequence[Sequence[int]]  # groups of devices; a device is given by its position in the mesh
Link = tuple[Place, int, int]  # a chip, an axis of the torus, and the direction in which the chip sends: 1 or -1

# How often the data go round a group: twice in an all-reduce (a reduce-scatter, then an all-gather), else once.
ROUNDS = {"all-reduce": 2}


def link_bytes(
    kind: str, size: int, groups: Groups, places: Sequence[Place], wraps: Sequence[bool], shape: Place
) -> float:
    """Returns the bytes that the busiest link carries in one direction; traffic between slices is left out.

    A group whose chips form a box spreads its traffic over the links that it has along each axis. These are two of a
    chip along an axis that wraps around. Along any other axis they are one, since the chips at the ends have only one.
    Groups that are interleaved along an axis share its links. A group whose chips form no box counts as a ring of its
    chips in the order listed. A collective-permute and an all-to-all take the shortest routes, one axis after the
    other.

    Args:
        kind: see `collectives.COLLECTIVE_KINDS`.
        size: `Collective.bytes`.
        groups: `Collective.groups`.
        places: the place of each device, in the order of the mesh.
        wraps: for each axis, whether the last chip along it is a neighbour of the first.
        shape: chips along each axis.
    """
    if kind == "collective-permute":
        return size * _max_load(_link_loads([(places[a], places[b]) for a, b in groups], wraps, shape))
    chips = [part for group in groups or [range(len(places))] for part in _by_slice([places[i] for i in group])]
    most = max(map(len, chips))
    if most == 1:
        return 0.0
    if kind == "all-to-all":
        pairs = [pair for group in chips for pair in itertools.permutations(group, 2)]
        return size / most * _max_load(_link_loads(pairs, wraps, shape))
    return ROUNDS.get(kind, 1) * size * (most - 1) / most / _free_links(chips, wraps, shape)


def _by_slice(places: Sequence[Place]) -> Iterable[list[Place]]:
    slices: dict[int, list[Place]] = {}
    for place in places:
        slices.setdefault(place[0], []).append(place)
    return slices.values()


def _free_links(groups: list[list[Place]], wraps: Sequence[bool], shape: Place) -> float:
    """Returns over how many links of a chip a group can spread its traffic, for the group that has the fewest links.

    A link that n groups share counts as 1/n for each of them.
    """
    groups = [group for group in groups if len(group) > 1]
    if not all(math.prod(len(set(axis)) for axis in zip(*group, strict=True)) == len(group) for group in groups):
        pairs = [pair for group in groups for pair in itertools.pairwise([*group, group[0]])]
        both_ways = [*pairs, *(pair[::-1] for pair in pairs)]
        return 2 / _max_load(_link_loads(both_ways, wraps, shape))  # half of the data goes each way
    free_links = [0.0] * len(groups)
    for axis, (size, wrapped) in enumerate(zip(shape, wraps, strict=True)):
        loads: Counter[Link] = Counter()
        ends = []
        for group in groups:
            lines: dict[Place, list[int]] = {}
            for place in group:
                lines.setdefault((*place[: axis + 1], -1, *place[axis + 2 :]), []).append(place[axis + 1])
            ways = {line: _axis_links(sorted(steps), size, wrapped) for line, steps in lines.items()}
            for line, way in ways.items():
                loads.update((line, step, 1) for step in way)
            ends.append(min(2 if len(way) == size else min(len(way), 1) for way in ways.values()))
        free_links = (
            [links + end / _max_load(loads) for links, end in zip(free_links, ends, strict=True)]
            if loads
            else free_links
        )
    return min(free_links)


def _axis_links(steps: list[int], size: int, wrapped: bool) -> list[int]:
    """Returns the links that join the chips of a group along an axis; a link is given by the chip before it.

    Args:
        steps: the coordinates of the chips along the axis, sorted.
        size: chips along the axis.
        wrapped: whether the last chip along the axis is a neighbour of the first.
    """
    gaps = [(after - step) % size for step, after in zip(steps, [*steps[1:], steps[0]], strict=True)]
    if len(steps) == 1 or (wrapped and len(set(gaps)) == 1):
        return list(range(size)) if len(steps) > 1 else []
    widest = gaps.index(max(gaps)) if wrapped else len(gaps) - 1
    first = steps[(widest + 1) % len(steps)]
    return [(first + step) % size for step in range((steps[widest] - first) % size)]


def _link_loads(pairs: Iterable[tuple[Place, Place]], wraps: Sequence[bool], shape: Place) -> Counter[Link]:
    """Returns link -> the number of the pairs (from, to) whose route uses it. Pairs in different slices use none."""
    return Counter(link for start, end in pairs if start[0] == end[0] for link in _route(start, end, wraps, shape))


def _route(start: Place, end: Place, wraps: Sequence[bool], shape: Place) -> Iterator[Link]:
    place = list(start)
    for axis, (size, wrapped) in enumerate(zip(shape, wraps, strict=True)):
        distance = end[axis + 1] - start[axis + 1]
        if wrapped and abs(distance) > size / 2:
            distance -= size if distance > 0 else -size
        for _ in range(abs(distance)):
            yield tuple(place), axis, 1 if distance > 0 else -1
            place[axis + 1] = (place[axis + 1] + (1 if distance > 0 else -1)) % size


def _max_load(loads: Counter[Link]) -> int:
    return max(loads.values(), default=0)
