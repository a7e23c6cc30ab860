"""The forms of self-attention on devices, with one signature: the projection, and what equations 5 to 7 make of it."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.execution.forms_by_chip import SMALLEST_TPU, AttentionSizes, choose_attention, choose_packing
from vit_jax.execution.norms_and_products import add_bias, normalise, product
from vit_jax.execution.sparse_attention import attend_in_pattern
from vit_jax.execution.tpu import fused
from vit_jax.kernels import Packing
from vit_jax.models import (
    QKV,
    AttentionExtras,
    AttentionKind,
    AttentionWeights,
    QKVBias,
    QKVKernel,
    Rows,
    ScoreFunction,
    Tokens,
    scaled,
    softmax_attention,
)
from vit_jax.sharding import constrain, gather, traced_device_kind

# (rows of all images, kernel and bias of the projection, packing of the rows, extras) -> (attended rows, weights)
Attention: TypeAlias = Callable[[Rows, QKVKernel, QKVBias, Packing, AttentionExtras], tuple[Rows, AttentionWeights]]
RowsOf: TypeAlias = Callable[[Rows, QKVKernel, QKVBias, Packing, AttentionExtras], Rows]
Attended: TypeAlias = Float[Array, "batch tokens width"]
PerHead: TypeAlias = Float[Array, "batch heads tokens head_dim"]

IN_BLOCKS = 1024  # from so many tokens a pattern is computed in blocks, below by a mask: docs/models.md


def project(x: Tokens, kernel: QKVKernel, bias: QKVBias, extras: AttentionExtras) -> QKV:
    """Returns the queries, keys and values of all images (equation 5), normalised and rotated as `extras` says."""
    kernel = gather(kernel, "qkv/kernel", x.dtype)
    qkv = constrain(add_bias(product(x, kernel), bias), ("batch", "tokens", "qkv", "heads", "head_dim"))
    return extras.normalised_and_rotated(qkv, normalise)


def heads_first(qkv: QKV, scores: ScoreFunction | None = None) -> tuple[Attended, AttentionWeights]:
    """Returns the sum of the values weighted by softmax(q kᵀ / √head_dim), and these weights in float32.

    One transposition puts heads before tokens, so that every product is a batch of plain matrix products. The backward
    pass is written out, except where `scores` are added. Only reverse-mode differentiation works.
    """
    batch, tokens, _, heads, head_dim = qkv.shape
    query, key, value = qkv.transpose(2, 0, 3, 1, 4)
    if scores:
        added = scores(scaled(qkv[:, :, 0]))
        (attended, weights), _ = _forward(query, key, value, added)
    else:
        attended, weights = _attend(query, key, value)
    return attended.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * head_dim), weights


@jax.custom_vjp
def _attend(query: PerHead, key: PerHead, value: PerHead) -> tuple[PerHead, AttentionWeights]:
    return _forward(query, key, value)[0]


def _forward(
    query: PerHead, key: PerHead, value: PerHead, added: AttentionWeights | None = None
) -> tuple[tuple[PerHead, AttentionWeights], tuple]:
    scores = jnp.einsum("bhqd,bhkd->bhqk", scaled(query), key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores if added is None else scores + added)
    attended = jnp.einsum("bhqk,bhkd->bhqd", weights.astype(value.dtype), value)
    return (attended, weights), (query, key, value, weights)


def _backward(residuals: tuple, grads: tuple[PerHead, AttentionWeights]) -> tuple[PerHead, PerHead, PerHead]:
    query, key, value, weights = residuals
    grad, grad_weights = grads  # the second is zero, and compiled away, unless the loss depends on the weights
    grad_value = jnp.einsum("bhqk,bhqd->bhkd", weights.astype(grad.dtype), grad)
    grad_weights += jnp.einsum("bhqd,bhkd->bhqk", grad, value, preferred_element_type=jnp.float32)
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdims=True))
    grad_scores = grad_scores.astype(query.dtype)
    grad_query = jnp.einsum("bhqk,bhkd->bhqd", grad_scores, scaled(key))
    grad_key = jnp.einsum("bhqk,bhqd->bhkd", grad_scores, scaled(query))
    return grad_query, grad_key, grad_value


_attend.defvjp(_forward, _backward)


def _projected(attention: Callable[[QKV, ScoreFunction | None], tuple[Attended, AttentionWeights]]) -> Attention:
    def attend(
        x: Rows, kernel: QKVKernel, bias: QKVBias, packing: Packing, extras: AttentionExtras
    ) -> tuple[Rows, AttentionWeights]:
        attended, weights = attention(project(packing.unpack(x), kernel, bias, extras), extras.scores)
        return packing.pack(attended), weights

    return attend


def _with_plain_weights(rows_of: RowsOf) -> Attention:
    """Returns a form of attention that computes the weights by the plain form and the attended rows by `rows_of`.

    A program that does not return the weights does not compute them.
    """

    def attend(
        x: Rows, kernel: QKVKernel, bias: QKVBias, packing: Packing, extras: AttentionExtras
    ) -> tuple[Rows, AttentionWeights]:
        attended = rows_of(x, kernel, bias, packing, extras)
        return attended, softmax_attention(project(packing.unpack(x), kernel, bias, extras), extras.scores)[1]

    return attend


def cudnn(
    x: Rows, kernel: QKVKernel, bias: QKVBias, packing: Packing, extras: AttentionExtras
) -> tuple[Rows, AttentionWeights]:
    """Returns attention by cuDNN on NVIDIA's GPUs. The attention weights are computed by the plain form.

    Raises:
        ValueError: something is added to the scores, or there is a pattern.
    """
    if extras.scores:
        raise ValueError("cuDNN's attention gets no further scores")
    tokens, rows = packing.tokens, packing.rows
    qkv = project(x.reshape(-1, rows, x.shape[-1]), kernel, bias, extras)
    lengths = None if rows == tokens else jnp.full(len(qkv), tokens, jnp.int32)
    attended = jax.nn.dot_product_attention(
        *(qkv[:, :, part] for part in range(3)),
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return attended.reshape(x.shape), softmax_attention(qkv[:, :tokens])[1]


def fastest_attention(sizes: AttentionSizes) -> Attention:
    """Returns attention by the fastest form for the platform that the program is lowered for: `attention=auto`.

    It is for models for which no device was chosen, as `Model.for_device` does. `FASTEST_ATTENTION` says which form it
    is; for TPUs, if the model is traced for other devices, it is the form of those with the least memory. The
    compiled program does not contain the other forms. cuDNN is never chosen, since its rows would have to be packed for
    it. A pattern without relative positions is computed in blocks from `IN_BLOCKS` tokens on. Only reverse-mode
    differentiation works.
    """

    def rows_of(x: Rows, kernel: QKVKernel, bias: QKVBias, packing: Packing, extras: AttentionExtras) -> Rows:
        if extras.pattern and not extras.relative and packing.tokens >= IN_BLOCKS:
            qkv = project(packing.unpack(x), kernel, bias, extras)
            return packing.pack(attend_in_pattern(extras.pattern.spec, qkv).reshape(*qkv.shape[:2], -1))

        def run(kind: AttentionKind) -> Callable[[Rows, QKVKernel, QKVBias], Rows]:
            suited = choose_packing("fused", sizes) if kind == "fused" else packing

            def attend(x: Rows, kernel: QKVKernel, bias: QKVBias) -> Rows:
                operands = packing.repack(x, suited), kernel, bias, suited, extras
                attended = fused(*operands) if kind == "fused" else ATTENTIONS[kind](*operands)[0]  # without weights
                return suited.repack(attended, packing)

            return attend

        traced = traced_device_kind()
        devices = {"cpu": "cpu", "tpu": traced if traced.startswith("TPU") else SMALLEST_TPU, "default": ""}
        kinds = {platform: choose_attention(device_kind, sizes) for platform, device_kind in devices.items()}
        forms = {kind: run(kind) for kind in kinds.values()}  # one function for each: JAX then makes one branch
        chosen = {platform: forms[kind] for platform, kind in kinds.items()}
        return jax.lax.platform_dependent(*(x, kernel, bias), **chosen)

    return _with_plain_weights(rows_of)


ATTENTIONS: dict[AttentionKind, Attention] = {
    "heads_first": _projected(heads_first),  # the fastest on CPUs
    "tokens_first": _projected(softmax_attention),
    "fused": _with_plain_weights(fused),
    "cudnn": cudnn,
}
