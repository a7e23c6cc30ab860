"""ResNets with stand-alone attention, augmented convolutions, squeeze-and-excitation: sizes, and loops in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from tests.models.test_axial import compare, convolved, group_norm, means, standardise
from tests.models.test_bit import convolve
from tests.models.test_bit import norm as norm_relu
from tests.models.test_bit import unit as pre_activation_unit
from tests.models.test_models import apply, count, images_of, params_of
from tests.test_sharding import on, trained
from vit_jax import UserError, interop
from vit_jax.macs import macs_per_image
from vit_jax.model import create, parameter_shapes
from vit_jax.models import bit_spec, model_name, stand_alone

EPSILON = 1e-6

# Parameters with 1000 classes, and multiply-accumulates, at 224 pixels; as published, in millions and in 1e9 FLOPs.
SIZES = {
    ("SASA-ResNet-26", "convolution"): (10_342_632, 2_191_886_080, (10.3, 4.5)),
    ("SASA-ResNet-38", "convolution"): (14_190_632, 2_796_582_144, (14.1, 5.7)),
    ("SASA-ResNet-50", "convolution"): (18_038_632, 3_401_278_208, (18.0, 7.0)),
    ("SASA-ResNet-26", "attention"): (10_334_568, 2_207_346_688, (10.3, 4.7)),
    ("SASA-ResNet-38", "attention"): (14_182_568, 2_812_042_752, (14.1, 6.0)),
    ("SASA-ResNet-50", "attention"): (18_030_568, 3_416_738_816, (18.0, 7.2)),
    ("AA-ResNet-50", "convolution"): (25_777_392, 4_053_090_224, (25.8, 8.3)),
    ("AA-ResNet-101", "convolution"): (45_354_728, 7_845_921_328, (45.4, 16.1)),
    ("SE-ResNet-50", "convolution"): (28_088_024, 3_950_766_848, (28.1, 7.74)),
}


def tiny(unit, **fields):
    shape = {"stages": (1, 2), "width": 32, "resolution": (28, 24), "num_classes": 5}
    return create("BiT", unit=unit, **shape | fields)


def definition(query, key, value, down, across):
    """Stand-alone attention with the 49 keys of every query in an array, to count its products."""
    (rows, columns), half = query.shape[1:3], down.shape[-1]
    padding = ((0, 0), (3, 3), (3, 3), (0, 0), (0, 0))

    def windows(x):
        padded = jnp.pad(x, padding)
        return jnp.stack([padded[:, a : a + rows, b : b + columns] for a, b in np.ndindex(7, 7)])

    scores = jnp.einsum("nyxhd,knyxhd->nyxhk", query, windows(key))
    scores += jnp.repeat(jnp.einsum("nyxhd,ahd->nyxha", query[..., :half], down), 7, axis=-1)
    scores += jnp.tile(jnp.einsum("nyxhd,bhd->nyxhb", query[..., half:], across), 7)
    return jnp.einsum("nyxhk,knyxhd->nyxhd", jax.nn.softmax(scores), windows(value))


@pytest.mark.parametrize(
    ("name", "root"), [n if n[0] == "AA-ResNet-50" else pytest.param(*n, marks=pytest.mark.slow) for n in SIZES]
)
def test_sizes(name, root, monkeypatch):
    monkeypatch.setattr(stand_alone, "attend", definition)
    model, (parameters, macs, (millions, _)) = create(name, root=root), SIZES[name, root]
    assert (count(model), macs_per_image(model)) == (parameters, macs)
    assert abs(parameters / 1e6 - millions) < 0.1
    assert model.fields == ({} if root == "convolution" else {"root": root})
    assert model_name(model.values) == name


def attend_nearby(x, p):
    """Stand-alone attention of one map."""
    rows, columns, channels = x.shape
    size = channels // 8
    query, key, value = np.moveaxis((x @ p["conv_qkv"]["kernel"][0, 0]).reshape(rows, columns, 3, 8, size), 2, 0)
    return neighbours(query, key, value, *(p[f"relative_{axis}"].reshape(7, 8, -1) for axis in ("rows", "columns")))


def neighbours(query, key, value, down, across):
    """Equation 3: each half of a query reads the positions of one axis."""
    rows, columns, heads, _ = query.shape
    found = np.zeros(query.shape)
    for i, j, head in np.ndindex(rows, columns, heads):
        places = [
            (a, b) for a in range(i - 3, i + 4) for b in range(j - 3, j + 4) if 0 <= a < rows and 0 <= b < columns
        ]
        scores = []
        for a, b in places:
            position = np.concatenate([down[a - i + 3, head], across[b - j + 3, head]])
            scores.append(query[i, j, head] @ (key[a, b, head] + position))
        weights = scipy.special.softmax(scores)
        found[i, j, head] = sum(weight * value[a, b, head] for weight, (a, b) in zip(weights, places, strict=True))
    return found.reshape(rows, columns, -1)


def same_places(size):
    """The places of 3 under each of half as many, as a convolution with stride 2 has them."""
    half = -(-size // 2)
    first = -(max(0, 2 * (half - 1) + 3 - size) // 2)
    return [range(max(0, first + 2 * n), min(size, first + 2 * n + 3)) for n in range(half)], first


def halved(x):
    """Means of 3x3 places, two apart; there are fewer at the edges."""
    rows, columns = (same_places(size)[0] for size in x.shape[:2])
    return np.array([[x[a.start : a.stop, b.start : b.stop].mean((0, 1)) for b in columns] for a in rows])


def same_convolution(x, kernel, stride):
    firsts = [same_places(size)[1] if stride == 2 else -1 for size in x.shape[:2]]
    padded = np.pad(x, ((-firsts[0], 3), (-firsts[1], 3), (0, 0)))
    rows, columns = (-(-size // stride) for size in x.shape[:2])
    taps = np.ndindex(3, 3)
    return sum(
        padded[a : a + stride * rows : stride, b : b + stride * columns : stride][:rows, :columns] @ kernel[a, b]
        for a, b in taps
    )


def resized(x, sides):
    """Bilinear, by the centres of places; the edges are repeated."""
    for axis, (old, new) in enumerate(zip(x.shape[:2], sides, strict=True)):
        places = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        weights = np.maximum(0, 1 - abs(places[:, None] - np.arange(old)))
        x = np.moveaxis(np.tensordot(weights, x, (1, axis)), 0, axis)
    return x


def attend_to_all(x, p):
    """The attention of an augmented convolution of one map."""
    rows, columns, _ = x.shape
    values, key_size = p["conv_out"]["kernel"].shape[-1], p["relative_rows"].shape[-1]
    qkv = x @ p["conv_qkv"]["kernel"][0, 0]
    query, key, value = np.split(qkv, [8 * key_size, 16 * key_size], axis=-1)
    query, key, value = (each.reshape(rows, columns, 8, -1) for each in (query, key, value))
    out = np.zeros((rows, columns, 8, values // 8))
    for i, j, head in np.ndindex(rows, columns, 8):
        scores = np.zeros((rows, columns))
        for a, b in np.ndindex(rows, columns):
            positions = p["relative_rows"][a - i + rows - 1] + p["relative_columns"][b - j + columns - 1]
            scores[a, b] = query[i, j, head] @ (key[a, b, head] + positions) / np.sqrt(key_size)
        out[i, j, head] = np.tensordot(scipy.special.softmax(scores), value[:, :, head], 2)
    return out.reshape(rows, columns, values) @ p["conv_out"]["kernel"][0, 0]


def convolution(x, p, stride):
    return group_norm(same_convolution(x, standardise(p["conv2"]["kernel"]), stride), p["norm2"], EPSILON)


def stand_alone_attention(x, p, stride):
    x = attend_nearby(x, p["attention"])
    return group_norm(means(x) if stride > 1 else x, p["norm2"], EPSILON)


def augmented(x, p, stride, coarse):
    beside = same_convolution(x, standardise(p["conv2"]["kernel"]), stride)
    for halve in (stride == 2, coarse):
        x = halved(x) if halve else x
    attended = resized(attend_to_all(x, p["attention"]), beside.shape[:2])
    return group_norm(np.concatenate([beside, attended], axis=-1), p["norm2"], EPSILON)


def squeezed(x, p):
    hidden = np.maximum(x.mean((0, 1)) @ p["reduce"]["kernel"] + p["reduce"]["bias"], 0)
    return x / (1 + np.exp(-hidden @ p["expand"]["kernel"] - p["expand"]["bias"]))


def unit(x, p, stride, spatial):
    residual = convolved(x, p, "_proj", stride, EPSILON) if "conv_proj" in p else x
    x = spatial(np.maximum(convolved(x, p, "1", epsilon=EPSILON), 0), p, stride)
    x = convolved(np.maximum(x, 0), p, "3", epsilon=EPSILON)
    return np.maximum(residual + (squeezed(x, p["squeeze"]) if "squeeze" in p else x), 0)


def evaluate(params, root, spatials):
    """The logits of images, given the root's output and what each stage computes between the 1x1 convolutions."""
    logits = []
    for x in root:
        for stage, spatial in enumerate(spatials):
            for number in range(len(params[f"stage{stage + 1}"])):
                p = params[f"stage{stage + 1}"][f"unit{number + 1}"]
                x = unit(x, p, 2 if stage and not number else 1, spatial)
        logits.append(x.mean((0, 1)) @ params["head"]["kernel"] + params["head"]["bias"])
    return np.array(logits)


