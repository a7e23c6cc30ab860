"""The cycles of the Pallas kernels of a compiled program, which the compiler does not estimate.

A kernel's schedule is found by compiling it alone, for one device, in a process in which libtpu writes schedules. That
process is given the kernels in JSON on stdin, and answers on stdout with the cycles of each kernel, or null if unknown.
The cycles are kept in the cache.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from vit_jax import cli
from vit_jax.planning import chips, hlo, targets
from vit_jax.planning.schedules import dumps
from vit_jax.storage import memo, versions

OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?)\}, \w+=")
ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
ARRAY = re.compile(r"\b(pred(?=\[)|[a-z]+(?=\d))(\d*)\[([\d,]*)\]")
DTYPES = {"pred": "bool", "bf": "bfloat", "f": "float", "s": "int", "u": "uint"}

# The options with which a kernel is compiled alone. Its operands stay in HBM on every kind of chip, since without its
# program they would often lie in a faster memory. The limit of VMEM is high: the kernel fitted the memory that its
# program left it, and the limit does not change its schedule.
STANDALONE_KERNEL_ENVIRONMENT = {
    "xla_vf_vmem_memory_space_assignment": False,
    "xla_gf_vmem_memory_space_assignment": False,
    "xla_tpu_cmem_memory_space_assignment": False,
    "xla_tpu_scoped_vmem_limit_kib": str(256 * 1024),
}

Array = tuple[str, tuple[int, ...]]  # (numpy's name of the dtype, shape)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, with all that its schedule depends on.

    Attributes:
        config: the configuration of the call in JSON, which contains the kernel's program.
        operands: dtype and shape of each operand.
        results: dtype and shape of each result.
        aliases: the pairs (index of an operand, index of a result) that share their memory.
    """

    config: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    aliases: tuple[tuple[int, int], ...]


def parse_kernel(instruction: hlo.Instruction) -> Kernel:
    """Returns the kernel that an instruction executes."""
    line = instruction.line
    config, _ = json.JSONDecoder().raw_decode(line, line.index("backend_config=") + len("backend_config="))
    operands = OPERANDS.search(line)
    aliasing = line.partition("output_operand_aliasing={")[2].partition("}, custom_call_target")[0]
    return Kernel(
        config=json.dumps({"custom_call_config": config["custom_call_config"]}, sort_keys=True),
        operands=_parse_arrays(operands[1] if operands else ""),
        results=_parse_arrays(instruction.shape),
        aliases=tuple((int(operand), int(result or 0)) for result, operand in ALIAS.findall(aliasing)),
    )


def _parse_arrays(text: str) -> tuple[Array, ...]:
    return tuple(
        (DTYPES[letters] + bits, tuple(int(size) for size in sizes.split(",") if size))
        for letters, bits, sizes in ARRAY.findall(text)
    )


def sum_kernel_cycles(text: str, target: str) -> int | None:
    """Returns the cycles of all Pallas kernels of a program.

    The cycles of a kernel are those of its schedule when it is compiled alone.

    Args:
        text: the text of the compiled program.
        target: the TPU slice for which the program was compiled.

    Returns:
        The sum over all executions, or None if there are no kernels or the cycles of one are unknown.
    """
    times: dict[Kernel, int] = {}
    for each in hlo.read_instructions(text):
        if each.is_kernel and not each.fused:
            kernel = parse_kernel(each)
            times[kernel] = times.get(kernel, 0) + each.times
    keys = {kernel: _memo_key(kernel, target) for kernel in times}
    cycles_by_kernel = {kernel: memo.recall("kernels", key, int) for kernel, key in keys.items()}
    unknown = [kernel for kernel, cycles in cycles_by_kernel.items() if cycles is None]
    for kernel, cycles in zip(unknown, _compile(unknown, target), strict=True):
        cycles_by_kernel[kernel] = cycles
        if cycles is not None:
            memo.remember("kernels", keys[kernel], str(cycles))
    known = [cycles * times[kernel] for kernel, cycles in cycles_by_kernel.items() if cycles is not None]
    return sum(known) if times and len(known) == len(times) else None


def _compile(unknown: list[Kernel], target: str) -> list[int | None]:
    """Returns the cycles of kernels; None for one that cannot be compiled alone, or for all if the process fails."""
    if not unknown:
        return []
    with tempfile.TemporaryDirectory(prefix="vit_jax_schedules_") as folder:
        answer = subprocess.run(
            [sys.executable, "-m", "vit_jax.planning.schedules.kernel_cycles", target],
            input=json.dumps([dataclasses.asdict(kernel) for kernel in unknown]),
            env=os.environ | dumps.dump_environment(folder),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    return json.loads(answer.stdout) if answer.returncode == 0 else [None] * len(unknown)


def _memo_key(kernel: Kernel, target: str) -> str:
    code = versions.library_versions(versions.COMPILERS), versions.source_digest(Path(__file__).parents[1])
    return json.dumps([dataclasses.asdict(kernel), target.partition(":")[0], code, dumps.other_flags()])


def compile_kernel(kernel: Kernel, device: jax.Device) -> str:
    """Compiles a program that executes only this kernel, and returns its text."""
    operands, results = (
        [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=SingleDeviceSharding(device)) for dtype, shape in part]
        for part in (kernel.operands, kernel.results)
    )
    call = jax.ffi.ffi_call(
        "tpu_custom_call",
        [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in results],
        custom_call_api_version=1,
        legacy_backend_config=kernel.config,
        input_output_aliases=dict(kernel.aliases),
    )
    return jax.jit(call).lower(*operands).compile(STANDALONE_KERNEL_ENVIRONMENT).as_text()


def main(argv: list[str]) -> None:
    """Prints the cycles of each kernel given on stdin, on a chip of the slice that the first argument names."""
    target, folder = argv[1], dumps.dump_folder()
    assert folder
    [device, *_] = targets.find_devices(target, 1)
    chip = chips.parse_topology(target).chip
    answers: list[int | None] = []
    for given in json.load(sys.stdin):
        dumps.delete_dumps(folder)
        operands, results = (
            tuple((dtype, tuple(shape)) for dtype, shape in given[part]) for part in ("operands", "results")
        )
        aliases = tuple((operand, result) for operand, result in given["aliases"])
        try:
            text = compile_kernel(Kernel(given["config"], operands, results, aliases), device)
        except jax.errors.JaxRuntimeError as error:
            print(f"a kernel does not compile alone: {error}", file=sys.stderr)
            answers.append(None)
            continue
        [name] = [each.name for each in hlo.read_instructions(text) if each.is_kernel]
        schedule = dumps.Dumps(folder).read(name)
        answers.append(schedule.cycles(chip) if schedule else None)
    print(json.dumps(answers))


if __name__ == "__main__":
    cli.run_command(main)
