"""Reads the text of a compiled program: which instructions a device executes, and how often."""

import dataclasses
import re
from collections.abc import Iterator

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.+?) ([a-z][\w-]*)\(")
OPERAND = re.compile(r"%([\w.-]+)")
CALL_ATTRIBUTES = "body|calls|to_apply|(?:true|false)_computation|branch_computations|called_computations"
CALLED = re.compile(rf"\b(?:{CALL_ATTRIBUTES})=\{{?((?:%?[\w.-]+(?:, )?)+)")
CONDITION = re.compile(r"\bcondition=%?([\w.-]+)")
LOOP_LIMIT = re.compile(r"= [su]32\[\]\S* constant\((\d+)\)")
ESTIMATED_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
KERNEL = 'custom_call_target="tpu_custom_call"'
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
        name: unique in the program.
        operation: `fusion`, `all-reduce-start`, ...
        shape: of the result, as written.
        line: the whole line.
        within: the computation that contains it.
        fused: that computation is executed as one instruction, which came before.
        times: how often it is executed.
    """

    name: str
    operation: str
    shape: str
    line: str
    within: str
    fused: bool
    times: int

    @property
    def operands(self) -> list[str]:
        """The names of the instructions whose results it takes."""
        return OPERAND.findall(self.line.partition(f" {self.operation}(")[2].partition(")")[0])

    @property
    def is_kernel(self) -> bool:
        """Whether it executes a Pallas kernel."""
        return KERNEL in self.line

    @property
    def cycles(self) -> int | None:
        """The clock cycles that a TPU takes for it, as its compiler estimates; None: there is no estimate."""
        found = ESTIMATED_CYCLES.search(self.line)
        return int(found[1]) if found else None


def read_instructions(text: str) -> Iterator[Instruction]:
    """Yields the instructions of a compiled program, `jitted.lower(...).compile().as_text()`, in order.

    An instruction in a loop counts as often as the loop runs, if the text says so.
    """
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            lines = bodies.setdefault(found[2], [])
            entry = found[2] if found[1] else entry
        else:
            lines.append(line)
    return _walk_computation(bodies, entry, 1, False)


def _walk_computation(bodies: dict[str, list[str]], name: str, times: int, fused: bool) -> Iterator[Instruction]:
    for line in bodies[name]:
        found = INSTRUCTION.match(line)
        if found is None:
            continue
        result, shape, operation = found.groups()
        yield Instruction(result, operation, shape, line, name, fused, times)
        trips = _trip_count(bodies, line) if operation == "while" else 1
        inside = fused or operation not in ("while", "call", "conditional")
        for called in CALLED.findall(line):
            for inner in called.replace("%", "").split(", "):
                if inner in bodies:
                    yield from _walk_computation(bodies, inner, times * trips, inside)


def _trip_count(bodies: dict[str, list[str]], line: str) -> int:
    """Returns how often a loop runs: as stated, else the single limit up to which its condition counts, else 1."""
    if found := TRIP_COUNT.search(line):
        return int(found[1])
    condition = CONDITION.search(line)
    body = "\n".join(bodies.get(condition[1], [])) if condition else ""
    limits = LOOP_LIMIT.findall(body)
    return int(limits[0]) if len(limits) == 1 and body.count("direction=LT") == body.count(" compare(") == 1 else 1
