"""Models: published parameter counts, initial values, and properties that hold for every way to compute them."""

import dataclasses
import functools
import itertools
import json
import re
from typing import get_args

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval

from tests.conftest import ROOT
from vit_jax import UserError, execution, kernels, models
from vit_jax.execution import AttentionSizes, choose_packing
from vit_jax.execution.attention_kinds import heads_first
from vit_jax.execution.norms_and_products import layer_norm, narrowing_product
from vit_jax.macs import macs_per_image
from vit_jax.model import create, parameter_shapes
from vit_jax.models import ModelSpec, resample_positions
from vit_jax.models import softmax_attention as tokens_first
from vit_jax.models.flat_keywords import flatten_spec
from vit_jax.models.resampling import RESAMPLINGS
from vit_jax.models.resnet import StdConv, standardise

BICUBIC = ROOT / "tests" / "fixtures" / "bicubic.npz"

# Parameters at 224 px: backbone; 1000 classes; 21,843 classes with pre_logits. Table 1 rounds them; the authors' own
# tests state those of the second column, except for g, G, R50+ViT-B/32 and R50+ViT-L/16.
COUNTS = {
    "ViT-Ti/16": (5_524_416, 5_717_416, 9_777_171),
    "ViT-S/32": (22_493_952, 22_878_952, 31_051_347),
    "ViT-S/16": (21_665_664, 22_050_664, 30_223_059),
    "ViT-B/32": (87_455_232, 88_224_232, 104_843_091),
    "ViT-B/16": (85_798_656, 86_567_656, 103_186_515),
    "ViT-B/8": (85_807_872, 86_576_872, 103_195_731),
    "ViT-L/32": (305_510_400, 306_535_400, 328_949_075),
    "ViT-L/16": (303_301_632, 304_326_632, 326_740_307),
    "ViT-H/14": (630_764_800, 632_045_800, 660_385_363),
    "ViT-g/14": (1_011_202_432, 1_012_611_432, 1_043_963_091),
    "ViT-G/14": (1_842_775_680, 1_844_440_680, 1_881_914_835),
    "R+ViT-Ti/16": (6_144_704, 6_337_704, 10_397_459),
    "R26+ViT-S/32": (36_046_912, 36_431_912, 44_604_307),
    "R26+ViT-B/32": (100_614_976, 101_383_976, 118_002_835),
    "R50+ViT-B/16": (97_890_112, 98_659_112, 115_277_971),
    "R50+ViT-B/32": (110_176_832, 110_945_832, 127_564_691),
    "R50+ViT-L/16": (315_458_624, 316_483_624, 338_897_299),
    "R50+ViT-L/32": (327_969_856, 328_994_856, 351_408_531),
}
GAP_COUNTS = {"ViT-B/16": 86_566_120, "ViT-B/32": 88_222_696, "ViT-S/16": 22_049_896, "ViT-S/32": 22_878_184}


def tiny(**fields):
    return create("ViT-mu/8", **{"resolution": 32, "depth": 2, "num_classes": 7} | fields)


def tiny_hybrid(**fields):
    """Two stages of one unit: 8 pixels under a position of the feature map, 2x2 positions in a patch."""
    stem = {"stem": "resnet", "stages": (1, 1), "stem_width": 32}
    shape = {"width": 32, "depth": 1, "mlp_dim": 64, "num_heads": 2}
    return create("ViT/16", **{"resolution": 32, "num_classes": 7} | stem | shape | fields)


def images_of(*shape, seed=0):
    return jax.random.uniform(jax.random.key(seed), shape or (4, 32, 32, 3), minval=-1, maxval=1)


def params_of(model):
    """Random parameters: none is zero, so that each has an effect."""
    return random_values(parameter_shapes(model))


def random_values(shapes):
    generator = np.random.default_rng(1)

    def values(path, leaf):
        return generator.normal(path[-1].key == "scale", 0.15, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(values, shapes)


def count(model):
    return sum(leaf.size for leaf in jax.tree.leaves(parameter_shapes(model)))


def apply(model, params, images, key=None, capture=()):
    return jax.jit(model.apply, static_argnames="capture")(params, images, key, capture=capture)


def gradients(model, params, images, key=None):
    return jax.jit(jax.grad(lambda p: (model.apply(p, images, key)[0] ** 2).sum()))(params)


# Numbers.


# The others are made of the same stems and blocks.
USUAL = ("ViT-Ti/16", "ViT-B/16", "ViT-H/14", "R+ViT-Ti/16")


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.slow) for n in COUNTS])
def test_parameter_counts(name):
    counts = (
        count(create(name, num_classes=0)),
        count(create(name, num_classes=1000)),
        count(create(name, num_classes=21_843, pre_logits=True)),
    )
    assert counts == COUNTS[name]


def test_the_representation_has_a_width_of_its_own():
    model = create("ViT-B/16", num_classes=1000, pre_logits=True, representation_size=512)
    assert count(model) == COUNTS["ViT-B/16"][0] + (768 + 1) * 512 + (512 + 1) * 1000
    same = create("ViT-B/16", num_classes=0)
    assert macs_per_image(model) == macs_per_image(same) + 768 * 512 + 512 * 1000
    assert create(model.name, **json.loads(json.dumps(model.fields))) == model
    assert create("ViT-B/16", pre_logits=True, representation_size=768) == create("ViT-B/16", pre_logits=True)
    small = tiny(pre_logits=True, representation_size=24)
    logits, out = apply(small, params_of(small), images_of())
    assert logits.shape == (4, 7) and out["pre_logits"].shape == (4, 24)


