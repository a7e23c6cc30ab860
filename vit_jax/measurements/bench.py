"""The argument of every measurement: the devices, the time that is left for them, the hosts, a clock."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.distributed import Coordinator
from vit_jax.program import auto_dtype

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
        """Returns the time of one part of the call, which has `parts` equal parts."""
        return Timing(self.median / parts, self.spread / parts)

    def rate(self, amount: float) -> tuple[float, float]:
        """Returns `amount` per second if one call processes `amount`, and the interquartile range of this rate."""
        rate = amount / self.median
        return rate, rate * self.spread / self.median


@dataclasses.dataclass
class Bench:
    """The devices to measure, and how long the measurements may take.

    Attributes:
        config: the configuration that all programs share, with the fields that the command line sets.
        mesh: the mesh of the devices.
        coordinator: how the hosts agree. All of them measure, and host 0 decides what is measured.
        models: the names of the models to measure.
        folder: a folder that all hosts share and may write to; None: they share none.
        given: the names of the fields that the command line sets.
        step_seconds: the most seconds that a training step may take. A longer step is measured with fewer images.
        product_flops: operations per second of matrix products on one device; 0 until they are measured.
        deadline: the end of the section that is being measured, on this host's monotonic clock.
        compiled: text of a workload -> (its compiled step, the seconds that the compiler took).
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
        return auto_dtype(self.device)

    def agree(self, value: Value) -> Value:
        """Returns host 0's value; all hosts call this."""
        return self.coordinator.all_gather("what is measured next", value)[0]

    def agree_seconds_left(self) -> float:
        """Returns the seconds that are left for the section, as host 0 counts them; all hosts call this."""
        return self.agree(self.deadline - time.monotonic())

    def time(self, call: Call) -> Timing:
        """Returns the time of a call until its arrays are ready, without compilation; see `time_in_turns`."""
        return self.time_in_turns([call])[0]

    def time_in_turns(self, calls: Sequence[Call]) -> list[Timing]:
        """Returns the time of each of several calls until its arrays are ready, without compilation.

        The calls take turns, so that a disturbance slows down all of them. Each has `ROUNDS` turns, or three if the
        time is short. A short call is made several times in a turn.
        """
        for call in calls:
            jax.block_until_ready(call())  # compiles
        once = self.agree([seconds_of(call, 1) for call in calls])
        counts = [min(IN_FLIGHT, max(1, round(ROUND_SECONDS / seconds))) for seconds in once]
        turn = sum(count * seconds for count, seconds in zip(counts, once, strict=True))
        turns = [
            [seconds_of(call, count) / count for call, count in zip(calls, counts, strict=True)]
            for _ in range(ROUNDS if ROUNDS * turn < self.agree_seconds_left() else 3)
        ]
        return [summarize(list(seconds)) for seconds in zip(*turns, strict=True)]


def seconds_of(call: Call, calls: int) -> float:
    """Returns the seconds of `calls` calls in all, one after the other, until the arrays of the last are ready."""
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
