"""The mesh, and the tables that place parameters and activations on it.

The mesh has four axes, the slowest links first: `slice` (TPU slices, connected by the data centre's network), `data`,
`fsdp` and `tensor`. The batch is split over the first three. Over `fsdp`, the parameters, the optimizer state and the
moving average are split too (ZeRO-3: parameters are gathered where they are used, gradients are scattered again). Over
`tensor`, attention heads and MLPs are split, with their parameters; a BiT has neither, and the devices repeat its work.
Models name dimensions of arrays, never mesh axes.

What a device exchanges in a step, in bytes of the whole arrays of its collectives (`planning/collectives.py` reads
them). P is the size of the parameters that it computes with (its part of heads and MLPs), A that of its tokens [rows,
tokens, width]:

    slice, data      all-reduce          P          gradients; P / fsdp of those that fsdp has scattered
    fsdp             all-gather          P          parameters; 2 P with remat, which gathers again
                     reduce-scatter      P          gradients; an all-reduce on CPUs, where XLA forms no other
    tensor           all-reduce          4 depth A  after attention and MLP, forwards and backwards
    MixUp, CutMix    collective-permute  one image and its targets, from the next device

Scalars come on top. Kernels pass in the dtype of the activations, and so do their gradients unless
`optim.grad_dtype` is float32; other gradients are float32. Gradients are exchanged for each of the `accum_steps` parts.
Only gradients and MixUp's row cross slices; on TPUs, as messages between hosts.
"""

import contextlib
import contextvars
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax import UserError, tree
from vit_jax.tree import ArrayTree

Dimensions: TypeAlias = tuple[str, ...]  # names of an array's dimensions

AXES = ("slice", "data", "fsdp", "tensor")

# Dimension of an activation -> mesh axes.
ACTIVATION_AXES: dict[str, Any] = {"batch": ("slice", "data", "fsdp"), "heads": "tensor", "mlp": "tensor"}

# Dimension of a parameter -> mesh axis.
PARAMETER_AXES: dict[str, Any] = {"width": "fsdp", "filters": "fsdp", "heads": "tensor", "mlp": "tensor"}

# Last part of a parameter's name -> its last dimensions (encoder blocks have a leading dimension for the layers).
PARAMETER_DIMENSIONS = {
    # The weights of a filter stay on one device, which standardises them.
    r"conv(\d|_proj|_qkv|_out)?/kernel": ("kernel_rows", "kernel_columns", "channels", "filters"),
    "relative_(line|rows|columns)": ("offsets", "head_dim"),
    "query_key": ("channels", "qkv", "filters"),
    "values": ("mixtures", "channels", "filters"),
    "mixture_(rows|columns|values)": ("mixtures", "head_dim"),
    "reduce/kernel": ("width", "hidden"),
    "reduce/bias": ("hidden",),
    "expand/kernel": ("hidden", "width"),
    "expand/bias": ("width",),
    "embed/kernel": ("patch_rows", "patch_columns", "channels", "width"),
    "embed/bias": ("width",),
    "cls": ("width",),
    "mask": ("width",),
    "registers": ("tokens", "width"),
    "probe": ("width",),
    "position(_[xy]|_prefix)?": ("tokens", "width"),
    "relative": ("offsets", "head_dim"),
    "relative_heads": ("heads", "offsets", "head_dim"),
    r"(pre_|pooled_)?norm(\d|_proj|_qkv|_out)?/(scale|bias)": ("width",),
    "(query|key)_norm/(scale|bias)": ("head_dim",),
    r"layer_scale\d": ("width",),
    "qkv/kernel": ("width", "qkv", "heads", "head_dim"),
    "qkv/bias": ("qkv", "heads", "head_dim"),
    "(query|key|value)/kernel": ("width", "heads", "head_dim"),
    "(query|key|value)/bias": ("heads", "head_dim"),
    "out/kernel": ("heads", "head_dim", "width"),
    "out/bias": ("width",),
    "qkv/lora/down": ("width", "qkv", "rank"),
    "qkv/lora/up": ("qkv", "rank", "heads", "head_dim"),
    "out/lora/down": ("heads", "head_dim", "rank"),
    "dense1(_gated)?/lora/down": ("width", "rank"),
    "dense1/lora/up": ("rank", "mlp"),
    "dense1_gated/lora/up": ("rank", "gate", "mlp"),
    "dense2/lora/down": ("mlp", "rank"),
    "(out|dense2)/lora/up": ("rank", "width"),
    "lora/scale": (),
    "dense1/kernel": ("width", "mlp"),
    "dense1/bias": ("mlp",),
    "dense1_gated/kernel": ("width", "gate", "mlp"),
    "dense1_gated/bias": ("gate", "mlp"),
    "dense2/kernel": ("mlp", "width"),
    "dense2/bias": ("width",),
    "pre_logits/kernel": ("width", "hidden"),
    "pre_logits/bias": ("hidden",),
    "head/kernel": ("width", "classes"),
    "head/bias": ("classes",),
}

