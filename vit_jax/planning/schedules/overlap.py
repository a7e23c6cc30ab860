"""How much of what is transferred beside the operations of a program is hidden behind them."""

import dataclasses
from collections import Counter

from vit_jax.planning import hlo
from vit_jax.planning.collectives import Links, find_chain, parse_collective


@dataclasses.dataclass
class Timeline:
    """The operations of a device in their order, and transfers beside them, which are served one after the other.

    Times are cycles from the beginning of the program. A loop of n turns counts as one turn that takes n times as long.

    Attributes:
        now: when the operation that comes next begins.
        free: when the last transfer that was started ends.
        pending: a transfer -> when it ends and how long it takes.
        hidden: the cycles of transfers during which operations ran.
        exposed: the cycles during which operations waited.
    """

    now: float = 0.0
    free: float = 0.0
    pending: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    hidden: float = 0.0
    exposed: float = 0.0

    def run(self, cycles: float) -> None:
        """Adds an operation."""
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


class Exchange:
    """The collectives of a program, one after the other, each at the full speed of the busiest link.

    Attributes:
        timeline: of the device.
    """

    def __init__(self, links: Links, text: str) -> None:
        """Makes the exchange of a program that is given as text; `links` are those between its devices."""
        self.timeline = Timeline()
        self._links = links
        # The compiler spreads some collectives over several fusions, which share a chain -> those that are to come.
        self._steps = Counter(chain for each in hlo.read_instructions(text) if (chain := find_chain(each)))
        self._started: set[str] = set()

    def begin(self, executed: hlo.Instruction, fused: list[hlo.Instruction]) -> None:
        """Adds what an instruction waits for before it does anything else, and what it starts."""
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
        """Adds what an instruction waits for at its end: the collectives of which it is the last step."""
        for chain in (chain for each in (executed, *fused) if (chain := find_chain(each))):
            self._steps[chain] -= 1
            if not self._steps[chain]:
                self.timeline.wait(chain)
