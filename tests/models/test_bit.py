"""BiT: published parameter counts, numbers of both forms, and properties that hold for every way to compute them."""

import importlib.util
import json
import os
import subprocess
import sys
from typing import get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import ROOT
from tests.models.test_models import apply, gradients, images_of, params_of
from vit_jax import UserError, models, tree
from vit_jax.model import create, parameter_shapes
from vit_jax.models.bit import BORDERS, FORMS, REMATS, ROOTS, standardise
from vit_jax.planning import targets

# Parameters: pre-activation, features alone and with 1000 classes; post-activation with 1000 classes. Computed from the
# published arrays' shapes.
COUNTS = {
    "BiT-R50x1": (23_500_352, 25_549_352, 25_557_032),
    "BiT-R50x2": (93_891_712, 97_988_712, 98_004_072),
    "BiT-R50x3": (211_174_080, 217_319_080, 217_342_120),
    "BiT-R101x1": (42_492_480, 44_541_480, 44_549_160),
    "BiT-R101x3": (381_789_888, 387_934_888, 387_957_928),
    "BiT-R152x1": (58_136_128, 60_185_128, 60_192_808),
    "BiT-R152x2": (232_238_208, 236_335_208, 236_350_568),
    "BiT-R152x4": (928_340_224, 936_533_224, 936_563_944),
    "BiT-R200x3": (562_488_000, 568_633_000, 568_656_040),
}


def tiny(**fields):
    return create("BiT", **{"stages": (1, 2), "width": 32, "resolution": 32, "num_classes": 7} | fields)


FAST = "BiT-R50x1"  # the others have the same parts


@pytest.mark.parametrize("name", [n if n == FAST else pytest.param(n, marks=pytest.mark.slow) for n in COUNTS])
def test_parameter_counts(name):
    params, other = (parameter_shapes(create(name, unit=unit)) for unit in ("pre_activation", "post_activation"))
    assert (tree.count(params), tree.count(other)) == COUNTS[name][1:]
    assert tree.count(params) - tree.count(params["head"]) == COUNTS[name][0]


def pool(x, border):
    """3x3 maxima with stride 2, by NumPy."""
    x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=border)
    rows, columns = (x.shape[1] - 1) // 2, (x.shape[2] - 1) // 2
    windows = [x[:, i : i + 2 * rows : 2, j : j + 2 * columns : 2] for i in range(3) for j in range(3)]
    return np.max(windows, axis=0)


