"""The attention kernel, interpreted, against plain attention in float64: results and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import kernels
from vit_jax.kernels import tiles

# Errors, as parts of the largest value: of results, of gradients of the projections, and of the bias.
LIMITS = {"float32": (2e-6, 2e-6, 5e-6), "bfloat16": (4e-3, 8e-3, 8e-3)}
EXTREME = (2e-6, 4e-3, 4e-3)

# (batch, tokens, heads, head_dim, dtype). 50, 196 and 577 tokens leave rows without tokens.
QUICK = [
    (3, 9, 3, 8, "float32"),  # three images in a step of the grid
    (1, 50, 3, 64, "bfloat16"),  # a group of heads that does not fill its lanes
    (1, 197, 1, 80, "float32"),
]
SLOW = [
    *((batch, tokens, 3, 64, dtype) for batch in (1, 3) for tokens in (9, 50, 196, 197, 257) for dtype in LIMITS),
    *((2, 50, heads, size, dtype) for heads, size in ((5, 8), (5, 24), (3, 80), (2, 88), (3, 104)) for dtype in LIMITS),
    *((1, 197, heads, 128, dtype) for heads in (1, 2) for dtype in LIMITS),
    *((1, 577, heads, 64, dtype) for heads in (3, 6) for dtype in LIMITS),
    (1, 1370, 3, 64, "float32"),  # in bfloat16, CPUs have no products of this size
    (1, 257, 16, 80, "bfloat16"),
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


def exact_attention(qkv, tokens, heads, cotangent):
    """Returns attended values and the gradient of qkv in float64; rows beyond the tokens do not count."""
    batch, rows, wide = qkv.shape
    query, key, value = np.moveaxis(qkv.astype(np.float64).reshape(batch, rows, 3, heads, -1), 2, 0)
    scale = query.shape[-1] ** -0.5
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) * scale
    scores[..., tokens:] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended = np.einsum("bhqk,bkhd->bqhd", weights, value)
    grad = cotangent.astype(np.float64).reshape(attended.shape)
    weights_grad = np.einsum("bqhd,bkhd->bhqk", grad, value)
    scores_grad = weights * (weights_grad - (weights * weights_grad).sum(-1, keepdims=True)) * scale
    query_grad = np.einsum("bhqk,bkhd->bqhd", scores_grad, key)
    key_grad = np.einsum("bhqk,bqhd->bkhd", scores_grad, query)
    value_grad = np.einsum("bhqk,bqhd->bkhd", weights, grad)
    grads = np.stack([query_grad, key_grad, value_grad], 2)
    return attended.reshape(batch, rows, wide // 3), grads.reshape(qkv.shape)


def padded(tokens):
    return -(-tokens // kernels.ROW_TILE) * kernels.ROW_TILE


def random_qkv(batch, tokens, heads, head_dim, dtype="float32"):
    """Normal values in rows of tokens, and 1e4 in other rows."""
    shape = (batch, padded(tokens), 3 * heads * head_dim)
    return jax.random.normal(jax.random.key(0), shape, dtype).at[:, tokens:].set(1e4)


def random_cotangent(qkv, tokens):
    """Normal values in rows of tokens, and zero in other rows."""
    shape = (*qkv.shape[:2], qkv.shape[2] // 3)
    return jax.random.normal(jax.random.key(1), shape, qkv.dtype).at[:, tokens:].set(0)


def interpret(projected, bias, tokens, heads, cotangent):
    """Returns what the kernels compute: attended values, and the gradients of projections and bias."""

    def run(projected, bias, cotangent):
        attended, transpose = jax.vjp(lambda *args: kernels.fused_attention(*args, tokens, heads), projected, bias)
        return attended, *transpose(cotangent)

    with kernels.interpret_kernels():
        return [np.asarray(x, np.float64) for x in jax.jit(run)(projected, bias, cotangent)]


def assert_exact(projected, tokens, heads, limits):
    """Returns the gradient of the projections."""
    cotangent, bias = random_cotangent(projected, tokens), jax.random.normal(jax.random.key(2), projected.shape[2:])
    if limits == EXTREME:
        bias *= 0
    attended, grad, bias_grad = interpret(projected, bias, tokens, heads, cotangent)
    qkv = (projected + bias.astype(projected.dtype)).at[:, tokens:].set(0)
    exact, exact_grad = exact_attention(np.asarray(qkv), tokens, heads, np.asarray(cotangent))
    assert_close(attended[:, :tokens], exact[:, :tokens], limits[0])
    assert_close(grad[:, :tokens], exact_grad[:, :tokens], limits[1])
    assert_close(bias_grad, exact_grad.sum((0, 1)), limits[2])
    return grad


def assert_close(found, exact, limit):
    np.testing.assert_allclose(found, exact, rtol=0, atol=limit * np.abs(exact).max())


@pytest.mark.parametrize(("batch", "tokens", "heads", "head_dim", "dtype"), CASES)
def test_equals_plain_attention_in_float64(batch, tokens, heads, head_dim, dtype):
    """Whatever is in the rows that are no tokens, and these get no gradient."""
    qkv = random_qkv(batch, tokens, heads, head_dim, dtype)
    grad = assert_exact(qkv, tokens, heads, LIMITS[dtype])
    assert not grad[:, tokens:].any()


def test_steps_over_the_queries(monkeypatch):
    """As for long sequences; the last block of queries overlaps the one before it."""
    monkeypatch.setattr(tiles, "MAX_STEP_REGISTERS", 1)
    qkv = random_qkv(2, 197, 2, 64)
    assert tiles.make_shape(qkv.shape, 197, 2).query_steps == 2
    assert_exact(qkv, 197, 2, LIMITS["float32"])


def test_extreme_scores():
    """Scores of ±1e4, some of them equal: float32 then holds an exponent to 1e-3."""
    qkv = np.asarray(random_qkv(1, 9, 2, 16)).copy().reshape(1, 16, 3, 2, 16)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (1, 9, 2, 16))
    qkv[:, :9, :2] = 50 * signs[:, :, None]  # scores from -1e4 to 1e4
    qkv[:, 3, :2] = qkv[:, 2, :2]
    qkv = jnp.asarray(qkv.reshape(1, 16, -1))
    assert_exact(qkv, 9, 2, EXTREME)


def test_plain_form_equals_the_kernel():
    """Also under `vmap`, and where an array is not traced."""
    qkv = random_qkv(4, 9, 2, 16).at[:, 9:].set(0)
    expected, _ = exact_attention(np.asarray(qkv), 9, 2, np.asarray(random_cotangent(qkv, 9)))
    apply = lambda x: kernels.fused_attention(x, jnp.zeros(96), 9, 2)  # noqa: E731
    mapped = jax.vmap(lambda x: apply(x[None])[0])
    np.testing.assert_allclose(apply(qkv), expected, atol=2e-6)
    np.testing.assert_allclose(mapped(qkv), expected, atol=2e-6)
    with kernels.interpret_kernels():
        np.testing.assert_allclose(mapped(qkv)[:, :9], expected[:, :9], atol=2e-6)
    gradients = [jax.grad(lambda x, f=f: (f(x)[:, :9] ** 2).sum())(qkv) for f in (apply, mapped)]
    np.testing.assert_allclose(*gradients, atol=2e-6)


def test_eager_use_compiles_once(caplog):
    qkv = random_qkv(1, 9, 2, 8)

    def compiles(scale):
        caplog.clear()
        with jax.log_compiles():
            jax.grad(lambda x: kernels.fused_attention(x, jnp.ones(48), 9, 2).sum())(qkv * scale)
        return "Compiling" in caplog.text

    assert compiles(1.0) and not compiles(2.0)
