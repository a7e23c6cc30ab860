"""Attention in patterns: against loops in float64, on several devices, and what they cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from tests.models.test_models import apply, images_of, params_of
from tests.test_sharding import on, trained
from vit_jax import UserError, interop
from vit_jax.execution import attention_kinds
from vit_jax.execution.sparse_attention import Blocks, attend_in_pattern, pattern_parts
from vit_jax.macs import macs_per_image
from vit_jax.model import create
from vit_jax.models.pattern import RULES, attended_pairs, block_length
from vit_jax.training import run_summary

# Pattern, window, (rows, columns): also windows that divide neither.
CASES = [
    ("local", 3, (4, 5)),
    ("local", 0, (3, 4)),
    ("local2d", 2, (5, 7)),
    ("local2d", 3, (3, 3)),
    ("strided", 4, (4, 4)),
    ("strided", 5, (3, 4)),
    ("fixed", 4, (4, 4)),
    ("fixed", 9, (4, 5)),
]

USUAL = {("local2d", 2, (5, 7), 2), ("strided", 5, (3, 4), 0), ("fixed", 9, (4, 5), 2)}


@pytest.fixture(autouse=True)
def in_blocks(monkeypatch):
    """Few tokens, too, are computed in blocks."""
    monkeypatch.setattr(attention_kinds, "IN_BLOCKS", 0)


def model_of(pattern, window, grid, **fields):
    size = tuple(8 * side for side in grid)
    return create("ViT-mu/8", resolution=size, attention_pattern=pattern, attention_window=window, **fields)


def attends(pattern, window, columns, query, key):
    """Whether one patch attends to another, each given by its number."""
    row, column, key_row, key_column = query // columns, query % columns, key // columns, key % columns
    match pattern:
        case "local":
            return query // window - 1 <= key // window <= query // window + 1
        case "local2d":
            return abs(row // window - key_row // window) < 2 and abs(column // window - key_column // window) < 2
        case "strided":
            return query - window < key < query + window or query % window == key % window
        case "fixed":
            return query // window == key // window or key % window in range(window - -(-window // 8), window)


def by_loops(qkv, pattern, window, columns, prefix):
    """The attention of equation 7 in float64, over the keys that each query has."""
    batch, tokens, _, heads, width = qkv.shape
    found = np.zeros((batch, tokens, heads, width))
    for query in range(tokens):
        keys = [
            key
            for key in range(tokens)
            if min(query, key) < prefix or attends(pattern, window, columns, query - prefix, key - prefix)
        ]
        scores = np.einsum("bhd,bkhd->bhk", qkv[:, query, 0], qkv[:, keys, 1]) / np.sqrt(width)
        found[:, query] = np.einsum("bhk,bkhd->bhd", scipy.special.softmax(scores, -1), qkv[:, keys, 2])
    return found


def gradient_by_loops(qkv, grad, *case):
    """The derivative of the sum of `grad` times the result, by central differences along random directions."""
    random = np.random.default_rng(1)
    directions = random.standard_normal((3, *qkv.shape))
    step = 1e-6
    return directions, [
        ((by_loops(qkv + step * one, *case) - by_loops(qkv - step * one, *case)) * grad).sum() / (2 * step)
        for one in directions
    ]


def differentiate(spec, qkv, grad):
    found, transpose = jax.vjp(lambda qkv: attend_in_pattern(spec, qkv), qkv)
    return found, transpose(grad)[0]


@pytest.mark.parametrize(
    ("pattern", "window", "grid", "prefix"),
    [
        pytest.param(*case, prefix, marks=() if (*case, prefix) in USUAL else pytest.mark.slow)
        for case in CASES
        for prefix in (0, 2)
    ],
)
def test_result_and_gradient_are_those_of_loops(pattern, window, grid, prefix):
    fields = {"registers": 1} if prefix else {"pooling": "gap"}
    spec = model_of(pattern, window, grid, num_heads=2, **fields).vit
    assert spec.prefix_rows == prefix
    random = np.random.default_rng(0)
    qkv = random.standard_normal((2, spec.tokens, 3, 2, spec.head_dim))
    grad = random.standard_normal((2, spec.tokens, 2, spec.head_dim))
    case = pattern, block_length(spec), grid[1], prefix
    with jax.enable_x64(True):
        found, derivative = jax.jit(functools.partial(differentiate, spec))(jnp.asarray(qkv), jnp.asarray(grad))
    np.testing.assert_allclose(found, by_loops(qkv, *case), rtol=0, atol=2e-6)  # sums are in float32
    directions, expected = gradient_by_loops(qkv, grad, *case)
    np.testing.assert_allclose(
        [(np.asarray(derivative) * one).sum() for one in directions], expected, rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize(("pattern", "window", "grid"), CASES)
def test_each_pair_is_in_one_part(pattern, window, grid):
    spec = model_of(pattern, window, grid, pooling="gap").vit
    counted = np.zeros((spec.tokens, spec.tokens), int)
    for part in pattern_parts(spec):
        if isinstance(part, Blocks):
            places = part.arrange(np.arange(spec.tokens)[None, None], -1)
            keys = np.concatenate(part.around(places, -1), axis=-1)
            pairs = np.broadcast_arrays(places[0, 0][..., None], keys[0, 0][..., None, :], part.mask())
            query, key, mask = (array.ravel() for array in pairs)
            np.add.at(counted, (query[mask], key[mask]), 1)
        else:
            counted[:, part.keys] += part.mask
    expected = [
        [attends(pattern, block_length(spec), grid[1], query, key) for key in range(spec.tokens)]
        for query in range(spec.tokens)
    ]
    assert (counted == np.array(expected, int)).all() and (attended_pairs(spec) == expected).all()


PATTERNS = [name if name == "strided" else pytest.param(name, marks=pytest.mark.slow) for name in RULES]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_blocks_give_what_the_plain_form_gives_of_a_mask(pattern):
    fields = {"depth": 2, "registers": 1, "rotary": "axial"}
    model, plain = (model_of(pattern, 3, (4, 5), **fields, attention=kind) for kind in ("auto", "tokens_first"))
    params, images = params_of(model), images_of(2, 32, 40, 3)

    def run(model):
        logits, out = jax.jit(lambda *args: model.apply(*args, capture=("attention",)))(params, images)
        return logits, out["attention"]

    (found, weights), (expected, of_plain) = run(model), run(plain)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(weights, of_plain, rtol=1e-4, atol=1e-6)
    assert ((np.asarray(weights) > 0) == attended_pairs(model.vit)).all()


def test_relative_positions_are_those_of_the_pairs_that_attend():
    model = model_of("local", 3, (4, 5), position="relative", depth=1)
    weights = apply(model, params_of(model), images_of(2, 32, 40, 3), capture=("attention",))[1]["attention"]
    assert ((np.asarray(weights) > 0) == attended_pairs(model.vit)).all()


def test_what_is_multiplied(monkeypatch):
    """Counted by hand, for 8 x 8 patches in blocks of 4, and a class token."""
    full, local = (model_of(pattern, window, (8, 8), depth=1) for pattern, window in (("full", 0), ("local", 4)))
    spec = full.vit
    channels, saved = spec.width, 64 * 64 - 64 * 3 * 4
    assert macs_per_image(full) - macs_per_image(local) == 2 * channels * saved
    monkeypatch.setattr(attention_kinds, "IN_BLOCKS", 1024)  # so few are masked
    assert macs_per_image(full) == macs_per_image(local)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", RULES)
def test_training_on_8_devices_is_that_on_one(tiny, pattern):
    changes = {"depth": 2, "dropout_rate": 0.0, "stochastic_depth": 0.0}
    tiny.model.update(changes | {"attention_pattern": pattern, "attention_window": 2})
    tiny.task.mixup = 0.0
    expected = trained(on({}, tiny))
    found = trained(on({"fsdp": 4, "tensor": 2}, tiny), expected.start)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)


def test_files_are_ours_alone(tmp_path):
    model = model_of("local2d", 2, (4, 4))
    params = params_of(model)
    interop.save(tmp_path / "model.npz", model, params)
    loaded, _ = interop.load(tmp_path / "model.npz")
    assert loaded == model
    for layout, suffix in (("google", ".npz"), ("big_vision", ".npz"), ("timm", ".safetensors"), ("huggingface", "")):
        with pytest.raises(UserError, match="attention_pattern local2d"):
            interop.save(tmp_path / f"other{suffix}", model, params, layout=layout)


def test_a_run_says_that_no_kernel_computes_it():
    model = create("ViT-B/16", dtype="bfloat16", attention_pattern="strided")
    found = {}
    for platform, kind in (("tpu", "TPU v5e"), ("gpu", "NVIDIA H100"), ("cpu", "cpu")):
        chosen = model.for_device(kind, 8)
        found[platform] = chosen.field("attention"), run_summary.lacks_kernel(chosen, platform)
    assert found == {
        "tpu": ("auto", run_summary.NO_PATTERN),
        "gpu": ("auto", run_summary.NO_PATTERN),
        "cpu": ("auto", None),
    }


def test_a_run_says_that_a_chip_has_too_little_memory_for_the_kernel(tiny):
    model = create("ViT-B/16", dtype="bfloat16", resolution=384)

    def reason(kind):
        return run_summary.lacks_memory(tiny, model, kind, images=128)

    assert reason("TPU v4") == run_summary.NO_MEMORY
    assert not any(map(reason, ("TPU v5 lite", "TPU v3", "cpu")))  # v3: there is no kernel for it
    tiny.model.attention = "tokens_first"
    assert not reason("TPU v4")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"attention_pattern": "lokal"}, "did you mean 'local'"),
        ({"attention_window": 7}, "attention_window=7 must be 0 or more, and 0 for attention_pattern full"),
        ({"attention_pattern": "local", "attention_window": -1}, "attention_window=-1 must be 0 or more"),
        ({"attention_pattern": "local2d"}, "local2d needs attention_window"),
        ({"attention_pattern": "local2d", "attention_window": 15}, "attention_window must be at most 14, not 15"),
        ({"attention_pattern": "fixed", "attention_window": 197}, "attention_window must be at most 196, not 197"),
        ({"attention_pattern": "fixed", "attention": "fused"}, "attention fused computes no attention_pattern"),
        ({"attention_pattern": "fixed", "block": "axial", "pooling": "gap"}, "have a pattern of their own"),
    ],
)
def test_mistakes_are_reported(fields, sentence):
    with pytest.raises(UserError, match=sentence):
        create("ViT-B/16", **fields)
