"""Self-attention, with the projection before it: implementations with one signature (equations 5 to 7)."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax import kernels
from vit_jax.models.attention_choice import AttentionSizes, fits_every_tpu
from vit_jax.models.layers import Rows, add_bias, as_matrix, product
from vit_jax.models.spec import AttentionKind
from vit_jax.sharding import constrain, gather, per_device

QKV: TypeAlias = Float[Array, "batch tokens 3 heads head_dim"]
Attended: TypeAlias = Float[Array, "batch tokens width"]
PerHead: TypeAlias = Float[Array, "batch heads tokens head_dim"]
AttentionWeights: TypeAlias = Float[Array, "batch heads queries keys"]
QKVKernel: TypeAlias = Float[Array, "width 3 heads head_dim"]
QKVBias: TypeAlias = Float[Array, "3 heads head_dim"]
LocalHeads: TypeAlias = Float[Array, "*rows channels"]  # of a device
# (rows of all images, kernel and bias of the projection, tokens of an image) -> (attended rows, weights)
Attention: TypeAlias = Callable[[Rows, QKVKernel, QKVBias, int], tuple[Rows, AttentionWeights]]

# Names of the dimensions of the parameters.
KERNEL, BIAS = ("width", "qkv", "heads", "head_dim"), ("qkv", "heads", "head_dim")


def heads_first(qkv: QKV) -> tuple[Attended, AttentionWeights]:
    """Returns the sum of the values weighted by softmax(q kᵀ / √head_dim), and these weights in float32.

    One transposition puts heads before tokens, so that every product is a batch of plain matrix products, and the
    backward pass is written out. This is the fastest form on CPUs. Only reverse-mode differentiation works.
    """
    batch, tokens, _, heads, head_dim = qkv.shape
    query, key, value = qkv.transpose(2, 0, 3, 1, 4)
    attended, weights = _attend(query, key, value)
    return attended.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * head_dim), weights


@jax.custom_vjp
def _attend(query: PerHead, key: PerHead, value: PerHead) -> tuple[PerHead, AttentionWeights]:
    return _forward(query, key, value)[0]


def _forward(query: PerHead, key: PerHead, value: PerHead) -> tuple[tuple[PerHead, AttentionWeights], tuple]:
    weights = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", _scaled(query), key, preferred_element_type=jnp.float32))
    attended = jnp.einsum("bhqk,bhkd->bhqd", weights.astype(value.dtype), value)
    return (attended, weights), (query, key, value, weights)


def _backward(residuals: tuple, grads: tuple[PerHead, AttentionWeights]) -> tuple[PerHead, PerHead, PerHead]:
    query, key, value, weights = residuals
    grad, grad_weights = grads  # the second is zero, and compiled away, unless the loss depends on the weights
    grad_value = jnp.einsum("bhqk,bhqd->bhkd", weights.astype(grad.dtype), grad)
    grad_weights += jnp.einsum("bhqd,bhkd->bhqk", grad, value, preferred_element_type=jnp.float32)
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdims=True))
    grad_scores = grad_scores.astype(query.dtype)
    grad_query = jnp.einsum("bhqk,bhkd->bhqd", grad_scores, _scaled(key))
    grad_key = jnp.einsum("bhqk,bhqd->bhkd", grad_scores, _scaled(query))
    return grad_query, grad_key, grad_value


_attend.defvjp(_forward, _backward)


def tokens_first(qkv: QKV) -> tuple[Attended, AttentionWeights]:
    """Returns the same as `heads_first`, without a transposition: accelerators choose the layout of each product."""
    batch, tokens, _, heads, head_dim = qkv.shape
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", _scaled(query), key, preferred_element_type=jnp.float32))
    attended = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(qkv.dtype), value)
    return attended.reshape(batch, tokens, heads * head_dim), weights


def project(x: Rows, kernel: QKVKernel, bias: QKVBias, tokens: int) -> QKV:
    """Returns the queries, keys and values of all images (equation 5)."""
    kernel = gather(kernel, KERNEL, x.dtype)
    qkv = add_bias(product(x.reshape(-1, tokens, x.shape[-1]), kernel), bias)
    return constrain(qkv, ("batch", "tokens", *BIAS))


def _projected(attention: Callable[[QKV], tuple[Attended, AttentionWeights]]) -> Attention:
    def attend(x: Rows, kernel: QKVKernel, bias: QKVBias, tokens: int) -> tuple[Rows, AttentionWeights]:
        attended, weights = attention(project(x, kernel, bias, tokens))
        return attended.reshape(x.shape), weights

    return attend


def fused(x: Rows, kernel: QKVKernel, bias: QKVBias, tokens: int) -> tuple[Rows, AttentionWeights]:
    """Returns the same by a kernel on TPUs, which keeps scores and softmax on the chip; the weights by the plain form.

    Each device projects and attends by itself, so that the kernel gets the fused layout as the matmul writes it.
    """
    rows = padded_rows("fused", tokens)

    def attend(x: Rows, kernel: QKVKernel, bias: QKVBias) -> LocalHeads:
        _, _, heads, head_dim = kernel.shape
        projected = product(x, as_matrix(kernel, bias.size)).reshape(-1, rows, bias.size)
        attended = kernels.fused_attention(projected, bias.reshape(-1), tokens, heads)
        return attended.reshape(-1, heads * head_dim)

    attend = per_device(attend, (("batch", "width"),), (KERNEL, BIAS), ("batch", "heads"), rows)
    attended = attend(x, kernel, bias)
    _, weights = tokens_first(project(x, kernel, bias, rows)[:, :tokens])
    return attended, weights


def cudnn(x: Rows, kernel: QKVKernel, bias: QKVBias, tokens: int) -> tuple[Rows, AttentionWeights]:
    """Returns the same by cuDNN on NVIDIA's GPUs; the weights by the plain form. Not measured."""
    rows = padded_rows("cudnn", tokens)
    qkv = project(x, kernel, bias, rows)
    lengths = None if rows == tokens else jnp.full(len(qkv), tokens, jnp.int32)
    attended = jax.nn.dot_product_attention(
        *(qkv[:, :, part] for part in range(3)),
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return attended.reshape(x.shape), tokens_first(qkv[:, :tokens])[1]


def auto(x: Rows, kernel: QKVKernel, bias: QKVBias, tokens: int) -> tuple[Rows, AttentionWeights]:
    """Returns the same by the fastest form for the platform that the program is lowered for.

    The compiled program does not contain the other forms. On TPUs it is the kernel, unless the smallest of them have
    too little memory for it: what kind they are is not known here. Only reverse-mode differentiation works.
    """
    heads, head_dim = kernel.shape[2:]
    sizes = AttentionSizes(len(x) // tokens, tokens, heads, head_dim, x.dtype.name)

    def by(attention: Attention) -> Callable[[Rows, QKVKernel, QKVBias], Rows]:
        return lambda x, kernel, bias: attention(x, kernel, bias, tokens)[0]

    plain = by(_projected(tokens_first))
    attended = jax.lax.platform_dependent(
        *(x, kernel, bias),
        cpu=by(_projected(heads_first)),
        tpu=by(_fused_of_tokens) if fits_every_tpu(sizes) else plain,
        default=plain,
    )
    return attended, tokens_first(project(x, kernel, bias, tokens))[1]


def _fused_of_tokens(x: Rows, kernel: QKVKernel, bias: QKVBias, tokens: int) -> tuple[Rows, AttentionWeights]:
    """Returns `fused` of tokens without padding."""
    images = x.reshape(-1, tokens, x.shape[-1])
    padded = jnp.pad(images, ((0, 0), (0, padded_rows("fused", tokens) - tokens), (0, 0)))
    attended, weights = fused(padded.reshape(-1, x.shape[-1]), kernel, bias, tokens)
    return attended.reshape(padded.shape)[:, :tokens].reshape(x.shape), weights


ATTENTIONS: dict[AttentionKind, Attention] = {
    "auto": auto,
    "heads_first": _projected(heads_first),
    "tokens_first": _projected(tokens_first),
    "fused": fused,
    "cudnn": cudnn,
}


# The rows of an image are a multiple of these: tiles of the kernel; cuDNN's backward pass refuses odd numbers.
ROW_MULTIPLES: dict[AttentionKind, int] = {"fused": kernels.ROW_TILE, "cudnn": 2}


def padded_rows(kind: AttentionKind, tokens: int) -> int:
    """Returns the rows in which the tokens of an image are stored."""
    multiple = ROW_MULTIPLES.get(kind, 1)
    return -(-tokens // multiple) * multiple


def _scaled(x: Array) -> Array:
    return x * x.shape[-1] ** -0.5
