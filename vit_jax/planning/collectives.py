"""The collectives of a compiled program, by which its devices exchange arrays, and the links of a TPU slice that carry
them."""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.planning import chips, hlo

COLLECTIVE_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
BETWEEN_SLICES = " between slices"  # added to the kind if hosts carry the data from one TPU slice to another
REDUCE_SCATTER_NAME = "all-reduce-scatter"  # how the TPUs' compiler names a computation that is a reduce-scatter

ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
MEGASCALE_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
CHAIN = re.compile(r'\bchain_id="(\d+)"')  # shared by the fusions over which TPUs spread a collective

# The three notations for the groups of devices: {{0,1},{2,3}}, [2,2]<=[4]T(0), and axes of a mesh.
LISTED_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
IOTA_GROUPS = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\]?(?:T\([\d,]+\))?)\))? \{([^}]*)\}")

Place = tuple[int, ...]  # where a chip is: the number of its slice, then its coordinates in the torus
Groups = Sequence[Sequence[int]]  # groups of devices; a device is given by its position in the mesh
Link = tuple[Place, int, int]  # a chip, an axis of the torus, and the direction in which the chip sends: 1 or -1

# The connection between the two devices of a chip, in links to other chips
# (cloud.google.com/tpu/docs/tpu7x, dual-chiplet architecture).
LINKS_IN_CHIP = 6

