"""What later ViTs added: against a direct evaluation in float64, in training, on several devices."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from tests.models.test_models import apply, count, images_of, params_of, tiny
from tests.test_sharding import on, trained
from vit_jax import UserError, interop, kernels, models, tree
from vit_jax.model import create, parameter_shapes
from vit_jax.models import PlainOps
from vit_jax.models.mlp import ACTIVATIONS
from vit_jax.models.rotary import ROTARIES

# Every variant at once, on a grid of 4x3 patches.
ALL = {
    "resolution": (32, 24),
    "image_mean": (0.4, 0.5, 0.6),
    "image_std": (0.2, 0.25, 0.3),
    "embed_bias": False,
    "pre_norm": True,
    "registers": 3,
    "position_rows": "class",
    "rotary": "axial",
    "rotary_grid": 6,
    "rotary_theta": 100.0,
    "qk_norm": True,
    "qkv_bias": "query_value",
    "activation": "swiglu",
    "mlp_norm": True,
    "norm_epsilon": 1e-3,
    "layer_scale": 0.5,
    "pooling": "token_gap",
    "final_norm": "pooled",
    "projection": 5,
}
IMAGES = (4, 32, 24, 3)

# Parameters without a head: those of facebookresearch/dinov2 (ViT-S, B and g/14 at 518 pixels) but for the mask token,
# the vision towers of google/siglip-base-patch16-224 and siglip-so400m-patch14-384, and that of
# openai/clip-vit-base-patch32.
DINOV2 = {"resolution": 518, "layer_scale": 1e-5, "num_classes": 0, "activation": "gelu", "norm_epsilon": 1e-6}
SIGLIP = {"pooling": "map", "num_classes": 0}
GIANT = {"width": 1536, "depth": 40, "num_heads": 24, "mlp_dim": 4096, "activation": "swiglu"}
COUNTS = [
    pytest.param("ViT-S/14", DINOV2, 22_056_576 - 384, marks=pytest.mark.slow),
    pytest.param("ViT-B/14", DINOV2, 86_580_480 - 768, marks=pytest.mark.slow),
    ("ViT-B/14", DINOV2 | {"registers": 4, "position_rows": "class"}, 86_580_480 + 3 * 768),
    ("ViT/14", DINOV2 | GIANT, 1_136_480_768 - 1536),
    pytest.param("ViT-B/16", SIGLIP, 92_884_224, marks=pytest.mark.slow),
    ("ViT-So400m/14", SIGLIP | {"resolution": 378}, 428_225_600),
    ("ViT-B/32", {"pre_norm": True, "embed_bias": False, "num_classes": 0}, 87_456_000),
]


@pytest.mark.parametrize(("name", "fields", "parameters"), COUNTS)
def test_parameter_counts(name, fields, parameters):
    assert count(create(name, **fields)) == parameters


def norm(x, leaves, epsilon=ALL["norm_epsilon"]):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * leaves["scale"] + leaves["bias"]


def rotated(x, row, column, scale):
    """The channels of a head as complex numbers, turned by row (first half) and column."""
    quarter = x.shape[-1] // 4
    angles = np.concatenate([place * 100.0 ** (-np.arange(quarter) / quarter) for place in (row, column) * scale])
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def attention(x, p, grid, before, reference):
    """Attention of one image's tokens."""
    q, k, v = np.einsum("td,dshc->shtc", x, p["qkv"]["kernel"])
    q, v = (x + bias[:, None] for x, bias in zip((q, v), p["qkv"]["bias"], strict=True))
    q, k = norm(q, p["query_norm"]), norm(k, p["key_norm"])
    for index, place in enumerate(np.ndindex(*grid)):
        for part in (q, k):
            scale = reference / np.array(grid)
            part[:, before + index] = rotated(part[:, before + index], *np.array(place, float), scale)
    weights = scipy.special.softmax(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]), -1)
    return np.einsum("htc,hcd->td", weights @ v, p["out"]["kernel"]) + p["out"]["bias"]


