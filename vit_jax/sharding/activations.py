"""How a model's arrays are sharded while its function is traced, by the names of their dimensions."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from vit_jax.sharding.axis_rules import (
    ACTIVATION_AXES,
    AXES,
    PARAMETER_AXES,
    Dimensions,
    axes_size,
    dimensions_of,
    partition,
)

_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)
# Inside `per_device`: the dimensions that are split over devices.
_split_dimensions: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "split_dimensions", default=frozenset()
)


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[None]:
    """Sets the mesh for the functions of this module while a model is traced inside; without a mesh they do nothing."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def traced_device_kind() -> str:
    """Returns the kind of the devices, as JAX names it, for which a model is traced: of the mesh, or the default's."""
    mesh = _mesh.get()
    return (jax.devices()[0] if mesh is None else mesh.devices.flat[0]).device_kind


def constrain(x: jax.Array, dimensions: Dimensions) -> jax.Array:
    """Constrains the sharding of an activation and of its gradient, given the names of its dimensions."""
    mesh = _mesh.get()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(
        x, NamedSharding(mesh, partition(ACTIVATION_AXES, dimensions, x.shape, mesh))
    )


def gather(parameter: jax.Array, name: str, dtype: DTypeLike) -> jax.Array:
    """Gathers a parameter, where it is used, over the mesh axes that split the batch. Its gradient is split again.

    The parameter is rounded to `dtype` to pass between devices, and is returned in its own dtype. The gradient passes
    between devices in the dtype of the parameter.

    Without the constraint, the compiler may split over `tensor` what is split over `fsdp`, or gather the batch instead.

    Args:
        parameter: the parameter.
        name: its name, or the end of it by which `axis_rules.py` knows the dimensions.
        dtype: the dtype in which it passes between devices.
    """
    mesh = _mesh.get()
    if mesh is None:
        return parameter
    batch = ACTIVATION_AXES["batch"]
    spec = partition(PARAMETER_AXES, dimensions_of(name), parameter.shape, mesh)
    split, gathered = (NamedSharding(mesh, P(*axes)) for axes in (spec, [None if a in batch else a for a in spec]))
    # The compiler would split the gradient over an unused axis first, and then move the parts between devices.
    unused = any(size > 1 for axis, size in mesh.shape.items() if axis not in (*batch, *spec))
    return _gather(parameter, gathered, (gathered, split) if unused else (split,), jnp.dtype(dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(
    parameter: jax.Array, gathered: NamedSharding, backwards: tuple[NamedSharding, ...], dtype: Any
) -> jax.Array:
    """Constrains the sharding of a parameter to `gathered`, and that of its gradient to each of `backwards` in turn."""
    return jax.lax.with_sharding_constraint(parameter.astype(dtype), gathered).astype(parameter.dtype)


def _gather_forward(
    parameter: jax.Array, gathered: NamedSharding, backwards: tuple[NamedSharding, ...], dtype: Any
) -> tuple[jax.Array, None]:
    return _gather(parameter, gathered, backwards, dtype), None


def _gather_backward(
    gathered: NamedSharding, backwards: tuple[NamedSharding, ...], dtype: Any, residuals: None, grad: jax.Array
) -> tuple[jax.Array]:
    for sharding in backwards:
        grad = jax.lax.with_sharding_constraint(grad, sharding)
    return (grad,)


_gather.defvjp(_gather_forward, _gather_backward)


def local_size(dimension: str, size: int) -> int:
    """Returns how much of a dimension of an activation is on one device: all of it if the mesh does not divide it."""
    mesh, axes = _mesh.get(), ACTIVATION_AXES[dimension]
    parts = axes_size(mesh, axes) if mesh and axes else 1
    return size // parts if size % parts == 0 else size


def per_device(
    function: Callable[..., jax.Array],
    activations: tuple[Dimensions, ...],
    parameters: tuple[str, ...],
    output: Dimensions,
    rows: int = 1,
) -> Callable[..., jax.Array]:
    """Returns `function` run by each device on its parts of the arrays (shard_map), for collectives and kernels.

    If the mesh does not divide the batch, the compiler splits the function instead.

    Args:
        function: takes activations, then parameters: the parts that `constrain` and `gather` leave on a device. It sums
            over split dimensions with `sum_over`.
        activations: the names of the dimensions of each activation.
        parameters: the name of each parameter, as `gather` takes it.
        output: the names of the dimensions of the result.
        rows: number of rows of the batch dimension that form a pack of images and stay on one device.
    """
    mesh = _mesh.get()
    if mesh is None:
        return function
    count, names = len(activations), (*activations, *map(dimensions_of, parameters))
    tables = [ACTIVATION_AXES] * count + [PARAMETER_AXES] * len(parameters)

    def call(*arrays: jax.Array) -> jax.Array:
        specs = [
            partition(table, dims, array.shape, mesh) for table, dims, array in zip(tables, names, arrays, strict=True)
        ]
        split = {
            name for dims, spec in zip(names, specs, strict=True) for name, axes in zip(dims, spec, strict=True) if axes
        }
        if "batch" not in split or len(arrays[0]) % (rows * axes_size(mesh, ACTIVATION_AXES["batch"])):
            return function(*arrays)

        used = {axis for spec in specs for axis in _axes(spec)}

        def local(*parts: jax.Array) -> jax.Array:
            placed = list(zip(parts, specs, strict=True))
            whole = [_vary(part, spec, used) for part, spec in placed[:count]]
            whole += [_all_gather(part, spec, parts[0].dtype) for part, spec in placed[count:]]
            token = _split_dimensions.set(frozenset(split))
            try:
                return function(*whole)
            finally:
                _split_dimensions.reset(token)

        out = partition(ACTIVATION_AXES, output, jax.eval_shape(function, *arrays).shape, mesh)
        return jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=out)(*arrays)

    return call


def _axes(spec: P) -> set[str]:
    """Returns the mesh axes over which an array is split."""
    return {axis for axes in spec if axes for axis in ((axes,) if isinstance(axes, str) else axes)}


def _vary(part: jax.Array, spec: P, axes: Iterable[str]) -> jax.Array:
    """Returns a part of an array whose gradient will be summed over those of `axes` that do not split the array."""
    over = set(axes) - _axes(spec)
    return jax.lax.pcast(part, tuple(axis for axis in AXES if axis in over), to="varying")


def _all_gather(part: jax.Array, spec: P, dtype: Any) -> jax.Array:
    batch = ACTIVATION_AXES["batch"]
    part = _vary(part, spec, batch)  # gradients are then scattered before each part is summed over the other axes
    for dimension, axis in enumerate(spec):
        if axis in batch:
            part = _gather_axis(part, axis, dimension, dtype)
    return part


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather_axis(part: jax.Array, axis: str, dimension: int, dtype: Any) -> jax.Array:
    """Gathers parts, rounded to `dtype`, over an axis; their gradient is scattered in the dtype of the parameter."""
    return jax.lax.all_gather(part.astype(dtype), axis, axis=dimension, tiled=True).astype(part.dtype)


def _gather_axis_forward(part: jax.Array, axis: str, dimension: int, dtype: Any) -> tuple[jax.Array, None]:
    return _gather_axis(part, axis, dimension, dtype), None


def _gather_axis_backward(axis: str, dimension: int, dtype: Any, residuals: None, grad: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.psum_scatter(grad, axis, scatter_dimension=dimension, tiled=True),)


_gather_axis.defvjp(_gather_axis_forward, _gather_axis_backward)


def sum_over(dimension: str, x: jax.Array) -> jax.Array:
    """Returns, inside `per_device`, the sum over a dimension of a parameter, given each device's partial sum."""
    return jax.lax.psum(x, PARAMETER_AXES[dimension]) if dimension in _split_dimensions.get() else x
