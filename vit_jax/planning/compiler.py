"""Compiles what a run would run, and tells what the compiler says of it: a process of its own, since libtpu may end it.

It is given a request in JSON and answers with lines of JSON: what it compiles, then what came of it. What was compiled
once is remembered by the program itself, in the cache's folder `plans`.
"""

import hashlib
import importlib.util
import json
import math
import os
import re
import time
from importlib import metadata
from typing import Any

import jax
from jax.experimental import topologies

from vit_jax import UserError, cache, cli, data, settings, sharding, tree
from vit_jax.main import parse
from vit_jax.planning import chips, collectives, flops, hlo
from vit_jax.program import Program, make_program

FORM = 4  # of what is remembered; another number forgets it all
# What the TPUs' compiler says that a program needs: in all, or besides its arguments.
ALL = re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm")
BESIDES = re.compile(r"memory required for HLO temporaries \(([\d.]+)([KMGT]?)\)")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
KERNEL = 'custom_call_target="tpu_custom_call"'  # of Pallas


def main(argv: list[str]) -> None:
    """Answers the request, `{"words": flags of vit_jax.main, "target": ..., "inference": ...}`."""
    request = json.loads(argv[1])
    config, _ = parse(["plan", *request["words"]])
    settings.check(config)
    config = settings.resolve(config)
    devices = find_devices(request["target"], config.mesh.slice)
    program = make_program(config, sharding.make_mesh(config, devices), data.spec(config))
    facts = describe(config, program) | {"memory_bytes": memory(request["target"], devices)}
    print(json.dumps(facts), flush=True)
    facts |= compiled(program, request["target"], request["inference"])
    if facts["fits"] and facts["peak_bytes"] > facts["memory_bytes"]:  # compilers for what is here do not look
        facts |= {"fits": False, "needed_bytes": facts["peak_bytes"]}
    print(json.dumps(facts), flush=True)


def find_devices(target: str, slices: int) -> list[jax.Device]:
    """Returns the devices of a TPU slice that need not be here, `v5e:2x4`, or those that are, `cpu` or `gpu`.

    Raises:
        UserError: there is no such slice, or no libtpu.
    """
    if ":" not in target:
        return jax.devices()
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("compiling for TPUs wants libtpu (x86-64 Linux): pip install -e '.[plan]'.")
    found = chips.parse(target)
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if found.kind == "v4":
        options["chip_config_name"] = "megacore"  # the two cores of a chip as one device, as on real hosts
    if found.chips < found.chip.chips_per_host:
        options["chips_per_host_bounds"] = [*found.shape, 1, 1][:3]
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=target, **options)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"libtpu knows no slice {target}: {str(error).splitlines()[0]}") from None
    return list(topology.devices)


def memory(target: str, devices: list[jax.Device]) -> int:
    """Returns the bytes that one of the devices has for a program."""
    if ":" in target:
        return chips.parse(target).chip.hbm
    if target == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    return (devices[0].memory_stats() or {})["bytes_limit"]


def describe(config: Any, program: Program) -> dict[str, Any]:
    """Returns what is known before anything is compiled; bytes and images are those of one device."""
    state, places = program.state, program.state_shardings
    params = _bytes(state.params, places.params)
    return {
        "model": program.model.name,
        "mesh": dict(program.mesh.shape),
        "devices": program.mesh.devices.size,
        "device_kind": program.mesh.devices.flat[0].device_kind,
        "batch": config.batch,
        "images_per_device": program.batch_sharding.shard_shape((config.batch,))[0],
        "accum_steps": config.accum_steps,
        "remat": program.model.spec.remat,
        "dtype": program.model.spec.dtype,
        "steps": config.total_steps,
        "epochs": config.total_steps * config.batch / config.data.num_examples,
        "num_examples": config.data.num_examples,
        "parameters": tree.count(state.params),
        "parameter_bytes": params,
        "state_bytes": _bytes(state, places),
        "macs_per_image": flops.of_image(program.model),
    }


def _bytes(shapes: Any, places: Any) -> int:
    sizes = jax.tree.map(
        lambda leaf, place: math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize, shapes, places
    )
    return sum(jax.tree.leaves(sizes))


def compiled(program: Program, target: str, inference: bool) -> dict[str, Any]:
    """Returns what the compiler tells of the train step, or of a prediction: of one device and one step."""
    if inference:
        function, arguments = program.predict, (program.state.params, program.batch["image"])
        places = program.state_shardings.params
    else:
        function, arguments = program.train_step, (program.state, program.batch)
        places = program.state_shardings
    lowered = function.lower(*arguments)
    versions = {name: _version(name) for name in ("jax", "jaxlib", "libtpu")}
    flags = [os.environ.get(name, "") for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS")]
    mesh = [program.mesh.devices.shape, [device.id for device in program.mesh.devices.flat]]
    asked = json.dumps([FORM, target, versions, flags, mesh, lowered.as_text()])
    path = cache.root() / "plans" / f"{hashlib.sha256(asked.encode()).hexdigest()}.json"
    if path.exists():
        return json.loads(path.read_text()) | {"remembered": True}
    began = time.monotonic()
    try:
        facts = read(lowered.compile(), target)
    except jax.errors.JaxRuntimeError as error:
        facts = refusal(str(error), _bytes(arguments[0], places))
    facts |= {"compile_seconds": round(time.monotonic() - began, 1), "versions": versions}
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(facts))
    partial.replace(path)
    return facts | {"remembered": False}


def read(executable: jax.stages.Compiled, target: str) -> dict[str, Any]:
    """Returns what stands in a compiled program; `kernels`: those of which a TPU's compiler estimates no cycles."""
    memory, text = executable.memory_analysis(), executable.as_text()
    costs = executable.cost_analysis() or {}
    executed = [each for each in hlo.read(text) if not each.fused]
    cycles = sum(each.cycles * each.times for each in executed if each.cycles)
    loops = any(each.operation == "while" for each in executed)
    peak = memory.peak_memory_in_bytes
    if ":" not in target:  # there it leaves out what a step needs besides its arguments
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        peak = memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes
    exchanged: dict[str, dict[str, int]] = {}
    for exchange in collectives.read(text):
        row = exchanged.setdefault(exchange.kind, {"count": 0, "bytes": 0})
        row["count"] += exchange.times
        row["bytes"] += exchange.bytes * exchange.times
    return {
        "fits": True,
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "peak_bytes": peak,
        "flops": None if loops else costs.get("flops"),  # of a loop it counts one turn
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


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    cli.run(main)
