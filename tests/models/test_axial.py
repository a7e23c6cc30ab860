"""The models of appendix D.6: sizes, and a direct evaluation in float64 with loops over rows and columns."""

import jax
import numpy as np
import pytest
import scipy.special

from tests.models.test_bit import convolve
from tests.models.test_later_vits import norm as layer_norm
from tests.models.test_models import apply, count, images_of, params_of
from tests.test_sharding import on, trained
from vit_jax import UserError, interop, kernels, tree
from vit_jax.macs import macs_per_image
from vit_jax.model import create, parameter_shapes
from vit_jax.models import bit_spec, model_name

# Parameters with 1000 classes, and multiply-accumulates, at 224 pixels.
SIZES = {
    "Axial-ViT-B/16": (171_620_584, 33_511_913_472),
    "Axial-ViT-B/32": (173_277_160, 8_452_614_144),
    "AxialResNet-50": (19_373_640, 4_050_806_528),
}
LAYOUTS = {"google": ".npz", "big_vision": ".npz", "timm": ".safetensors", "huggingface": ""}


def tiny_vit(**fields):
    """4 rows of 3 patches."""
    return create("Axial-ViT-mu/8", **{"resolution": (32, 24), "depth": 2, "num_classes": 7} | fields)


def tiny_resnet(**fields):
    """Its second stage halves an odd number of rows."""
    shape = {"stages": (1, 2), "width": 32, "resolution": (28, 24), "num_classes": 5}
    return create("BiT", unit="axial", **shape | fields)


@pytest.mark.parametrize(
    "name", [n if n == "Axial-ViT-B/16" else pytest.param(n, marks=pytest.mark.slow) for n in SIZES]
)
def test_sizes(name):
    model = create(name)
    assert (count(model), macs_per_image(model)) == SIZES[name]
    assert model.fields == {} and model_name(model.values) == name


def test_the_first_unit_of_a_stage_attends_to_the_lines_before_its_stride():
    spec = create("AxialResNet-50", resolution=(224, 192)).spec
    lengths = {
        (stage, unit): [spec.line_length(stage, unit, axis) for axis in (0, 1)]
        for stage, unit in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2))
    }
    assert lengths == {(1, 1): [56, 48], (2, 1): [56, 48], (2, 2): [28, 24], (4, 1): [14, 12], (4, 2): [7, 6]}


@pytest.mark.slow
def test_an_axial_vit_has_each_block_of_a_vit_twice():
    blocks = {kind: create(f"{kind}ViT-B/16", pooling="gap", num_classes=0) for kind in ("", "Axial-")}
    of_a_block = 2 * 768 + (768 + 1) * 3 * 768 + (768 + 1) * 768 + 2 * 768 + (768 + 1) * 3072 + (3072 + 1) * 768
    assert count(blocks["Axial-"]) - count(blocks[""]) == 12 * of_a_block
    patches, dense = 16 * 16 * 3 * 768 * 196, 12 * 768 * (4 * 768 + 2 * 3072) * 196
    scores = 12 * 2 * 196 * 768  # of all heads and the sum of values, for each key
    assert macs_per_image(blocks[""]) == patches + dense + 196 * scores
    assert macs_per_image(blocks["Axial-"]) == patches + 2 * (dense + 14 * scores)


def attention(x, p):
    """Attention within one line of patches."""
    q, k, v = np.einsum("td,dshc->shtc", x, p["qkv"]["kernel"]) + p["qkv"]["bias"][:, :, None]
    weights = scipy.special.softmax(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]), -1)
    return np.einsum("htc,hcd->td", weights @ v, p["out"]["kernel"]) + p["out"]["bias"], weights


def block(x, p):
    """The block of one line of patches."""
    branch, weights = attention(layer_norm(x, p["norm1"], 1e-6), p["attention"])
    x = x + branch
    hidden = layer_norm(x, p["norm2"], 1e-6) @ p["mlp"]["dense1"]["kernel"] + p["mlp"]["dense1"]["bias"]
    hidden = hidden / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
    return x + hidden @ p["mlp"]["dense2"]["kernel"] + p["mlp"]["dense2"]["bias"], weights


def evaluate_vit(params, image):
    """The logits of one image, and the weights of all heads of the last block, rows first."""
    patches = image.reshape(4, 8, 3, 8, 3).swapaxes(1, 2).reshape(4, 3, -1)
    x = patches @ params["embed"]["kernel"].reshape(-1, 32) + params["embed"]["bias"]
    x = x + params["position"].reshape(4, 3, 32)
    for layer in range(len(params["encoder"]["blocks"]["rows"]["norm1"]["bias"])):
        p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["encoder"]["blocks"])
        whole = np.zeros((4, 4, 3, 4, 3))  # heads, then query and key
        for row in range(4):
            x[row], whole[:2, row, :, row] = block(x[row], p["rows"])
        for column in range(3):
            x[:, column], whole[2:, :, column, :, column] = block(x[:, column], p["columns"])
    pooled = layer_norm(x, params["encoder"]["norm"], 1e-6).mean((0, 1))
    return pooled @ params["head"]["kernel"] + params["head"]["bias"], whole.reshape(4, 12, 12)