AUGMENTED = [convolution, *(functools.partial(augmented, coarse=coarse) for coarse in (True, False))]
ATTENTION = ("attention/conv_qkv/kernel", "attention/relative_rows", "attention/relative_columns")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unit_kind", "fields", "spatials", "leaves"),
    [
        ("stand_alone", {}, [stand_alone_attention] * 2, ATTENTION),
        (
            "augmented",
            {"stages": (1, 1, 1), "resolution": (28, 36)},
            AUGMENTED,
            (*ATTENTION, "attention/conv_out/kernel", "conv2/kernel"),
        ),
        ("post_activation", {"se_reduction": 16}, [convolution] * 2, ("squeeze/reduce/kernel", "squeeze/expand/bias")),
    ],
)
def test_models_equal_their_definitions(unit_kind, fields, spatials, leaves):
    model, size = tiny(unit_kind, **fields), fields.get("resolution", (28, 24))
    names = [f"stage{len(spatials)}/unit1/{leaf}" for leaf in leaves]
    images = np.asarray(images_of(2, *size, 3))
    # In float32, the norms of few values and the ReLUs lose some digits.
    compare(model, images, functools.partial(evaluate, spatials=spatials), names, tolerance=1e-2)


@pytest.mark.slow
def test_the_released_form_takes_squeeze_and_excitation():
    model, images = tiny("pre_activation", stages=(1,), se_reduction=16), np.asarray(images_of(2, 28, 24, 3))

    def released(params, root):
        p = params["stage1"]["unit1"]
        plain = pre_activation_unit(root, p, 1)
        projected = convolve(norm_relu(root, p["norm1"]), p["conv_proj"]["kernel"])
        x = projected + np.array([squeezed(one, p["squeeze"]) for one in plain - projected])
        features = norm_relu(x, params["norm"]).mean((1, 2))
        return features @ params["head"]["kernel"] + params["head"]["bias"]

    compare(model, images, released, ["stage1/unit1/squeeze/reduce/kernel"], tolerance=1e-2)


