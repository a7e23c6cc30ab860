"""The text of a compiled program: which instructions a device executes, and how often."""

import dataclasses
import re
from collections.abc import Iterator

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z][\w-]*)\(")
CALLS = "body|calls|to_apply|(?:true|false)_computation|branch_computations|called_computations"
CALLED = re.compile(rf"\b(?:{CALLS})=\{{?((?:%?[\w.-]+(?:, )?)+)")
CONDITION = re.compile(r"\bcondition=%?([\w.-]+)")
LIMIT = re.compile(r"= [su]32\[\]\S* constant\((\d+)\)")
ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
        operation: `fusion`, `all-reduce-start`, ...
        shape: of what it gives, as written.
        line: all of it.
        within: the computation that it stands in.
        fused: that computation is carried out as one instruction, which was met before.
        times: how often it is executed.
    """

    operation: str
    shape: str
    line: str
    within: str
    fused: bool
    times: int

    @property
    def cycles(self) -> int | None:
        """How many clock cycles a TPU takes for it, as its compiler estimates; None: it does not say."""
        found = ESTIMATE.search(self.line)
        return int(found[1]) if found else None


def read(text: str) -> Iterator[Instruction]:
    """Yields the instructions of a compiled program, `jitted.lower(...).compile().as_text()`, in order.

    One in a loop counts as often as the loop runs, if the text tells.
    """
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            lines = bodies.setdefault(found[2], [])
            entry = found[2] if found[1] else entry
        else:
            lines.append(line)
    return _walk(bodies, entry, 1, False)


def _walk(bodies: dict[str, list[str]], name: str, times: int, fused: bool) -> Iterator[Instruction]:
    for line in bodies[name]:
        found = INSTRUCTION.match(line)
        if found is None:
            continue
        shape, operation = found.groups()
        yield Instruction(operation, shape, line, name, fused, times)
        trips = _trips(bodies, line) if operation == "while" else 1
        inside = fused or operation not in ("while", "call", "conditional")
        for called in CALLED.findall(line):
            for inner in called.replace("%", "").split(", "):
                if inner in bodies:
                    yield from _walk(bodies, inner, times * trips, inside)


def _trips(bodies: dict[str, list[str]], line: str) -> int:
    """Returns how often a loop runs: as said, else by the one limit up to which its condition counts, else 1."""
    if found := TRIPS.search(line):
        return int(found[1])
    condition = CONDITION.search(line)
    body = "\n".join(bodies.get(condition[1], [])) if condition else ""
    limits = LIMIT.findall(body)
    return int(limits[0]) if len(limits) == 1 and body.count("direction=LT") == body.count(" compare(") == 1 else 1