def group_norm(x, p, epsilon=1e-4):
    """Over 32 groups of channels, with statistics of all places."""
    groups = x.reshape(-1, 32, x.shape[-1] // 32)
    groups = (groups - groups.mean((0, 2), keepdims=True)) / np.sqrt(groups.var((0, 2), keepdims=True) + epsilon)
    return groups.reshape(x.shape) * p["scale"] + p["bias"]


def attend_line(x, p):
    length, channels = x.shape
    size = channels // 8
    qkv = group_norm(x @ p["conv_qkv"]["kernel"][0, 0], p["norm_qkv"]).reshape(length, 8, 2 * size)
    out = np.zeros((length, 8, size))
    of_query, of_key, of_value = np.split(p["relative_line"], [size // 2, size], axis=1)
    for head, i in np.ndindex(8, length):
        q, k, v = np.split(qkv[:, head], [size // 2, size], axis=1)
        there, back = ([sign * (i - j) + length - 1 for j in range(length)] for sign in (1, -1))
        scores = [q[i] @ k[j] + q[i] @ of_query[there[j]] + k[j] @ of_key[back[j]] for j in range(length)]
        weights = scipy.special.softmax(scores)
        out[i, head] = sum(weights[j] * (v[j] + of_value[there[j]]) for j in range(length))
    return group_norm(out.reshape(length, channels), p["norm_out"])


def standardise(kernel):
    return (kernel - kernel.mean((0, 1, 2))) / (kernel.std((0, 1, 2)) + 1e-5)


def convolved(x, p, suffix, stride=1, epsilon=1e-4):
    return group_norm(
        convolve(x[None], standardise(p[f"conv{suffix}"]["kernel"]), stride)[0], p[f"norm{suffix}"], epsilon
    )


def means(x):
    """The means of 2x2 places; an odd number of rows is completed by one of zeros, which counts."""
    x = np.pad(x, ((0, x.shape[0] % 2), (0, x.shape[1] % 2), (0, 0)))
    return (x[::2, ::2] + x[1::2, ::2] + x[::2, 1::2] + x[1::2, 1::2]) / 4


def unit(x, p, stride):
    residual = convolved(x, p, "_proj", stride) if "conv_proj" in p else x
    x = np.maximum(convolved(x, p, "1"), 0)
    for column in range(x.shape[1]):
        x[:, column] = attend_line(x[:, column], p["columns"])
    for row in range(x.shape[0]):
        x[row] = attend_line(x[row], p["rows"])
    x = means(x) if stride > 1 else x
    return np.maximum(residual + convolved(np.maximum(x, 0), p, "3"), 0)


def evaluate_resnet(params, root):
    """The logits of one image, given the root's output."""
    x = unit(root, params["stage1"]["unit1"], 1)
    x = unit(unit(x, params["stage2"]["unit1"], 2), params["stage2"]["unit2"], 1)
    return x.mean((0, 1)) @ params["head"]["kernel"] + params["head"]["bias"]


def compare(model, images, evaluate, names, tolerance=1e-3, capture=()):
    """The logits, and the gradients of some parameters along a random direction, against those in float64.

    `evaluate` takes the parameters and the root's output.
    """
    params = params_of(model)

    def loss(params):
        logits, out = model.apply(params, images, capture=capture)
        return (logits**2).sum(), (logits, out)

    with jax.default_matmul_precision("highest"):
        (_, (logits, out)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    wide, random = tree.flatten(jax.tree.map(np.float64, params)), np.random.default_rng(0)
    root = np.float64(out["root"]) if "root" in out else None
    expected = evaluate(tree.unflatten(wide), root)
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())
    for name in names:
        direction = random.standard_normal(wide[name].shape)
        high, low = (
            (evaluate(tree.unflatten(wide | {name: wide[name] + step * direction}), root) ** 2).sum()
            for step in (1e-6, -1e-6)
        )
        grad = tree.flatten(grads)[name]
        assert (grad * direction).sum() == pytest.approx((high - low) / 2e-6, rel=tolerance), name
    return out


@pytest.mark.slow
def test_an_axial_vit_equals_its_definition():
    model, images = tiny_vit(depth=1), np.asarray(images_of(2, 32, 24, 3))

    def evaluate(params, root):
        return np.array([evaluate_vit(params, np.float64(image))[0] for image in images])

    names = [f"encoder/blocks/{axis}/attention/qkv/kernel" for axis in ("rows", "columns")]
    out = compare(model, images, evaluate, [*names, "position"], capture=("attention",))
    _, expected = evaluate_vit(jax.tree.map(np.float64, params_of(model)), np.float64(images[0]))
    np.testing.assert_allclose(out["attention"][-1, 0], expected, atol=1e-4)
    np.testing.assert_allclose(out["attention"].sum(-1), 1, atol=1e-5)


@pytest.mark.slow
def test_an_axial_resnet_equals_its_definition():
    model = tiny_resnet()

    def evaluate(params, root):
        return np.array([evaluate_resnet(params, each) for each in root])

    names = [
        f"stage2/unit1/{axis}/{leaf}" for axis in ("rows", "columns") for leaf in ("conv_qkv/kernel", "relative_line")
    ]
    # In float32, the norms of few values and the ReLUs lose some digits.
    out = compare(model, np.asarray(images_of(2, 28, 24, 3)), evaluate, names, tolerance=1e-2)
    assert out["stage1"].shape == (2, 7, 6, 128) and out["stage2"].shape == (2, 4, 3, 256)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"scan": True, "remat": "full", "attention": "heads_first"},
        {"attention": "tokens_first"},
        {"attention": "fused"},
    ],
    ids=str,
)
def test_ways_to_compute_change_nothing(fields):
    images, params = images_of(2, 32, 24, 3), params_of(tiny_vit())
    expected = apply(tiny_vit(), params, images)[0]
    with kernels.interpret_kernels():
        found = apply(tiny_vit(**fields), params, images)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_the_kernel_is_chosen_by_the_length_of_lines():
    """At 1024 pixels, 64 rows of 64 patches fit where 4096 patches do not."""
    for kind, found in (("", "tokens_first"), ("Axial-", "fused")):
        model = create(f"{kind}ViT-B/16", dtype="bfloat16", resolution=1024)
        assert model.for_device("TPU v5p", 8).field("attention") == found


@pytest.mark.slow
def test_stochastic_depth_drops_whole_images():
    params = params_of(tiny_vit())
    _, out = apply(tiny_vit(stochastic_depth=0.9), params, images_of(16, 32, 24, 3), jax.random.key(1))
    first, last = out["blocks"]
    kept = np.abs(last - first).max(-1) > 0  # of each patch
    assert set(kept.mean(1)) <= {0.0, 1.0} and 0 < kept[:, 0].sum() < 16


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ViT", "ResNet"])
def test_training_on_8_devices_is_that_on_one(tiny, kind, monkeypatch):
    monkeypatch.setitem(bit_spec.UNITS, 26, (1,))
    changes = {"name": "AxialResNet-26", "width": 32, "depth": None}
    if kind == "ViT":
        changes = {"name": "Axial-ViT-mu/8", "pooling": "gap"}
    tiny.model.update(changes)
    tiny.model.dropout_rate = tiny.model.stochastic_depth = tiny.task.mixup = 0.0
    tiny.base_lr = 1e-3
    expected = trained(on({}, tiny))
    found = trained(on({"fsdp": 4, "tensor": 2}, tiny), expected.start)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_vit, tiny_resnet])
