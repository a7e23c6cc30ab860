"""Self-attention, with the projection before it: implementations with one signature (equations 5 to 7)."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from vit_jax import kernels
from vit_jax.kernels import Packing
from vit_jax.models.attention_choice import AttentionSizes, choose_division, choose_shape
from vit_jax.models.head_change import QKV, HeadChange
from vit_jax.models.layers import Rows, Tokens, add_bias, as_matrix, product
from vit_jax.models.part_specs import AttentionKind
from vit_jax.models.position import RelativePositions
from vit_jax.sharding import constrain, dimensions_of, gather, per_device, traced_device_kind

Attended: TypeAlias = Float[Array, "batch tokens width"]
PerToken: TypeAlias = Float[Array, "batch tokens heads head_dim"]
PerHead: TypeAlias = Float[Array, "batch heads tokens head_dim"]
AttentionWeights: TypeAlias = Float[Array, "batch heads queries keys"]
QKVKernel: TypeAlias = Float[Array, "width 3 heads head_dim"]
QKVBias: TypeAlias = Float[Array, "3 heads head_dim"]
LocalHeads: TypeAlias = Float[Array, "*rows channels"]  # of the heads on one device
Queries: TypeAlias = Float[Array, "batch queries heads head_dim"]
ScoreFunction: TypeAlias = Callable[[Queries], AttentionWeights]  # scaled queries -> what is added to their scores


class Pattern(NamedTuple):
    """Which tokens attend to which, where not all attend to all."""

    pairs: Bool[np.ndarray, "queries keys"]
    attend: Callable[[QKV], PerToken]  # computes attention for these pairs, and for few others

    def scores(self, queries: Queries) -> AttentionWeights:
        """Returns what is added to the scores: zero for the pairs that attend, minus infinity for all others."""
        batch, tokens, heads, _ = queries.shape
        return jnp.broadcast_to(jnp.where(self.pairs, 0.0, -jnp.inf), (batch, heads, tokens, tokens))


class AttentionChange(NamedTuple):
    """What a model does besides equations 5 to 7; by default, nothing.

    Attributes:
        qkv: the change of queries and keys after their projection.
        relative: the relative positions; None: there are none.
        pattern: which tokens attend to which; None: all to all.
    """

    qkv: HeadChange = HeadChange()
    relative: RelativePositions | None = None
    pattern: Pattern | None = None

    @property
    def added(self) -> ScoreFunction | None:
        """The function of all that is added to the scores; None: nothing is added."""
        functions = [part.scores for part in (self.relative, self.pattern) if part is not None]
        return (lambda queries: sum(function(queries) for function in functions)) if functions else None

    @property
    def relative_kind(self) -> kernels.RelativeKind | None:
        """The relative positions in the form that the TPU kernel takes; None: there are none, or it takes none."""
        return self.relative and self.relative.spec.relative_kind

    @property
    def fits_kernel(self) -> bool:
        """Whether the TPU kernel computes all that is added to the scores."""
        return self.pattern is None and (self.relative is None or self.relative_kind is not None)


UNCHANGED = AttentionChange()

# (rows of all images, kernel and bias of the projection, packing of the rows, change) -> (attended rows, weights)
Attention: TypeAlias = Callable[[Rows, QKVKernel, QKVBias, Packing, AttentionChange], tuple[Rows, AttentionWeights]]
RowsOf: TypeAlias = Callable[[Rows, QKVKernel, QKVBias, Packing, AttentionChange], Rows]

IN_BLOCKS = 1024  # from so many tokens a pattern is computed in blocks, below by a mask: docs/models.md


def heads_first(qkv: QKV, scores: ScoreFunction | None = None) -> tuple[Attended, AttentionWeights]:
    """Returns the sum of the values weighted by softmax(q kᵀ / √head_dim), and these weights in float32.

    One transposition puts heads before tokens, so that every product is a batch of plain matrix products. The backward
    pass is written out, except where `scores` are added. This is the fastest form on CPUs. Only reverse-mode
    differentiation works.
    """
    batch, tokens, _, heads, head_dim = qkv.shape
    query, key, value = qkv.transpose(2, 0, 3, 1, 4)
    if scores:
        added = scores(_scaled(qkv[:, :, 0]))
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
    scores = jnp.einsum("bhqd,bhkd->bhqk", _scaled(query), key, preferred_element_type=jnp.float32)
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
    grad_query = jnp.einsum("bhqk,bhkd->bhqd", grad_scores, _scaled(key))
    grad_key = jnp.einsum("bhqk,bhqd->bhkd", grad_scores, _scaled(query))
    return grad_query, grad_key, grad_value


_attend.defvjp(_forward, _backward)


def tokens_first(qkv: QKV, scores: ScoreFunction | None = None) -> tuple[Attended, AttentionWeights]:
    """Returns the same as `heads_first`, without a transposition: the compiler chooses the layout of each product."""
    batch, tokens, _, heads, head_dim = qkv.shape
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    products = jnp.einsum("bqhd,bkhd->bhqk", _scaled(query), key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(products + scores(_scaled(query)) if scores else products)
    attended = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(qkv.dtype), value)
    return attended.reshape(batch, tokens, heads * head_dim), weights


def project(x: Tokens, kernel: QKVKernel, bias: QKVBias, change: AttentionChange) -> QKV:
    """Returns the queries, keys and values of all images (equation 5), after `change.qkv`."""
    kernel = gather(kernel, "qkv/kernel", x.dtype)
    return change.qkv(constrain(add_bias(product(x, kernel), bias), ("batch", "tokens", "qkv", "heads", "head_dim")))


def _projected(attention: Callable[[QKV, ScoreFunction | None], tuple[Attended, AttentionWeights]]) -> Attention:
    def attend(
        x: Rows, kernel: QKVKernel, bias: QKVBias, packing: Packing, change: AttentionChange
    ) -> tuple[Rows, AttentionWeights]:
        attended, weights = attention(project(packing.unpack(x), kernel, bias, change), change.added)
        return packing.pack(attended), weights

    return attend


def _with_plain_weights(rows_of: RowsOf) -> Attention:
    """Returns an implementation that computes the attention weights by the plain form, the attended rows by `rows_of`.

    A program that does not return the weights does not compute them.
    """

    def attend(
        x: Rows, kernel: QKVKernel, bias: QKVBias, packing: Packing, change: AttentionChange
    ) -> tuple[Rows, AttentionWeights]:
        attended = rows_of(x, kernel, bias, packing, change)
        return attended, tokens_first(project(packing.unpack(x), kernel, bias, change), change.added)[1]

    return attend


def fused(x: Rows, kernel: QKVKernel, bias: QKVBias, packing: Packing, change: AttentionChange) -> Rows:
    """Returns attention by the TPU kernel, which keeps scores and softmax on the chip.

    Each device projects and attends by itself, so that the kernel gets the fused layout as the matmul writes it.

    Raises:
        ValueError: the kernel does not compute all that is added to the scores.
    """
    if not change.fits_kernel:
        raise ValueError("the kernel does not compute all that is added to the scores")

    def attend(x: Rows, norms: Array, relative: Array, kernel: QKVKernel, bias: QKVBias) -> LocalHeads:
        _, _, heads, head_dim = kernel.shape
        kernel, bias = change.qkv.centred(kernel), change.qkv.centred(bias)
        projected = product(x, as_matrix(kernel, bias.size)).reshape(-1, packing.rows, bias.size)
        tables = change.qkv.tables(norms, packing, heads, head_dim)
        tables += (kernels.spread_table(relative, packing),) if change.relative else ()
        attended = kernels.fused_attention(
            *(projected, bias.reshape(-1), packing, heads),
            change=change.qkv.for_kernel,
            relative=change.relative_kind,
            tables=tables,
        )
        return attended.reshape(-1, heads * head_dim)

    relative = change.relative.table if change.relative else jnp.zeros((0, 1))
    # Parameters are gathered in the dtype of the rows. The norms and the relative positions, whose gradients stay in
    # float32, are passed like rows.
    of_relative = dimensions_of("relative_heads" if relative.ndim == 3 else "relative")
    names = ("batch", "width"), ("norms", "channels"), of_relative
    attend = per_device(attend, names, ("qkv/kernel", "qkv/bias"), ("batch", "heads"), packing.rows)
    return attend(x, change.qkv.norm_rows, relative, kernel, bias)


def cudnn(
    x: Rows, kernel: QKVKernel, bias: QKVBias, packing: Packing, change: AttentionChange
) -> tuple[Rows, AttentionWeights]:
    """Returns attention by cuDNN on NVIDIA's GPUs. The attention weights are computed by the plain form.

    Raises:
        ValueError: something is added to the scores, or there is a pattern.
    """
    if change.added:
        raise ValueError("cuDNN's attention gets no further scores")
    tokens, rows = packing.tokens, packing.rows
    qkv = project(x.reshape(-1, rows, x.shape[-1]), kernel, bias, change)
    lengths = None if rows == tokens else jnp.full(len(qkv), tokens, jnp.int32)
    attended = jax.nn.dot_product_attention(
        *(qkv[:, :, part] for part in range(3)),
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return attended.reshape(x.shape), tokens_first(qkv[:, :tokens])[1]


def auto(x: Rows, kernel: QKVKernel, bias: QKVBias, packing: Packing, change: AttentionChange) -> Rows:
    """Returns attention by the fastest form for the platform that the program is lowered for.

    The compiled program does not contain the other forms. On TPUs the kernel is used, unless it does not compute what
    is added to the scores, or needs more memory than the TPUs for which the model is traced have (where it is traced
    for other devices, than the smallest TPUs have). A pattern without relative positions is computed in blocks from
    `IN_BLOCKS` tokens on. Only reverse-mode differentiation works.
    """
    if change.pattern and not change.relative and packing.tokens >= IN_BLOCKS:
        qkv = project(packing.unpack(x), kernel, bias, change)
        return packing.pack(change.pattern.attend(qkv).reshape(*qkv.shape[:2], -1))
    heads, head_dim = kernel.shape[2:]
    sizes = AttentionSizes(
        *(len(x) // packing.rows * packing.images, packing.tokens),
        *(heads, head_dim, x.dtype.name),
        change=change.qkv.for_kernel,
        relative=change.relative_kind,
        unsupported_scores=not change.fits_kernel,
    )

    def plain(attention: Attention) -> Callable[[Rows, QKVKernel, QKVBias], Rows]:
        return lambda x, kernel, bias: attention(x, kernel, bias, packing, change)[0]

    def repacked(x: Rows, kernel: QKVKernel, bias: QKVBias) -> Rows:
        suited = choose_packing("fused", sizes)
        return suited.repack(fused(packing.repack(x, suited), kernel, bias, suited, change), packing)

    otherwise = plain(_projected(tokens_first))
    return jax.lax.platform_dependent(
        *(x, kernel, bias),
        cpu=plain(_projected(heads_first)),
        tpu=repacked if choose_shape(sizes, traced_device_kind()) else otherwise,
        default=otherwise,
    )


ATTENTIONS: dict[AttentionKind, Attention] = {
    "auto": _with_plain_weights(auto),
    "heads_first": _projected(heads_first),
    "tokens_first": _projected(tokens_first),
    "fused": _with_plain_weights(fused),
    "cudnn": cudnn,
}


def choose_packing(kind: AttentionKind, sizes: AttentionSizes, device_kind: str | None = None) -> Packing:
    """Returns the packing in which an implementation of attention needs the tokens of the images.

    Args:
        kind: the implementation of attention.
        sizes: the sizes of the attention on one device.
        device_kind: the kind of device, as JAX names it; None: that of the devices for which a model is traced.
    """
    tokens = sizes.tokens
    if kind == "fused":
        device_kind = device_kind or traced_device_kind()
        shape = choose_shape(sizes, device_kind)
        alone = Packing(tokens, 1, kernels.round_up(tokens, kernels.ROW_TILE), choose_division(device_kind))
        return shape.packing if shape else alone
    # cuDNN's backward pass refuses odd numbers of rows.
    return Packing(tokens, 1, kernels.round_up(tokens, 2) if kind == "cudnn" else tokens)


def _scaled(x: Array) -> Array:
    return x * x.shape[-1] ** -0.5
