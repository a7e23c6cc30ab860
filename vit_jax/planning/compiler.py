"""Asks the compiler about one function of a program, reads its report, and keeps it in the folder `plans` of the cache.

A function for which a device has too little memory has a report, too: the memory that it needs.
"""

import dataclasses
import json
import math
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh

from vit_jax import UserError
from vit_jax.kernels import Options
from vit_jax.macs import jaxpr_macs
from vit_jax.planning import chips, collectives, hlo, records, schedules
from vit_jax.planning.chips import is_topology
from vit_jax.planning.records import Exchange, Executable, StepReport
from vit_jax.storage import memo, versions
from vit_jax.tree import ArrayTree

# What is asked about a function: "memory" is the memory that it needs. "estimate" adds the compiler's estimate of its
# cycles, and "schedule" adds the schedule of every operation to both.
CompileDetail = Literal["memory", "estimate", "schedule"]
PACKAGES = ("jax", "jaxlib", "libtpu")  # whose versions a report states

# How the TPUs' compiler states the memory that a program needs: in all, or beside its arguments.
TOTAL_MEMORY = re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm")
TEMPORARY_MEMORY = re.compile(r"memory required for HLO temporaries \(([\d.]+)([KMGT]?)\)")
SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


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
        target: see `records.PlanRequest`.
        measure: what is asked about it.

    Raises:
        UserError: the compiler refuses the function for another reason than its size.
    """
    traced = function.jitted.trace(*function.arguments)
    lowered = traced.lower()
    macs = jaxpr_macs(traced.jaxpr.jaxpr) / mesh.devices.size
    key = _memo_key(mesh, target, measure, function.options, lowered.as_text())
    if known := memo.recall("plans", key, partial(records.remembered_step, flops=2 * macs)):
        return known
    began = time.monotonic()
    executable, needed_bytes = None, None
    try:
        executable = _compile(lowered, target, list(mesh.devices.flat), measure)
    except jax.errors.JaxRuntimeError as error:
        needed_bytes = read_refusal(str(error), device_bytes(function.arguments[0], function.shardings))
    step = StepReport(
        executable=executable,
        needed_bytes=needed_bytes,
        flops=2 * macs,
        compile_seconds=round(time.monotonic() - began, 1),
        versions=dict.fromkeys(PACKAGES) | versions.library_versions(PACKAGES),
        remembered=False,
    )
    memo.remember("plans", key, records.remember_step(step))
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
    executable = read_executable(program, target, devices, schedules.Dumps(folder) if folder else None)
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


def read_executable(
    executable: jax.stages.Compiled, target: str, devices: list[jax.Device], dumps: schedules.Dumps | None = None
) -> Executable:
    """Returns what a compiled program contains.

    `kernel_cycles` and `schedule` of the result are None unless `dumps` is given and the target is a TPU slice.

    Args:
        executable: the compiled program.
        target: see `records.PlanRequest`.
        devices: the devices of the program, in the order of the mesh.
        dumps: the schedules of the program's operations.
    """
    memory, text = executable.memory_analysis(), executable.as_text()
    costs = executable.cost_analysis() or {}
    executed = [each for each in hlo.read_instructions(text) if not each.fused]
    cycles = sum(each.cycles * each.times for each in executed if each.cycles)
    loops = any(each.operation == "while" for each in executed)
    tpu = chips.parse_topology(target) if chips.is_topology(target) else None
    links = collectives.find_links(tpu, devices) if tpu else None
    schedule = schedules.read_step_schedule(text, dumps, links) if dumps and links else None
    return Executable(
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        peak_bytes=peak_bytes(memory, is_tpu=tpu is not None),
        compiler_flops=None if loops else costs.get("flops"),
        collectives=sum_exchanges(collectives.read_collectives(text), links),
        cycles=cycles or None,
        kernels=sum(each.times for each in executed if each.is_kernel),
        kernel_cycles=schedule.kinds.get("kernel") if schedule else None,
        schedule=schedule,
    )


def peak_bytes(memory: Any, is_tpu: bool) -> int:
    """Returns the most bytes that a program needs on a device at once, its arguments included.

    Args:
        memory: the program's `memory_analysis()`.
        is_tpu: whether the program was compiled for a TPU.
    """
    if is_tpu:
        return memory.peak_memory_in_bytes
    # The peak that other compilers state leaves out what a step needs beside its arguments.
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes


def sum_exchanges(
    program_collectives: list[collectives.Collective], links: collectives.Links | None
) -> dict[str, Exchange]:
    """Returns kind of collective -> the sum of all collectives of this kind; `link_bytes` is 0 without links."""
    result: dict[str, Exchange] = {}
    for each in program_collectives:
        link_bytes = links.carried_bytes(each) if links else 0.0
        before = result.get(each.kind, Exchange(0, 0, 0.0))
        result[each.kind] = Exchange(
            before.count + each.times,
            before.bytes + each.bytes * each.times,
            before.link_bytes + link_bytes * each.times,
        )
    return result


def read_refusal(text: str, argument_bytes: int) -> int:
    """Returns the bytes that a program needs on a device, from the compiler's error that the device has fewer.

    Args:
        text: the text of the error.
        argument_bytes: the bytes of the program's arguments on one device. They are added if the error states only the
            bytes of intermediate results.

    Raises:
        UserError: the error is another one, or states no bytes.
    """
    match = TOTAL_MEMORY.search(text) or TEMPORARY_MEMORY.search(text)
    if "RESOURCE_EXHAUSTED" not in text or match is None:
        raise UserError(f"the compiler rejected the program: {text.splitlines()[0]}")
    needed = int(float(match[1]) * SIZE_UNITS[match[2]])
    return needed if match.re is TOTAL_MEMORY else needed + argument_bytes
