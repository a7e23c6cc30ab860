"""Compiles what a run would run, and tells what the compiler says of it: a process of its own, since libtpu may end it.

It is given a request in JSON and answers with lines of JSON: what it compiles, a line for each function, then what came
of it. What was compiled
once is remembered by the program itself, in the cache's folder `plans`.
"""

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import jax

from vit_jax import cli
from vit_jax.main import parse
from vit_jax.planning import compiled, flops
from vit_jax.planning import target as topology
from vit_jax.program import Program, program_without_data
from vit_jax.storage import cache

FORM = 5  # of what is remembered; another number forgets it all


def main(argv: list[str]) -> None:
    """Answers the request."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what recipes and libraries print is no answer
        for facts in answer(**json.loads(argv[1])):
            print(json.dumps(facts), file=answers, flush=True)


def answer(words: list[str], target: str, inference: bool) -> Iterator[dict[str, Any]]:
    """Yields what is known of a program before each of its functions is compiled (`compiling`), and then all.

    Args:
        words: flags of `vit_jax.main`.
        target: see `topology.devices`.
        inference: a prediction instead of a step of training.

    Raises:
        UserError: the flags are wrong, or the program is refused for another reason than its size.
    """
    config, _ = parse(["plan", *words])
    devices = topology.devices(target, config.mesh.slice)
    config, program = program_without_data(config, devices)
    facts: dict[str, Any] = {"target": target, "inference": inference}
    facts["memory_bytes"] = topology.memory(target, devices)
    facts |= describe(config, program, target)
    yield facts | {"compiling": "prediction" if inference else "train step"}
    state, places = program.state, program.state_shardings
    if inference:
        images = program.batch["image"]
        facts |= compile_facts(program, program.predict, (state.params, images), places.params, target)
    else:
        facts |= compile_facts(program, program.train_step, (state, program.batch), places, target)
        yield {"compiling": "evaluation step"}
        facts["evaluation"] = evaluation(program, target, facts["state_bytes"] - facts["parameter_bytes"])
    parts = [facts, facts["evaluation"]] if "evaluation" in facts else [facts]
    for part in parts:
        if part["fits"] and part["peak_bytes"] > facts["memory_bytes"]:  # compilers for what is here do not look
            part |= {"fits": False, "needed_bytes": part["peak_bytes"]}
    yield facts | {"fits": all(part["fits"] for part in parts)}


def evaluation(program: Program, target: str, kept: int) -> dict[str, Any]:
    """Returns what the compiler tells of the evaluation step: of one device, with what training keeps there besides.

    Args:
        program: that of the run.
        target: see `topology.devices`.
        kept: bytes of the training state that the step is not given.
    """
    batch = program.eval_batch
    found = compile_facts(
        program, program.eval_step, (program.state.params, batch), program.state_shardings.params, target
    )
    rows = batch["image"].shape[0]
    facts = {"batch": rows, "images_per_device": program.batch_sharding.shard_shape((rows,))[0]}
    facts |= {key: found[key] + kept for key in ("peak_bytes", "needed_bytes") if key in found}
    return facts | {key: found[key] for key in ("fits", "compile_seconds", "remembered")}


def describe(config: Any, program: Program, target: str) -> dict[str, Any]:
    """Returns what is known before anything is compiled; bytes and images are those of one device."""
    state, places = program.state, program.state_shardings
    params = _bytes(state.params, places.params)
    images = program.batch["image"]
    share = math.prod(program.batch_sharding.shard_shape(images.shape))
    return {
        "model": program.model.name,
        "mesh": dict(program.mesh.shape),
        "devices": program.mesh.devices.size,
        "device_kind": program.mesh.devices.flat[0].device_kind,
        "batch": config.batch,
        "images_per_device": program.batch_sharding.shard_shape((config.batch,))[0],
        "images_per_host": topology.images_per_host(target, program.batch_sharding, config.batch),
        # Beside what a step holds: the next batch, and three more as they were read (`data.loader.Ahead`).
        "waiting_bytes": share * (images.dtype.itemsize + 3),
        "source": config.data.source,
        "data_dir": config.data.data_dir,
        "fast": config.data.fast,
        "resolution": config.resolution,
        "accum_steps": config.accum_steps,
        "remat": program.model.spec.remat,
        "dtype": program.model.spec.dtype,
        "steps": config.total_steps,
        "epochs": config.total_steps * config.batch / config.data.num_examples,
        "num_examples": config.data.num_examples,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "parameter_bytes": params,
        "state_bytes": _bytes(state, places),
        "macs_per_image": flops.of_image(program.model),
    }


def _bytes(shapes: Any, places: Any) -> int:
    sizes = jax.tree.map(
        lambda leaf, place: math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize, shapes, places
    )
    return sum(jax.tree.leaves(sizes))


def compile_facts(
    program: Program, function: Any, arguments: tuple[Any, ...], places: Any, target: str
) -> dict[str, Any]:
    """Returns what the compiler tells of one of the program's jitted functions: of one device and one call.

    Args:
        program: that the function belongs to.
        function: jitted.
        arguments: shapes of what it takes.
        places: placement of the first of them.
        target: see `topology.devices`.
    """
    traced = function.trace(*arguments)
    lowered = traced.lower()
    counted = {"flops": 2 * flops.products(traced.jaxpr.jaxpr) / program.mesh.devices.size}
    versions = {name: _version(name) for name in ("jax", "jaxlib", "libtpu")}
    flags = [os.environ.get(name, "") for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS")]
    mesh = [program.mesh.devices.shape, [device.id for device in program.mesh.devices.flat]]
    place = target if ":" in target else f"{target} {program.mesh.devices.flat[0].device_kind}"
    asked = json.dumps([FORM, place, versions, flags, mesh, lowered.as_text()])
    path = cache.root() / "plans" / f"{hashlib.sha256(asked.encode()).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError):  # it was never compiled, or what is remembered is damaged
        return json.loads(path.read_text()) | counted | {"remembered": True}
    began = time.monotonic()
    try:
        facts = compiled.read(lowered.compile(), target, list(program.mesh.devices.flat))
    except jax.errors.JaxRuntimeError as error:
        facts = compiled.refusal(str(error), _bytes(arguments[0], places))
    facts |= {"compile_seconds": round(time.monotonic() - began, 1), "versions": versions}
    with contextlib.suppress(OSError):  # a full disk: then it is not remembered
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(facts))
        partial.replace(path)
    return facts | counted | {"remembered": False}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    cli.run(main)