@pytest.mark.parametrize("name", GAP_COUNTS)
def test_parameter_counts_without_class_token(name):
    assert count(create(name, pooling="gap")) == GAP_COUNTS[name]


def test_parameter_names_and_shapes():
    params = parameter_shapes(tiny(pre_logits=True))
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    shapes = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in paths}
    blocks = {
        "norm1/scale": (32,),
        "norm1/bias": (32,),
        "attention/qkv/kernel": (32, 3, 2, 16),
        "attention/qkv/bias": (3, 2, 16),
        "attention/out/kernel": (2, 16, 32),
        "attention/out/bias": (32,),
        "norm2/scale": (32,),
        "norm2/bias": (32,),
        "mlp/dense1/kernel": (32, 128),
        "mlp/dense1/bias": (128,),
        "mlp/dense2/kernel": (128, 32),
        "mlp/dense2/bias": (32,),
    }
    assert shapes == {
        "embed/kernel": (8, 8, 3, 32),
        "embed/bias": (32,),
        "cls": (32,),
        "position": (17, 32),
        **{f"encoder/blocks/{name}": (2, *shape) for name, shape in blocks.items()},
        "encoder/norm/scale": (32,),
        "encoder/norm/bias": (32,),
        "pre_logits/kernel": (32, 32),
        "pre_logits/bias": (32,),
        "head/kernel": (32, 7),
        "head/bias": (7,),
    }
    chex.assert_type(jax.tree.leaves(params), jnp.float32)


def test_initial_values_are_as_published():
    model = create(
        "ViT-mu/8", resolution=64, width=192, depth=2, num_heads=3, mlp_dim=384, pre_logits=True, head_bias=-10.0
    )
    images = images_of(1, 64, 64, 3)
    params = jax.jit(model.init)(jax.random.key(0), images)
    block = params["encoder"]["blocks"]

    def assert_uniform(kernel, fan_in, fan_out):
        limit = np.sqrt(6 / (fan_in + fan_out))
        assert limit * 0.999 < np.abs(kernel).max() <= limit
        np.testing.assert_allclose(kernel.std(), limit / np.sqrt(3), rtol=0.02)

    for layer in range(2):
        for projection in range(3):
            assert_uniform(block["attention"]["qkv"]["kernel"][layer, :, projection], 192, 192)
        assert_uniform(block["attention"]["out"]["kernel"][layer], 192, 192)
        assert_uniform(block["mlp"]["dense1"]["kernel"][layer], 192, 384)
        assert_uniform(block["mlp"]["dense2"]["kernel"][layer], 384, 192)
    layers = block["attention"]["qkv"]["kernel"]
    assert not np.allclose(layers[0], layers[1]) and not np.allclose(layers[0, :, 0], layers[0, :, 1])
    for dense in ("dense1", "dense2"):
        np.testing.assert_allclose(block["mlp"][dense]["bias"].std(), 1e-6, rtol=0.15)
    np.testing.assert_allclose(params["position"].std(), 0.02, rtol=0.05)
    np.testing.assert_allclose(params["embed"]["kernel"].std(), (8 * 8 * 3) ** -0.5, rtol=0.05)
    np.testing.assert_allclose(params["pre_logits"]["kernel"].std(), 192**-0.5, rtol=0.05)
    for norm in (block["norm1"], block["norm2"], params["encoder"]["norm"]):
        assert np.all(norm["scale"] == 1) and np.all(norm["bias"] == 0)
    zeros = (params["cls"], params["embed"]["bias"], params["pre_logits"]["bias"], params["head"]["kernel"])
    assert all(np.all(x == 0) for x in (*zeros, *(block["attention"][part]["bias"] for part in ("qkv", "out"))))
    assert np.all(apply(model, params, images)[0] == -10)


# Ways to compute that must not matter.


def train_once(**fields):
    """The logits, intermediates and gradients of a training step."""
    model = tiny(dropout_rate=0.1, stochastic_depth=0.3, **fields)

    def loss(params):
        logits, out = model.apply(params, images_of(), jax.random.key(3), capture=("attention",))
        return (logits**2).mean(), (logits, out)

    (_, outputs), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params_of(model))
    return outputs, grads


@pytest.fixture(scope="module")
def plain_training():
    return train_once()


ONE_BY_ONE = [{"scan": True}, *({"remat": remat} for remat in ("dots", "mlp", "attention"))]
ALONE = [pytest.param(fields, marks=pytest.mark.slow) for fields in ONE_BY_ONE]


@pytest.mark.parametrize("fields", [*ALONE, {"scan": True, "remat": "full"}], ids=str)
def test_scan_and_remat_change_nothing(fields, plain_training):
    """Dropout and stochastic depth are drawn from the same key."""
    for found, expected in zip(train_once(**fields), plain_training, strict=True):
        chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


