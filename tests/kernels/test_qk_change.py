"""Norms and rotation of queries and keys in the attention kernel, interpreted, against float64."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.packings import choose_packing
from tests.kernels.test_attention_kernel import LIMITS, assert_close, pack, unpack
from vit_jax import kernels
from vit_jax.execution import tpu
from vit_jax.kernels import attention_shape
from vit_jax.models import AttentionExtras, NormParameters, PlainOps, softmax_attention

EPSILON = 1e-6
# (images, tokens, heads, head_dim, dtype, norms, rotation)
QUICK = [
    (8, 9, 3, 8, "float32", True, True),  # eight share 72 rows
    (2, 50, 3, 64, "bfloat16", True, True),  # two share 104 rows; a group of heads does not fill its lanes
]
SLOW = [
    *((2, 50, 2, 64, dtype, norms, not norms) for norms in (True, False) for dtype in LIMITS),
    (3, 17, 3, 80, "float32", True, True),
    (1, 197, 2, 128, "bfloat16", True, True),
    (1, 1, 2, 64, "float32", True, True),
    (1, 1370, 1, 80, "bfloat16", True, True),
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


def norms_of(rows):
    return tuple(NormParameters("layer", scale, bias, EPSILON) for scale, bias in rows)


def check(images, tokens, heads, head_dim, dtype, norms, rotates):
    random = np.random.default_rng(0)
    width = heads * head_dim
    qkv = jnp.asarray(random.normal(size=(images, tokens, 3 * width)), dtype)
    bias, cotangent = random.normal(size=3 * width), jnp.asarray(random.normal(size=(images, tokens, width)), dtype)
    rows = tuple(map(tuple, random.normal(1, 0.5, size=(2, 2, head_dim)))) if norms else ()
    angles = random.normal(size=(tokens, head_dim // 2)) if rotates else None
    packing = choose_packing(tokens, heads, images)

    def ours(qkv, bias, rows):
        change = AttentionExtras(norms_of(rows), angles)
        tables = tpu.kernel_tables(change, tpu.norm_rows(change), packing, heads, head_dim)
        attended = kernels.fused_attention(
            pack(packing, qkv, 1e4), bias, packing, heads, tpu.kernel_change(change), tables=tables
        )
        return unpack(packing, attended)

    def exact(qkv, bias, rows):
        parts = (qkv + bias.astype(qkv.dtype)).reshape(images, tokens, 3, heads, head_dim)
        return attend_exactly(parts, rows, angles).reshape(images, tokens, width)

    found = differentiate(ours, (qkv, bias, rows), jnp.float32, cotangent)
    with jax.enable_x64(True):
        rounded = qkv.astype(jnp.float64), bias, rows
        expected = differentiate(exact, rounded, jnp.float64, cotangent.astype(jnp.float64))
    assert_close(found[0], expected[0], 2 * LIMITS[dtype][0])
    (*own, own_norms), (*others, norms) = found[1], expected[1]
    for one, other in zip(own, others, strict=True):
        assert_close(one, other, 2 * LIMITS[dtype][1])
    # Some of these are zero, such as that of a key's bias without a rotation: all have one scale.
    for one, other in zip(jax.tree.leaves(own_norms), jax.tree.leaves(norms), strict=True):
        limit = 2 * LIMITS[dtype][2] * max(np.abs(leaf).max() for leaf in (*jax.tree.leaves(norms), others[1]))
        np.testing.assert_allclose(one, other, rtol=0, atol=limit)


def differentiate(function, arguments, dtype, cotangent, interpret=True):
    def run(arguments, cotangent):
        value, transpose = jax.vjp(function, *arguments)
        return value, transpose(cotangent)

    qkv, *rest = arguments
    rest = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), rest)
    with kernels.interpret_kernels() if interpret else contextlib.nullcontext():
        return jax.jit(run)((qkv, *rest), cotangent)


def attend_exactly(parts, rows, angles, relative=None):
    query, key, value = (parts[:, :, index] for index in range(3))
    changed = []
    for index, x in enumerate((query, key)):
        if rows:
            scale, bias = rows[index]
            x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale + bias
        if angles is not None:
            turns = jnp.exp(1j * angles)[:, None]
            turned = (x[..., ::2] + 1j * x[..., 1::2]) * turns
            x = jnp.stack([turned.real, turned.imag], -1).reshape(x.shape)
        changed.append(x)
    query, key = changed
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    if relative is not None:
        scores += jnp.einsum("bqhd,hqkd->bhqk" if relative.ndim == 4 else "bqhd,qkd->bhqk", query, relative)
    weights = jax.nn.softmax(scores * query.shape[-1] ** -0.5)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


@pytest.mark.parametrize(("images", "tokens", "heads", "head_dim", "dtype", "norms", "rotates"), CASES)
def test_equals_changed_attention_in_float64(images, tokens, heads, head_dim, dtype, norms, rotates):
    check(images, tokens, heads, head_dim, dtype, norms, rotates)


def test_steps_over_the_queries(monkeypatch):
    """Changed once, in the first step; gradients are changed back in the last one."""
    monkeypatch.setattr(attention_shape, "MAX_STEP_REGISTERS", 1)
    packing = choose_packing(197, 2, 2)
    assert attention_shape.make_shape((2, 200, 384), packing, 2, 4).query_steps == 2
    check(2, 197, 2, 64, "float32", True, True)


def test_the_plain_form_is_the_same():
    """Which runs where the kernel cannot."""
    random = np.random.default_rng(0)
    qkv, rows = random.normal(size=(2, 9, 3, 2, 16)), random.normal(size=(2, 2, 16))
    angles, packing = random.normal(size=(9, 8)), choose_packing(9, 2, 2)

    @jax.jit
    def both(qkv, rows):
        change = AttentionExtras(norms_of(rows), angles)
        tables = tpu.kernel_tables(change, tpu.norm_rows(change), packing, 2, 16)
        packed = pack(packing, tpu.centred(qkv).reshape(2, 9, -1))
        found = kernels.fused_attention(packed, jnp.zeros(96), packing, 2, tpu.kernel_change(change), tables=tables)
        return unpack(packing, found), softmax_attention(change.normalised_and_rotated(qkv, PlainOps().norm))[0]

    found, expected = both(qkv.astype(np.float32), rows.astype(np.float32))
    np.testing.assert_allclose(found, expected, atol=1e-5)
