"""A text decoder and its training step, to compare with runs on real TPUs whose speed others have published.

It is written for `benchmarks.calibration` alone. Its sizes, the layout of its weights, its attention kernel and its
rematerialization are those of a published run. Everything else is as plain as possible.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.kernels import Options
from vit_jax.planning.compiler import Function

Arrays = dict[str, Any]

NORM_EPSILON, CLIP, DECAY, BETA1, BETA2 = 1e-6, 1.0, 0.1, 0.9, 0.95
OFFLOADED = ("layer_input", "query", "key", "value")  # activations kept in the host's memory for the backward pass
POLICIES = {
    "full": None,
    "products": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(OFFLOADED),
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "offload_out": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[*OFFLOADED, "out"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder and how a step of it is computed.

    Attributes:
        width: the channels of the residual stream.
        layers: the number of layers.
        heads: the number of heads of the queries.
        kv_heads: the number of heads of keys and values.
        head_dim: the channels of each head.
        mlp_dim: the channels of the hidden layer of the MLP.
        vocabulary: the number of different tokens.
        gated: whether the MLP computes SiLU(a) * b from two products a and b; if not, it computes ReLU of one product.
        parallel: whether attention and MLP read the same normalised input; if not, the MLP reads the normalised sum of
            the layer's input and the output of attention.
        untied: whether the logits have a matrix of their own; if not, they share that of the token embeddings.
        length: the tokens of a sequence.
        remat: the rematerialization policy, a key of `POLICIES`.
        attention: the kernel: `flash` in blocks of 512 tokens, or `splash` in blocks of 2,048 tokens, which skips
            blocks that the mask excludes.
        dtype: the dtype of the parameters and of the optimizer's moments.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_dim: int
    vocabulary: int
    gated: bool
    parallel: bool
    untied: bool
    length: int
    remat: str
    attention: Literal["flash", "splash"]
    dtype: str = "float32"

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the weights of a layer that are used in matrix products."""
        inputs = ("mlp_gate", "mlp_in") if self.gated else ("mlp_in",)
        return {
            "query": (self.width, self.heads, self.head_dim),
            "key": (self.width, self.kv_heads, self.head_dim),
            "value": (self.width, self.kv_heads, self.head_dim),
            "out": (self.heads, self.head_dim, self.width),
            **dict.fromkeys(inputs, (self.width, self.mlp_dim)),
            "mlp_out": (self.mlp_dim, self.width),
        }

    @property
    def parameters(self) -> int:
        """The number of all parameters."""
        layer = sum(map(math.prod, self.kernels.values())) + self.width * (1 if self.parallel else 2)
        return layer * self.layers + self.vocabulary * self.width * (2 if self.untied else 1) + self.width

    def flops(self, sequences: float) -> float:
        """Returns the model FLOPs of a training step on some sequences.

        They are 6 FLOPs for each parameter and token, and the FLOPs of attention's products that the causal mask keeps.
        MaxText counts like that (train.py, after PaLM, arXiv 2204.02311, Appendix B).
        """
        attention = 12 * self.heads * self.head_dim * self.layers * self.length**2 / 2
        return sequences * (6 * self.parameters * self.length + attention)


