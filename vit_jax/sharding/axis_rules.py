"""The mesh, and the tables that place parameters and activations on it.

The mesh has four axes, the slowest links first: `slice` (TPU slices, connected by the data centre's network), `data`,
`fsdp` and `tensor`. The batch is split over the first three. Over `fsdp`, the parameters, the optimizer state and the
moving average are split too (ZeRO-3: parameters are gathered where they are used, gradients are scattered again). Over
`tensor`, attention heads and MLPs are split, with their parameters. A BiT has neither, so that the devices along this
axis repeat its work. Models name dimensions of arrays, never mesh axes.

What a device exchanges in a step, in bytes of the whole arrays of its collectives (`planning/collectives.py` reads
them). P is the size of the parameters that it computes with (its part of heads and MLPs). A is the size of its tokens
[rows, tokens, width].

    slice, data      all-reduce          P          gradients; P / fsdp if they were scattered over fsdp before
    fsdp             all-gather          P          parameters; 2 P with remat, which gathers again
                     reduce-scatter      P          gradients; an all-reduce on CPUs, where XLA forms no other
    tensor           all-reduce          4 depth A  after attention and MLP, forwards and backwards
    MixUp, CutMix    collective-permute  one image and its targets, from the next device

Scalars come on top. Kernels are exchanged in the dtype of the activations, and so are their gradients unless
`optim.grad_dtype` is float32; other gradients are float32. Gradients are exchanged for each of the `accum_steps` parts.
Only gradients and the image of MixUp or CutMix cross slices. On TPUs they do so as messages between hosts.
"""

import math
import re
from typing import Any, TypeAlias

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

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
    "query_key_kernel": ("channels", "qkv", "filters"),
    "values_kernel": ("mixtures", "channels", "filters"),
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
    "relative_bias": ("offsets", "heads"),
    r"(pre_|pooled_)?norm(\d|_proj|_qkv|_out)?/(scale|bias)": ("width",),
    "(query|key)_norm/(scale|bias)": ("head_dim",),
    "hidden_norm/(scale|bias)": ("mlp",),
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
    "(pre_logits|projection)/kernel": ("width", "hidden"),
    "pre_logits/bias": ("hidden",),
    "(distilled_)?head/kernel": ("width", "classes"),
    "(distilled_)?head/bias": ("classes",),
}


def dimensions_of(name: str) -> Dimensions:
    """Returns the names of a parameter's last dimensions, given its name, or any name that ends in it.

    Raises:
        KeyError: `PARAMETER_DIMENSIONS` has no row for the parameter.
    """
    for rule, dimensions in PARAMETER_DIMENSIONS.items():
        if re.search(f"(^|/){rule}$", name):
            return dimensions
    raise KeyError(f"{name} has no row in sharding.axis_rules.PARAMETER_DIMENSIONS")


def partition(table: dict[str, Any], dimensions: Dimensions, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the mesh axes of each dimension, as `table` has them; None where they do not divide the dimension."""
    axes = [table.get(dimension) for dimension in dimensions]
    return P(*(a if a and size % axes_size(mesh, a) == 0 else None for a, size in zip(axes, shape, strict=True)))


def axes_size(mesh: Mesh, axes: str | tuple[str, ...]) -> int:
    """Returns into how many parts a mesh axis, or several together, split a dimension."""
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
