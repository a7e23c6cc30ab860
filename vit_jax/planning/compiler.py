"""Asks the compiler about one function of a program, and keeps its report in the folder `plans` of the cache."""

import dataclasses
import json
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh

from vit_jax.kernels import Options
from vit_jax.macs import jaxpr_macs
from vit_jax.planning import compiler_report, schedules, serialization
from vit_jax.planning.chips import is_topology
from vit_jax.planning.compile_records import Executable, StepReport
from vit_jax.storage import memo, versions
from vit_jax.tree import ArrayTree

# What is asked about a function: "memory" is the memory that it needs. "estimate" adds the compiler's estimate of its
# cycles, and "schedule" adds the schedule of every operation to both.
CompileDetail = Literal["memory", "estimate", "schedule"]
PACKAGES = ("jax", "jaxlib", "libtpu")  # whose versions a report states


class Function(NamedTuple):
    """A jitted function of a program.

    Attributes:
        jitted: the function.
        arguments: trees of the shapes and dtypes of its arguments.
        shardings: the shardings of its first argument.
        options: the compiler options with which it was jitted.
    """

    jitted: Any
    arguments: tuple[ArrayTree, ...]
    shardings: ArrayTree
    options: Options


def compile_function(function: Function, mesh: Mesh, target: str, measure: CompileDetail = "estimate") -> StepReport:
    """Returns the compiler's report of a function, from the cache if it is there.

    Args:
        function: the function to compile.
        mesh: the mesh of its devices.
        target: see `compile_records.PlanRequest`.
        measure: what is asked about it.

    Raises:
        UserError: the compiler refuses the function for another reason than its size.
    """
    traced = function.jitted.trace(*function.arguments)
    lowered = traced.lower()
    macs = jaxpr_macs(traced.jaxpr.jaxpr) / mesh.devices.size
    key = _memo_key(mesh, target, measure, function.options, lowered.as_text())
    if known := memo.recall("plans", key, partial(serialization.remembered_step, flops=2 * macs)):
        return known
    began = time.monotonic()
    executable, needed_bytes = None, None
    try:
        executable = _compile(lowered, target, list(mesh.devices.flat), measure)
    except jax.errors.JaxRuntimeError as error:
        needed_bytes = compiler_report.read_refusal(str(error), device_bytes(function.arguments[0], function.shardings))
    step = StepReport(
        executable=executable,
        needed_bytes=needed_bytes,
        flops=2 * macs,
        compile_seconds=round(time.monotonic() - began, 1),
        versions=dict.fromkeys(PACKAGES) | versions.library_versions(PACKAGES),
        remembered=False,
    )
    memo.remember("plans", key, serialization.remember_step(step))
    return step


def _compile(
    lowered: jax.stages.Lowered,
    target: str,
    devices: list[jax.Device],
    measure: CompileDetail,
) -> Executable:
    """Compiles a function, and returns what the compiled program contains."""
    folder = schedules.dump_folder() if measure == "schedule" else None
    if folder:
        schedules.delete_dumps(folder)
    program = lowered.compile()
    executable = compiler_report.read_executable(program, target, devices, schedules.Dumps(folder) if folder else None)
    if measure == "estimate" and executable.kernels and is_topology(target):
        cycles = schedules.sum_kernel_cycles(program.as_text(), target)
        executable = dataclasses.replace(executable, kernel_cycles=cycles)
    return executable


def _memo_key(mesh: Mesh, target: str, measure: CompileDetail, options: Options, text: str) -> str:
    flags = [schedules.other_flags(), os.environ.get("XLA_FLAGS", "")]
    devices = mesh.devices
    places = [devices.shape, [device.id for device in devices.flat]]
    place = target if is_topology(target) else f"{target} {devices.flat[0].device_kind}"
    code = versions.library_versions(versions.COMPILERS), versions.source_digest(Path(__file__).parent)
    return json.dumps([code, place, measure, flags, options, places, text])


def device_bytes(shapes: ArrayTree, shardings: ArrayTree) -> int:
    """Returns how many bytes of a tree of sharded arrays each device holds."""
    sizes = jax.tree.map(
        lambda leaf, place: math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize, shapes, shardings
    )
    return sum(jax.tree.leaves(sizes))
