"""The attention kernel, interpreted, against plain attention in float64: results and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.packings import choose_packing
from vit_jax import kernels
from vit_jax.kernels import Packing, attention_shape

# Errors, as parts of the largest value: of results, of gradients of the projections, and of the bias.
LIMITS = {"float32": (3e-6, 2e-6, 5e-6), "bfloat16": (4e-3, 8e-3, 8e-3)}
EXTREME = (2e-6, 4e-3, 4e-3)

# (images, tokens, heads, head_dim, dtype). Images are alone in their rows or share them, with rows left over or not.
QUICK = [
    (8, 9, 3, 8, "float32"),  # eight share 72 rows
    (2, 50, 3, 64, "bfloat16"),  # two share 104 rows; a group of heads does not fill its lanes
    (1, 197, 1, 80, "float32"),
]
PAIRS = ((1, 9), (8, 50), (2, 196), (1, 197), (8, 257))  # images, tokens
SLOW = [
    (3, 9, 3, 8, "float32"),  # alone, three in a step of the grid
    (8, 5, 3, 8, "float32"),  # fewer tokens than a tile of memory has rows
    *((batch, tokens, 3, 64, dtype) for batch, tokens in PAIRS for dtype in LIMITS),
    *((2, 50, heads, size, dtype) for heads, size in ((5, 8), (5, 24), (3, 80), (2, 88), (3, 104)) for dtype in LIMITS),
    *((1, 197, heads, 128, dtype) for heads in (1, 2) for dtype in LIMITS),
    *((1, 577, heads, 64, dtype) for heads in (3, 6) for dtype in LIMITS),
    *((8, tokens, 3, 64, dtype) for tokens in (1, 2, 4, 7) for dtype in LIMITS),
    (1, 1370, 3, 64, "float32"),  # in bfloat16, CPUs have no products of this size
    (1, 257, 16, 80, "bfloat16"),
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


def exact_attention(qkv, heads, cotangent):
    """Returns the attended values of images and the gradient of qkv, in float64."""
    images, tokens, wide = qkv.shape
    query, key, value = np.moveaxis(qkv.astype(np.float64).reshape(images, tokens, 3, heads, -1), 2, 0)
    scale = query.shape[-1] ** -0.5
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) * scale
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
    return attended.reshape(images, tokens, wide // 3), grads.reshape(qkv.shape)


def normal(seed, shape, dtype="float32"):
    """Normal numbers, drawn by NumPy, as JAX compiles a program for each shape."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype)))


def random_images(images, tokens, heads, head_dim, dtype="float32"):
    return normal(0, (images, tokens, 3 * heads * head_dim), dtype)


def pack(packing, x, empty=0.0):
    return packing.pack(x, empty).reshape(-1, packing.rows, x.shape[-1])


def rows_of_images(packing, x):
    """The result of `unpack`, for a NumPy array."""
    tokens = x[:, : packing.images * packing.tokens]
    return tokens.reshape(-1, packing.tokens, x.shape[-1])


def unpack(packing, x):
    return packing.unpack(jnp.asarray(x).reshape(-1, x.shape[-1]))


def interpret(images, bias, packing, heads, cotangent):
    """Returns what the kernels compute: attended values, and the gradients of projections and bias, in packs."""

    def run(images, bias, cotangent):
        packed = pack(packing, images, 1e4)
        attended, transpose = jax.vjp(lambda *args: kernels.fused_attention(*args, packing, heads), packed, bias)
        grads = transpose(pack(packing, cotangent))
        return jax.tree.map(lambda x: x.astype(jnp.float32), (attended, *grads))

    with kernels.interpret_kernels():
        return [np.asarray(x) for x in jax.jit(run)(images, bias, cotangent)]