def train_step(decoder: Decoder, mesh: Mesh, sequences: int, options: Options) -> Function:
    """Returns a step of training on a mesh with the axes `fsdp` and `tensor`.

    Args:
        decoder: the model.
        mesh: the mesh. `fsdp` divides the sequences and the width of all weights; `tensor` divides heads, MLP and
            vocabulary.
        sequences: the sequences of a step, over all chips.
        options: the options of the compiler.
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
        compiler_options=options,
    )
    batch = jax.ShapeDtypeStruct((sequences, decoder.length), jnp.int32)
    return Function(jitted, (state, batch, batch), shardings, options)


def _parameters(decoder: Decoder) -> tuple[Arrays, dict[str, P]]:
    """Returns name -> shape and name -> partition of the parameters. All layers share one array, along dimension 1."""
    axes: dict[str, tuple[str | None, ...]] = {
        "query": ("fsdp", "tensor", None),
        "key": ("fsdp", "tensor", None),
        "value": ("fsdp", "tensor", None),
        "out": ("tensor", None, "fsdp"),
        "mlp_gate": ("fsdp", "tensor"),
        "mlp_in": ("fsdp", "tensor"),
        "mlp_out": ("tensor", "fsdp"),
    }
    shapes = {name: (shape[0], decoder.layers, *shape[1:]) for name, shape in decoder.kernels.items()}
    specs = {name: P(axes[name][0], None, *axes[name][1:]) for name in shapes}
    for name in ("norm",) if decoder.parallel else ("norm", "mlp_norm"):
        shapes[name], specs[name] = (decoder.width, decoder.layers), P("fsdp", None)
    for name in ("embed", "logits") if decoder.untied else ("embed",):
        shapes[name], specs[name] = (decoder.vocabulary, decoder.width), P("tensor", "fsdp")
    shapes["last_norm"], specs["last_norm"] = (decoder.width,), P("fsdp")
    return {name: jax.ShapeDtypeStruct(shape, decoder.dtype) for name, shape in shapes.items()}, specs


def _loss(params: Arrays, tokens: jax.Array, labels: jax.Array, decoder: Decoder, mesh: Mesh) -> jax.Array:
    """Returns the mean cross-entropy of predicting `labels`, the next tokens."""
    place = functools.partial(_place, mesh)
    params = dict(params)
    outer = {name: params.pop(name) for name in ("embed", "logits", "last_norm") if name in params}
    embed = outer["embed"].astype(jnp.bfloat16)
    x = place(jax.nn.one_hot(tokens, decoder.vocabulary, dtype=jnp.bfloat16) @ embed, "fsdp", None, "tensor")

    @functools.partial(jax.checkpoint, policy=POLICIES[decoder.remat], prevent_cse=False)
    def layer(x: jax.Array, weights: Arrays) -> tuple[jax.Array, None]:
        return _layer(x, weights, decoder, mesh), None

    layers = {name: jnp.moveaxis(leaf, 1, 0) for name, leaf in params.items()}
    x, _ = jax.lax.scan(layer, x, layers)
    x = _norm(x, outer["last_norm"])
    matrix = outer.get("logits", outer["embed"]).astype(jnp.bfloat16)
    logits = place(jnp.einsum("btd,vd->btv", x, matrix), "fsdp", None, "tensor").astype(jnp.float32)
    picked = jnp.sum(jax.nn.one_hot(labels, decoder.vocabulary) * logits, axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def _layer(x: jax.Array, weights: Arrays, decoder: Decoder, mesh: Mesh) -> jax.Array:
    """Returns the output of a layer for the input x [sequences, tokens, width]."""
    place = functools.partial(_place, mesh)
    w = {name: leaf.astype(jnp.bfloat16) for name, leaf in weights.items()}
    x = place(checkpoint_name(x, "layer_input"), "fsdp", None, "tensor")
    normed = _norm(x, weights["norm"])
    q, k, v = (
        checkpoint_name(place(jnp.einsum("btd,dhk->bhtk", normed, w[name]), "fsdp", "tensor"), name)
        for name in ("query", "key", "value")
    )
    attended = _attention(_rotate(q) * decoder.head_dim**-0.5, _rotate(k), v, decoder, mesh)
    added = checkpoint_name(place(jnp.einsum("bhtk,hkd->btd", attended, w["out"]), "fsdp", None, "tensor"), "out")
    if not decoder.parallel:
        x = x + added
        normed = _norm(x, weights["mlp_norm"])
    hidden = place(normed @ w["mlp_in"], "fsdp", None, "tensor")
    hidden = jax.nn.silu(normed @ w["mlp_gate"]) * hidden if decoder.gated else jax.nn.relu(hidden)
    mlp = place(hidden @ w["mlp_out"], "fsdp", None, "tensor")
    return x + mlp + added if decoder.parallel else x + mlp


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, decoder: Decoder, mesh: Mesh) -> jax.Array:
    """Returns the result of causal attention by one of JAX's kernels.

    Arguments and result are [sequences, heads, tokens, head_dim].
    """
    one = _splash(decoder, mesh) if decoder.attention == "splash" else _flash(decoder)
    spec = P("fsdp", "tensor")
    return jax.shard_map(one, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)(q, k, v)


def _flash(decoder: Decoder) -> Any:
    block = min(512, decoder.length)
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
    return functools.partial(flash_attention.flash_attention, causal=True, block_sizes=sizes)


def _splash(decoder: Decoder, mesh: Mesh) -> Any:
    block = min(2048, decoder.length)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
    sizes = splash_attention_kernel.BlockSizes(**{f"block_{name}": block for name in names}, use_fused_bwd_kernel=True)
    heads = decoder.heads // mesh.shape["tensor"]
    mask = splash_attention_mask.MultiHeadMask(
        [splash_attention_mask.CausalMask((decoder.length, decoder.length)) for _ in range(heads)]
    )
    make = splash_attention_kernel.make_splash_mha
    return jax.vmap(make(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1))


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


def _place(mesh: Mesh, x: jax.Array, *axes: str | None) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))
