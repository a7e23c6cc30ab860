"""The collectives of a compiled program, by which its devices exchange arrays, read from its text."""

import dataclasses
import math
import re
from typing import Any

import numpy as np

from vit_jax.planning import chips, hlo, link_traffic

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
    places: list[link_traffic.Place]

    def carried_bytes(self, collective: Collective) -> float:
        """Returns the bytes that the busiest link carries in one execution of a collective.

        What hosts carry between slices is left out.
        """
        if collective.kind.endswith(BETWEEN_SLICES):
            return 0.0
        return link_traffic.link_bytes(
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
