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
        name: the name of the instruction, which is unique in the program.
        operation: `fusion`, `all-reduce-start`, ...
        shape: the shape of the result, as written.
        line: the whole line.
        within: the computation that contains it.
        fused: whether that computation is executed as a single instruction, which `read_instructions` yields before it.
        times: how often one run of the program executes it.
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
        match = ESTIMATED_CYCLES.search(self.line)
        return int(match[1]) if match else None


def read_instructions(text: str) -> Iterator[Instruction]:
    """Yields the instructions of a compiled program, `jitted.lower(...).compile().as_text()`, in order.

    The `times` of an instruction in a loop include the turns of the loop, if the text states their number.
    """
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            lines = bodies.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        else:
            lines.append(line)
    return _walk_computation(bodies, entry, 1, False)


def _walk_computation(bodies: dict[str, list[str]], name: str, times: int, fused: bool) -> Iterator[Instruction]:
    for line in bodies[name]:
        match = INSTRUCTION.match(line)
        if match is None:
            continue
        result, shape, operation = match.groups()
        yield Instruction(result, operation, shape, line, name, fused, times)
        trips = _trip_count(bodies, line) if operation == "while" else 1
        inside = fused or operation not in ("while", "call", "conditional")
        for called in CALLED.findall(line):
            for inner in called.replace("%", "").split(", "):
                if inner in bodies:
                    yield from _walk_computation(bodies, inner, times * trips, inside)


def _trip_count(bodies: dict[str, list[str]], line: str) -> int:
    """Returns how often a loop runs.

    This is the number that its line states, or else the only limit up to which its condition counts, or else 1.
    """
    if match := TRIP_COUNT.search(line):
        return int(match[1])
    condition = CONDITION.search(line)
    body = "\n".join(bodies.get(condition[1], [])) if condition else ""
    limits = LOOP_LIMIT.findall(body)
    return int(limits[0]) if len(limits) == 1 and body.count("direction=LT") == body.count(" compare(") == 1 else 1