def test_attention_implementations_agree():
    models = [tiny(attention=attention, depth=1) for attention in ("heads_first", "tokens_first")]
    params = params_of(models[0])
    a, b = (apply(model, params, images_of(), capture=("attention",)) for model in models)
    chex.assert_trees_all_close(a, b, rtol=1e-5, atol=1e-5)
    a, b = (gradients(model, params, images_of()) for model in models)
    chex.assert_trees_all_close(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("pooling", ["token", *(pytest.param(p, marks=pytest.mark.slow) for p in ("gap", "map"))])
def test_the_attention_kernel_equals_the_plain_form(pooling):
    """Rows pack 16 or 17 tokens, of which the same are dropped; gradients are relative to their largest value."""
    fields = {"depth": 1, "pooling": pooling, "dropout_rate": 0.1, "stochastic_depth": 0.3}
    plain, fused = (tiny(attention=attention, **fields) for attention in ("heads_first", "fused"))
    params, images = params_of(plain), images_of()

    def run(model):
        def loss(params):
            logits, out = model.apply(params, images, dropout_key=jax.random.key(1))
            return (logits**2).sum(), (logits, out)

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    expected_grads, expected = run(plain)
    with kernels.interpret_kernels():
        grads, found = run(fused)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)
    scales = jax.tree.map(lambda x: np.abs(x).max(), expected_grads)
    least = 1e-3 * max(jax.tree.leaves(scales))  # the gradient of a key's bias is zero
    scales = jax.tree.map(lambda scale: np.maximum(scale, least), scales)
    chex.assert_trees_all_close(*(jax.tree.map(np.divide, each, scales) for each in (grads, expected_grads)), atol=1e-5)


@pytest.mark.slow
def test_capture_leaves_the_logits_of_the_kernel_as_they_are():
    """The logits are equal to the digit; the weights are those of the plain form."""
    model = tiny(attention="fused")
    params = params_of(model)
    with kernels.interpret_kernels():
        logits, out = apply(model, params, images_of())
        again, captured = apply(model, params, images_of(), capture=("attention",))
    np.testing.assert_array_equal(logits, again)
    np.testing.assert_array_equal(out["blocks"], captured["blocks"])
    _, expected = apply(tiny(), params, images_of(), capture=("attention",))
    np.testing.assert_allclose(captured["attention"], expected["attention"], atol=1e-5)


CHOSEN = [
    ("cpu", "heads_first", {}),
    ("cuda", "tokens_first", {}),
    ("cuda", "tokens_first", {"scan": True, "remat": "dots"}),
]


@pytest.mark.parametrize(("platform", "form", "fields"), CHOSEN)
def test_attention_is_chosen_where_the_model_is_lowered(platform, form, fields):
    """Also for a platform that is not here."""

    def products(attention):
        model = tiny(attention=attention, depth=1, **fields)

        def loss(params, images):
            return (model.apply(params, images)[0] ** 2).sum()

        traced = jax.jit(jax.grad(loss)).trace(
            parameter_shapes(model), jax.ShapeDtypeStruct((4, 32, 32, 3), jnp.float32)
        )
        text = re.sub(r"[%#]\w+", "", traced.lower(lowering_platforms=(platform,)).as_text())  # names
        # The forms differ in the order of their dimensions.
        return set(re.findall(r"stablehlo\.(?:dot_general|transpose) .*", text))

    assert create("ViT-mu/8").field("attention") == "auto"
    found = products(None)
    assert found == products(form)
    assert found != products({"heads_first": "tokens_first", "tokens_first": "heads_first"}[form])


@pytest.mark.parametrize(("depth", "resolution", "kernels"), [(2, 32, 4), (1, 32 * 32, 0)])
def test_attention_lowered_for_tpus_is_the_kernel_where_it_fits(depth, resolution, kernels):
    model = tiny(depth=depth, resolution=resolution)
    images = jax.ShapeDtypeStruct((4, resolution, resolution, 3), jnp.float32)
    grad = jax.jit(jax.grad(lambda params, images: model.apply(params, images)[0].sum()))
    lowered = grad.trace(parameter_shapes(model), images).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("@tpu_custom_call") == kernels


def test_attention_chosen_in_lowering_costs_nothing():
    def cost(attention):
        model = tiny(attention=attention, depth=1)
        compiled = jax.jit(model.apply).lower(parameter_shapes(model), images_of()).compile()
        return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes

    assert cost("auto") == cost("heads_first")


def assert_same_gradients(ours, plain, *arguments):
    """Compares the gradients of every output with respect to every argument."""

    def gradients_of(function, *arguments):
        outputs, transpose = jax.vjp(function, *arguments)
        random = np.random.default_rng(9)
        cotangents = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), outputs)
        return outputs, transpose(cotangents)

    found, expected = (jax.jit(functools.partial(gradients_of, each))(*arguments) for each in (ours, plain))
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


def test_written_out_gradients_equal_derived_ones():
    x, kernel = images_of(4, 5, 16), images_of(16, 8)
    assert_same_gradients(narrowing_product, lambda x, kernel: x @ kernel, x, kernel)
    norm = nn.LayerNorm(epsilon=1e-6)
    plain = lambda x, scale, bias: norm.apply({"params": {"scale": scale, "bias": bias}}, x)  # noqa: E731
    assert_same_gradients(lambda *arrays: layer_norm(*arrays, 1e-6), plain, x, images_of(16), images_of(16, seed=1))
    # Training on captured weights is possible, too.
    assert_same_gradients(heads_first, tokens_first, images_of(4, 5, 3, 2, 8))


@pytest.mark.parametrize("attention", ["heads_first", "tokens_first"])
def test_bfloat16_is_close_to_float32(attention):
    model = tiny(dtype="bfloat16", attention=attention, pre_logits=True)
    params = params_of(model)
    logits, out = apply(model, params, images_of(), capture=("attention",))
    expected, _ = apply(tiny(pre_logits=True), params, images_of())
    np.testing.assert_allclose(logits, expected, atol=0.05)
    assert not np.array_equal(logits, expected)
    assert out["blocks"].dtype == out["tokens"].dtype == jnp.bfloat16
    assert logits.dtype == out["attention"].dtype == out["pre_logits"].dtype == jnp.float32
    grads = jax.eval_shape(jax.grad(lambda params: model.apply(params, images_of())[0].sum()), params)
    chex.assert_type(jax.tree.leaves(grads), jnp.float32)


