"""What the devices tell each other: the collectives of a compiled program, read from its text."""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
SCATTERED = "all-reduce-scatter"  # how TPUs name a computation that is a reduce-scatter

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z][\w-]*)\(")
ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
CALLED = re.compile(r"\b(?:body|calls|to_apply|branch_computations|called_computations)=\{?((?:%?[\w.-]+(?:, )?)+)")
CONDITION = re.compile(r"\bcondition=%?([\w.-]+)")
LIMIT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
CHAIN = re.compile(r'\bchain_id="(\d+)"')  # of the fusions over which TPUs spread a collective

# The ways to write which devices exchange: {{0,1},{2,3}}, [2,2]<=[4]T(0), or axes of a mesh.
LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\]?(?:T\([\d,]+\))?)\))? \{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    Attributes:
        kind: one of `KINDS`.
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
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            lines = bodies.setdefault(found[2], [])
            entry = found[2] if found[1] else entry
        else:
            lines.append(line)
    return [each for each in _walk(bodies, entry, 1, set()) if max(map(len, each.groups), default=2) > 1]


def _walk(bodies: dict[str, list[str]], name: str, times: int, seen: set[str]) -> Iterator[Collective]:
    for line in bodies[name]:
        found = INSTRUCTION.match(line)
        if found is None:
            continue
        shape, operation = found.groups()
        kind = operation.removesuffix("-start")
        if kind in KINDS:
            chain = CHAIN.search(line)
            if chain is None or chain[1] not in seen:
                seen |= {chain[1]} if chain else set()
                yield _collective(kind, shape, line, name, times, asynchronous=operation != kind)
            continue
        trips = _trips(bodies, line) if operation == "while" else 1
        for called in CALLED.findall(line):
            for inner in called.replace("%", "").split(", "):
                if inner in bodies:
                    yield from _walk(bodies, inner, times * trips, seen)


def _trips(bodies: dict[str, list[str]], line: str) -> int:
    """Returns how often a loop runs: as said, else by the one limit up to which its condition counts, else 1."""
    if found := TRIPS.search(line):
        return int(found[1])
    condition = CONDITION.search(line)
    body = "\n".join(bodies.get(condition[1], [])) if condition else ""
    limits = LIMIT.findall(body)
    return int(limits[0]) if len(limits) == 1 and body.count("direction=LT") == body.count(" compare(") == 1 else 1


def _collective(kind: str, shape: str, line: str, within: str, times: int, asynchronous: bool) -> Collective:
    groups = tuple(sorted(_groups(line)))
    sizes = [math.prod(_numbers(sizes)) * max(int(bits or 8) // 8, 1) for bits, sizes in ARRAY.findall(shape)]
    if asynchronous:  # operands come first, then as many results, then what the device counts with
        sizes = sizes[:2] if kind == "collective-permute" else sizes
        sizes = sizes[len(sizes) // 2 :] if shape.startswith("(") and kind != "all-reduce" else sizes
    total = sum(sizes)
    if kind == "reduce-scatter":
        total *= max(map(len, groups), default=1)
    return Collective("reduce-scatter" if within.startswith(SCATTERED) else kind, total, groups, times)


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