def convolve(x, kernel, stride=1):
    """A convolution of standardised weights in float64, by NumPy; zeros around the image."""
    axes = (0, 1, 2)
    kernel = (kernel - kernel.mean(axes)) / np.sqrt(kernel.var(axes) + 1e-10)
    half = len(kernel) // 2
    x = np.pad(x, ((0, 0), (half, half), (half, half), (0, 0)))
    rows, columns = ((size - len(kernel)) // stride + 1 for size in x.shape[1:3])
    taps = np.ndindex(kernel.shape[:2])
    return sum(x[:, i : i + stride * rows : stride, j : j + stride * columns : stride] @ kernel[i, j] for i, j in taps)


def norm(x, params):
    """GroupNorm over 32 groups, then ReLU."""
    groups = x.reshape(*x.shape[:3], 32, -1)
    axes = (1, 2, 4)
    groups = (groups - groups.mean(axes, keepdims=True)) / np.sqrt(groups.var(axes, keepdims=True) + 1e-5)
    return np.maximum(groups.reshape(x.shape) * params["scale"] + params["bias"], 0)


def unit(x, params, stride):
    inside = norm(x, params["norm1"])
    residual = convolve(inside, params["conv_proj"]["kernel"], stride) if "conv_proj" in params else x
    inside = norm(convolve(inside, params["conv1"]["kernel"]), params["norm2"])
    inside = norm(convolve(inside, params["conv2"]["kernel"], stride), params["norm3"])
    return residual + convolve(inside, params["conv3"]["kernel"])


@pytest.mark.parametrize("border", BORDERS)
def test_the_released_form_equals_its_definition(border):
    """Evaluated in float64, on images whose sides are odd."""
    model = tiny(border=border)
    params, images = params_of(model), images_of(2, 33, 31, 3)
    with jax.default_matmul_precision("highest"):
        logits, out = apply(model, params, images)
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = pool(convolve(np.asarray(images, np.float64), weights["root"]["conv"]["kernel"], 2), BORDERS[border])
    np.testing.assert_allclose(out["root"], x, rtol=1e-5, atol=1e-5)
    x = unit(x, weights["stage1"]["unit1"], 1)
    x = unit(x, weights["stage2"]["unit1"], 2)
    x = unit(x, weights["stage2"]["unit2"], 1)
    np.testing.assert_allclose(out["stage2"], x, rtol=1e-4, atol=1e-4)
    features = norm(x, weights["norm"]).mean((1, 2))
    np.testing.assert_allclose(out["pre_logits"], features, rtol=1e-4, atol=1e-5)
    expected = features @ weights["head"]["kernel"] + weights["head"]["bias"]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_other_form_has_the_units_of_the_hybrids():
    """The same stages as a hybrid's stem: equal feature maps from equal weights."""
    hybrid = create(
        "ViT/8", stem="resnet", stages=(1, 2), stem_width=32, width=32, depth=1, mlp_dim=8, num_heads=2, resolution=32
    )
    stem = params_of(hybrid)["stem"]
    model = tiny(unit="post_activation", num_classes=0)
    assert parameter_shapes(model) == jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), stem)
    resnet = models.resnet.ResNet((1, 2), 32)
    features, out = apply(model, stem, images_of())
    expected, stages = jax.jit(resnet.apply)({"params": stem}, images_of())
    for name in ("root", "stage1", "stage2"):
        np.testing.assert_allclose(out[name], stages[name], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(features, expected.mean((1, 2)), rtol=1e-5, atol=1e-5)


def test_a_bit_starts_as_published():
    params = jax.jit(tiny(head_bias=-10.0).init)(jax.random.key(0), images_of())
    assert not params["head"]["kernel"].any() and np.all(params["head"]["bias"] == -10)
    block = params["stage2"]["unit1"]
    assert {name: value["kernel"].shape for name, value in block.items() if "kernel" in value} == {
        "conv1": (1, 1, 128, 64),
        "conv2": (3, 3, 64, 64),
        "conv3": (1, 1, 64, 256),
        "conv_proj": (1, 1, 128, 256),
    }
    assert all(np.all(block[name]["scale"] == 1) for name in ("norm1", "norm2", "norm3"))
    np.testing.assert_allclose(block["conv2"]["kernel"].std(), (3 * 3 * 64) ** -0.5, rtol=0.05)
    assert {"root", "stage1", "stage2", "norm", "head"} == set(params)


@pytest.mark.parametrize("name", ["ViT-mu/8", "BiT-R14x1"])
def test_the_head_may_start_with_random_values(name):
    model = create(name, resolution=32, num_classes=100, head_std=0.02)
    params = jax.jit(model.init)(jax.random.key(0), images_of())
    np.testing.assert_allclose(params["head"]["kernel"].std(), 0.02, rtol=0.05)


def test_standardised_filters_ignore_scale_and_offset():
    kernel = 0.1 * images_of(3, 3, 3, 8, seed=1)
    np.testing.assert_allclose(standardise(kernel), standardise(5 * kernel - 2), atol=1e-4)


def test_intermediates():
    model = tiny(resolution=(40, 24))
    logits, out = apply(model, params_of(model), images_of(2, 40, 24, 3))
    shapes = {name: value.shape for name, value in out.items()}
    assert shapes == {
        "root": (2, 10, 6, 32),
        "stage1": (2, 10, 6, 128),
        "stage2": (2, 5, 3, 256),
        "tokens": (2, 15, 256),
        "pre_logits": (2, 256),
    }
    assert logits.shape == (2, 7) and model.spec.grid == (5, 3)
    np.testing.assert_allclose(out["tokens"].mean(1), out["pre_logits"], rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="BiT has no attention to capture"):
        model.apply(params_of(model), images_of(2, 40, 24, 3), capture=("attention",))


def test_remat_changes_nothing_and_bfloat16_is_close():
    model = tiny(stages=(1,))
    params, images = params_of(model), images_of()
    expected = gradients(model, params, images)
    chex.assert_trees_all_close(gradients(tiny(stages=(1,), remat="full"), params, images), expected, atol=1e-5)
    logits = apply(model, params, images)[0]
    narrow, out = apply(tiny(stages=(1,), dtype="bfloat16"), params, images)
    assert narrow.dtype == out["pre_logits"].dtype == jnp.float32 and out["stage1"].dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow, logits, atol=0.05)
    assert not np.array_equal(narrow, logits)