def test_remat_computes_again_what_its_name_says():
    """Counted are calls of the attention kernel, and the other products of the gradient of one block."""

    def count(jaxpr, name):
        inner = sum(count(each, name) for equation in jaxpr.eqns for each in jaxprs_in_params(equation.params))
        return inner + sum(equation.primitive.name == name for equation in jaxpr.eqns)

    def counts(remat):
        model = tiny(attention="fused", depth=1, remat=remat)
        images = jax.ShapeDtypeStruct((4, 32, 32, 3), jnp.float32)
        gradient = jax.grad(lambda params, images: model.apply(params, images)[0].sum())
        traced = jax.make_jaxpr(gradient)(parameter_shapes(model), images).jaxpr
        used, _ = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
        return count(used, "dot_general"), count(used, "kernel_or_plain")

    products, calls = counts("none")
    assert calls == 2 and counts("dots") == (products, 2)
    assert counts("mlp") == (products + 1, 2)  # to the hidden activations
    assert counts("attention") == (products + 3, 2)  # also to q, k and v, and from the attended values
    assert counts("full") == (products + 3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_unreturned_intermediates_cost_nothing(scan):
    """The program of the gradient does not grow when the loss function receives intermediates and drops them."""
    model = tiny(scan=scan, depth=3)
    params = params_of(model)

    def cost(capture):
        def loss(params):
            logits, out = model.apply(params, images_of(), capture=capture)
            return (logits**2).sum(), out

        step = jax.jit(lambda params: jax.value_and_grad(loss, has_aux=True)(params)[1])
        return step.lower(params).compile().cost_analysis()["flops"]

    assert cost(("attention",)) == cost(())


# Randomness in training.


def test_without_a_key_nothing_is_dropped():
    params = params_of(tiny())
    images = images_of()
    expected = apply(tiny(), params, images)[0]
    random = tiny(dropout_rate=0.5, stochastic_depth=0.5)
    np.testing.assert_array_equal(apply(random, params, images)[0], expected)
    np.testing.assert_array_equal(apply(tiny(), params, images, jax.random.key(0))[0], expected)
    assert not np.allclose(apply(random, params, images, jax.random.key(0))[0], expected)


def test_without_classes_there_is_no_second_head():
    assert tiny(registers=1, distilled_head=True, num_classes=0).spec == tiny(registers=1, num_classes=0).spec


def test_a_distilled_head_reads_the_first_register_and_the_logits_are_the_mean_of_both_heads():
    model, images = tiny(registers=2, distilled_head=True), images_of()
    params = params_of(model)
    logits, out = apply(model, params, images)
    for number, name in enumerate(("head", "distilled_head")):  # of rows 0 and 1 of the tokens
        expected = out["tokens"][:, number] @ params[name]["kernel"] + params[name]["bias"]
        np.testing.assert_allclose(out["head_logits"][:, number], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logits, out["head_logits"].mean(axis=1), rtol=1e-6)


def test_dropout_stands_after_positions_and_keeps_the_mean():
    """The output of blocks that add nothing is the embedding after dropout: zeros or scaled values."""
    model = tiny(dropout_rate=0.25, depth=1)
    params = params_of(model)
    params["encoder"]["blocks"] = jax.tree.map(jnp.zeros_like, params["encoder"]["blocks"])
    images = images_of(64, 32, 32, 3)
    embedded = apply(model, params, images)[1]["blocks"][0]
    dropped = apply(model, params, images, jax.random.key(5))[1]["blocks"][0]
    kept = dropped != 0
    np.testing.assert_allclose(kept.mean(), 0.75, atol=0.01)
    np.testing.assert_allclose(dropped[kept], embedded[kept] / 0.75, rtol=1e-5)
    assert 0 < kept[:, 0].mean() < 1  # the class token's row as well


def test_dropout_stands_after_each_dense_layer_but_qkv():
    """Only biases reach the output: its values are a mask after `out` plus a mask after `dense2`."""
    model = tiny(dropout_rate=0.5, depth=1, position="none")
    params = jax.tree.map(jnp.zeros_like, params_of(model))
    block = params["encoder"]["blocks"]
    block["attention"]["out"]["bias"] += 1.0
    block["mlp"]["dense2"]["bias"] += 10.0
    values = apply(model, params, images_of(), jax.random.key(5))[1]["blocks"]
    assert set(np.unique(values)) == {0.0, 2.0, 20.0, 22.0}
    # After the GELU: the hidden values are all equal, so the second layer returns binomial sums.
    block["attention"]["out"]["bias"] *= 0
    block["mlp"]["dense2"]["bias"] *= 0
    block["mlp"]["dense1"]["bias"] += 1.0
    block["mlp"]["dense2"]["kernel"] += 1 / 128
    values = apply(model, params, images_of(), jax.random.key(5))[1]["blocks"]
    survivors = values[values != 0]
    assert len(np.unique(np.round(survivors, 4))) > 10
    np.testing.assert_allclose(survivors.mean(), 2 * jax.nn.gelu(1.0), rtol=0.01)


def test_attention_weights_are_never_dropped():
    _, out = apply(tiny(dropout_rate=0.5), params_of(tiny()), images_of(), jax.random.key(1), ("attention",))
    assert np.all(out["attention"] > 0)
    np.testing.assert_allclose(out["attention"].sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize(("scan", "schedule"), [(False, "linear"), (True, "linear"), (False, "constant")])
def test_stochastic_depth_rises_or_is_constant_and_takes_whole_branches(scan, schedule):
    fields = {"stochastic_depth": 0.6, "stochastic_depth_schedule": schedule}
    model = create("ViT-mu/8", resolution=8, depth=3, scan=scan, position="none", num_classes=0, **fields)
    params = jax.tree.map(jnp.zeros_like, params_of(model))
    params["encoder"]["blocks"]["attention"]["out"]["bias"] += 1.0
    params["encoder"]["blocks"]["mlp"]["dense2"]["bias"] += 10.0
    blocks = np.asarray(apply(model, params, images_of(4000, 8, 8, 3), jax.random.key(7))[1]["blocks"])
    assert np.all(blocks == blocks[:, :, :1, :1])  # one draw per example, for all tokens and channels
    added = np.diff(blocks[:, :, 0, 0], axis=0, prepend=0)
    for rate, values in zip((0.0, 0.3, 0.6) if schedule == "linear" else (0.6,) * 3, added, strict=True):
        keep = 1 - rate
        np.testing.assert_allclose(values.mean(), 11, rtol=0.06)
        possible = np.array([0, 1 / keep, 10 / keep, 11 / keep])
        assert np.abs(values[:, None] - possible).min(axis=1).max() < 1e-4
        both = np.isclose(values, 11 / keep).mean()
        np.testing.assert_allclose(both, keep**2, atol=0.03)  # the two branches are drawn apart


# Shapes and intermediates.

OTHER_PARTS = [("gap", "learned"), ("map", "learned"), ("token", "sincos2d"), ("token", "none")]


@pytest.mark.parametrize(
    ("pooling", "position"),
    [("token", "learned"), *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_PARTS)],
)
def test_intermediates(pooling, position):
    model = tiny(pooling=pooling, position=position, pre_logits=True)
    params = params_of(model)
    logits, out = apply(model, params, images_of(), capture=("attention",))
    tokens = 16 + (pooling == "token")
    chex.assert_shape([logits, out["pre_logits"]], [(4, 7), (4, 32)])
    chex.assert_shape([out["tokens"], out["blocks"]], [(4, tokens, 32), (2, 4, tokens, 32)])
    chex.assert_shape(out["attention"], (2, 4, 2, tokens, tokens))
    np.testing.assert_allclose(out["attention"].sum(-1), 1, rtol=1e-5)
    assert set(jax.eval_shape(model.apply, params, images_of())[1]) == {"tokens", "pre_logits", "blocks"}
    assert ("cls" in params) == (pooling == "token") and ("position" in params) == (position == "learned")
    expected = out["pre_logits"] @ params["head"]["kernel"] + params["head"]["bias"]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_tokens_are_the_normalised_last_block():
    model = tiny(pooling="gap", num_classes=0)
    params = params_of(model)
    logits, out = apply(model, params, images_of())
    last = np.asarray(out["blocks"][-1], np.float64)
    normal = (last - last.mean(-1, keepdims=True)) / np.sqrt(last.var(-1, keepdims=True) + 1e-6)
    norm = params["encoder"]["norm"]
    np.testing.assert_allclose(out["tokens"], normal * norm["scale"] + norm["bias"], atol=1e-4)
    np.testing.assert_allclose(logits, out["tokens"].mean(1), atol=1e-5)


def test_patches_are_a_strided_convolution_in_raster_order():
    model = tiny(resolution=(16, 24), position="none", pooling="gap", depth=1)
    params = params_of(model)
    params["encoder"]["blocks"] = jax.tree.map(jnp.zeros_like, params["encoder"]["blocks"])
    images = images_of(2, 16, 24, 3)
    expected = jax.lax.conv_general_dilated(
        images, params["embed"]["kernel"], (8, 8), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    tokens = apply(model, params, images)[1]["blocks"][0]
    np.testing.assert_allclose(tokens, expected.reshape(2, 6, 32) + params["embed"]["bias"], atol=1e-5)


def test_fixed_positions_take_any_tiled_image():
    for position in ("sincos2d", "none"):
        model = tiny(position=position)
        assert apply(model, params_of(model), images_of(2, 16, 48, 3))[1]["tokens"].shape == (2, 13, 32)


@pytest.mark.parametrize(("name", "steps"), [("sincos2d", 3), ("sincos2d_moco", 4)])
def test_sincos_positions(name, steps):
    model = create("ViT-mu/8", resolution=(16, 24), width=16, depth=1, position=name)
    params = jax.tree.map(jnp.zeros_like, params_of(model))
    table = np.asarray(apply(model, params, images_of(1, 16, 24, 3))[1]["blocks"][0, 0])
    assert np.all(table[0] == 0)  # the class token's row
    for row, column, i in np.ndindex(2, 3, 4):
        x, y = column * 10_000.0 ** -(i / steps), row * 10_000.0 ** -(i / steps)
        expected = [np.sin(x), np.cos(x), np.sin(y), np.cos(y)]
        expected = expected if name == "sincos2d" else expected[2:] + expected[:2]
        np.testing.assert_allclose(table[1 + row * 3 + column, i::4], expected, atol=1e-6)


GRIDS = [((14, 14), (24, 24)), ((7, 7), (12, 12)), ((16, 16), (37, 37)), ((24, 24), (14, 14)), ((7, 7), (9, 14))]


@pytest.mark.parametrize(("old", "new"), [*GRIDS, ((6, 10), (13, 4)), ((4, 4), (1, 3)), ((1, 4), (2, 8))])
@pytest.mark.parametrize("class_rows", [0, 1])
def test_resampling_is_the_authors(old, new, class_rows):
    table = np.random.default_rng(0).normal(size=(class_rows + old[0] * old[1], 8)).astype(np.float32)
    found = resample_positions(table, old, new, class_rows)
    grid = table[class_rows:].reshape(*old, 8)
    expected = scipy.ndimage.zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1).reshape(-1, 8)
    assert found.dtype == np.float32 and len(found) == class_rows + new[0] * new[1]
    np.testing.assert_allclose(found[class_rows:], expected, atol=1e-6)
    np.testing.assert_array_equal(found[:class_rows], table[:class_rows])


def test_bicubic_resampling_is_that_of_torch():
    """tests/fixtures/bicubic.npz: torch's interpolate(mode="bicubic") of random grids, with and without antialias."""
    stored = np.load(BICUBIC)
    for name in {key.split("/")[0] for key in stored}:
        old, cases = stored[f"{name}/old"], (("new", "bicubic"), ("new_no_antialias", "bicubic_no_antialias"))
        for class_rows, (kind, method) in itertools.product((0, 1), cases):
            new = stored[f"{name}/{kind}"]
            table = np.pad(old.reshape(-1, old.shape[2]), ((class_rows, 0), (0, 0)))
            found = resample_positions(table, old.shape[:2], new.shape[:2], class_rows, method=method)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found[:class_rows], 0)
            np.testing.assert_allclose(found[class_rows:].reshape(new.shape), new, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("method", [method for method in RESAMPLINGS if method != "geometric"])  # of biases alone
def test_resampling_to_the_same_grid_changes_nothing(method):
    table = np.random.default_rng(0).normal(size=(17, 8)).astype(np.float32)
    np.testing.assert_array_equal(resample_positions(jnp.asarray(table), (4, 4), (4, 4), 1, method), table)
    constant = np.ones((17, 8), np.float32)
    np.testing.assert_allclose(resample_positions(constant, (4, 4), (3, 7), 1, method), np.ones((22, 8)), rtol=1e-6)
    with pytest.raises(UserError, match="unknown method of resampling 'cubic'; did you mean 'bicubic'"):
        resample_positions(table, (4, 4), (8, 8), 1, "cubic")
    with pytest.raises(ValueError, match="17 rows"):
        resample_positions(table, (4, 4), (8, 8), 0)


# Hybrids.


def test_standardised_convolutions_ignore_scale_and_offset_of_a_filter():
    images = images_of(2, 9, 8, 3)
    kernel = 0.1 * images_of(3, 3, 3, 8, seed=1)
    scale, offset = np.random.default_rng(0).uniform([[0.5], [-3]], [[20], [3]], (2, 8)).astype(np.float32)
    conv = StdConv(8, 3, stride=2)
    found, moved = (conv.apply({"params": {"kernel": k}}, images) for k in (kernel, kernel * scale + offset))
    assert found.shape == (2, 5, 4, 8)
    np.testing.assert_allclose(found, moved, atol=2e-3)  # 1e-5 is added to the deviation
    standard = np.asarray(standardise(kernel), np.float64)
    np.testing.assert_allclose(standard.mean((0, 1, 2)), 0, atol=1e-6)
    np.testing.assert_allclose((standard**2).mean((0, 1, 2)), 1, atol=1e-3)


@pytest.mark.slow
def test_a_hybrid_starts_as_published():
    params = jax.jit(tiny_hybrid().init)(jax.random.key(0), images_of())
    assert {name: list(values) for name, values in params["stem"].items()} == {
        "root": ["conv", "norm"],
        "stage1": ["unit1"],
        "stage2": ["unit1"],
    }
    unit = params["stem"]["stage2"]["unit1"]
    shapes = {name: values["kernel"].shape for name, values in unit.items() if "kernel" in values}
    assert shapes == {
        "conv1": (1, 1, 128, 64),
        "conv2": (3, 3, 64, 64),
        "conv3": (1, 1, 64, 256),
        "conv_proj": (1, 1, 128, 256),
    }
    assert params["stem"]["root"]["conv"]["kernel"].shape == (7, 7, 3, 32)
    assert params["embed"]["kernel"].shape == (2, 2, 256, 32)
    np.testing.assert_allclose(unit["conv2"]["kernel"].std(), (3 * 3 * 64) ** -0.5, rtol=0.05)
    for name in ("norm1", "norm2", "norm3", "norm_proj"):
        assert np.all(unit[name]["scale"] == (name != "norm3")) and np.all(unit[name]["bias"] == 0)


def test_the_number_of_r_vit_ti_is_not_its_stride():
    spec = create("R+ViT-Ti/16").spec
    assert spec.grid == (7, 7) and spec.stem.kernel_size == 8 and spec.stem.channels == 64
    small = create("R+ViT-mu/4", resolution=32)
    assert (small.spec.grid, small.spec.stem.kernel_size, small.name) == ((8, 8), 1, "R+ViT-mu/4")
    assert create("R50+ViT-B/16").spec.grid == (14, 14) and create("R50+ViT-B/32").spec.stem.channels == 2048


@pytest.mark.slow
def test_a_hybrid_in_bfloat16_on_images_that_are_not_square():
    model = tiny_hybrid(resolution=(32, 48), pre_logits=True)
    params = params_of(model)
    images = images_of(2, 32, 48, 3)
    expected, out = apply(model, params, images)
    assert out["tokens"].shape == (2, 1 + 2 * 3, 32)
    narrow = tiny_hybrid(resolution=(32, 48), pre_logits=True, dtype="bfloat16")
    logits, out = apply(narrow, params, images)
    assert out["tokens"].dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, atol=0.1)
    assert not np.array_equal(logits, expected)
    shifted = apply(model, params, jnp.roll(images, 16, axis=2))[0]
    assert np.abs(shifted - expected).max() > 1e-3