def test_files_are_ours_alone(make, tmp_path):
    model = make()
    params = params_of(model)
    interop.save(tmp_path / "model.npz", model, params)
    loaded, read = interop.load(tmp_path / "model.npz")
    assert loaded == model
    jax.tree.map(np.testing.assert_array_equal, read, params)
    larger, resampled = interop.load(tmp_path / "model.npz", resolution=(40, 48))
    assert jax.tree.map(np.shape, resampled) == jax.tree.map(np.shape, parameter_shapes(larger))
    for layout, suffix in LAYOUTS.items():
        with pytest.raises(UserError):
            interop.save(tmp_path / f"other{suffix}", model, params, layout=layout)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"pooling": "token"}, "axial blocks have no place for a class token"),
        ({"registers": 1}, "axial blocks have no place for a class token"),
        ({"position": "relative"}, "axial blocks get positions at the stem only"),
        ({"position_place": "shared"}, "axial blocks get positions at the stem only"),
        ({"rotary": "axial"}, "axial blocks get positions at the stem only"),
    ],
)
def test_mistakes_are_reported(fields, sentence):
    with pytest.raises(UserError) as error:
        create("Axial-ViT-B/16", **fields)
    assert sentence in str(error.value)


def test_other_images_and_names_are_refused():
    with pytest.raises(UserError, match="resamples the positions of its axial units"):
        tiny_resnet().init(jax.random.key(0), images_of(1, 32, 32, 3))
    with pytest.raises(UserError, match="did you mean 'AxialResNet-50'"):
        create("AxialResNet-51")
    with pytest.raises(UserError, match="did you mean 'Axial-ViT-"):
        create("Axial-ViT-C/16")
