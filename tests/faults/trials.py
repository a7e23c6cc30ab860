"""What a trial of a fault checks: a run that came to its end, and that it equals another."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.faults.hosts import Hosts, metrics

Outcome = tuple[int, str]  # times tried, what happened


class Broken(Exception):
    """A promise was not kept."""


def check(kept: bool, otherwise: str) -> None:
    """Raises Broken with what happened otherwise."""
    if not kept:
        raise Broken(otherwise)


def finish(
    workdir: Path, hosts: int, devices: int, *words: str, variables: Callable[[int], dict[str, str]] = lambda host: {}
) -> None:
    """Runs to the end, at full speed; takes what `Hosts` does."""
    with Hosts(workdir, hosts, devices, *words, slow=0, variables=variables) as run:
        codes = run.wait(300)
        check(codes == [0] * hosts, f"exit codes {codes}: {run.output()[-2000:]}")


def same(one: Path, other: Path) -> bool:
    """Returns whether two runs left the same metrics and weights, bit by bit."""
    first, second = np.load(one / "model.npz"), np.load(other / "model.npz")
    weights = set(first) == set(second) and all(np.array_equal(first[name], second[name]) for name in first)
    return weights and metrics(one) == metrics(other)


def distance(one: Path, other: Path, start: int, steps: int = 10) -> float:
    """Returns the largest relative difference of the losses of the steps after `start`."""
    first, second = (
        {row["step"]: row["train/loss"] for row in metrics(workdir) if "train/loss" in row} for workdir in (one, other)
    )
    return max(abs(first[step] / second[step] - 1) for step in range(start + 1, start + 1 + steps))
