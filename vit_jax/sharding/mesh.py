"""The mesh of a configuration, and how a batch is split over it."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax import UserError, refuse
from vit_jax.sharding.axis_rules import ACTIVATION_AXES, AXES, PARAMETER_AXES


def axis_sizes(config: ConfigDict, devices: int) -> dict[str, int]:
    """Returns mesh axis -> its size, for the mesh of `config.mesh` over a number of devices.

    A size of -1, which one axis may have, stands for all devices that the other axes leave.

    Raises:
        UserError: the sizes do not multiply to the number of devices, or do not divide the batch.
    """
    asked_sizes = (config.mesh.slice, config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    sizes = dict(zip(AXES, asked_sizes, strict=True))
    asked = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) == 1 and fixed > 0:
        sizes[free[0]], rest = divmod(devices, fixed)
        if rest:
            given = (
                f"the sizes other than -1 multiply to {fixed}, which does not divide {devices}, the number of devices"
            )
            raise UserError(f"cannot build a mesh with {asked}: {given}; choose sizes whose product does.")
    if min(sizes.values()) < 1 or math.prod(sizes.values()) != devices:
        product = f"mesh sizes multiply to {math.prod(sizes.values())}, but {devices} devices are available"
        wrong = product if min(sizes.values()) > 0 else "mesh sizes must be at least 1; a single one may be -1"
        raise UserError(f"cannot build a mesh with {asked}: {wrong}; use -1 for all remaining devices.")
    _check_batch(config, sizes)
    return sizes


def make_mesh(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of `config.mesh` over `devices` (by default all that JAX has).

    Raises:
        UserError: see `axis_sizes`; or `mesh.slice` is not the number of slices.
    """
    devices = jax.devices() if devices is None else devices
    shape = tuple(axis_sizes(config, len(devices)).values())
    return Mesh(_arrange_devices(devices, shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def count_slices(devices: Sequence[jax.Device]) -> int:
    """Returns the number of TPU slices that the devices belong to; 1 for devices of other kinds."""
    return len({getattr(device, "slice_index", 0) for device in devices if device.platform == "tpu"}) or 1


def _arrange_devices(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    """Returns the devices as an array: slices along its first axis, the closest neighbours along its last."""
    slices = count_slices(devices)
    if slices == 1:  # `mesh.slice` then counts groups of neighbours, such as hosts, in the order of `jax.devices`
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if shape[0] != slices:
        asked = f"mesh.slice={shape[0]}, but the devices belong to {slices} slices"
        raise UserError(f"{asked}; set --config.mesh.slice={slices}.")
    return mesh_utils.create_hybrid_device_mesh(
        (1, *shape[1:]), (slices, *(1 for _ in shape[1:])), devices, allow_split_physical_axes=True
    )


def _check_batch(config: ConfigDict, sizes: dict[str, int]) -> None:
    axes = ACTIVATION_AXES["batch"]
    parts = math.prod(sizes[axis] for axis in axes)
    over = f"{parts} devices" if parts == math.prod(sizes.values()) else f"{parts} parts ({' x '.join(axes)})"
    refuse(
        (
            config.batch % (config.accum_steps * parts),
            f"batch={config.batch} is not divisible by accum_steps={config.accum_steps} x {over}; choose a multiple of "
            "their product.",
        ),
        (
            config.batch_eval is not None and config.batch_eval % parts,  # the default divides
            f"batch_eval={config.batch_eval} is not divisible by the {over}; choose a multiple.",
        ),
    )


def check_divides(mesh: Mesh, sizes: dict[str, int]) -> None:
    """Checks that the mesh divides the dimensions of parameters that must be split.

    Args:
        mesh: the devices.
        sizes: dimension -> its size.

    Raises:
        UserError: a mesh axis does not divide a dimension.
    """
    for dimension, size in sizes.items():
        axis = PARAMETER_AXES[dimension]
        if size % mesh.shape[axis]:
            common = math.gcd(*(size for name, size in sizes.items() if PARAMETER_AXES[name] == axis))
            fit = [str(number) for number in range(1, common + 1) if common % number == 0]
            raise UserError(
                f"mesh.{axis}={mesh.shape[axis]} does not divide the model's {dimension}, {size}; "
                f"choose from {', '.join(fit)}."
            )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays with a leading batch dimension."""
    return NamedSharding(mesh, P(ACTIVATION_AXES["batch"]))
