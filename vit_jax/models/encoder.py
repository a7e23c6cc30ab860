"""The blocks in their order, with one stored layout of their parameters, and the norms around them."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array

from vit_jax.models.adapters import is_adapted, merge_adapters
from vit_jax.models.block import BLOCKS, shared_positions
from vit_jax.models.layers import norm_of
from vit_jax.models.norms import Rows
from vit_jax.models.operations import PlainOps, Tokens
from vit_jax.models.spec import ROTARY_THETA, DepthSchedule, ModelSpec, PositionSpec
from vit_jax.tree import ArrayTree

# Rate of stochastic depth in the first block, as a share of that in the last one; linear between them.
STOCHASTIC_DEPTHS: dict[DepthSchedule, float] = {"linear": 0.0, "constant": 1.0}


class Encoder(nn.Module):
    """The blocks, then a norm (equation 4). The parameters of the blocks have a leading layer axis.

    With `final_norm=pooled` there is no norm after the blocks, because it follows the pooling. With `pre_norm`
    there is another one before them.
    """

    spec: ModelSpec
    ops: PlainOps

    @nn.compact
    def __call__(self, x: Rows, capture: tuple[str, ...] = ()) -> tuple[Tokens, dict[str, Array]]:
        """Returns the tokens and the intermediates of the blocks.

        Args:
            x: the rows of all images.
            capture: the names of further intermediates to return.

        Returns:
            tokens: [batch, tokens, width].
            out: `blocks`, each block's tokens [depth, batch, tokens, width]. If captured, also `attention`, the float32
                weights [depth, batch, heads, tokens, tokens], where axial blocks have twice as many heads.
        """
        spec, ops = self.spec, self.ops
        # `step` applies the block to a slice of the stacked parameters, so it is no submodule.
        block = BLOCKS[spec.block.kind](spec, ops, parent=None)
        stacks = self._stacks()
        shared = shared_positions(self, spec, ops)
        if spec.stem.pre_norm:
            x = norm_of(spec.block, ops, "pre_norm")(x)
        key = self.make_rng("dropout") if self.has_rng("dropout") else None
        first, last = STOCHASTIC_DEPTHS[spec.block.stochastic_depth_schedule], spec.block.stochastic_depth
        rates = jnp.linspace(first * last, last, spec.depth)

        def step(x: Rows, layer: ArrayTree, index: Array | int, rate: Array) -> tuple[Rows, dict[str, Array]]:
            rngs = {} if key is None else {"dropout": jax.random.fold_in(key, index)}
            x, weights = block.apply({"params": merge_adapters(layer)}, x, rate, shared, rngs=rngs)
            return x, {"blocks": ops.tokens(x)} | ({"attention": weights} if "attention" in capture else {})

        x, out = ops.run_blocks(step, x, stacks, rates)
        # The norm of equation 4.
        x = ops.place(ops.tokens(x), "batch", "tokens", "width")
        return x if spec.head.final_norm == "pooled" else norm_of(spec.block, ops, "norm")(x), out

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


def _init_stacked(key: Array, spec: ModelSpec) -> dict:
    # The parameters are the same for all patterns, and a single token is not rotated.
    attention = dataclasses.replace(spec.attention, pattern="full", window=0)
    position = dataclasses.replace(spec.position, rotary="none", rotary_grid=0, rotary_theta=ROTARY_THETA)
    tokens = spec.tokens
    if spec.position.owner != "block":
        position = PositionSpec("none", position.resolution)
        tokens = tokens if spec.block.kind == "axial" else 1
    spec = dataclasses.replace(spec, attention=attention, position=position)
    block = BLOCKS[spec.block.kind](spec, PlainOps(), parent=None)
    example = jnp.zeros((1, tokens, spec.width), spec.dtype)
    return jax.vmap(lambda key: block.init(key, example)["params"])(jax.random.split(key, spec.depth))