# Creating.


def test_fields_recreate_the_model():
    model = create(
        "ViT-S/16", num_classes=10, resolution=(96, 128), pooling="map", scan=True, depth=None, dropout_rate=0.1
    )
    fields = json.loads(json.dumps(model.fields))
    assert set(fields) == {"num_classes", "resolution", "pooling", "scan", "dropout_rate"}
    again = create(model.name, **fields)
    assert again == model and hash(again) == hash(model)
    assert create("ViT-S/16").fields == {}
    hybrid = create("R50+ViT-S/32", num_classes=10)
    assert hybrid.fields == {"num_classes": 10} and create(hybrid.name, **hybrid.fields) == hybrid
    shape = {"width": 768, "depth": 2, "mlp_dim": 3072, "num_heads": 12}
    unnamed = create("ViT/16", stem="resnet", stages=[1, 2, 1], **shape)
    assert unnamed.fields == {"stem": "resnet", "stages": (1, 2, 1), **shape}
    assert create(unnamed.name, **json.loads(json.dumps(unnamed.fields))) == unnamed
    assert create("ViT-S/16", resolution=[224, 224], width=384) == create("ViT-S/16")
    described = create("ViT-S/16", num_classes=2, preprocess="value_range(-1,1)", class_names=["cat", "dog"])
    assert described.preprocess == "value_range(-1,1)" and described.class_names == ("cat", "dog")