def test_fields_recreate_the_model():
    for model, fields in (
        (create("BiT-R50x1"), {}),
        (create("BiT-R101x3", num_classes=10, unit="post_activation"), {"num_classes": 10, "unit": "post_activation"}),
        (create("BiT-R14x1", width=32), {"width": 32}),
        (tiny(), {"stages": (1, 2), "width": 32, "resolution": 32, "num_classes": 7}),
    ):
        assert model.fields == fields
        assert create(model.name, **json.loads(json.dumps(model.fields))) == model
    assert create("BiT-R50x2").spec == create("BiT", stages=[3, 4, 6, 3], width=128).spec
    assert models.model_name(create("BiT-R152x4").values) == "BiT-R152x4"
    assert models.model_name(tiny().values) == "BiT"
    # A configuration states the fields of all models.
    assert create("BiT-R50x1", pooling="token", attention="auto", scan=False) == create("BiT-R50x1")
    assert create("ViT-S/16", unit="pre_activation") == create("ViT-S/16")
    same = {"unit": "post_activation"}
    assert tiny(border="lowest", **same).spec == tiny(**same).spec  # after a ReLU, the border makes no difference


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        ("BiT-R51x1", {}, "unknown model 'BiT-R51x1'; did you mean 'BiT-R"),
        ("BiT-50x1", {}, "did you mean 'BiT-R50x1'"),
        ("bit-r50x1", {}, "unknown model 'bit-r50x1'; did you mean 'BiT-R50x1'"),
        ("BiT", {"width": 32}, "the model name BiT does not contain a size; set stages."),
        ("BiT-R50x1", {"width": 48}, "width must be a multiple of 32, the groups of GroupNorm, not 48"),
        ("BiT-R50x1", {"stages": ()}, "a BiT must have at least 1 stage"),
        ("BiT-R50x1", {"num_classes": -1}, "num_classes must be 0 or more"),
        ("BiT-R50x1", {"unit": "preactivation"}, "unknown unit 'preactivation'; did you mean 'pre_activation'"),
        ("BiT-R50x1", {"se_reduction": 257}, "se_reduction must be at most 256, the channels of a unit, or 0"),
        ("BiT-R50x1", {"root": "attention", "resolution": 30}, "images of a multiple of 4 pixels, not (30, 30)"),
        ("BiT-R50x1", {"remat": "mlp"}, "unknown remat 'mlp'; choose from full, none"),
        (
            "BiT-R50x1",
            {"dropout_rate": 0.1, "depth": 3, "grad_dtype": "float32", "stem": "resnet"},
            "BiT-R50x1, a BiT, has no dropout_rate, depth, grad_dtype, stem; leave them out or, where a recipe sets "
            "them, add --config.model.dropout_rate=0.0 --config.model.depth=None --config.optim.grad_dtype=auto.",
        ),
        ("BiT-R50x1", {"resolution": 0}, "resolution must be at least 1 pixel"),
        ("ViT-B/16", {"unit": "post_activation"}, "ViT-B/16, a ViT, has no unit; leave"),
    ],
)
def test_mistakes_are_reported(name, fields, sentence):
    with pytest.raises(UserError) as error:
        create(name, **fields)
    assert sentence in str(error.value)


def test_every_word_that_the_spec_accepts_is_implemented():
    spec = models.bit_spec
    tables = {spec.UnitKind: FORMS, spec.RootKind: ROOTS, spec.Border: BORDERS, spec.BitRemat: REMATS}
    for words, table in tables.items():
        assert get_args(words) == tuple(table)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu for this kind of machine")
def test_a_strided_unit_compiles_for_v6e():
    """Without a barrier before its strided convolution the compiler ends by a stack overflow."""
    environment = os.environ | targets.NO_POD | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.models.compiled_resnet", "v6e:2x2"]
    answer = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[-2000:]