def evaluate(params, image, grid, registers=3):
    """The logits of the model of `ALL` for one image, in float64."""
    pixels = (image / 2 + 0.5 - ALL["image_mean"]) / ALL["image_std"]
    patches = pixels.reshape(grid[0], 8, grid[1], 8, 3).swapaxes(1, 2).reshape(-1, 8 * 8 * 3)
    position = params["position"]
    x = patches @ params["embed"]["kernel"].reshape(8 * 8 * 3, -1) + position[1:]
    x = np.concatenate([params["cls"][None] + position[:1], params["registers"], x])
    x = norm(x, params["encoder"]["pre_norm"])
    blocks = params["encoder"]["blocks"]
    for layer in range(len(blocks["layer_scale1"])):
        p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], blocks)
        x = x + p["layer_scale1"] * attention(norm(x, p["norm1"]), p["attention"], grid, 1 + registers, 6)
        a, b = (
            norm(x, p["norm2"]) @ p["mlp"]["dense1_gated"]["kernel"][:, part] + p["mlp"]["dense1_gated"]["bias"][part]
            for part in range(2)
        )
        hidden = norm(a * scipy.special.expit(a) * b, p["mlp"]["hidden_norm"])
        x = x + p["layer_scale2"] * (hidden @ p["mlp"]["dense2"]["kernel"] + p["mlp"]["dense2"]["bias"])
    pooled = norm(np.concatenate([x[0], x[1 + registers :].mean(0)]), params["pooled_norm"])
    return pooled @ params["projection"]["kernel"] @ params["head"]["kernel"] + params["head"]["bias"]


@pytest.fixture(scope="module")
def everything():
    """Logits and gradients of the model of `ALL`, whose attention is plain."""
    return run("tokens_first")


def run(attention, **fields):
    model = tiny(**ALL | {"attention": attention} | fields)

    def loss(params):
        logits, _ = model.apply(params, images_of(*IMAGES))
        return (logits**2).mean(), logits

    with jax.default_matmul_precision("highest"):
        (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params_of(model))
    return logits, grads


def test_all_at_once_is_the_direct_evaluation(everything):
    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), params_of(tiny(**ALL)))
    expected = [evaluate(params, np.float64(image), (4, 3)) for image in images_of(*IMAGES)]
    assert np.abs(np.array(expected) - everything[0]).max() < 1e-5 * np.abs(expected).max()


def test_a_model_without_biases_is_one_whose_biases_are_zero():
    without, images = tiny(**ALL | {"dense_bias": False, "qkv_bias": "none"}), images_of(*IMAGES)
    own, whole = tree.flatten(params_of(without)), tree.flatten(params_of(tiny(**ALL)))
    left_out = {re.sub(r"encoder/blocks/", "", name) for name in whole.keys() - own.keys()}
    biased = ("attention/qkv", "attention/out", "mlp/dense1_gated", "mlp/dense2")
    assert left_out == {f"{layer}/bias" for layer in biased}
    zeroed = {name: own.get(name, np.zeros_like(leaf)) for name, leaf in whole.items()}
    expected, _ = apply(tiny(**ALL), tree.unflatten(zeroed), images)
    np.testing.assert_allclose(apply(without, tree.unflatten(own), images)[0], expected, rtol=0, atol=1e-5)


def test_every_parameter_has_a_gradient(everything):
    zero = {name for name, grad in tree.flatten(everything[1]).items() if not np.any(np.abs(grad) > 1e-6)}
    assert zero == set()