def stem(image, p):
    """The attention stem of one image."""
    height, width, _ = image.shape
    shares = scipy.special.softmax((p["mixture_rows"][:, None] + p["mixture_columns"]) @ p["mixture_values"].T, -1)
    found = np.zeros((height // 4, width // 4, 4, 4, p["values_kernel"].shape[-1]))
    for i, j in np.ndindex(height // 4, width // 4):
        pixels = image[4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
        query, key = np.moveaxis(np.tensordot(pixels, p["query_key_kernel"], 1), 2, 0)
        value = np.array(
            [[np.tensordot(shares[a, b], p["values_kernel"], 1).T @ pixels[a, b] for b in range(4)] for a in range(4)]
        )
        for head in np.split(np.arange(value.shape[-1]), 4):
            scores = np.tensordot(query[..., head], key[..., head], (2, 2))
            weights = scipy.special.softmax(scores, (2, 3))
            found[i, j][..., head] = np.tensordot(weights, value[..., head], 2)
    whole = found.swapaxes(1, 2).reshape(height, width, -1)
    return group_norm(whole, p["norm"], EPSILON).reshape(found.swapaxes(1, 2).shape).max((1, 3))


@pytest.mark.slow
def test_the_attention_stem_equals_its_definition():
    model, images = tiny("stand_alone", root="attention", stages=(1,), resolution=(12, 8)), images_of(2, 12, 8, 3)

    def whole(params, root):
        roots = np.array([stem(np.float64(image), params["root"]) for image in np.asarray(images)])
        np.testing.assert_allclose(root, roots, atol=1e-2)  # and below, with changed parameters, nearly so
        return evaluate(params, roots, [stand_alone_attention])

    names = [
        f"root/{name}"
        for name in ("query_key_kernel", "values_kernel", "mixture_rows", "mixture_columns", "mixture_values")
    ]
    out = compare(model, images, whole, names, tolerance=1e-2)
    assert out["root"].shape == (2, 3, 2, 32)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of at most 4 places, and of all if there are no more than 5."""
    monkeypatch.setattr(stand_alone, "BLOCK", 4)
    monkeypatch.setattr(stand_alone, "WHOLE", 5)


@pytest.mark.parametrize(
    "grid", [(6, 5), *(pytest.param(each, marks=pytest.mark.slow) for each in [(3, 4), (9, 7), (5, 13)])]
)
def test_neighbourhoods_in_blocks_equal_loops(grid, small_blocks):
    random = np.random.default_rng(0)
    arrays = [*random.standard_normal((3, 1, *grid, 2, 4)), *random.standard_normal((2, 7, 2, 2))]
    grad = random.standard_normal((1, *grid, 2, 4))

    def by_loops(arrays):
        query, key, value, down, across = arrays
        return neighbours(query[0], key[0], value[0], down, across).reshape(grad.shape)

    def differentiate(arrays, grad):
        found, transpose = jax.vjp(lambda arrays: stand_alone.attend(*arrays), arrays)
        return found, transpose(grad)[0]

    with jax.enable_x64(True):
        found, grads = jax.jit(differentiate)([jnp.asarray(one) for one in arrays], jnp.asarray(grad))
    np.testing.assert_allclose(found, by_loops(arrays), rtol=0, atol=2e-6)  # scores are in float32
    step = 1e-6
    for number, one in enumerate(grads):
        direction = random.standard_normal(one.shape)
        high, low = (
            by_loops([array + sign * step * direction if n == number else array for n, array in enumerate(arrays)])
            for sign in (1, -1)
        )
        assert (np.asarray(one) * direction).sum() == pytest.approx(((high - low) * grad).sum() / (2 * step), rel=1e-4)


def test_a_neighbourhood_ends_where_the_map_ends(small_blocks):
    """A change reaches 3 places, also from one block to the next."""
    arrays = np.random.default_rng(0).standard_normal((3, 1, 11, 9, 1, 4)).astype(np.float32)
    tables = np.ones((2, 7, 1, 2), np.float32)
    attend = jax.jit(stand_alone.attend)
    moved = arrays.copy()  # the arrays themselves may still be read
    moved[2, 0, 2, 6] += 1
    changed = np.abs(np.asarray(attend(*moved, *tables) - attend(*arrays, *tables))).max((0, 3, 4)) > 0
    reached = np.zeros((11, 9), bool)
    reached[: 2 + 4, 6 - 3 :] = True
    assert (changed == reached).all()


def test_stand_alone_attention_takes_images_of_other_sizes():
    params = params_of(tiny("stand_alone"))
    logits, out = apply(tiny("stand_alone"), params, images_of(2, 40, 32, 3))
    assert logits.shape == (2, 5) and out["stage2"].shape == (2, 5, 4, 256)
    with pytest.raises(UserError, match="resamples the positions of its augmented units"):
        tiny("augmented").init(jax.random.key(0), images_of(1, 32, 32, 3))


SMALL = {
    "stand_alone": {"root": "attention", "resolution": (32, 24)},
    "augmented": {},
    "post_activation": {"se_reduction": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("unit_kind", SMALL)
def test_files_are_ours_alone(unit_kind, tmp_path):
    model = tiny(unit_kind, **SMALL[unit_kind])
    params = params_of(model)
    interop.save(tmp_path / "model.npz", model, params)
    loaded, read = interop.load(tmp_path / "model.npz")
    assert loaded == model
    jax.tree.map(np.testing.assert_array_equal, read, params)
    larger, resampled = interop.load(tmp_path / "model.npz", resolution=(40, 48))
    assert jax.tree.map(np.shape, resampled) == jax.tree.map(np.shape, parameter_shapes(larger))
    for layout, suffix in {"google": ".npz", "big_vision": ".npz", "timm": ".safetensors", "huggingface": ""}.items():
        with pytest.raises(UserError):
            interop.save(tmp_path / f"other{suffix}", model, params, layout=layout)


@pytest.mark.slow
@pytest.mark.parametrize("unit_kind", SMALL)
def test_training_on_8_devices_is_that_on_one(tiny, unit_kind, monkeypatch):
    monkeypatch.setitem(bit_spec.UNITS, 26, (1, 1))
    fields = {name: value for name, value in SMALL[unit_kind].items() if name != "resolution"}
    tiny.model.update({"name": "BiT-R26x1", "width": 32, "depth": None, "unit": unit_kind} | fields)
    tiny.model.dropout_rate = tiny.model.stochastic_depth = tiny.task.mixup = 0.0
    tiny.base_lr = 1e-3
    expected = trained(on({}, tiny))
    found = trained(on({"fsdp": 4, "tensor": 2}, tiny), expected.start)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-4)
