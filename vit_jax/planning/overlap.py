"""How much of the transfers that run beside the operations of a program is hidden behind them."""

import dataclasses


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
