"""The stack of blocks: one stored layout, executed as separate blocks or as one loop."""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from vit_jax.kernels import Packing
from vit_jax.models.adapters import is_adapted, merge_adapters
from vit_jax.models.block import BLOCKS, shared_positions
from vit_jax.models.layers import LayerNorm, Rows, Tokens
from vit_jax.models.part_specs import DepthSchedule, PositionSpec, Remat
from vit_jax.models.spec import ModelSpec
from vit_jax.sharding import constrain
from vit_jax.tree import ArrayTree, flatten, unflatten

_POLICIES = jax.checkpoint_policies
BlockStep = Callable[[Rows, ArrayTree, Array | int, Array], tuple[Rows, dict[str, Array]]]
_ATTENTION = ("attended", "log_sum_exp")  # what the attention kernel returns; "hidden": the MLP's kernel

# Rate of stochastic depth in the first block, as a share of that in the last one; linear between them.
STOCHASTIC_DEPTHS: dict[DepthSchedule, float] = {"linear": 0.0, "constant": 1.0}

# What is kept for the backward pass, which need not compute it again: from everything to nothing. Names are those of
# `checkpoint_name`. For a token and a block whose MLP has 4 times the width, `dots` keeps 10 widths besides the block's
# input, `mlp` 5, `attention` 1 and `full` 0.
REMAT_POLICIES: dict[Remat, Callable[..., bool]] = {
    "none": _POLICIES.everything_saveable,
    "dots": _POLICIES.save_from_both_policies(
        _POLICIES.dots_with_no_batch_dims_saveable, _POLICIES.save_only_these_names(*_ATTENTION, "hidden")
    ),
    "mlp": _POLICIES.save_only_these_names("qkv", "between", *_ATTENTION),
    "attention": _POLICIES.save_only_these_names(*_ATTENTION),
    "full": _POLICIES.nothing_saveable,
}


class Encoder(nn.Module):
    """The blocks, then a LayerNorm (equation 4). The parameters of the blocks have a leading layer axis.

    With `final_norm=pooled` there is no LayerNorm after the blocks, because it follows the pooling. With `pre_norm`
    there is another one before them.
    """

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: Rows, packing: Packing, capture: tuple[str, ...] = ()) -> tuple[Tokens, dict[str, Array]]:
        """Returns the tokens and the intermediates of the blocks.

        Args:
            x: the rows of all images.
            packing: the packing of these rows.
            capture: the names of further intermediates to return.

        Returns:
            tokens: [batch, tokens, width].
            out: `blocks`, each block's tokens [depth, batch, tokens, width]. If captured, also `attention`, the float32
                weights [depth, batch, heads, tokens, tokens], where axial blocks have twice as many heads.
        """
        spec = self.spec
        # Applied to one layer's slice of the stacked parameters.
        block = BLOCKS[spec.block.kind](spec, packing, parent=None)
        stacks = self._stacks()
        shared = shared_positions(self, spec)
        if spec.stem.pre_norm:
            x = LayerNorm(spec.block.norm_epsilon, name="pre_norm")(x)
        key = self.make_rng("dropout") if self.has_rng("dropout") else None
        first, last = STOCHASTIC_DEPTHS[spec.block.stochastic_depth_schedule], spec.block.stochastic_depth
        rates = jnp.linspace(first * last, last, spec.depth)

        def step(x: Rows, layer: ArrayTree, index: Array | int, rate: Array) -> tuple[Rows, dict[str, Array]]:
            rngs = {} if key is None else {"dropout": jax.random.fold_in(key, index)}
            x, weights = block.apply({"params": merge_adapters(layer)}, x, rate, shared, rngs=rngs)
            return x, {"blocks": packing.unpack(x)} | ({"attention": weights} if "attention" in capture else {})

        if spec.remat != "none":
            # Inside a loop nothing can be merged with the forward pass: the barriers against it would only cost time.
            step = jax.checkpoint(step, policy=REMAT_POLICIES[spec.remat], prevent_cse=not spec.scan)
        x, out = (
            _run_scanned(step, x, stacks, rates)
            if spec.scan
            else _run_unrolled(step, x, stacks, rates, spec.kernel_dtype)
        )
        x = constrain(packing.unpack(x), ("batch", "tokens", "width"))
        return x if spec.head.final_norm == "pooled" else LayerNorm(spec.block.norm_epsilon, name="norm")(x), out

    def _stacks(self) -> tuple[ArrayTree, ...]:
        """Returns the parameters of the blocks as one stack, or as the consecutive stacks into which training split it.

        Adapters may stand beside the kernels.
        """
        given = self.get_variable("params", "blocks")
        if isinstance(given, tuple):
            return given
        if given is not None and is_adapted(given):
            return (given,)
        return (self.param("blocks", lambda key: _init_stacked(key, self.spec)),)


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


def _init_stacked(key: Array, spec: ModelSpec) -> dict:
    # The parameters are the same for all kinds of attention, and a single token is not rotated.
    attention = dataclasses.replace(spec.attention, kind="heads_first", pattern="full", window=0)
    position = dataclasses.replace(spec.position, rotary="none", rotary_grid=0)
    tokens = spec.tokens
    if spec.position.owner != "block":
        position = PositionSpec("none", position.resolution)
        tokens = tokens if spec.block.kind == "axial" else 1
    spec = dataclasses.replace(spec, attention=attention, position=position)
    block = BLOCKS[spec.block.kind](spec, Packing(tokens, 1, tokens), parent=None)
    example = jnp.zeros((tokens, spec.width), spec.dtype)
    return jax.vmap(lambda key: block.init(key, example)["params"])(jax.random.split(key, spec.depth))