def test_flat_keywords_are_unique():
    values = [getattr(ModelSpec(), field.name) for field in dataclasses.fields(ModelSpec)]
    parts = [dataclasses.fields(value) for value in values if dataclasses.is_dataclass(value)]
    assert len(flatten_spec(ModelSpec())) == len(values) - len(parts) + sum(map(len, parts))


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        ("ViT-X/16", {}, "unknown model 'ViT-X/16'; did you mean 'ViT-"),
        ("ViT-B16", {}, "did you mean 'ViT-B/16'"),
        ("perceiver", {}, "unknown model 'perceiver'; vit_jax/models/variants.py lists them"),
        ("R50+ViT-B/14", {}, "unknown model 'R50+ViT-B/14'; did you mean 'R50+ViT-B/1"),
        ("R50+ViT/16", {"width": 8}, "unknown model 'R50+ViT/16'; did you mean"),
        ("ViT/16", {"width": 8, "depth": 1}, "the model name ViT/16 does not contain a size; set mlp_dim, num_heads."),
        ("ViT-B/16", {"stem": "resnets"}, "unknown stem 'resnets'; did you mean 'resnet'"),
        (
            "ViT-B/16",
            {"stages": (3, 4)},
            "stages, stem_width and stem_epsilons are fields of a ResNet; give stem='resnet'",
        ),
        ("R50+ViT-B/16", {"patch_size": 24}, "patch_size must be a multiple of 16, the stem's stride, not 24"),
        ("R50+ViT-B/16", {"stages": (3, 0)}, "each of the stages must have at least 1 unit, not (3, 0)"),
        ("R50+ViT-B/16", {"stages": 3}, "stages must be a list of whole numbers, not 3"),
        ("R50+ViT-B/16", {"stages": [3, "4"]}, "stages must be a whole number, not '4'"),
        ("R50+ViT-B/16", {"stem_width": 48}, "stem_width must be a multiple of 32"),
        ("ViT-B/16", {"num_class": 10}, "field 'num_class'; did you mean 'num_classes'"),
        ("ViT-B/16", {"pooling": "gab"}, "unknown pooling 'gab'; did you mean 'gap'"),
        ("ViT-B/16", {"attention": "heads"}, "unknown attention 'heads'; did you mean 'heads_first'"),
        ("ViT-B/16", {"dtype": "float16"}, "unknown dtype 'float16'"),
        ("ViT-B/16", {"remat": "dot"}, "did you mean 'dots'"),
        ("ViT-B/16", {"position": "rope"}, "unknown position"),
        ("ViT-B/16", {"num_heads": 5}, "width 768 is not divisible by num_heads 5"),
        ("ViT-B/15", {}, "patches of 15 pixels do not tile 224x224 images; resolution 225 would fit"),
        ("ViT-B/16", {"resolution": (224, 100)}, "do not tile 224x100"),
        ("ViT-B/16", {"resolution": (1, 2, 3)}, "one size or"),
        ("ViT-B/16", {"width": 42, "num_heads": 2, "position": "sincos2d"}, "divisible by 4, not 42"),
        ("ViT-B/16", {"width": 4, "num_heads": 2, "position": "sincos2d_moco"}, "sincos2d_moco needs a width of 8"),
        ("ViT-B/16", {"depth": 0}, "depth must be at least 1"),
        ("ViT-B/16", {"depth": "12"}, "depth must be a whole number, not '12'"),
        ("ViT-B/16", {"depth": True}, "depth must be a whole number"),
        ("ViT-B/16", {"scan": 1}, "scan must be True or False"),
        ("ViT-B/16", {"dropout_rate": 1.0}, "dropout_rate must be at least 0 and below 1"),
        ("ViT-B/16", {"num_classes": -1}, "num_classes must be 0 or more"),
        ("ViT-B/16", {"head_std": -1.0}, "head_std=-1.0 must be at least 0."),
        ("ViT-B/16", {"representation_size": -1}, "representation_size must be 0 or more"),
        ("ViT-B/16", {"representation_size": 512}, "the width of the pre_logits layer; give pre_logits=True as well"),
    ],
)
def test_mistakes_are_reported(name, fields, sentence):
    with pytest.raises(UserError) as error:
        create(name, **fields)
    assert sentence in str(error.value)


