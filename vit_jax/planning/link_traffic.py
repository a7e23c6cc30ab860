"""Which links of a TPU slice an exchange uses, and how much the busiest of them carries."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

Place = tuple[int, ...]  # of a chip: the number of its slice, then its coordinates in the torus
Groups = Sequence[Sequence[int]]  # devices, by their place in the mesh
Link = tuple[Place, int, int]  # a chip, an axis of the torus, and the direction in which it sends: 1 or -1

# What a device sends of each byte of an exchange in a group of so many: an all-reduce goes round twice.
ROUNDS = {"all-reduce": 2}


def link_bytes(
    kind: str, size: int, groups: Groups, places: Sequence[Place], ring: Sequence[bool], shape: Place
) -> float:
    """Returns the bytes that the busiest link carries in one direction; what passes between slices is left out.

    A group whose chips form a box spreads its part over the links that it has along each axis (two of a chip where the
    axis closes, one at an end where it does not); groups that are interleaved along an axis share its links. Any other
    group is taken as a ring of its chips as listed. A collective-permute takes the shortest ways, one axis after the
    other, and so does an all-to-all.

    Args:
        kind: see `collectives.KINDS`.
        size: `Collective.bytes`.
        groups: `Collective.groups`.
        places: of the devices, as they lie in the mesh.
        ring: whether the last chip along an axis is a neighbour of the first.
        shape: chips along each axis.
    """
    if kind == "collective-permute":
        return size * _most(_loads([(places[a], places[b]) for a, b in groups], ring, shape))
    chips = [part for group in groups or [range(len(places))] for part in _by_slice([places[i] for i in group])]
    most = max(map(len, chips))
    if most == 1:
        return 0.0
    if kind == "all-to-all":
        pairs = [pair for group in chips for pair in itertools.permutations(group, 2)]
        return size / most * _most(_loads(pairs, ring, shape))
    return ROUNDS.get(kind, 1) * size * (most - 1) / most / _links(chips, ring, shape)


def _by_slice(places: Sequence[Place]) -> Iterable[list[Place]]:
    found: dict[int, list[Place]] = {}
    for place in places:
        found.setdefault(place[0], []).append(place)
    return found.values()


def _links(groups: list[list[Place]], ring: Sequence[bool], shape: Place) -> float:
    """Returns how many links a chip of the groups has to itself, where they are fewest."""
    groups = [group for group in groups if len(group) > 1]
    if not all(math.prod(len(set(axis)) for axis in zip(*group, strict=True)) == len(group) for group in groups):
        pairs = [pair for group in groups for pair in itertools.pairwise([*group, group[0]])]
        return 2 / _most(_loads([*pairs, *(pair[::-1] for pair in pairs)], ring, shape))  # half goes round each way
    found = [0.0] * len(groups)
    for axis, (size, closes) in enumerate(zip(shape, ring, strict=True)):
        loads: Counter[Link] = Counter()
        ends = []
        for group in groups:
            lines: dict[Place, list[int]] = {}
            for place in group:
                lines.setdefault((*place[: axis + 1], -1, *place[axis + 2 :]), []).append(place[axis + 1])
            ways = {line: _way(sorted(steps), size, closes) for line, steps in lines.items()}
            for line, way in ways.items():
                loads.update((line, step, 1) for step in way)
            ends.append(min(2 if len(way) == size else min(len(way), 1) for way in ways.values()))
        found = [links + end / _most(loads) for links, end in zip(found, ends, strict=True)] if loads else found
    return min(found)


def _way(steps: list[int], size: int, closes: bool) -> list[int]:
    """Returns the links of an axis, by the chip before each, that join the chips of a group: all if they close it."""
    gaps = [(after - step) % size for step, after in zip(steps, [*steps[1:], steps[0]], strict=True)]
    if len(steps) == 1 or (closes and len(set(gaps)) == 1):
        return list(range(size)) if len(steps) > 1 else []
    widest = gaps.index(max(gaps)) if closes else len(gaps) - 1
    first = steps[(widest + 1) % len(steps)]
    return [(first + step) % size for step in range((steps[widest] - first) % size)]


def _loads(pairs: Iterable[tuple[Place, Place]], ring: Sequence[bool], shape: Place) -> Counter[Link]:
    """Returns how many of the pairs (from, to) send over each link."""
    return Counter(link for start, end in pairs if start[0] == end[0] for link in _route(start, end, ring, shape))


def _route(start: Place, end: Place, ring: Sequence[bool], shape: Place) -> Iterator[Link]:
    place = list(start)
    for axis, (size, closes) in enumerate(zip(shape, ring, strict=True)):
        ahead = end[axis + 1] - start[axis + 1]
        if closes and abs(ahead) > size / 2:
            ahead -= size if ahead > 0 else -size
        for _ in range(abs(ahead)):
            yield tuple(place), axis, 1 if ahead > 0 else -1
            place[axis + 1] = (place[axis + 1] + (1 if ahead > 0 else -1)) % size


def _most(loads: Counter[Link]) -> int:
    return max(loads.values(), default=0)