@pytest.mark.parametrize(
    "fields",
    [
        {"attention": "heads_first", "scan": True, "remat": "full"},
        pytest.param({"mlp": "shard_map"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ways_to_compute_change_nothing(everything, fields):
    found = run(**{"attention": "tokens_first"} | fields)
    chex.assert_trees_all_close(found, everything, rtol=1e-4, atol=1e-5)


def test_centred_rotation_is_that_of_places_in_the_image():
    """DINOv3's formula, evaluated patch by patch; it does not turn the tokens before the patches."""
    spec = tiny(rotary="centred", rotary_theta=100.0, registers=2, resolution=(32, 24)).spec
    found, quarter = ROTARIES["centred"](spec), spec.head_dim // 4
    assert not found[:3].any()
    for (row, column), angles in zip(np.ndindex(4, 3), found[3:], strict=True):
        places = (row + 0.5) / 4 * 2 - 1, (column + 0.5) / 3 * 2 - 1
        expected = [2 * np.pi * place / 100 ** (pair / quarter) for place in places for pair in range(quarter)]
        np.testing.assert_allclose(angles, expected, atol=1e-12)


def test_axial_xy_is_by_column_and_row_counted_from_one():
    """timm's formula, evaluated patch by patch; the class token stays at (0, 0)."""
    spec = tiny(rotary="axial_xy", rotary_grid=6, resolution=(32, 24)).spec
    found, quarter = ROTARIES["axial_xy"](spec), spec.head_dim // 4
    assert not found[:1].any()
    for (row, column), angles in zip(np.ndindex(4, 3), found[1:], strict=True):
        places = (column + 1) / 3 * 6, (row + 1) / 4 * 6
        expected = [place / 10_000 ** (pair / quarter) for place in places for pair in range(quarter)]
        np.testing.assert_allclose(angles, expected, atol=1e-12)


def test_attention_pooling_with_sizes_of_its_own_is_the_direct_evaluation():
    """With four heads beside the blocks' two, 24 hidden channels, and class token and register among its tokens."""
    fields = {"pooling": "map", "map_heads": 4, "map_mlp_dim": 24, "map_prefix": True, "num_classes": 0}
    model = tiny(depth=1, class_token="always", registers=1, activation="gelu", **fields)
    params = params_of(model)
    pooled, out = apply(model, params, images_of())
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["map_head"])
    assert p["mlp"]["dense1"]["kernel"].shape == (32, 24)
    attention = p["attention"]
    for tokens, found in zip(np.asarray(out["tokens"], np.float64), pooled, strict=True):
        key, value = (
            np.einsum("td,dhc->htc", tokens, attention[name]["kernel"]) + attention[name]["bias"][:, None]
            for name in ("key", "value")
        )
        query = np.einsum("d,dhc->hc", p["probe"], attention["query"]["kernel"]) + attention["query"]["bias"]
        assert key.shape == (4, 1 + 1 + 16, 8)
        weights = scipy.special.softmax(np.einsum("hc,htc->ht", query, key) / np.sqrt(8), -1)
        x = np.einsum("ht,htc,hcd->d", weights, value, attention["out"]["kernel"]) + attention["out"]["bias"]
        hidden = norm(x, p["norm"], 1e-6) @ p["mlp"]["dense1"]["kernel"] + p["mlp"]["dense1"]["bias"]
        expected = x + (hidden * scipy.special.ndtr(hidden)) @ p["mlp"]["dense2"]["kernel"] + p["mlp"]["dense2"]["bias"]
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_quick_gelu():
    x = np.linspace(-4, 4, 9)
    found = ACTIVATIONS["quick_gelu"].activate(PlainOps(), jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, x / (1 + np.exp(-1.702 * x)), atol=1e-6)


def test_without_biases_the_projections_have_none():
    model, biased = tiny(qkv_bias="none", depth=1), tiny(depth=1)
    params = params_of(model)
    given = jax.tree.map(lambda leaf: leaf, params)
    assert "bias" not in given["encoder"]["blocks"]["attention"]["qkv"]
    given["encoder"]["blocks"]["attention"]["qkv"]["bias"] = np.zeros((1, 3, 2, 16), np.float32)
    assert jax.tree.map(np.shape, given) == jax.tree.map(np.shape, params_of(biased))
    np.testing.assert_array_equal(apply(model, params, images_of())[0], apply(biased, given, images_of())[0])


def test_exact_gelu_is_exact():
    x = np.linspace(-4, 4, 9, dtype=np.float32)[:, None]
    exact, tanh = (np.asarray(ACTIVATIONS[word].activate(PlainOps(), jnp.asarray(x))) for word in ("gelu", "gelu_tanh"))
    np.testing.assert_allclose(exact, x * scipy.special.ndtr(x), atol=1e-6)
    assert 1e-4 < np.abs(exact - tanh).max() < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["gap", "map"])
def test_pooling_reads_patches_only(pooling):
    """Without attention between tokens, prefix tokens change nothing."""
    model = tiny(pooling=pooling, class_token="always", registers=2, depth=1)
    params = params_of(model)
    params["encoder"]["blocks"]["attention"]["out"] = jax.tree.map(
        np.zeros_like, params["encoder"]["blocks"]["attention"]["out"]
    )
    other = params | {"cls": params["cls"] + 1, "registers": params["registers"] * 2}
    found, expected = (jax.jit(model.apply)(each, images_of()) for each in (other, params))
    np.testing.assert_array_equal(found[0], expected[0])
    assert np.abs(found[1]["tokens"][:, :3] - expected[1]["tokens"][:, :3]).max() > 1e-3
    assert expected[1]["tokens"].shape[1] == 3 + 16


def test_positions_before_the_class_token_are_those_with_rows_of_zeros():
    fields = {"registers": 2, "depth": 1}
    every, patches = (tiny(position_rows=rows, **fields) for rows in ("all", "patches"))
    params = params_of(patches)
    padded = params | {"position": np.pad(params["position"], ((3, 0), (0, 0)))}
    np.testing.assert_allclose(apply(patches, params, images_of())[0], apply(every, padded, images_of())[0], atol=1e-6)


def test_mean_and_deviation_are_a_step_of_the_model():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    model, plain = (tiny(depth=1, **fields) for fields in ({"image_mean": mean, "image_std": std}, {}))
    params, images = params_of(plain), np.asarray(images_of())
    normalised = ((images / 2 + 0.5) - mean) / std
    expected = apply(plain, params, normalised.astype(np.float32))[0]
    np.testing.assert_allclose(apply(model, params, images)[0], expected, rtol=1e-4, atol=1e-4)


def test_rms_norm_is_the_direct_evaluation():
    """Of rows whose mean is not zero; in training as in the plain form, and no norm has a bias."""
    x, scale = np.random.default_rng(0).normal(2, 1, (5, 32)), np.linspace(0.5, 2, 32)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * scale
    norm = models.NormParameters("rms", jnp.asarray(scale, jnp.float32), None, 1e-3)
    np.testing.assert_allclose(models.PlainOps().norm(jnp.asarray(x, jnp.float32), norm), expected, atol=1e-5)
    model = tiny(norm="rms", qk_norm=True, mlp_norm=True, pre_norm=True, depth=1)
    params = params_of(model)
    assert not [name for name in tree.flatten(params) if "norm" in name and name.endswith("/bias")]
    with jax.default_matmul_precision("highest"):
        found, plain = (
            jax.jit(functools.partial(model.apply, ops=ops))(params, images_of())[0] for ops in (None, PlainOps())
        )
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-5)


CHANGES = {"qk_norm": True, "rotary": "axial", "registers": 2}


@pytest.mark.parametrize(
    "fields",
    [
        CHANGES,
        *(pytest.param(fields, marks=pytest.mark.slow) for fields in ({"registers": 4}, {"qk_norm": True})),
        pytest.param({"qk_norm": True, "norm": "rms"}, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_is_the_plain_form(fields):
    """Logits and the gradients of all parameters."""
    fields = {"depth": 1, "layer_scale": 0.1, "num_heads": 3, "width": 48} | fields
    params = jax.tree.map(
        lambda x: x + 0.1 * np.random.default_rng(x.size).normal(size=x.shape), params_of(tiny(**fields))
    )

    def differentiate(**kind):
        model = tiny(**fields, **kind)
        return jax.jit(jax.value_and_grad(lambda params: (model.apply(params, images_of())[0] ** 2).sum()))(params)

    with jax.default_matmul_precision("highest"), kernels.interpret_kernels():
        found, expected = (differentiate(attention=kind) for kind in ("fused", "tokens_first"))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * np.abs(other).max() + 1e-5)


def test_the_kernel_changes_queries_and_keys():
    def calls(**fields):
        model = tiny(depth=1, **fields)
        lowered = jax.jit(model.apply).trace(parameter_shapes(model), images_of()).lower(lowering_platforms=("tpu",))
        return lowered.as_text().count("@tpu_custom_call")

    for fields in ({"registers": 4}, {"qk_norm": True}, {"rotary": "axial"}):
        assert calls(**fields)
        model = create("ViT-B/16", dtype="bfloat16", **fields)
        assert model.for_device("TPU v5e", 8).field("attention") == "fused"
        assert model.for_device("NVIDIA H100", 8).field("attention") == "cudnn"


def test_positions_are_resampled_with_their_rows():
    old, new = (tiny(registers=2, position_rows="class", resolution=size) for size in (32, 48))
    params = params_of(old)
    wanted = parameter_shapes(new)
    found = interop.adapt_parameters(old, params, new, wanted)
    assert found["position"].shape == (1 + 36, 32)
    np.testing.assert_array_equal(found["position"][0], params["position"][0])
    np.testing.assert_array_equal(found["registers"], params["registers"])
    with pytest.raises(UserError, match="qk_norm False, not True, layer_scale 0"):
        interop.adapt_parameters(old, params, tiny(registers=2, qk_norm=True, layer_scale=0.1), wanted)


@pytest.mark.slow
def test_training_on_8_devices_is_that_on_one(tiny):
    chosen = {name: value for name, value in ALL.items() if name != "resolution"}
    tiny.model.update(chosen | {"depth": 1, "dropout_rate": 0.0, "stochastic_depth": 0.0})
    tiny.task.mixup = 0.0
    expected = trained(on({}, tiny))
    found = trained(on({"fsdp": 4, "tensor": 2}, tiny), expected.start)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    gated = found.state.params["encoder"]["blocks"]["mlp"]["dense1_gated"]["kernel"]
    assert gated.addressable_shards[0].data.shape == (1, 32 // 4, 2, 128 // 2)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"registers": -1}, "registers must be 0 or more, not -1"),
        ({"norm_epsilon": 0}, "norm_epsilon must be above 0"),
        ({"layer_scale": -1.0}, "layer_scale must be 0 or more"),
        ({"activation": "gelutanh"}, "unknown activation 'gelutanh'; did you mean 'gelu_tanh'"),
        ({"rotary_grid": 16}, "rotary_grid=16 must be 0 or more, and 0 without rotary='axial' or 'axial_xy'"),
        ({"map_heads": 4}, "map_heads, map_mlp_dim and map_prefix are fields of pooling='map'"),
        ({"pooling": "map", "map_heads": 5}, "width 768 is not divisible by map_heads 5"),
        ({"rotary": "axial", "num_heads": 384}, "heads of a multiple of 4 channels, not 2"),
        ({"stem_epsilons": "timm"}, "stem_epsilons are fields of a ResNet"),
        ({"image_mean": [0.5]}, "image_mean and image_std must have a value for red, green and blue"),
        ({"image_std": [1.0, 1.0, 0.0]}, "std above 0"),
        ({"image_std": 1.0}, "image_std must be a list of numbers, not 1.0"),
    ],
)
def test_mistakes_are_reported(fields, sentence):
    with pytest.raises(UserError) as error:
        create("ViT-B/16", **fields)
    assert sentence in str(error.value)


def test_equal_models_have_equal_specs():
    plain = create("ViT-B/16")
    assert create("ViT-B/16", class_token="always", position_rows="class") == plain
    assert create("ViT-B/16", position_rows="patches") != plain
    fixed = {"position": "sincos2d", "registers": 2}
    assert create("ViT-B/16", position_rows="patches", **fixed) == create("ViT-B/16", **fixed)
