"""What a compiler tells: of a program that it compiled, or of one for which it found no memory."""

import re
from typing import Any

import jax

from vit_jax import UserError
from vit_jax.planning import chips, collectives, hlo, link_traffic

KERNEL = 'custom_call_target="tpu_custom_call"'  # of Pallas

# What the TPUs' compiler says that a program needs: in all, or besides its arguments.
ALL = re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm")
BESIDES = re.compile(r"memory required for HLO temporaries \(([\d.]+)([KMGT]?)\)")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def read(executable: jax.stages.Compiled, target: str, devices: list[jax.Device]) -> dict[str, Any]:
    """Returns what stands in a compiled program.

    `kernels` are those of which a TPU's compiler estimates no cycles; `link_bytes`, what the busiest link between chips
    carries for the exchanges of a kind, one after the other.

    Args:
        executable: the program.
        target: see `topology.devices`.
        devices: in the order of the mesh.
    """
    memory, text = executable.memory_analysis(), executable.as_text()
    costs = executable.cost_analysis() or {}
    executed = [each for each in hlo.read(text) if not each.fused]
    cycles = sum(each.cycles * each.times for each in executed if each.cycles)
    loops = any(each.operation == "while" for each in executed)
    peak = memory.peak_memory_in_bytes
    if ":" not in target:  # there it leaves out what a step needs besides its arguments
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        peak = memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes
    tpu = chips.parse_topology(target) if ":" in target else None
    places = [(getattr(chip, "slice_index", 0), *chip.coords[: len(tpu.shape)]) for chip in devices] if tpu else []
    exchanged: dict[str, dict[str, float]] = {}
    for each in collectives.read(text):
        row = exchanged.setdefault(each.kind, {"count": 0, "bytes": 0, "link_bytes": 0.0})
        row["count"] += each.times
        row["bytes"] += each.bytes * each.times
        if tpu and not each.kind.endswith(collectives.BETWEEN):
            over = link_traffic.link_bytes(each.kind, each.bytes, each.groups, places, tpu.ring, tpu.shape)
            row["link_bytes"] += over * each.times
    return {
        "fits": True,
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "peak_bytes": peak,
        "compiler_flops": None if loops else costs.get("flops"),  # of a loop it counts one turn
        "collectives": exchanged,
        "cycles": cycles or None,
        "kernels": sum(each.times for each in executed if KERNEL in each.line),
    }


def refusal(text: str, arguments: int) -> dict[str, Any]:
    """Returns what a compiler says that did not find the memory that a program needs; bytes of one device.

    Raises:
        UserError: it says something else.
    """
    found = ALL.search(text) or BESIDES.search(text)
    if "RESOURCE_EXHAUSTED" not in text or found is None:
        raise UserError(f"the compiler refuses the program: {text.splitlines()[0]}")
    needed = int(float(found[1]) * UNITS[found[2]])
    return {"fits": False, "needed_bytes": needed if found.re is ALL else needed + arguments}