_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)
# Inside `per_device`: the dimensions that are split over devices.
_split_dimensions: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "split_dimensions", default=frozenset()
)


def axis_sizes(config: ConfigDict, devices: int) -> dict[str, int]:
    """Returns the sizes of the axes of `config.mesh` over a number of devices.

    Raises:
        UserError: they do not multiply to that number, or do not divide the batch.
    """
    asked_sizes = (config.mesh.slice, config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    sizes = dict(zip(AXES, asked_sizes, strict=True))
    asked = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) == 1 and fixed > 0:
        sizes[free[0]], rest = divmod(devices, fixed)
        if rest:
            given = f"{fixed} does not divide {devices}, the number of devices"
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
    if config.batch % (config.accum_steps * parts):
        product = f"accum_steps={config.accum_steps} x {over}"
        raise UserError(f"batch={config.batch} is not divisible by {product}; choose a multiple of their product.")
    if config.batch_eval is not None and config.batch_eval % parts:  # the default divides
        raise UserError(f"batch_eval={config.batch_eval} is not divisible by the {over}; choose a multiple.")


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


def state_shardings(state: ArrayTree, mesh: Mesh) -> ArrayTree:
    """Returns the sharding of every leaf of a training state (or of parameters), by the tables above.

    The names of optimizer moments and of the moving average end in their parameter's name: they are sharded as it is;
    means over some of its dimensions, as its others are. Other leaves are copied to every device.
    A dimension that its axis does not divide is not split.
    """
    shapes = {name: leaf.shape for name, leaf in tree.flatten(state).items()}
    owned = {name.removeprefix("params/"): shape for name, shape in shapes.items() if name.startswith("params/")}
    parameters = owned or shapes

    def partition(name: str, shape: tuple[int, ...]) -> P:
        parts = name.split("/")
        endings = ("/".join(parts[start:]) for start in range(len(parts)))
        parameter = next((parameters[ending] for ending in endings if ending in parameters), None)
        return P() if parameter is None else _parameter_partition(name, shape, parameter, mesh)

    return tree.map_named(lambda name, leaf: NamedSharding(mesh, partition(name, leaf.shape)), state)


