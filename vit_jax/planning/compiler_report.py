"""Reads what a compiler reports of a program that it compiled, or of one for which a device has too little memory."""

import re
from typing import Any

import jax

from vit_jax import UserError
from vit_jax.planning import chips, collectives, hlo, schedules
from vit_jax.planning.compile_records import Exchange, Executable

# How the TPUs' compiler states the memory that a program needs: in all, or beside its arguments.
TOTAL_MEMORY = re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm")
TEMPORARY_MEMORY = re.compile(r"memory required for HLO temporaries \(([\d.]+)([KMGT]?)\)")
SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def read_executable(
    executable: jax.stages.Compiled, target: str, devices: list[jax.Device], dumps: schedules.Dumps | None = None
) -> Executable:
    """Returns what a compiled program contains.

    `kernel_cycles` and `schedule` of the result are None unless `dumps` is given and the target is a TPU slice.

    Args:
        executable: the compiled program.
        target: see `compile_records.PlanRequest`.
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
