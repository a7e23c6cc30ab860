"""The mesh, and the tables that place parameters and activations on it.

Two axes: the batch is split over both; over `fsdp` the parameters, the optimizer state and the moving average are split
too (ZeRO-3: gathered where they are used, their gradients reduced and scattered). Models name the dimensions of their
arrays, never a mesh axis.
"""

import contextlib
import contextvars
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax import UserError, tree

AXES = ("data", "fsdp")

# Dimension of an activation -> mesh axes.
ACTIVATION_AXES = {"batch": AXES}

# Dimension of a parameter -> mesh axis.
PARAMETER_AXES = {"width": "fsdp", "filters": "fsdp"}

# End of a parameter's path -> names of its last dimensions (encoder blocks have a leading one for the layers).
PARAMETER_DIMENSIONS = {
    # A filter's weights stay together, so that they are standardised where they lie.
    r"conv(\d|_proj)?/kernel": ("kernel_rows", "kernel_columns", "channels", "filters"),
    "embed/kernel": ("patch_rows", "patch_columns", "channels", "width"),
    "embed/bias": ("width",),
    "cls": ("width",),
    "probe": ("width",),
    "position": ("tokens", "width"),
    r"norm(\d|_proj)?/(scale|bias)": ("width",),
    "qkv/kernel": ("width", "qkv", "heads", "head_dim"),
    "qkv/bias": ("qkv", "heads", "head_dim"),
    "(query|key|value)/kernel": ("width", "heads", "head_dim"),
    "(query|key|value)/bias": ("heads", "head_dim"),
    "out/kernel": ("heads", "head_dim", "width"),
    "out/bias": ("width",),
    "dense1/kernel": ("width", "mlp"),
    "dense1/bias": ("mlp",),
    "dense2/kernel": ("mlp", "width"),
    "dense2/bias": ("width",),
    "pre_logits/kernel": ("width", "hidden"),
    "pre_logits/bias": ("hidden",),
    "head/kernel": ("width", "classes"),
    "head/bias": ("classes",),
}

_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)


def make_mesh(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of `config.mesh` over `devices` (all of the program's by default).

    Raises:
        UserError: the axes' sizes do not multiply to the number of devices, or the batch cannot be split over them.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"data": config.mesh.data, "fsdp": config.mesh.fsdp}
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) == 1 and fixed > 0:
        sizes[free[0]] = len(devices) // fixed
    shape = tuple(sizes.values())
    if min(shape) < 1 or math.prod(shape) != len(devices):
        asked = f"mesh.data={config.mesh.data}, mesh.fsdp={config.mesh.fsdp}"
        raise UserError(f"{asked} does not multiply to the {len(devices)} devices here; -1 stands for all the others.")
    _check_divides(config, len(devices))
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def _check_divides(config: ConfigDict, devices: int) -> None:
    if config.batch % (config.accum_steps * devices):
        parts = f"accum_steps={config.accum_steps} x {devices} devices"
        raise UserError(f"batch={config.batch} is not divisible by {parts}; choose a multiple of their product.")
    if (config.batch_eval or config.batch) % devices:
        raise UserError(f"batch_eval={config.batch_eval} is not divisible by the {devices} devices; choose a multiple.")


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns how arrays with a leading batch dimension lie on the mesh."""
    return NamedSharding(mesh, P(ACTIVATION_AXES["batch"]))


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """Returns the placement of every leaf of a training state (or of parameters) by the tables above.

    Optimizer moments and the moving average have their parameter's path at the end of theirs and lie as it does. A
    dimension that its axis does not divide stays whole.
    """
    return tree.map_named(lambda name, leaf: NamedSharding(mesh, _parameter_spec(name, leaf.shape, mesh)), state)


def _parameter_spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    if not shape:
        return P()
    dimensions = next((d for rule, d in PARAMETER_DIMENSIONS.items() if re.search(f"(^|/){rule}$", name)), None)
    if dimensions is None or len(shape) - len(dimensions) not in (0, 1):
        raise KeyError(f"{name} {shape} has no row in sharding.PARAMETER_DIMENSIONS")
    leading = (None,) * (len(shape) - len(dimensions))
    axes = leading + tuple(PARAMETER_AXES.get(dimension) for dimension in dimensions)
    return P(*(axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in zip(axes, shape, strict=True)))


@contextlib.contextmanager
def use(mesh: Mesh) -> Iterator[None]:
    """Lets `constrain` know the mesh while a function is traced."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def constrain(x: jax.Array, dimensions: tuple[str, ...]) -> jax.Array:
    """Pins an activation, given the names of its dimensions, to the mesh in use; does nothing outside of one."""
    mesh = _mesh.get()
    if mesh is None:
        return x
    spec = P(*(ACTIVATION_AXES.get(dimension) for dimension in dimensions))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
