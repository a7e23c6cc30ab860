"""Makes a plan: compiles a program, estimates what it takes, and searches what to change if it does not fit.

A plan ends with the command that runs what was planned.
"""

import dataclasses
import re
import shlex
from collections.abc import Callable
from pathlib import PurePath

from vit_jax.data import sources
from vit_jax.planning.chips import is_topology
from vit_jax.planning.goodput import ASSUMED_FAULTS, Faults
from vit_jax.planning.records import Advice, Compilation, ConfigChange, LargestBatch, Plan, PlanRequest, Workload
from vit_jax.planning.search import find_fitting_change, find_largest_batch
from vit_jax.planning.time_estimate import estimate_interruptions, estimate_schedule, estimate_step

TFDS_SOURCE = re.compile(r"\b(tfds|vtab):")  # also as a part of a mixture


def make_plan(
    request: PlanRequest,
    compile: Callable[[PlanRequest], Compilation],
    largest_batch: bool = False,
    chip_hour_price: float | None = None,
    faults: Faults = ASSUMED_FAULTS,
) -> Plan:
    """Compiles a request, and returns the plan: memory and cost, what to change if it does not fit in memory, and the
    training command for it.

    Args:
        request: what to compile.
        compile: compiles a request.
        largest_batch: whether to search the largest batch that fits, instead of a change that makes the request fit.
        chip_hour_price: the price of a chip-hour, in any currency; None: the plan has no price.
        faults: what is assumed of failures.

    Raises:
        UserError: the flags are wrong, or nothing compiles for the target.
    """

    def compile_changed(change: ConfigChange) -> Compilation:
        return compile(request.with_change(change))

    first = compile(request)
    change: ConfigChange | None = {} if first.fits else None  # to a program that fits
    advice, largest = None, None
    if largest_batch:
        best, refused = find_largest_batch(first, compile_changed)
        largest = LargestBatch(_estimated(best, chip_hour_price, faults) if best else None, refused)
        change = {"batch": str(best.workload.batch)} if best else None
    elif not first.fits:
        fitting = find_fitting_change(first, compile_changed)
        advice = Advice(fitting[0], _estimated(fitting[1], chip_hour_price, faults)) if fitting else Advice({}, None)
        change = fitting[0] if fitting else None
    command = None
    if change is not None and not request.inference:
        command = training_command(request.with_change(change), first.workload)
    plan = _estimated(first, chip_hour_price, faults)
    return dataclasses.replace(plan, advice=advice, largest=largest, command=command)


def _estimated(compilation: Compilation, chip_hour_price: float | None, faults: Faults) -> Plan:
    estimate = estimate_step(compilation)
    run = estimate.run if estimate else None
    price = run.chip_hours * chip_hour_price if run and chip_hour_price is not None else None
    goodput = estimate_interruptions(compilation.workload, estimate, faults) if estimate and run else None
    return Plan(compilation, estimate, price, by_schedule=estimate_schedule(compilation), goodput=goodput)


def training_command(request: PlanRequest, workload: Workload) -> str:
    """Returns the shell command that trains as planned.

    The command for a TPU slice is that of the launcher for Cloud TPU, or for Compute Engine if Cloud TPU does not have
    the chip. It has flags that place data which cloud machines
    cannot reach, and a workdir that they would lose, in a bucket. Its words in capitals (BUCKET, DATA, ZONE) are for
    the user to replace. Any other command trains on this machine.
    """
    given = dict(word.partition("=")[::2] for word in request.words)
    command = ["python", "-m", "vit_jax.main", *request.words]
    if not is_topology(request.target):
        variables = ["JAX_PLATFORMS=cpu", f"XLA_FLAGS={request.emulation_flag}"] if request.target == "cpu" else []
        return shlex.join([*variables, *command])
    recipe = PurePath(given["--config"].partition(":")[0]).stem
    source = sources.change_paths(workload.source, _path_in_bucket, str)
    if source != workload.source:
        command.append(f"--config.data.source={source}")
    if TFDS_SOURCE.search(source) and "://" not in (workload.data_dir or ""):
        command.append("--config.data.data_dir=gs://BUCKET/tensorflow_datasets")
    if "--workdir" not in given:
        command.append(f"--workdir=gs://BUCKET/{recipe}")
    slices = workload.mesh["slice"]
    run_name = re.sub(r"[^a-z0-9]+", "-", recipe.lower()).strip("-")[:40]
    options = [f"--topology={request.target}", *([f"--slices={slices}"] if slices > 1 else []), "--zone=ZONE"]
    launcher = "launch.compute_engine" if request.target.startswith("tpu7x:") else "launch.tpu_vm"
    return shlex.join(["python", "-m", launcher, "run", run_name, *options, "--", *command])


def _path_in_bucket(path: str) -> str:
    return path if "://" in path else "gs://BUCKET/DATA"