def test_patch_size_may_follow_the_resolution():
    assert create("ViT-B/15", resolution=225).spec.grid == (15, 15)


def test_images_must_fit_the_positions():
    model = tiny()
    params = params_of(model)
    with pytest.raises(UserError, match="resolution=64"):
        model.apply(params, images_of(1, 64, 64, 3))
    with pytest.raises(UserError, match="images of 64x64 pixels do not fit a model of resolution 32x32"):
        model.init(jax.random.key(0), images_of(1, 64, 64, 3))
    with pytest.raises(UserError, match="do not tile 30x32"):
        tiny(position="none").init(jax.random.key(0), images_of(1, 30, 32, 3))
    with pytest.raises(UserError, match="did you mean 'attention'"):
        model.apply(params, images_of(), capture=("atention",))


def test_every_word_that_the_spec_accepts_is_implemented():
    spec = models.spec
    implementations = {
        spec.AttentionKind: ("auto", *execution.ATTENTIONS),
        spec.AttentionPattern: ("full", *models.pattern.RULES),
        spec.MlpKind: execution.dense_layers.MLPS,
        spec.Activation: models.mlp.ACTIVATIONS,
        spec.Rotary: models.rotary.ROTARIES,
        spec.StemEpsilons: models.resnet.EPSILONS,
        spec.Pooling: models.pooling.POOLINGS,
        spec.PositionKind: models.position.POSITIONS,
        spec.StemKind: models.vit.STEMS,
        spec.Remat: execution.stack.REMAT_POLICIES,
    }
    for words, table in implementations.items():
        assert get_args(words) == tuple(table)


