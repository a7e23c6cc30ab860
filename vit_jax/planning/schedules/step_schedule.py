"""The cost of a whole program by the schedules of its operations, by kind, and the exchange that they do not hide.

The measure is optimistic. An operation takes the maximum of the cycles of its bundles, of the busiest matrix unit and
of its HBM traffic, and nothing waits for anything else. The measure serves XLA's operations and Pallas kernels alike.
The compiler's own estimate is pessimistic for all but matrix products. The two measures must never be mixed.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator

from vit_jax.planning import collectives, hlo
from vit_jax.planning.collectives import Links, find_chain, parse_collective
from vit_jax.planning.records import StepSchedule
from vit_jax.planning.schedules.dumps import Dumps

ZERO_COST_OPERATIONS = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
}
LAYOUT = ZERO_COST_OPERATIONS | {
    "fusion",
    "copy",
    "transpose",
    "reshape",
    "slice",
    "concatenate",
    "pad",
    "dynamic-slice",
    "dynamic-update-slice",
    "bitcast-convert",
}
OTHER = {"sort", "gather", "scatter", "rng-bit-generator", "select-and-scatter", "custom-call"}
EXCHANGES = (*collectives.COLLECTIVE_KINDS, "send", "recv")
ASYNCHRONOUS = "async-collective-"  # fusions that only begin or end a collective which others execute meanwhile
CONTROL = {"while", "call", "conditional"}  # their cost is that of the instructions in them
COPY_START = re.compile(r"(copy|slice)-start$")
LARGE_CYCLES = 1000  # an operation that is estimated at more and has no schedule is counted as missing


def group_fused(text: str) -> Iterator[tuple[hlo.Instruction, list[hlo.Instruction]]]:
    """Yields each instruction that a device executes, in order, with the list of the instructions fused in it."""
    executed, fused = None, []
    for each in hlo.read_instructions(text):
        if each.fused:
            fused.append(each)
        else:
            if executed:
                yield executed, fused
            executed, fused = each, []
    if executed:
        yield executed, fused


def operation_kind(executed: hlo.Instruction, fused: list[hlo.Instruction]) -> str:
    """Returns `matmul`, `kernel`, `exchange`, `reduction`, `layout`, `elementwise` or `other`."""
    operations = {executed.operation} | {each.operation for each in fused}
    if executed.is_kernel:
        return "kernel"
    if operations & {"convolution", "dot"}:
        return "matmul"
    if executed.operation.startswith(EXCHANGES) or executed.name.startswith(ASYNCHRONOUS):
        return "exchange"
    if operations & {"reduce", "reduce-window"}:
        return "reduction"
    if operations & OTHER:
        return "other"
    return "layout" if operations <= LAYOUT else "elementwise"


def read_step_schedule(text: str, dumps: Dumps, links: collectives.Links) -> StepSchedule:
    """Returns the schedule of a compiled program.

    Args:
        text: the text of the program.
        dumps: the schedules of its operations.
        links: the links between its devices.
    """
    chip = links.tpu.chip
    kinds: Counter[str] = Counter()
    exchange, copies = ExchangeTimeline(links, text), Timeline()
    hbm_bytes = open_loops = missing = 0
    for executed, fused in group_fused(text):
        if executed.operation in ZERO_COST_OPERATIONS | CONTROL:
            continue
        exchange.begin(executed, fused)
        kind = operation_kind(executed, fused)
        if kind != "exchange":
            schedule = dumps.read(executed.name)
            cycles = schedule.cycles(chip) * executed.times if schedule else 0
            if schedule and schedule.open_loops:
                cycles = max(cycles, (executed.cycles or 0) * executed.times)
            kinds[kind] += cycles
            exchange.timeline.run(cycles)
            copies.run(cycles)
            hbm_bytes += schedule.hbm_bytes(chip) * executed.times if schedule else 0
            open_loops += bool(schedule and schedule.open_loops)
            missing += not schedule and (executed.cycles or 0) > LARGE_CYCLES
        exchange.end(executed, fused)
        if COPY_START.search(executed.operation):
            moved = collectives.byte_sizes(executed.shape)[1]  # destination and source, or source and slice
            copies.start(executed.name, moved * executed.times / chip.device_hbm_bandwidth * chip.clock)
        elif executed.operation.endswith("-done"):
            copies.wait(executed.operands[0])
    return StepSchedule(
        kinds={kind: cycles for kind, cycles in kinds.most_common() if cycles},
        exchange_exposed=round(exchange.timeline.exposed),
        exchange_hidden=round(exchange.timeline.hidden),
        copies_exposed=round(copies.exposed),
        copies_hidden=round(copies.hidden),
        hbm_bytes=hbm_bytes,
        open_loops=open_loops,
        missing=missing,
    )


@dataclasses.dataclass
class Timeline:
    """The operations of a device in their order, and the transfers beside them, of which only one runs at a time.

    Times are cycles from the beginning of the program. A loop of n turns counts as one turn that takes n times as long.

    Attributes:
        now: when the next operation begins.
        free: when the last transfer that was started ends.
        pending: name of a transfer -> (when it ends, how long it takes).
        hidden: the cycles of transfers during which operations ran.
        exposed: the cycles during which operations waited for transfers.
    """

    now: float = 0.0
    free: float = 0.0
    pending: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    hidden: float = 0.0
    exposed: float = 0.0

    def run(self, cycles: float) -> None:
        """Adds an operation that takes `cycles` cycles."""
        self.now += cycles

    def start(self, name: str, cycles: float) -> None:
        """Adds the start of a transfer, which begins when those before it have ended."""
        self.free = max(self.now, self.free) + cycles
        self.pending[name] = self.free, cycles

    def wait(self, name: str) -> None:
        """Adds the operation that waits for a transfer."""
        end, cycles = self.pending.pop(name, (self.now, 0.0))
        waited = max(0.0, end - self.now)
        self.exposed += waited
        self.hidden += max(0.0, cycles - waited)
        self.now += waited

    def transfer(self, cycles: float) -> None:
        """Adds a transfer for which the next operation waits."""
        self.start("", cycles)
        self.wait("")


class ExchangeTimeline:
    """The collectives of a program, one after the other, each at the full speed of the busiest link.

    Attributes:
        timeline: the operations and collectives of the device.
    """

    def __init__(self, links: Links, text: str) -> None:
        """Starts with an empty timeline.

        Args:
            links: the links between the devices of the program.
            text: the text of the compiled program.
        """
        self.timeline = Timeline()
        self._links = links
        # Chain -> how many of its fusions are still to come. The compiler spreads some collectives over such a chain.
        self._steps = Counter(chain for each in hlo.read_instructions(text) if (chain := find_chain(each)))
        self._started: set[str] = set()

    def begin(self, executed: hlo.Instruction, fused: list[hlo.Instruction]) -> None:
        """Adds the collective for which an instruction waits first, and the collectives that it executes or starts.

        Args:
            executed: the instruction.
            fused: the instructions that are fused in it.
        """
        if executed.operation.endswith("-done") and executed.operands:
            self.timeline.wait(executed.operands[0])
        for each in (executed, *fused):
            if (collective := parse_collective(each)) is None:
                continue
            cycles, chain = self._links.cycles(collective) * collective.times, find_chain(each)
            if chain is None and not each.operation.endswith("-start"):
                self.timeline.transfer(cycles)
            elif chain is None:
                self.timeline.start(each.name, cycles)
            elif chain not in self._started:
                self._started.add(chain)
                self.timeline.start(chain, cycles)

    def end(self, executed: hlo.Instruction, fused: list[hlo.Instruction]) -> None:
        """Adds the collectives for which an instruction waits at its end, since it is their last step."""
        for chain in (chain for each in (executed, *fused) if (chain := find_chain(each))):
            self._steps[chain] -= 1
            if not self._steps[chain]:
                self.timeline.wait(chain)
