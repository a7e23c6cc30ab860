"""Simulates the scalar unit of a TPU core, to count how often a schedule issues each bundle and how much it transfers.

The scalar unit decides on loops, on the stages of a pipelined grid, and on the blocks that it need not fetch again.
"""

import bisect
import dataclasses
import operator
from collections import Counter
from collections.abc import Callable

from vit_jax.planning.chips import Chip
from vit_jax.planning.schedules.bundles import BundleInstruction, Bundles, Operand, is_transfer, parse_bundles

DELAY_SLOTS = 4  # bundles after a branch that are issued before it takes effect
MAX_STEPS = 5_000_000  # the simulation is given up after so many bundles with scalar instructions

UNSIGNED = 2**32 - 1

# What the scalar unit computes; operations that are not here have an unknown result.
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "smulhi": lambda a, b: (a & UNSIGNED) * (b & UNSIGNED) >> 32,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda value, bits: value << bits,
    "sshra": lambda value, bits: value >> bits,
    "sshrl": lambda value, bits: (value & UNSIGNED) >> bits,
    "smin": min,
    "smax": max,
}
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


@dataclasses.dataclass(frozen=True)
class OperationCost:
    """The use of a core by one execution of an operation.

    Attributes:
        bundles: the number of bundles issued, one in a cycle. Cycles in which the core waits are not counted.
        mxu_rows: the rows of left operands that the busiest matrix unit takes.
        granules: the size of the transfers from and to HBM, in units of `Chip.granule_bytes`; None: unknown.
        shared: whether the cores of a chip share the operation. If so, the numbers are those of one core.
        assumed: the number of conditions that depend on data. What they guard counts as executed.
        open_loops: the number of loops whose number of turns depends on data. Each counts as one turn.
    """

    bundles: int
    mxu_rows: int
    granules: int | None
    shared: bool
    assumed: int
    open_loops: int

    def hbm_bytes(self, chip: Chip) -> int:
        """Returns the bytes that a device moves from and to HBM; 0 if they are unknown."""
        return (self.granules or 0) * chip.granule_bytes * (chip.tensor_cores if self.shared else 1)

    def cycles(self, chip: Chip) -> int:
        """Returns the cycles of a device: the most that bundles, the busiest matrix unit or HBM traffic take."""
        moving = self.hbm_bytes(chip) / chip.device_hbm_bandwidth * chip.clock
        return max(self.bundles, self.mxu_rows // chip.matrix_rows, round(moving))


@dataclasses.dataclass
class _Core:
    """A core that executes a schedule.

    Attributes:
        values: name of a scalar or predicate -> its value; None: unknown.
        registers: register, such as `s19` -> its value; None: unknown.
        slots: slot of memory -> the value that it holds; None: unknown.
        divisions: name of a division -> its quotient and remainder, without those that were fetched already.
        issued: (first, end) -> how often the bundles from `first` to before `end` were issued one after the other.
        granules: the size of the transfers from and to HBM, in units of `Chip.granule_bytes`; None: unknown.
        assumed: (its bundle, the bundle to which it leads) of each branch that depends on data. None of them is taken.
        uses_core_id: whether the schedule reads the id of its core, so that the cores of a chip share the work.
    """

    values: dict[str, int | None] = dataclasses.field(default_factory=dict)
    registers: dict[str, int | None] = dataclasses.field(default_factory=dict)
    slots: dict[str, int | None] = dataclasses.field(default_factory=dict)
    divisions: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    issued: Counter[tuple[int, int]] = dataclasses.field(default_factory=Counter)
    granules: int | None = 0
    assumed: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    uses_core_id: bool = False

    def run(self, bundles: Bundles) -> None:
        """Executes a schedule from its first bundle to its last.

        Raises:
            ValueError: the schedule executes more than `MAX_STEPS` bundles with scalar instructions.
        """
        events = sorted({*bundles.scalar, bundles.count})
        after = dict(zip(events, [*events[1:], bundles.count], strict=True))
        begin, number = 0, events[0]  # of the bundles that are issued in sequence; the next to execute
        branch: tuple[int, int] | None = None  # after which bundle it takes effect, and where it leads
        for _ in range(MAX_STEPS):
            if branch and number > branch[0]:
                self.issued[begin, branch[0] + 1] += 1
                begin, branch = branch[1], None
                number = events[bisect.bisect_left(events, begin)]
            if number >= bundles.count:
                self.issued[begin, bundles.count] += 1
                return
            for each in bundles.scalar[number]:
                if each.target is None:
                    self.execute(each)
                elif (taken := self.holds(each)) is None:
                    self.assumed.add((number, each.target))
                elif taken:
                    branch = number + DELAY_SLOTS, each.target
            number = after[number]
        raise ValueError(f"more than {MAX_STEPS:,} steps")

    def holds(self, instruction: BundleInstruction) -> bool | None:
        """Returns whether an instruction is executed; None: unknown."""
        if instruction.predicate is None:
            return True
        value = self.values.get(instruction.predicate)
        return None if value is None else bool(value) != instruction.negated

    def value(self, operand: Operand | None) -> int | None:
        """Returns the value of an operand; None: unknown."""
        return operand if isinstance(operand, int) else self.values.get(operand or "")

    def execute(self, instruction: BundleInstruction) -> None:
        """Executes an instruction that is no branch."""
        holds = self.holds(instruction)
        if is_transfer(instruction.code):
            self.transfer(instruction, holds)
        elif instruction.code == "sst":
            if holds is not False and instruction.slot:
                self.slots[instruction.slot] = self.value(instruction.operands[-1])
        elif instruction.result and (holds is not False or instruction.otherwise is not None):
            value = self.compute(instruction, holds)
            self.values[instruction.result] = value
            self.registers[_register(instruction.result)] = value

    def compute(self, instruction: BundleInstruction, holds: bool | None) -> int | None:
        """Returns the result of an instruction; None: unknown."""
        if instruction.code == "sphi":
            return self.registers.get(_register(instruction.result or ""))
        if instruction.otherwise is not None:
            return None if holds is None else self.value(instruction.operands[0] if holds else instruction.otherwise)
        if instruction.code == "sld":
            self.uses_core_id |= instruction.core_id
            return 0 if instruction.core_id else self.slots.get(instruction.slot or "")
        if instruction.code == "spop.drf":
            results = self.divisions.get(str(instruction.operands[0]))
            return results.pop(0) if results else None
        values = [self.value(operand) for operand in instruction.operands]
        if instruction.code == "scalar_select":
            return None if values[0] is None else values[1 if values[0] else 2]
        if instruction.code in ("por", "pand", "pnand", "pneg"):
            return _combine(instruction.code, values)
        if instruction.code in ("smov", "pmov", "int_to_ptr.hbm", "int_to_ptr.vmem"):
            return values[0] if values else None
        kind = instruction.code.split(".")
        if len(values) != 2 or values[0] is None or values[1] is None:
            return None
        if kind[0] == "sdivrem" and values[1]:
            self.divisions[instruction.result or ""] = list(divmod(values[0], values[1]))
        if kind[0] == "scmp" and kind[1] in COMPARISONS:
            return int(COMPARISONS[kind[1]](values[0], values[1]))
        return _signed(OPERATIONS[kind[0]](values[0], values[1])) if kind[0] in OPERATIONS else None

    def transfer(self, instruction: BundleInstruction, holds: bool | None) -> None:
        """Counts a transfer from or to HBM, unless it is known that it does not take place.

        After a transfer of unknown size `granules` is None. A general transfer (`dma.general`) under a condition that
        depends on data is not counted: it is what a collective sends to another chip beside the operation, once in all
        turns of a loop, and belongs to the exchange.
        """
        if holds is False or self.granules is None:
            return
        if "hbm" not in instruction.code and not (instruction.code == "dma.general" and holds):
            return
        size = self.value(instruction.operands[1]) if len(instruction.operands) > 1 else None
        self.granules = None if size is None else self.granules + size


def read_schedule(text: str) -> OperationCost:
    """Returns what an operation occupies, from the text of its final schedule, which libtpu wrote.

    Raises:
        ValueError: the text is no schedule, or its loops do not end.
    """
    bundles = parse_bundles(text)
    if not bundles.count:
        raise ValueError("no bundles")
    core = _Core()
    core.run(bundles)
    rows: Counter[str] = Counter()
    for (first, end), times in core.issued.items():
        for number in (number for number in bundles.rows if first <= number < end):
            for unit, taken in bundles.rows[number].items():
                rows[unit] += taken * times
    return OperationCost(
        bundles=sum((end - first) * times for (first, end), times in core.issued.items()),
        mxu_rows=max(rows.values(), default=0),
        granules=core.granules,
        shared=core.uses_core_id,
        assumed=sum(target > number for number, target in core.assumed),
        open_loops=sum(target <= number for number, target in core.assumed),
    )


def _register(name: str) -> str:
    """Returns the register of a name: the last part of `s4716_s19`."""
    return name.rpartition("_")[2]


def _combine(code: str, values: list[int | None]) -> int | None:
    """Returns a logical combination of predicates, 1 or 0; None: unknown.

    It is known, even if some predicates are not, where one predicate alone decides it.

    Args:
        code: `por`, `pand`, `pnand` or `pneg`.
        values: the predicates; None: unknown.
    """
    if code == "pneg":
        return None if values[0] is None else int(not values[0])
    decisive = 1 if code == "por" else 0
    known = [bool(value) for value in values if value is not None]
    if bool(decisive) in known:
        combined = decisive
    elif len(known) < len(values):
        return None
    else:
        combined = 1 - decisive
    return 1 - combined if code == "pnand" else combined


def _signed(value: int) -> int:
    """Returns the lower 32 bits of a value as a signed integer."""
    return (value + 2**31) % 2**32 - 2**31
