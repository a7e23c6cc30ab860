"""What every measurement is given: the devices, the time that is left, the hosts, a clock."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.distributed import Coordinator

Value = TypeVar("Value")
Call: TypeAlias = Callable[[], Any]  # which may return before its arrays are ready
ROUNDS = 7  # of a measurement
ROUND_SECONDS = 0.03  # that a round should take: short calls are repeated in it
IN_FLIGHT = 16  # calls of a round at most: more programs with collectives at once block emulated devices


class Timing(NamedTuple):
    """Seconds of a call: the median, and the interquartile range."""

    median: float
    spread: float

    def of(self, parts: int) -> "Timing":
        """Returns what one of equal parts of the call takes."""
        return Timing(self.median / parts, self.spread / parts)

    def rate(self, amount: float) -> tuple[float, float]:
        """Returns the rate at which the call does so much, and its interquartile range."""
        rate = amount / self.median
        return rate, rate * self.spread / self.median


@dataclasses.dataclass
class Bench:
    """What is measured on, and how long that may take.

    Attributes:
        config: what all programs share: the fields of a run, with those of the command line.
        mesh: of the devices.
        coordinator: how the hosts agree; all of them measure, and host 0 decides what.
        models: names of those to measure.
        folder: to write to, which all hosts share; None: they share none.
        given: names of the fields that the command line sets.
        step_seconds: that a training step may take; it is measured with fewer images otherwise.
        product_flops: operations per second of a device's matrix products, once they are measured.
        deadline: of the section, on this host's clock.
        compiled: what is measured -> its program, and the seconds that the compiler took.
    """

    config: ConfigDict
    mesh: Mesh
    coordinator: Coordinator
    models: tuple[str, ...]
    folder: str | None
    given: frozenset[str] = frozenset()
    step_seconds: float = 4.0
    product_flops: float = 0.0
    deadline: float = 0.0
    compiled: dict[str, tuple[Any, float]] = dataclasses.field(default_factory=dict)

    @property
    def device(self) -> jax.Device:
        """The first device of this host."""
        return self.mesh.local_devices[0]

    @property
    def dtype(self) -> str:
        """The type of the activations that a run chooses here."""
        return "float32" if self.device.platform == "cpu" else "bfloat16"

    def agree(self, value: Value) -> Value:
        """Returns host 0's value; all hosts call this."""
        return self.coordinator.all_gather("what is measured next", value)[0]

    @property
    def left(self) -> float:
        """Returns the seconds that are left for the section, as host 0 counts them."""
        return self.agree(self.deadline - time.monotonic())

    def time(self, call: Call) -> Timing:
        """Returns what a call takes until its arrays are ready, once it is compiled; see `time_in_turns`."""
        return self.time_in_turns([call])[0]

    def time_in_turns(self, calls: Sequence[Call]) -> list[Timing]:
        """Returns the same of several calls, which take turns, so that what disturbs one disturbs all.

        Each has ROUNDS turns, three if the time is short; short calls are made several times in a turn.
        """
        for call in calls:
            jax.block_until_ready(call())  # compiles
        once = self.agree([seconds_of(call, 1) for call in calls])
        counts = [min(IN_FLIGHT, max(1, round(ROUND_SECONDS / seconds))) for seconds in once]
        turn = sum(count * seconds for count, seconds in zip(counts, once, strict=True))
        turns = [
            [seconds_of(call, count) / count for call, count in zip(calls, counts, strict=True)]
            for _ in range(ROUNDS if ROUNDS * turn < self.left else 3)
        ]
        return [summarize(list(seconds)) for seconds in zip(*turns, strict=True)]


def seconds_of(call: Call, calls: int) -> float:
    """Returns what some calls take, one after the other, until the arrays of the last are ready."""
    began = time.perf_counter()
    for _ in range(calls):
        result = call()
    jax.block_until_ready(result)
    return time.perf_counter() - began


def summarize(seconds: list[float]) -> Timing:
    """Returns the median of some seconds and their interquartile range."""
    if len(seconds) < 2:
        return Timing(seconds[0], 0.0)
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(middle, high - low)
