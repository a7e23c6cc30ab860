"""Low-rank adapters (LoRA, arXiv 2106.09685): a kernel W of the blocks becomes W + alpha / rank · down up.

The parameters of an adapter stand beside its kernel: `attention/qkv/lora/{down,up,scale}`. Queries, keys and values
have one adapter each.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax import UserError, tree
from vit_jax.models.depth import is_stacked
from vit_jax.tree import ArrayTree


class Factors(NamedTuple):
    """The dimensions of the two factors of an adapter, for one kind of kernel."""

    where: str  # the part of a block: attention or mlp
    down: str  # the dimensions of the first factor, a letter each; r: the rank
    up: str  # the dimensions of the second factor
    kernel: str  # the dimensions of the kernel


KERNELS = {
    "attention/qkv": Factors("attention", "wqr", "qrhd", "wqhd"),
    "attention/out": Factors("attention", "hdr", "rw", "hdw"),
    "mlp/dense1": Factors("mlp", "wr", "rm", "wm"),
    "mlp/dense1_gated": Factors("mlp", "wr", "rgm", "wgm"),
    "mlp/dense2": Factors("mlp", "mr", "rw", "mw"),
}


def add_adapters(params: ArrayTree, rank: int, alpha: float, where: str, key: jax.Array) -> ArrayTree:
    """Returns the parameters with adapters added. The input is not changed.

    `down` is drawn uniformly from ± 1 / sqrt(inputs) and `up` is 0, so that the adapters change nothing at first.

    Args:
        params: the float32 parameters of a model.
        rank: the rank of the adapters; 0: no adapters are added.
        alpha: an adapter is multiplied by alpha / rank.
        where: the parts of a block whose kernels are adapted: "attention", "mlp" or "attention,mlp".
        key: a JAX random key.

    Raises:
        UserError: the rank is above a dimension of a kernel, or the model has no blocks.
    """
    if not rank:
        return params
    leaves = tree.flatten(params)
    kernels = {name: kernel for name, kernel in leaves.items() if is_stacked(name) and name.endswith("/kernel")}
    if not kernels:
        raise UserError("adapt.rank needs a model with encoder blocks; set --config.adapt.rank=0 for this model.")
    for number, (name, kernel) in enumerate(kernels.items()):
        layer = name.removesuffix("/kernel")
        factors = factors_of(layer)
        if factors.where not in where.split(","):
            continue
        sizes = dict(zip(factors.kernel, kernel.shape[1:], strict=True), r=rank)
        down, up = ([sizes[letter] for letter in letters] for letters in (factors.down, factors.up))
        inputs, outputs = math.prod(down) // rank // sizes.get("q", 1), math.prod(up) // rank // sizes.get("q", 1)
        if rank > min(inputs, outputs):
            largest = min(inputs, outputs)
            raise UserError(f"adapt.rank={rank} must be at most {largest}, the shorter side of {layer}/kernel.")
        bound, depth = 1 / math.sqrt(inputs), len(kernel)
        draw = jax.random.fold_in(key, number)
        leaves[f"{layer}/lora/down"] = jax.random.uniform(draw, (depth, *down), jnp.float32, -bound, bound)
        leaves[f"{layer}/lora/up"] = jnp.zeros((depth, *up))
        leaves[f"{layer}/lora/scale"] = jnp.full(depth, alpha / rank)
    return tree.unflatten(leaves)


def factors_of(layer: str) -> Factors:
    """Returns how the kernel of a layer is adapted, given the layer's name in a block or in the model."""
    return next(factors for name, factors in KERNELS.items() if layer.endswith(name))


def is_adapter(name: str) -> bool:
    """Returns whether a parameter belongs to an adapter."""
    return "/lora/" in name


def is_factor(name: str) -> bool:
    """Returns whether a parameter is a factor of an adapter, `down` or `up`; these are trained, `scale` is not."""
    return is_adapter(name) and not name.endswith("/scale")


def is_adapted(params: ArrayTree) -> bool:
    """Returns whether there are adapters beside the kernels."""
    return any(is_adapter(name) for name in tree.flatten(params))


def merge_adapters(params: ArrayTree) -> ArrayTree:
    """Returns the parameters of a model, or of a block, with each adapter added to its kernel and then left out."""
    leaves = tree.flatten(params)
    merged = tree.flatten(without_adapters(params))
    for name, down in leaves.items():
        layer, separator, part = name.rpartition("/lora/")
        if separator and part == "down":
            merged[f"{layer}/kernel"] = leaves[f"{layer}/kernel"] + _product(layer, leaves, down)
    return tree.unflatten(merged)


def _product(layer: str, leaves: dict[str, Any], down: jax.typing.ArrayLike) -> jax.Array:
    factors = factors_of(layer)
    equation = f"...,...{factors.down},...{factors.up}->...{factors.kernel}"
    scale, up = leaves[f"{layer}/lora/scale"], leaves[f"{layer}/lora/up"]
    return jnp.einsum(equation, scale, down, up, precision=jax.lax.Precision.HIGHEST)


def without_adapters(params: ArrayTree) -> ArrayTree:
    """Returns the parameters, or their shapes, without the adapters, which are not added to the kernels."""
    return tree.unflatten({name: leaf for name, leaf in tree.flatten(params).items() if not is_adapter(name)})