def test_the_fastest_attention_is_chosen_by_device_and_sizes():
    def chosen(device_kind, images=128, tensor=1, name="ViT-B/16", **fields):
        model = create(name, **{"dtype": "bfloat16", **fields})
        return model.for_device(device_kind, images, tensor).field("attention")

    assert chosen("cpu") == "heads_first" and chosen("TPU v7x") == chosen("AMD Instinct MI300X") == "tokens_first"
    assert {chosen(kind) for kind in ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite")} == {"fused"}
    assert chosen("cpu", attention="fused") == "fused"  # what is given stays
    # Vector memory: libtpu says that v4 has enough for H/14, but not in float32, and v5p too little at 518 pixels.
    large = {"name": "ViT-H/14", "images": 8}
    assert [chosen("TPU v4", **large, dtype=dtype) for dtype in ("bfloat16", "float32")] == ["fused", "tokens_first"]
    large |= {"resolution": 518}
    assert chosen("TPU v5", **large) == "tokens_first" and chosen("TPU v5", **large, tensor=2) == "fused"
    # Where two images have too little memory to share rows, each has its own.
    forms = {"name": "ViT-B/16", "qk_norm": True}, {"name": "ViT-B/32", "position": "relative"}
    assert {chosen("TPU v4", images, **form) for images in (1, 2, 3, 8, 128) for form in forms} == {"fused"}
    assert chosen("TPU v5 lite", **large) == "fused"
    assert chosen("NVIDIA H100 80GB HBM3") == "cudnn"
    assert chosen("NVIDIA H100 80GB HBM3", dtype="float32") == "tokens_first"
    assert chosen("NVIDIA H100 80GB HBM3", width=768, num_heads=64) == "tokens_first"  # heads of 12 channels


def test_images_share_rows_as_the_kind_of_device_allows():
    """L/16 leaves 4 of 200 rows empty where a step of the kernel has no room for two images."""

    sizes = AttentionSizes(64, 196, 16, 64, "bfloat16")

    def rows(device_kind=None):
        packing = choose_packing("fused", sizes, device_kind)
        return packing.images, packing.rows

    assert {rows(kind) for kind in ("TPU v5 lite", "TPU v5e", "TPU v5", "TPU v6 lite")} == {(2, 392)}
    assert rows("TPU v4") == rows() == (1, 200)  # of the devices that are here


def test_attention_by_cudnn_is_lowered_for_nvidia(monkeypatch):
    """JAX asks the cuDNN and the GPU that are here; none is."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    model = tiny(attention="cudnn", dtype="bfloat16", depth=1)
    grad = jax.jit(jax.grad(lambda params, images: model.apply(params, images)[0].sum()))
    lowered = grad.trace(parameter_shapes(model), images_of()).lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r"@__cudnn\$\w+", lowered)) == {"@__cudnn$fmhaSoftmax", "@__cudnn$fmhaSoftmaxBackward"}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ViT-mu/16", {}),
        ("ViT-mu/16", {"pooling": "token_gap", "class_token": "always"}),
        ("ViT-mu/16", {"pooling": "token_gap", "pre_logits": True}),
        ("ViT-mu/16", {"pre_logits": True, "representation_size": 32}),
        ("ViT-mu/16", {"projection": 5, "pooling": "token_gap"}),
        ("ViT-mu/16", {"head": "patches", "pre_logits": True, "pooling": "token_gap"}),
        ("ViT-mu/16", {"head": "patches", "pre_logits": True, "representation_size": 16}),
        ("BiT-R50x1", {"stages": (1, 1), "width": 32}),
    ],
)
def test_the_width_of_features_is_known_before_they_are_computed(name, fields):
    model = create(name, resolution=32, num_classes=3, **fields)
    images = jax.ShapeDtypeStruct((1, 32, 32, 3), "float32")
    _, out = jax.eval_shape(model.apply, parameter_shapes(model), images)
    assert out["pre_logits"].shape == (1, model.spec.feature_width)
