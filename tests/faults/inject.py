"""Trains as `vit_jax.main`, with faults put into it: `python -m tests.faults.inject FAULT:WHEN,... <flags>`."""

from vit_jax import cli, main, program  # isort: skip  # first, as in vit_jax.main: a process counts its seconds from here

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import cache_key

from vit_jax.checkpoint import manager
from vit_jax.data import loader, pipeline
from vit_jax.distributed import lost_or_stuck_hosts
from vit_jax.evals import evaluators

FOR_EVER = 3600


def stuck_loader(when: str) -> None:
    """The loader of training gives `when` batches, and no more."""
    make = pipeline.train_batches

    class Stuck(loader.LocalBatches):
        given = 0

        def __next__(self) -> Any:
            self.given += 1
            if self.given > int(when):
                time.sleep(FOR_EVER)
            return super().__next__()

    def stuck(*args: Any, **options: Any) -> Any:
        batches = make(*args, **options)
        batches.local.__class__ = Stuck
        return batches

    pipeline.train_batches = stuck


def slow_restore(when: str) -> None:
    """Restoring takes for ever."""
    manager.Checkpoints.restore = lambda *args: time.sleep(FOR_EVER)  # type: ignore[method-assign,assignment]


def nan(when: str) -> None:
    """The images of steps FIRST-LAST are not numbers."""
    first, last = map(int, when.split("-"))

    def poison(step: int, batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {"image": batch["image"] * jnp.nan} if first <= step <= last else batch

    _before_steps(poison)


def slow_steps(seconds: str) -> None:
    """Every step takes some seconds more, so that a run is disturbed where it should be, on any machine."""

    def wait(step: int, batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(float(seconds))
        return batch

    _before_steps(wait)


def slow_evaluation(seconds: str) -> None:
    """Every batch of an evaluation takes some seconds more."""
    measure = evaluators.TaskSums.measure

    def slowly(self: Any, evaluation: Any, weights: Any, tick: Callable[[], None], cache: Any) -> dict[str, float]:
        return measure(self, evaluation, weights, lambda: (time.sleep(float(seconds)), tick())[0], cache)

    evaluators.TaskSums.measure = slowly  # type: ignore[method-assign]


def large_evaluation(when: str) -> None:
    """The devices have no memory for an evaluation."""

    def fail(*args: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17 bytes.")

    evaluators.TaskSums.measure = fail  # type: ignore[method-assign]


def many_hosts(count: str) -> None:
    """The hosts exchange messages as seldom as so many would."""
    lost_or_stuck_hosts.HOSTS_AT_FULL_RATE = (
        int(os.environ["JAX_NUM_PROCESSES"]) * lost_or_stuck_hosts.HOSTS_AT_FULL_RATE / int(count)
    )  # type: ignore[assignment]


def lost_after(seconds: str) -> None:
    """A host counts as lost after some seconds of silence, instead of a minute."""
    lost_or_stuck_hosts.LOST_AFTER_SECONDS = float(seconds)


def _before_steps(change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> None:
    make = program.make_program

    def changed(*args: Any) -> Any:
        made = make(*args)

        def train_step(state: Any, batch: Any, *teacher_params: Any) -> Any:
            return made.train_step(state, change(int(state.step) + 1, batch), *teacher_params)

        return dataclasses.replace(made, train_step=train_step)

    program.make_program = changed


KNOWN = (stuck_loader, slow_restore, nan, slow_steps, slow_evaluation, large_evaluation, many_hosts, lost_after)
FAULTS = {fault.__name__: fault for fault in KNOWN}


def share_compiled_programs() -> None:
    """All hosts read the compiled programs that host 0 has kept, as on a pod.

    JAX describes CPUs differently in each process, so that the others would compile everything again in every run.
    """
    cache_key._hash_accelerator_config = cache_key._hash_devices


if __name__ == "__main__":
    share_compiled_programs()
    for word in sys.argv.pop(1).split(","):
        name, _, when = word.partition(":")
        FAULTS[name](when)
    cli.run_command(main.main)
