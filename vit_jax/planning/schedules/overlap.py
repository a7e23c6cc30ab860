"""How much of the time of a program's transfers is hidden behind its operations."""

import dataclasses
from collections import Counter

from vit_jax.planning import hlo
from vit_jax.planning.collectives import Links, find_chain, parse_collective


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