def _parameter_partition(name: str, shape: tuple[int, ...], parameter: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the mesh axes of an array that has some of the dimensions of a parameter, or all."""
    dimensions = next((d for rule, d in PARAMETER_DIMENSIONS.items() if re.search(f"(^|/){rule}$", name)), None)
    if dimensions is None or len(parameter) - len(dimensions) not in (0, 1):
        raise KeyError(f"{name} {parameter} has no row in sharding.PARAMETER_DIMENSIONS")
    dimensions = ("layers",) * (len(parameter) - len(dimensions)) + dimensions
    choices = itertools.combinations(zip(dimensions, parameter, strict=True), len(shape))
    kept = next((choice for choice in choices if tuple(size for _, size in choice) == shape), ())
    return _partition(PARAMETER_AXES, tuple(dimension for dimension, _ in kept), shape, mesh) if kept else P()


def _partition(table: dict[str, Any], dimensions: Dimensions, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the mesh axes of each dimension; none for a dimension that its axes do not divide."""
    axes = [table.get(dimension) for dimension in dimensions]
    return P(*(a if a and size % _axes_size(mesh, a) == 0 else None for a, size in zip(axes, shape, strict=True)))


def _axes_size(mesh: Mesh, axes: str | tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[None]:
    """Sets the mesh of the functions below while a function is traced; without a mesh they do nothing."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def constrain(x: jax.Array, dimensions: Dimensions) -> jax.Array:
    """Constrains the sharding of an activation and of its gradient, given the names of its dimensions."""
    mesh = _mesh.get()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(
        x, NamedSharding(mesh, _partition(ACTIVATION_AXES, dimensions, x.shape, mesh))
    )


def gather(parameter: jax.Array, dimensions: Dimensions, dtype: Any) -> jax.Array:
    """Gathers a parameter, where it is used, over the axes that split the batch; its gradient is split again.

    The parameter passes between devices rounded to `dtype`, and its gradient in the dtype of the parameter.

    Without the constraint, the compiler may split over `tensor` what is split over `fsdp`, or gather the batch instead.
    """
    mesh = _mesh.get()
    if mesh is None:
        return parameter
    batch = ACTIVATION_AXES["batch"]
    spec = _partition(PARAMETER_AXES, dimensions, parameter.shape, mesh)
    split, gathered = (NamedSharding(mesh, P(*axes)) for axes in (spec, [None if a in batch else a for a in spec]))
    # The compiler would split the gradient over an unused axis first, and then move the parts between devices.
    unused = any(size > 1 for axis, size in mesh.shape.items() if axis not in (*batch, *spec))
    return _gather(parameter, gathered, (gathered, split) if unused else (split,), jnp.dtype(dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(
    parameter: jax.Array, gathered: NamedSharding, backwards: tuple[NamedSharding, ...], dtype: Any
) -> jax.Array:
    """Constrains the sharding of a parameter; that of its gradient to each of `backwards` in turn."""
    del backwards
    return jax.lax.with_sharding_constraint(parameter.astype(dtype), gathered).astype(parameter.dtype)


def _gather_forward(
    parameter: jax.Array, gathered: NamedSharding, backwards: tuple[NamedSharding, ...], dtype: Any
) -> tuple[jax.Array, None]:
    return _gather(parameter, gathered, backwards, dtype), None


def _gather_backward(
    gathered: NamedSharding, backwards: tuple[NamedSharding, ...], dtype: Any, residuals: None, grad: jax.Array
) -> tuple[jax.Array]:
    del gathered, dtype, residuals
    for sharding in backwards:
        grad = jax.lax.with_sharding_constraint(grad, sharding)
    return (grad,)


_gather.defvjp(_gather_forward, _gather_backward)


def local_size(dimension: str, size: int) -> int:
    """Returns how much of a dimension of an activation is on one device: all of it if the mesh does not divide it."""
    mesh, axes = _mesh.get(), ACTIVATION_AXES[dimension]
    parts = _axes_size(mesh, axes) if mesh and axes else 1
    return size // parts if size % parts == 0 else size


def per_device(
    function: Callable[..., jax.Array],
    activations: tuple[Dimensions, ...],
    parameters: tuple[Dimensions, ...],
    output: Dimensions,
    rows: int = 1,
) -> Callable[..., jax.Array]:
    """Returns `function` run by each device on its parts of the arrays (shard_map), for collectives and kernels.

    If the mesh does not divide the batch, the compiler splits the function instead.

    Args:
        function: takes activations, then parameters: the parts that `constrain` and `gather` leave on a device. It sums
            over split dimensions with `sum_over`.
        activations: the names of the dimensions of each activation.
        parameters: likewise of each parameter.
        output: likewise of the result.
        rows: of a pack of images, in the batch dimension; they stay on one device.
    """
    mesh = _mesh.get()
    if mesh is None:
        return function
    count, names = len(activations), activations + parameters
    tables = [ACTIVATION_AXES] * count + [PARAMETER_AXES] * len(parameters)

    def call(*arrays: jax.Array) -> jax.Array:
        specs = [
            _partition(table, dims, array.shape, mesh) for table, dims, array in zip(tables, names, arrays, strict=True)
        ]
        split = {
            name for dims, spec in zip(names, specs, strict=True) for name, axes in zip(dims, spec, strict=True) if axes
        }
        if "batch" not in split or len(arrays[0]) % (rows * _axes_size(mesh, ACTIVATION_AXES["batch"])):
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

        out = _partition(ACTIVATION_AXES, output, jax.eval_shape(function, *arrays).shape, mesh)
        return jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=out)(*arrays)

    return call


def _axes(spec: P) -> set[str]:
    """Returns the mesh axes over which an array is split."""
    return {axis for axes in spec if axes for axis in ((axes,) if isinstance(axes, str) else axes)}


def _vary(part: jax.Array, spec: P, axes: Iterable[str]) -> jax.Array:
    """Returns a part of an array; its gradient will be summed over those of the axes that do not split the array."""
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
    del dtype, residuals
    return (jax.lax.psum_scatter(grad, axis, scatter_dimension=dimension, tiled=True),)


_gather_axis.defvjp(_gather_axis_forward, _gather_axis_backward)


def sum_over(dimension: str, x: jax.Array) -> jax.Array:
    """Returns, inside `per_device`, the sum over a dimension of a parameter, given each device's partial sum."""
    return jax.lax.psum(x, PARAMETER_AXES[dimension]) if dimension in _split_dimensions.get() else x
