"""What the devices tell each other: the collectives of a compiled program, read from its text."""

import dataclasses
import math
import re

import numpy as np

from vit_jax.planning import hlo

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
BETWEEN = " between slices"  # added to the kind of what hosts carry from one TPU slice to another
SCATTERED = "all-reduce-scatter"  # how TPUs name a computation that is a reduce-scatter

ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
CARRIED = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
CHAIN = re.compile(r'\bchain_id="(\d+)"')  # of the fusions over which TPUs spread a collective

# The ways to write which devices exchange: {{0,1},{2,3}}, [2,2]<=[4]T(0), or axes of a mesh.
LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\]?(?:T\([\d,]+\))?)\))? \{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    Attributes:
        kind: one of `KINDS`; with `BETWEEN` after it, it is between slices, and only a device's part in that.
        bytes: of the whole array, as one device sees it: what an all-reduce, a reduce-scatter or a collective-permute
            takes, what an all-gather gives; of several arrays in one exchange the sum.
        groups: the devices, by their place in the mesh, that exchange among themselves; of a collective-permute the
            pairs (from, to). Empty: all devices.
        times: how often it happens in a run of the program.
    """

    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...]
    times: int = 1


def read(text: str) -> list[Collective]:
    """Returns the collectives of a compiled program, `jitted.lower(...).compile().as_text()`, in order.

    One in a loop counts as often as the loop runs, if the text tells. What a compiler cut in several (start and
    done, or the steps of a fusion that hides it) counts once, and so do exchanges within groups of one.
    """
    found: list[Collective] = []
    chains: set[str] = set()
    for each in hlo.read(text):
        kind = each.operation.removesuffix("-start")
        if kind == "send" and (carried := CARRIED.search(each.line)):
            kind = carried[1].lower().replace("_", "-") + BETWEEN
            found.append(Collective(kind, _sizes(each.shape)[0], (), each.times))
        if kind not in KINDS:
            continue
        chain = CHAIN.search(each.line)
        if chain is None or chain[1] not in chains:
            chains |= {chain[1]} if chain else set()
            found.append(_collective(kind, each))
    return [each for each in found if max(map(len, each.groups), default=2) > 1]


def _collective(kind: str, found: hlo.Instruction) -> Collective:
    groups = tuple(sorted(_groups(found.line)))
    sizes = _sizes(found.shape)
    if found.operation != kind:  # operands come first, then as many results, then what the device counts with
        sizes = sizes[:2] if kind == "collective-permute" else sizes
        sizes = sizes[len(sizes) // 2 :] if found.shape.startswith("(") and kind != "all-reduce" else sizes
    total = sum(sizes)
    if kind == "reduce-scatter":
        total *= max(map(len, groups), default=1)
    return Collective("reduce-scatter" if found.within.startswith(SCATTERED) else kind, total, groups, found.times)


def _sizes(shape: str) -> list[int]:
    return [math.prod(_numbers(sizes)) * max(int(bits or 8) // 8, 1) for bits, sizes in ARRAY.findall(shape)]


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    if found := LISTED.search(line):
        return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", found[1]))
    if found := MESH.search(line):
        axes = re.findall(r"'(\w+)'=(\d+)", found[1])
        shape = [int(size) for _, size in axes]
        order = IOTA.search(f"[{math.prod(shape)}]<={found[2]}") if found[2] else None
        ids = _iota(order[2], order[3]) if order else np.arange(math.prod(shape))
        inside = [i for i, (axis, _) in enumerate(axes) if f"'{axis}'" in found[3]]
        outside = [i for i in range(len(axes)) if i not in inside]
        ids = ids.reshape(shape).transpose(outside + inside).reshape(-1, math.prod(shape[i] for i in inside))
        return tuple(map(tuple, ids.tolist()))
    if found := IOTA.search(line):
        return tuple(map(tuple, _iota(found[2], found[3]).reshape(_numbers(found[1])).tolist()))
    return ()


def _iota(shape: str, order: str | None) -> np.ndarray:
    sizes = _numbers(shape)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_numbers(order)) if order else ids


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