def assert_exact(images, heads, limits, division=kernels.NARROW):
    """Whatever is in the empty rows, and these get no gradient."""
    packing = choose_packing(images.shape[1], heads, len(images), division)
    bias = np.asarray(normal(2, images.shape[2:])) * (limits != EXTREME)
    cotangent = normal(1, (*images.shape[:2], images.shape[2] // 3), images.dtype)
    found = interpret(images, bias, packing, heads, cotangent)
    exact, exact_grad = exact_attention(np.asarray(images) + bias.astype(images.dtype), heads, np.asarray(cotangent))
    attended, grad = (rows_of_images(packing, x) for x in found[:2])
    assert_close(attended, exact, limits[0])
    assert_close(grad, exact_grad, limits[1])
    assert_close(found[2], exact_grad.sum((0, 1)), limits[2])
    assert np.isfinite(found[0]).all()
    assert not found[1][:, packing.images * packing.tokens :].any()


def assert_close(found, exact, limit):
    np.testing.assert_allclose(found, exact, rtol=0, atol=limit * np.abs(exact).max())


@pytest.mark.parametrize(("images", "tokens", "heads", "head_dim", "dtype"), CASES)
def test_equals_plain_attention_in_float64(images, tokens, heads, head_dim, dtype):
    assert_exact(random_images(images, tokens, heads, head_dim, dtype), heads, LIMITS[dtype])


def test_images_share_rows_where_that_leaves_fewer_empty():
    """A step of the grid can take all of these images."""
    larger = kernels.Division(registers=2600)

    def chosen(*sizes):
        packing = choose_packing(*sizes)
        assert sizes[2] % packing.images == 0 and packing.rows >= packing.images * packing.tokens
        return packing.images, packing.rows

    assert chosen(196, 12, 128) == (2, 392) and chosen(49, 12, 512) == (8, 392) and chosen(256, 16, 32) == (1, 256)
    assert chosen(196, 12, 3) == (1, 200) and chosen(197, 12, 128) == (1, 200) and chosen(197, 6, 128) == (4, 792)
    assert chosen(1370, 16, 8) == (1, 1376)
    assert chosen(196, 16, 64) == (1, 200) and chosen(196, 16, 64, larger) == (2, 392)
    assert chosen(197, 12, 128, larger) == (4, 792)


@pytest.mark.parametrize("sharing", [2, 8])
def test_what_is_no_number_stays_in_its_image(sharing):
    images = random_images(sharing, 9, 2, 16)
    packing = choose_packing(9, 2, sharing)
    assert packing.images == sharing
    run = jax.jit(lambda x: kernels.fused_attention(pack(packing, x), jnp.zeros(96), packing, 2))
    with kernels.interpret_kernels():
        expected, found = (np.array(unpack(packing, run(x))) for x in (images, images.at[1].set(jnp.nan)))
    assert np.isnan(found[1]).all()
    found[1] = expected[1]
    np.testing.assert_array_equal(found, expected)


def test_steps_over_the_queries(monkeypatch):
    """Long sequences need such steps; the last block of queries overlaps the one before it."""
    monkeypatch.setattr(attention_shape, "MAX_STEP_REGISTERS", 1)
    packing = choose_packing(197, 2, 2)
    assert attention_shape.make_shape((2, 200, 384), packing, 2, 4).query_steps == 2
    assert_exact(random_images(2, 197, 2, 64), 2, LIMITS["float32"])


@pytest.mark.parametrize(
    ("tokens", "images", "registers", "expected"),
    [
        (197, 4, 2600, (256, 1)),  # four images share their rows, and one tile has all queries of an image
        pytest.param(400, 1, 1, (256, 2), marks=pytest.mark.slow),  # the second block overlaps the first
        (9, 8, 2600, (128, 1)),
        (257, 1, 2600, (128, 1)),  # 512 queries instead of 384
    ],
)
def test_tiles_of_256_queries(tokens, images, registers, expected, monkeypatch):
    """The tiles of v6e are taken unless they would compute many more queries than tiles of 128."""
    monkeypatch.setattr(attention_shape, "MAX_STEP_REGISTERS", min(registers, attention_shape.MAX_STEP_REGISTERS))
    wide = kernels.Division(256, registers)
    packing = choose_packing(tokens, 2, images, wide)
    shape = attention_shape.make_shape((1, packing.rows, 384), packing, 2, 4)
    assert packing.images == (images if registers > 1 else 1)
    assert (shape.queries, shape.query_steps) == expected
    if shape.queries == 256:
        assert_exact(random_images(images, tokens, 2, 64), 2, LIMITS["float32"], wide)


@pytest.mark.parametrize(
    ("images", "tokens", "heads", "expected"),
    [(128, 196, 12, 4), (512, 49, 12, 1), (256, 196, 3, 8)],  # the last fills the lanes of 4 heads
)
def test_how_many_packs_share_a_step(images, tokens, heads, expected):
    packing = choose_packing(tokens, heads, images, kernels.Division(registers=5200))
    qkv = images // packing.images, packing.rows, 3 * heads * 64
    assert attention_shape.make_shape(qkv, packing, heads, 4).packs == expected


@pytest.mark.slow
def test_extreme_scores():
    """Scores of ±1e4, some of them equal: float32 then holds an exponent to 1e-3."""
    qkv = np.asarray(random_images(1, 9, 2, 16)).copy().reshape(1, 9, 3, 2, 16)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (1, 9, 2, 16))
    qkv[:, :, :2] = 50 * signs[:, :, None]  # scores from -1e4 to 1e4
    qkv[:, 3, :2] = qkv[:, 2, :2]
    assert_exact(jnp.asarray(qkv.reshape(1, 9, -1)), 2, EXTREME)


@pytest.mark.slow
def test_plain_form_equals_the_kernel():
    """Also under `vmap`, and where an array is not traced."""
    images, alone = random_images(4, 9, 2, 16), Packing(9, 1, 16)
    qkv, expected = pack(alone, images), exact_attention(np.asarray(images), 2, np.ones((4, 9, 32)))[0]
    apply = lambda x: kernels.fused_attention(x, jnp.zeros(96), alone, 2)  # noqa: E731
    mapped = jax.vmap(lambda x: apply(x[None])[0])
    np.testing.assert_allclose(unpack(alone, apply(qkv)), expected, atol=2e-6)
    np.testing.assert_allclose(unpack(alone, mapped(qkv)), expected, atol=2e-6)
    shared = choose_packing(9, 2, 4)
    packed = kernels.fused_attention(pack(shared, images), jnp.zeros(96), shared, 2)
    np.testing.assert_allclose(unpack(shared, packed), expected, atol=2e-6)
    with kernels.interpret_kernels():
        np.testing.assert_allclose(unpack(alone, mapped(qkv)), expected, atol=2e-6)
    gradients = [jax.grad(lambda x, f=f: (f(x)[:, :9] ** 2).sum())(qkv) for f in (apply, mapped)]
    np.testing.assert_allclose(*gradients, atol=2e-6)


def test_eager_use_compiles_once(caplog):
    qkv, packing = random_images(1, 16, 2, 8), Packing(9, 1, 16)

    def compiles(scale):
        caplog.clear()
        with jax.log_compiles():
            jax.grad(lambda x: kernels.fused_attention(x, jnp.ones(48), packing, 2).sum())(qkv * scale)
        return "Compiling" in caplog.text

    assert compiles(1.0) and not compiles(2.0)
