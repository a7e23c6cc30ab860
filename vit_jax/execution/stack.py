"""The blocks of a model as one loop or one by one, and what their backward pass computes again."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from vit_jax.models import BlockStep, ModelSpec, Remat, Rows, is_adapted
from vit_jax.tree import ArrayTree, flatten, unflatten

_POLICIES = jax.checkpoint_policies
_ATTENTION = ("attended", "log_sum_exp")  # what the TPU kernel of attention returns; "hidden": that of the MLP

# What is kept for the backward pass, which need not compute it again: from everything to nothing. Names are those of
# `checkpoint_name`. For a token and a block whose MLP has 4 times the width, `dots` keeps 10 widths besides the block's
# input, `mlp` 5, `attention` 1 and `full` 0. Only the TPU kernels name what they return: with another form of attention
# `attention` keeps as little as `full`, and `mlp` only what is between attention and MLP.
REMAT_POLICIES: dict[Remat, Callable[..., bool]] = {
    "none": _POLICIES.everything_saveable,
    "dots": _POLICIES.save_from_both_policies(
        _POLICIES.dots_with_no_batch_dims_saveable, _POLICIES.save_only_these_names(*_ATTENTION, "hidden")
    ),
    "mlp": _POLICIES.save_only_these_names("qkv", "between", *_ATTENTION),
    "attention": _POLICIES.save_only_these_names(*_ATTENTION),
    "full": _POLICIES.nothing_saveable,
}


def run_blocks(
    spec: ModelSpec, step: BlockStep, x: Rows, stacks: tuple[ArrayTree, ...], rates: Array
) -> tuple[Rows, dict[str, Array]]:
    """Applies the blocks as the spec says; see `PlainOps.run_blocks`."""
    if spec.remat != "none":
        # Inside a loop nothing can be merged with the forward pass: the barriers against it would only cost time.
        step = jax.checkpoint(step, policy=REMAT_POLICIES[spec.remat], prevent_cse=not spec.scan)
    return (
        _run_scanned(step, x, stacks, rates) if spec.scan else _run_unrolled(step, x, stacks, rates, spec.kernel_dtype)
    )


def _run_scanned(
    step: BlockStep, x: Rows, stacks: tuple[ArrayTree, ...], rates: Array
) -> tuple[Rows, dict[str, Array]]:
    outs, start = [], 0
    for stack in stacks:
        end = start + len(jax.tree.leaves(stack)[0])
        x, out = jax.lax.scan(lambda x, layer: step(x, *layer), x, (stack, jnp.arange(start, end), rates[start:end]))
        outs.append(out)
        start = end
    return x, jax.tree.map(lambda *each: jnp.concatenate(each), *outs)


def _run_unrolled(
    step: BlockStep, x: Rows, stacks: tuple[ArrayTree, ...], rates: Array, dtype: str
) -> tuple[Rows, dict[str, Array]]:
    layers = []
    for stack in stacks:
        # The sum of a kernel and its adapter is rounded, not its parts.
        cast = not is_adapted(stack)
        columns = {
            name: _split(leaf, dtype if cast and name.endswith("kernel") else leaf.dtype)
            for name, leaf in flatten(stack).items()
        }
        layers += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    outs = []
    for index, (layer, rate) in enumerate(zip(layers, rates, strict=True)):
        x, out = step(x, unflatten(layer), index, rate)
        outs.append(out)
    return x, jax.tree.map(lambda *each: jnp.stack(each), *outs)


def _split(stacked: Array, dtype: DTypeLike) -> list[Array]:
    """Returns the parameter of each layer, cast to `dtype`.

    If that changes the dtype, each layer stays an array of its own. TPUs then move it to the chip's fast memory before
    its product.
    """
    # The gradient of a split is one concatenation; that of indexing would be a sum of layers padded with zeros.
    layers = [part[0].astype(dtype) for part in jax.lax.split(stacked, (1,) * len(stacked))]
    return layers if stacked.dtype == dtype else [jax.lax.optimization_barrier(layer) for layer in layers]
