"""A text decoder and its training step, to compare with runs on real TPUs whose speed others have published.

It is written for `benchmarks.calibration` alone. Its form is MaxText's default decoder of 2023 (base.yml): a ReLU MLP
beside the attention, embeddings that are the matrix of the logits, too, JAX's flash attention, and every layer computed
again in the backward pass. Its sizes and the layout of its weights are those of a published run. Everything else is as
plain as possible.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.planning.compiler import Function

Arrays = dict[str, Any]

NORM_EPSILON, CLIP, DECAY, BETA1, BETA2 = 1e-6, 1.0, 0.1, 0.9, 0.95


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder.

    Attributes:
        width: the channels of the residual stream.
        layers: the number of layers.
        heads: the number of heads.
        mlp_dim: the channels of the hidden layer of the MLP.
        head_dim: the channels of each head.
        vocabulary: the number of different tokens.
        length: the tokens of a sequence.
    """

    width: int
    layers: int
    heads: int
    mlp_dim: int
    head_dim: int = 256
    vocabulary: int = 32_768
    length: int = 2048

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the weights of a layer that are used in matrix products."""
        return {
            **dict.fromkeys(("query", "key", "value"), (self.width, self.heads, self.head_dim)),
            "out": (self.heads, self.head_dim, self.width),
            "mlp_in": (self.width, self.mlp_dim),
            "mlp_out": (self.mlp_dim, self.width),
        }

    @property
    def parameters(self) -> int:
        """The number of all parameters."""
        layer = sum(map(math.prod, self.kernels.values())) + self.width
        return layer * self.layers + self.vocabulary * self.width + self.width

    def flops(self, sequences: float) -> float:
        """Returns the model FLOPs of a training step on some sequences.

        They are 6 FLOPs for each parameter and token, and the FLOPs of attention's products that the causal mask keeps.
        MaxText counts like that (train.py, after PaLM, arXiv 2204.02311, Appendix B).
        """
        attention = 12 * self.heads * self.head_dim * self.layers * self.length**2 / 2
        return sequences * (6 * self.parameters * self.length + attention)


def train_step(decoder: Decoder, mesh: Mesh, sequences: int) -> Function:
    """Returns a step of training on a mesh with the one axis `fsdp`.

    Args:
        decoder: the model.
        mesh: the mesh, which divides the sequences and the width of all weights.
        sequences: the sequences of a step, over all chips.
    """
    shapes, specs = _parameters(decoder)
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.adamw(optax.cosine_decay_schedule(3e-5, 30), BETA1, BETA2, weight_decay=DECAY),
    )
    state = {"params": shapes, "opt": jax.eval_shape(optimizer.init, shapes)}
    shardings = {
        "params": {name: NamedSharding(mesh, spec) for name, spec in specs.items()},
        "opt": optax.tree_map_params(
            optimizer,
            lambda _, spec: NamedSharding(mesh, spec),
            state["opt"],
            specs,
            transform_non_params=lambda _: NamedSharding(mesh, P()),
        ),
    }

    def step(state: Arrays, tokens: jax.Array, labels: jax.Array) -> tuple[Arrays, jax.Array]:
        loss, grads = jax.value_and_grad(_loss)(state["params"], tokens, labels, decoder, mesh)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    rows = NamedSharding(mesh, P("fsdp"))
    jitted = jax.jit(
        step,
        in_shardings=(shardings, rows, rows),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    batch = jax.ShapeDtypeStruct((sequences, decoder.length), jnp.int32)
    return Function(jitted, (state, batch, batch), shardings, {})


def _parameters(decoder: Decoder) -> tuple[Arrays, dict[str, P]]:
    """Returns name -> shape and name -> partition of the parameters. All layers share one array, along dimension 1."""
    axes: dict[str, tuple[str | None, ...]] = {
        "query": ("fsdp", None, None),
        "key": ("fsdp", None, None),
        "value": ("fsdp", None, None),
        "out": (None, None, "fsdp"),
        "mlp_in": ("fsdp", None),
        "mlp_out": (None, "fsdp"),
    }
    shapes = {name: (shape[0], decoder.layers, *shape[1:]) for name, shape in decoder.kernels.items()}
    specs = {name: P(axes[name][0], None, *axes[name][1:]) for name in shapes}
    shapes["norm"], specs["norm"] = (decoder.width, decoder.layers), P("fsdp", None)
    shapes["embed"], specs["embed"] = (decoder.vocabulary, decoder.width), P(None, "fsdp")
    shapes["last_norm"], specs["last_norm"] = (decoder.width,), P("fsdp")
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}, specs


def _loss(params: Arrays, tokens: jax.Array, labels: jax.Array, decoder: Decoder, mesh: Mesh) -> jax.Array:
    """Returns the mean cross-entropy of predicting `labels`, the next tokens."""
    place = functools.partial(_place, mesh)
    params = dict(params)
    last_norm, matrix = params.pop("last_norm"), params.pop("embed")
    embed = matrix.astype(jnp.bfloat16)
    x = place(jax.nn.one_hot(tokens, decoder.vocabulary, dtype=jnp.bfloat16) @ embed)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x: jax.Array, weights: Arrays) -> tuple[jax.Array, None]:
        return _layer(x, weights, decoder, mesh), None

    layers = {name: jnp.moveaxis(leaf, 1, 0) for name, leaf in params.items()}
    x, _ = jax.lax.scan(layer, x, layers)
    x = _norm(x, last_norm)
    logits = place(jnp.einsum("btd,vd->btv", x, matrix.astype(jnp.bfloat16))).astype(jnp.float32)
    picked = jnp.sum(jax.nn.one_hot(labels, decoder.vocabulary) * logits, axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def _layer(x: jax.Array, weights: Arrays, decoder: Decoder, mesh: Mesh) -> jax.Array:
    """Returns the output of a layer for the input x [sequences, tokens, width]."""
    place = functools.partial(_place, mesh)
    w = {name: leaf.astype(jnp.bfloat16) for name, leaf in weights.items()}
    x = place(x)
    normed = _norm(x, weights["norm"])
    q, k, v = (place(jnp.einsum("btd,dhk->bhtk", normed, w[name])) for name in ("query", "key", "value"))
    attended = _attention(_rotate(q) * decoder.head_dim**-0.5, _rotate(k), v, mesh)
    added = place(jnp.einsum("bhtk,hkd->btd", attended, w["out"]))
    hidden = jax.nn.relu(place(normed @ w["mlp_in"]))
    return x + place(hidden @ w["mlp_out"]) + added


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns the result of causal attention by JAX's flash kernel, in blocks of 512 tokens.

    Arguments and result are [sequences, heads, tokens, head_dim].
    """
    block = min(512, q.shape[2])
    sizes = flash_attention.BlockSizes(
        block_q=block,
        block_k_major=block,
        block_k=block,
        block_b=1,
        block_q_major_dkv=block,
        block_k_major_dkv=block,
        block_q_dkv=block,
        block_k_dkv=block,
        block_q_dq=2 * block,
        block_k_dq=block // 2,
        block_k_major_dq=block,
    )
    one = functools.partial(flash_attention.flash_attention, causal=True, block_sizes=sizes)
    return jax.shard_map(one, mesh=mesh, in_specs=(P("fsdp"),) * 3, out_specs=P("fsdp"), check_vma=False)(q, k, v)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns x divided by its root mean square (computed in float32), times a scale, in bfloat16."""
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + NORM_EPSILON)
    return (wide * root).astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)


def _rotate(x: jax.Array) -> jax.Array:
    """Returns queries or keys, [sequences, heads, tokens, head_dim], with rotary positions (arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[2])[:, None] / 10_000 ** (jnp.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(jnp.bfloat16)


def _place(mesh: Mesh, x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("fsdp")))