# How often the data go round a group: twice in an all-reduce (a reduce-scatter, then an all-gather), else once.
ROUNDS = {"all-reduce": 2}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    Attributes:
        kind: one of `COLLECTIVE_KINDS`, followed by `BETWEEN_SLICES` if it is one device's part of an exchange between
            slices.
        bytes: the size of the whole array, as one device sees it. The whole array is the input of an all-reduce, a
            reduce-scatter or a collective-permute, and the output of an all-gather. If several arrays are exchanged at
            once, their sizes are added up.
        groups: the groups of devices that exchange data among themselves. A device is given by its position in the
            mesh. The groups of a collective-permute are its pairs (from, to). Empty: all devices are one group.
        times: how often one run of the program executes it.
    """

    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...]
    times: int = 1


@dataclasses.dataclass(frozen=True)
class Links:
    """The links between the devices of a mesh.

    Attributes:
        tpu: the slice that the devices form; where there are several slices, each of them.
        places: the place of each device, in the order of the mesh.
    """

    tpu: chips.Slice
    places: list[Place]

    def carried_bytes(self, collective: Collective) -> float:
        """Returns the bytes that the busiest link carries in one execution of a collective.

        What hosts carry between slices is left out.
        """
        if collective.kind.endswith(BETWEEN_SLICES):
            return 0.0
        return link_bytes(
            collective.kind, collective.bytes, collective.groups, self.places, self.tpu.wraps, self.tpu.shape
        )

    def cycles(self, collective: Collective) -> float:
        """Returns the cycles that one execution of a collective takes, if the busiest link is used at full speed."""
        return self.carried_bytes(collective) / self.tpu.link_bandwidth * self.tpu.chip.clock


def find_links(tpu: chips.Slice, devices: list[Any]) -> Links:
    """Returns the links between the devices of TPU slices. `devices` are in the order of the mesh."""
    return Links(tpu, [(getattr(chip, "slice_index", 0), *chip.coords[: len(tpu.shape)]) for chip in devices])


def read_collectives(text: str) -> list[Collective]:
    """Returns the collectives of a compiled program, `jitted.lower(...).compile().as_text()`, in order.

    A collective in a loop has the loop's number of rounds as its `times`, or 1 if the text does not state it. One that
    the compiler divided (into start and done, or into the steps of a fusion that hides it) counts once. Exchanges
    within groups of one device are left out.
    """
    collectives: list[Collective] = []
    chains: set[str | None] = set()
    for each in hlo.read_instructions(text):
        if collective := parse_collective(each):
            chain = find_chain(each)
            if chain is None or chain not in chains:
                collectives.append(collective)
            chains.add(chain)
    return collectives


def find_chain(instruction: hlo.Instruction) -> str | None:
    """Returns the chain number of an instruction, as text, or None if it has none.

    Where the compiler spread a collective over several fusions, all of them have the same chain number.
    """
    match = CHAIN.search(instruction.line)
    return match[1] if match else None


def parse_collective(instruction: hlo.Instruction) -> Collective | None:
    """Returns the collective that an instruction executes or starts.

    Returns None if there is none, or if each of its groups has only one device.
    """
    kind = instruction.operation.removesuffix("-start")
    if kind == "send" and (carried := MEGASCALE_TRANSFER.search(instruction.line)):
        kind = carried[1].lower().replace("_", "-") + BETWEEN_SLICES
        return Collective(kind, byte_sizes(instruction.shape)[0], (), instruction.times)
    if kind not in COLLECTIVE_KINDS:
        return None
    groups = tuple(sorted(_parse_groups(instruction.line)))
    if max(map(len, groups), default=2) == 1:
        return None
    sizes = byte_sizes(instruction.shape)
    if instruction.operation != kind:  # first the operands, then as many results, then the counters
        sizes = sizes[:2] if kind == "collective-permute" else sizes
        sizes = sizes[len(sizes) // 2 :] if instruction.shape.startswith("(") and kind != "all-reduce" else sizes
    total = sum(sizes)
    if kind == "reduce-scatter":
        total *= max(map(len, groups), default=1)
    kind = "reduce-scatter" if instruction.within.startswith(REDUCE_SCATTER_NAME) else kind
    return Collective(kind, total, groups, instruction.times)


def byte_sizes(shape: str) -> list[int]:
    """Returns the bytes of each array in a shape that a program's text states, be it that of an array or of a tuple."""
    return [math.prod(_parse_numbers(sizes)) * max(int(bits or 8) // 8, 1) for bits, sizes in ARRAY.findall(shape)]


def _parse_groups(line: str) -> tuple[tuple[int, ...], ...]:
    if match := LISTED_GROUPS.search(line):
        return tuple(tuple(_parse_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", match[1]))
    if match := MESH_GROUPS.search(line):
        axes = re.findall(r"'(\w+)'=(\d+)", match[1])
        shape = [int(size) for _, size in axes]
        order = IOTA_GROUPS.search(f"[{math.prod(shape)}]<={match[2]}") if match[2] else None
        ids = _iota_array(order[2], order[3]) if order else np.arange(math.prod(shape))
        inside = [i for i, (axis, _) in enumerate(axes) if f"'{axis}'" in match[3]]
        outside = [i for i in range(len(axes)) if i not in inside]
        ids = ids.reshape(shape).transpose(outside + inside).reshape(-1, math.prod(shape[i] for i in inside))
        return tuple(map(tuple, ids.tolist()))
    if match := IOTA_GROUPS.search(line):
        return tuple(map(tuple, _iota_array(match[2], match[3]).reshape(_parse_numbers(match[1])).tolist()))
    return ()


def _iota_array(shape: str, order: str | None) -> np.ndarray:
    sizes = _parse_numbers(shape)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_parse_numbers(order)) if order else ids


def _parse_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def link_bytes(
    kind: str, size: int, groups: Groups, places: Sequence[Place], wraps: Sequence[bool], shape: Place
) -> float:
    """Returns the bytes that the busiest link carries in one direction; traffic between slices is left out.

    A group whose chips form a box spreads its traffic over the links that it has along each axis. These are two of a
    chip along an axis that wraps around. Along any other axis they are one, since the chips at the ends have only one.
    Groups that are interleaved along an axis share its links. A group whose chips form no box counts as a ring of its
    chips in the order listed. A collective-permute and an all-to-all take the shortest routes, one axis after the
    other. What both devices of a chip receive crosses a link once. The connection between these two counts only where
    no other is used, since it is faster than all links of the chip together.

    Args:
        kind: see `COLLECTIVE_KINDS`.
        size: `Collective.bytes`.
        groups: `Collective.groups`.
        places: the place of each device, in the order of the mesh.
        wraps: for each axis, whether the last chip along it is a neighbour of the first.
        shape: chips along each axis.
    """
    if kind == "collective-permute":
        return size * _max_load(_link_loads([(places[a], places[b]) for a, b in groups], wraps, shape))
    devices = [part for group in groups or [range(len(places))] for part in _by_slice([places[i] for i in group])]
    if kind == "all-to-all":
        pairs = [pair for group in devices for pair in itertools.permutations(group, 2)]
        return size / max(map(len, devices)) * _max_load(_link_loads(pairs, wraps, shape))
    chips = [list(dict.fromkeys(group)) for group in devices]
    most = max(map(len, chips))
    if most > 1:
        return ROUNDS.get(kind, 1) * size * (most - 1) / most / _free_links(chips, wraps, shape)
    return ROUNDS.get(kind, 1) * size / 2 / LINKS_IN_CHIP if max(map(len, devices)) > 1 else 0.0


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
