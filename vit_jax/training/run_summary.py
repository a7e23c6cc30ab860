"""The summary that a run prints before it starts: versions, devices, data, sizes."""

import math
import platform

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import __version__, tree
from vit_jax.data import choose_workers
from vit_jax.execution import relative_kind
from vit_jax.kernels import find_tpu_kind
from vit_jax.machine import count_cores
from vit_jax.model import Model
from vit_jax.optim import Multiplier
from vit_jax.program import Program
from vit_jax.text_tables import align

NO_KERNEL = (
    "the kernel, which is faster, computes no relative positions if the class token has a place and registers have "
    "none; models with position_rows=all or patches can use it"
)
NO_PATTERN = "the kernel, which is faster for few patches, computes no attention_pattern"
NO_BIASES = "the kernel, which is faster, computes no relative_bias"
NO_CUDNN = "cuDNN's attention, which is faster, computes no relative positions"
NO_MEMORY = "the kernel, which is faster, needs more vector memory than a core of this chip has"


def banner_lines(config: ConfigDict, program: Program) -> list[str]:
    """Returns the lines that describe a run."""
    mesh, devices = program.mesh, program.mesh.devices.size
    first = mesh.devices.flat[0]
    used = {axis: size for axis, size in mesh.shape.items() if size > 1 or axis in ("data", "fsdp")}
    axes = " x ".join(f"{axis}={size}" for axis, size in used.items())
    rows = program.batch_sharding.shard_shape((config.batch,))[0]
    height, width, _ = program.batch["image"].shape[1:]
    model, kind, tensor = program.model, first.device_kind, mesh.shape["tensor"]
    sizes = ", ".join(f"{name} {value}" for name, value in model.spec.sizes.items())
    options = ",".join(f"{name}={value}" for name, value in program.compiler_options.items())
    passes = config.total_steps * config.batch / config.data.num_examples
    answers = "numbers" if config.task.kind == "regress" else "classes"
    classes = f"of {config.data.num_classes:,} {answers}" if config.data.num_classes else "without labels"
    count, trained = tree.count(program.state.params), count_trained(program)
    fewer = f" ({trained:,} of them trained)" if trained < count else ""
    cores = count_cores()
    workers = choose_workers(config.data.workers, cores)
    resized = ", ".join(f"{field} {now} instead of {named}" for field, (named, now) in model.resized.items())
    return [
        f"vit_jax {__version__}, jax {jax.__version__}, Python {platform.python_version()}",
        f"Devices: {devices} x {kind} on {jax.process_count()} host(s), mesh {axes}",
        f"Data: {config.data.source} {config.data.split}, {config.data.num_examples:,} images {classes}, "
        f"{height}x{width} pixels",
        *([f"Loader: {workers} worker processes on {cores} cores of this host"] if workers else []),
        "Evaluations: " + ", ".join(f"{name} on {config.evals[name].split}" for name in config.evals),
        f"Model: {model.name}, {sizes}, {count:,} parameters{fewer}, activations {model.field('dtype')}",
        *([f"Not of the size {model.name}, as the configuration sets {resized}"] if resized else []),
        *(
            [f"Attention: {model.field('attention')}; {reason}"]
            if (reason := lacks_kernel(model, first.platform) or lacks_memory(config, model, kind, rows, tensor))
            else []
        ),
        *(
            [f"Kernels: {', '.join(f'{field} {kind}' for field, kind in model.kernels.items())}"]
            if model.kernels
            else []
        ),
        f"Batch: {config.batch:,} images, {rows:,} per device, in {config.accum_steps} part(s)",
        f"Length: {config.total_steps:,} steps, {passes:.4g} epochs",
        *([f"Compiler options: {options}"] if options else []),
    ]


def count_trained(program: Program) -> int:
    """Returns the number of parameters that are trained: those in arrays and blocks that are not frozen."""
    trained = {name: np.ravel(rate) > 0 for name, rate in program.lr_multipliers.items()}
    shapes = tree.flatten(program.state.params)
    return sum(leaf.size * int(trained[name].sum()) // trained[name].size for name, leaf in shapes.items())


def lacks_kernel(model: Model, platform: str) -> str | None:
    """Returns why the model uses plain attention on a platform where other models use a kernel; None if it does not."""
    if platform in ("tpu", "gpu") and model.field("attention_pattern") not in (None, "full"):
        return NO_PATTERN
    if model.field("position") not in ("relative", "relative_bias"):
        return None
    if platform == "tpu":
        lacking = NO_BIASES if model.field("position") == "relative_bias" else NO_KERNEL
        return lacking if relative_kind(model.vit) is None else None
    return NO_CUDNN if platform == "gpu" else None


def lacks_memory(config: ConfigDict, model: Model, device_kind: str, images: int, tensor: int = 1) -> str | None:
    """Returns why `attention=auto` stands for plain attention on a TPU; None if it does not.

    Args:
        config: the configuration of the run.
        model: its model, for which the kernel can be used.
        device_kind: the kind of device, as JAX names it.
        images: the images of a step on the device.
        tensor: the number of devices over which the heads are split.
    """
    if config.model.attention != "auto" or find_tpu_kind(device_kind) is None:
        return None
    chosen = model.with_attention("auto").for_device(device_kind, images // config.accum_steps, tensor)
    return NO_MEMORY if chosen.field("attention") == "tokens_first" else None


def parameter_table(program: Program) -> list[str]:
    """Returns a line per array of parameters (name, shape, count, learning-rate multiplier, sharding), then a total."""
    shapes, places = tree.flatten(program.state.params), tree.flatten(program.state_shardings.params)
    rows = [
        (
            name,
            "x".join(map(str, leaf.shape)),
            f"{math.prod(leaf.shape):,}",
            _remarks(program.lr_multipliers[name], places[name]),
        )
        for name, leaf in shapes.items()
    ]
    count, trained = tree.count(shapes), count_trained(program)
    rows.append(("total", "", f"{count:,}", f"{trained:,} trained" if trained < count else ""))
    return align(rows, right=(1, 2))


def _remarks(lr_multiplier: Multiplier, sharding: jax.sharding.NamedSharding) -> str:
    axes = [axis for axis in sharding.spec if axis and sharding.mesh.shape[axis] > 1]
    return ", ".join(filter(None, [_describe_rate(lr_multiplier), f"split over {', '.join(axes)}" if axes else ""]))


def _describe_rate(lr_multiplier: Multiplier) -> str:
    blocks = np.ravel(lr_multiplier)
    trained = blocks[blocks > 0]
    if not len(trained):
        return "frozen"
    low, high = trained.min(), trained.max()
    rate = "" if low == high == 1 else f"rate x {low:.4g}" + (f" to {high:.4g}" if high > low else "")
    frozen = len(blocks) - len(trained)
    return ", ".join(filter(None, [rate, f"{frozen} of {len(blocks)} blocks frozen" if frozen else ""]))
