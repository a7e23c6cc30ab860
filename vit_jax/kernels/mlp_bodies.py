"""The bodies of the MLP's kernels, for the rows of one step of their grid, and their plain forms, for all rows."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from vit_jax.kernels.gelu import gelu_and_share, gelu_and_slope
from vit_jax.kernels.matrix_products import dot, dot_transposed, transposed_dot
from vit_jax.kernels.mlp_shape import MlpShape
from vit_jax.kernels.packing import ROW_TILE

Rows: TypeAlias = Float[Array, "rows width"]
Hidden: TypeAlias = Float[Array, "rows mlp"]
Widening: TypeAlias = Float[Array, "width mlp"]
Narrowing: TypeAlias = Float[Array, "mlp width"]
WidthRow: TypeAlias = Float[Array, "1 width"]
HiddenRow: TypeAlias = Float[Array, "1 mlp"]


def _normalize(x: Array, epsilon: float) -> tuple[Array, Array]:
    """Returns (x - mean) / sqrt(variance + epsilon) in float32, and the factor of that division."""
    x = x.astype(jnp.float32)
    mean = x.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.maximum((x * x).mean(-1, keepdims=True) - mean * mean, 0) + epsilon)
    return (x - mean) * inverse, inverse


def _norm_gradient(normal: Array, inverse: Array, scale: Array, grad: Array) -> Array:
    """Returns the gradient of a LayerNorm's operand, given that of its result, in float32."""
    inner = grad * scale
    return inverse * (inner - inner.mean(-1, keepdims=True) - normal * (inner * normal).mean(-1, keepdims=True))


def forward_plain(
    shape: MlpShape,
    x: Rows,
    kernel1: Widening,
    kernel2: Narrowing,
    scale: WidthRow,
    bias: WidthRow,
    bias1: HiddenRow,
    bias2: WidthRow,
) -> list[Array]:
    """Returns the result, and the hidden channels before their activation."""
    normal = (_normalize(x, shape.epsilon)[0] * scale + bias).astype(x.dtype)
    hidden = (dot(normal, kernel1) + bias1).astype(x.dtype)
    return [(x + (dot(gelu_and_share(hidden)[0], kernel2) + bias2)).astype(x.dtype), hidden]


def backward_plain(
    shape: MlpShape,
    x: Rows,
    grad: Rows,
    hidden: Hidden,
    kernel1: Widening,
    kernel2: Narrowing,
    scale: WidthRow,
    bias: WidthRow,
) -> list[Array]:
    """Returns the gradients of the rows and of both kernels, and partial sums of those of scale, bias, bias1, bias2."""
    normal, inverse = _normalize(x, shape.epsilon)
    active, slope = gelu_and_slope(hidden)
    grad_hidden = dot_transposed(grad, kernel2) * slope
    sums = _sums(grad_hidden), _sums(grad.astype(jnp.float32))
    grad_hidden = grad_hidden.astype(x.dtype)
    grad_normal = dot_transposed(grad_hidden, kernel1)
    grad_x = grad + _norm_gradient(normal, inverse, scale, grad_normal)
    grad1 = transposed_dot((normal * scale + bias).astype(x.dtype), grad_hidden)
    grad2 = transposed_dot(active, grad)
    kernels = (each.astype(shape.grad_dtype) for each in (grad1, grad2))
    return [grad_x.astype(x.dtype), *kernels, _sums(grad_normal * normal), _sums(grad_normal), *sums]


def _sums(x: Array) -> Array:
    """Returns sums of rows: as many partial ones as a tile has rows, which need no operation across the tile."""
    tile = ROW_TILE if len(x) % ROW_TILE == 0 else 1
    return jnp.pad(x.reshape(-1, tile, x.shape[-1]).sum(0), ((0, ROW_TILE - tile), (0, 0)))


def _only_rows(shape: MlpShape, x: Array) -> Array:
    """Returns the rows of a step with zeros in those after the last row, where nothing was loaded."""
    if not shape.last_rows:
        return x
    count = jnp.where(pl.program_id(0) == pl.num_programs(0) - 1, shape.last_rows, shape.rows)
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) < count, x, jnp.zeros_like(x))


def forward_kernel(
    shape: MlpShape,
    x: Any,
    kernel1: Any,
    kernel2: Any,
    scale: Any,
    bias: Any,
    bias1: Any,
    bias2: Any,
    y: Any,
    hidden: Any,
) -> None:
    """Computes the rows of a step, and their hidden channels before the activation."""
    rows = x[...]
    normal = (_normalize(rows, shape.epsilon)[0] * scale[...] + bias[...]).astype(rows.dtype)
    total = rows.astype(jnp.float32) + bias2[...]
    for columns in shape.columns(kernel1.shape[1]):
        hidden[:, columns] = (dot(normal, kernel1[:, columns]) + bias1[:, columns]).astype(rows.dtype)
        total += dot(gelu_and_share(hidden[:, columns])[0], kernel2[columns, :])
    y[...] = total.astype(y.dtype)


def backward_kernel(
    shape: MlpShape,
    x: Any,
    grad: Any,
    hidden: Any,
    kernel1: Any,
    kernel2: Any,
    scale: Any,
    bias: Any,
    grad_x: Any,
    grad1: Any,
    grad2: Any,
    scale_sums: Any,
    bias_sums: Any,
    bias1_sums: Any,
    bias2_sums: Any,
    total1: Any,
    total2: Any,
) -> None:
    """Computes the gradient of the rows of a step, and adds what the step contributes to those of the parameters.

    The gradients of the kernels are summed in `total1` and `total2`, and rounded after the last step.
    """

    @pl.when(pl.program_id(0) == 0)
    def _start() -> None:
        for each in (scale_sums, bias_sums, bias1_sums, bias2_sums, total1, total2):
            each[...] = jnp.zeros_like(each)

    rows, upstream = _only_rows(shape, x[...]), _only_rows(shape, grad[...])
    normal, inverse = _normalize(rows, shape.epsilon)
    transposed = (normal * scale[...] + bias[...]).astype(rows.dtype).T
    grad_normal = jnp.zeros(rows.shape, jnp.float32)
    for columns in shape.columns(kernel1.shape[1]):
        active, slope = gelu_and_slope(_only_rows(shape, hidden[:, columns]))
        grad_hidden = slope.astype(jnp.float32) * dot_transposed(upstream, kernel2[columns, :])
        bias1_sums[:, columns] += _sums(grad_hidden)
        grad_hidden = grad_hidden.astype(rows.dtype)
        total2[columns, :] += transposed_dot(active, upstream)
        grad_normal += dot_transposed(grad_hidden, kernel1[:, columns])
        total1[:, columns] += dot(transposed, grad_hidden)
    wide = upstream.astype(jnp.float32)
    bias2_sums[...] += _sums(wide)
    scale_sums[...] += _sums(grad_normal * normal)
    bias_sums[...] += _sums(grad_normal)
    grad_x[...] = (wide + _norm_gradient(normal, inverse, scale[...], grad_normal)).astype(grad_x.dtype)

    @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
    def _finish() -> None:
        grad1[...] = total1[...].astype(grad1.dtype)
        grad2[...] = total2[...].astype(grad2.dtype)
