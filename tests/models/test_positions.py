"""The positions of Table 8: against a direct evaluation in float64, resampled, stored, on several devices."""

import jax
import numpy as np
import pytest
import scipy.special

from tests.models.test_later_vits import norm
from tests.models.test_models import apply, images_of, params_of, tiny
from tests.test_sharding import on, trained
from vit_jax import UserError, interop, kernels, tree
from vit_jax.execution import measure_differences
from vit_jax.kernel_trials.correctness import TOLERANCE
from vit_jax.model import create, parameter_shapes
from vit_jax.models.position import relative_table
from vit_jax.models.resampling import TABLES, resample_relative
from vit_jax.training import run_summary

GRID, SIZE = (4, 3), (32, 24)
BASE = {"resolution": SIZE, "registers": 1, "attention": "auto"}

# The columns of Table 8, then what the paper leaves open.
TABLE_8 = {
    "none": {"position": "none"},
    "1-D": {"position": "learned"},
    "1-D in every block": {"position": "learned", "position_place": "blocks"},
    "1-D shared": {"position": "learned", "position_place": "shared"},
    "2-D": {"position": "learned2d"},
    "2-D in every block": {"position": "learned2d", "position_place": "blocks", "position_rows": "class"},
    "2-D shared": {"position": "learned2d", "position_place": "shared", "position_rows": "patches"},
    "relative": {"position": "relative"},
    "relative, of heads": {"position": "relative", "relative_tables": "head", "position_rows": "patches"},
    "relative, of the model": {"position": "relative", "relative_tables": "model", "position_rows": "class"},
    "bias": {"position": "relative_bias"},
    "bias, of patches": {"position": "relative_bias", "position_rows": "patches"},
    "bias, of the class token": {"position": "relative_bias", "position_rows": "class"},
    "relative, clipped": {"position": "relative", "relative_clip": 2, "attention": "tokens_first"},
}
USUAL = ("relative", "bias, of the class token")
VARIANTS = [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in TABLE_8]


def added(holder, rows):
    """What is added to each token of the grid: class token, register, patches; `holder` has the parameters."""
    before = {"all": 2, "class": 1, "patches": 0}[rows]
    width = 32
    table = np.zeros((2 + 12, width))
    places = [*range(before), *range(2, 14)]
    for row, place in enumerate(places):
        if "position" in holder:
            table[place] = holder["position"][row]
        elif row < before:
            table[place] = holder["position_prefix"][row]
        else:
            y, x = divmod(row - before, GRID[1])
            table[place] = [*holder["position_x"][x], *holder["position_y"][y]]
    return table


def relative_keys(table, rows, clip):
    """The embedding that stands for the key, for each query and key of a head."""
    before = {"all": 2, "class": 1, "patches": 0}[rows]
    places = {token: place for place, token in enumerate([*range(before), *range(2, 14)])}
    keys = np.zeros((14, 14, table.shape[-1]))
    for query, at in places.items():
        for key, other in places.items():
            offset = at - other
            reach = clip or len(places) - 1
            keys[query, key] = table[min(max(offset, -reach), reach) + reach]
    return keys


def biases(table, rows):
    """The bias of each head for each query and key, pair by pair."""
    before, result = {"all": 2, "class": 1, "patches": 0}[rows], np.zeros((2, 14, 14))
    places = dict.fromkeys(range(before)) | {2 + i: np.divmod(i, GRID[1]) for i in range(12)}
    plane, others = table[: 7 * 5].reshape(7, 5, 2), table[7 * 5 :]
    for query, at in places.items():
        for key, other in places.items():
            if at is None or other is None:
                result[:, query, key] = others[2 if at is other else 1 if other is None else 0]
            else:
                result[:, query, key] = plane[at[0] - other[0] + 3, at[1] - other[1] + 2]
    return result


def attention(x, p, fields, shared):
    q, k, v = np.einsum("btd,dshc->sbhtc", x, p["qkv"]["kernel"]) + p["qkv"]["bias"][:, None, :, None]
    scores = q @ k.swapaxes(2, 3)
    if fields["position"] == "relative":
        table = p.get("relative_heads", p.get("relative", shared))
        for head in range(2):
            of_head = table[head] if "relative_heads" in p else table
            keys = relative_keys(of_head, fields.get("position_rows", "all"), fields.get("relative_clip", 0))
            scores[:, head] += np.einsum("bqc,qkc->bqk", q[:, head], keys)
    scores = scores / np.sqrt(q.shape[-1])
    if fields["position"] == "relative_bias":
        scores = scores + biases(p["relative_bias"], fields.get("position_rows", "all"))
    weights = scipy.special.softmax(scores, -1)
    return np.einsum("bhtc,hcd->btd", weights @ v, p["out"]["kernel"]) + p["out"]["bias"], weights


def evaluate(params, images, fields):
    """The logits, and the weights of the last block, in float64."""
    rows, place = fields.get("position_rows", "all"), fields.get("position_place", "stem")
    is_added = fields["position"].startswith("learned")
    patches = images.reshape(-1, GRID[0], 8, GRID[1], 8, 3).swapaxes(2, 3).reshape(len(images), 12, -1)
    x = patches @ params["embed"]["kernel"].reshape(-1, 32) + params["embed"]["bias"]
    prefix = np.broadcast_to(np.concatenate([params["cls"][None], params["registers"]]), (len(x), 2, 32))
    x = np.concatenate([prefix, x], 1)
    if is_added and place == "stem":
        x = x + added(params, rows)
    blocks = params["encoder"]["blocks"]
    for layer in range(2):
        p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], blocks)
        if is_added and place != "stem":
            x = x + added(p if place == "blocks" else params["encoder"], rows)
        branch, weights = attention(
            norm(x, p["norm1"], 1e-6), p["attention"], fields, params["encoder"].get("relative")
        )
        x = x + branch
        hidden = norm(x, p["norm2"], 1e-6) @ p["mlp"]["dense1"]["kernel"] + p["mlp"]["dense1"]["bias"]
        hidden = hidden / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + hidden @ p["mlp"]["dense2"]["kernel"] + p["mlp"]["dense2"]["bias"]
    pooled = norm(x, params["encoder"]["norm"], 1e-6)[:, 0]
    return pooled @ params["head"]["kernel"] + params["head"]["bias"], weights


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_weights_and_gradients_are_those_of_the_equation(name):
    """The gradient of each parameter along a random direction, against a difference in float64."""
    fields = TABLE_8[name]
    model, images = tiny(**BASE | fields), np.asarray(images_of(2, *SIZE, 3))
    params = params_of(model)

    def loss(params):
        logits, out = model.apply(params, images, capture=("attention",))
        return (logits**2).sum(), (logits, out["attention"])

    with jax.default_matmul_precision("highest"):
        (_, (logits, weights)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    wide = tree.flatten(jax.tree.map(np.float64, params))
    expected, expected_weights = evaluate(tree.unflatten(wide), np.float64(images), fields)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(weights[-1], expected_weights, atol=1e-5)
    random, found, slopes = np.random.default_rng(0), {}, {}
    for key, grad in tree.flatten(grads).items():
        direction = random.standard_normal(grad.shape)
        ends = (evaluate(tree.unflatten(wide | {key: wide[key] + step * direction}), np.float64(images), fields)[0]
                for step in (1e-6, -1e-6))  # fmt: skip
        high, low = ((end**2).sum() for end in ends)
        found[key], slopes[key] = (grad * direction).sum(), (high - low) / 2e-6
        if "position" in key or "relative" in key:
            assert np.abs(grad).max() > 1e-4, key
    scale = max(map(abs, slopes.values()))
    assert {key: value for key, value in found.items() if abs(value - slopes[key]) > 1e-5 * scale} == {}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in TABLE_8])
def test_ways_to_compute_change_nothing(name):
    fields = BASE | TABLE_8[name]
    params, images = params_of(tiny(**fields)), images_of(2, *SIZE, 3)
    expected = apply(tiny(**fields), params, images)[0]
    other = tiny(**fields | {"attention": "heads_first", "scan": True, "remat": "full"})
    np.testing.assert_allclose(apply(other, params, images)[0], expected, rtol=1e-4, atol=1e-5)
    drawn = jax.jit(other.init)(jax.random.key(0), images)
    assert jax.tree.map(np.shape, drawn) == jax.tree.map(np.shape, params)


def test_parameters_and_their_initial_values():
    def shapes(**fields):
        return {name: leaf.shape for name, leaf in tree.flatten(parameter_shapes(tiny(depth=3, **fields))).items()}

    two = shapes(position="learned2d", position_place="blocks")
    assert two["encoder/blocks/position_x"] == two["encoder/blocks/position_y"] == (3, 4, 16)
    assert two["encoder/blocks/position_prefix"] == (3, 1, 32)
    heads = shapes(position="relative", relative_tables="head")
    assert heads["encoder/blocks/attention/relative_heads"] == (3, 2, 2 * 17 - 1, 16)
    assert shapes(position="relative", relative_clip=5)["encoder/blocks/attention/relative"] == (3, 11, 16)
    assert shapes(position="relative", relative_tables="model")["encoder/relative"] == (33, 16)
    key, spec = jax.random.key(0), tiny(position="relative", position_std=0.5).spec
    assert np.std(relative_table(lambda name, init, *shape: init(key, *shape), spec)) == pytest.approx(0.5, rel=0.2)


def interpolated(plane, y, x):
    """A plane between its points; the edges are never left."""
    top, left = min(int(y), plane.shape[0] - 2), min(int(x), plane.shape[1] - 2)
    down, across = y - top, x - left
    upper, lower = (plane[top + step, left] * (1 - across) + plane[top + step, left + 1] * across for step in (0, 1))
    return upper * (1 - down) + lower * down


def test_relative_tables_are_resampled_pair_by_pair():
    """Each offset of the new grid: the mean, over all pairs of patches, of the old table at their displacement."""
    old, new = (create("ViT-mu/8", position="relative", resolution=size) for size in ((32, 24), (40, 48)))
    table = np.random.default_rng(0).standard_normal((2 * 13 - 1, 3))
    plane = np.array([[table[dy * 3 + dx + 12] for dx in range(-2, 3)] for dy in range(-3, 4)])
    sums, counts = np.zeros((2 * 30 - 1, 3)), np.zeros((2 * 30 - 1, 1))
    for query in np.ndindex(5, 6):
        for key in np.ndindex(5, 6):
            dy, dx = np.subtract(query, key)
            offset = dy * 6 + dx + 29
            sums[offset] += interpolated(plane, dy * 3 / 4 + 3, dx * 2 / 5 + 2)
            counts[offset] += 1
    found = resample_relative(table, old.spec, new.spec)
    np.testing.assert_allclose(found, [table[0], *(sums / counts), table[-1]], rtol=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_resampling_keeps_what_the_grid_does_not_change(name):
    fields = BASE | TABLE_8[name]
    old, new = tiny(**fields), tiny(**fields | {"resolution": (40, 48)})
    params = params_of(old)
    found = interop.adapt_parameters(old, params, new, parameter_shapes(new))  # checks all shapes
    assert interop.adapt_parameters(old, params, old, parameter_shapes(old)).keys() == found.keys()
    same = [key for key in found if key.rpartition("/")[2] not in TABLES]
    assert all(found[key] is tree.flatten(params)[key] for key in same)
    ones = jax.tree.map(np.ones_like, params)
    for key, leaf in interop.adapt_parameters(old, ones, new, parameter_shapes(new)).items():
        np.testing.assert_allclose(leaf, 1, rtol=1e-6, err_msg=key)


def test_axes_of_2d_positions_are_resampled_alone():
    old, new = (tiny(position="learned2d", resolution=size) for size in ((32, 24), (32, 40)))
    params = params_of(old)
    found = interop.adapt_parameters(old, params, new, parameter_shapes(new))
    for axis, same in (("y", True), ("x", False)):
        kept = np.array_equal(found[f"position_{axis}"][[0, -1]], params[f"position_{axis}"][[0, -1]])
        assert kept and (found[f"position_{axis}"].shape == params[f"position_{axis}"].shape) == same
    np.testing.assert_allclose(found["position_x"][2], params["position_x"][1], rtol=1e-6)
    np.testing.assert_array_equal(found["position_prefix"], params["position_prefix"])


@pytest.mark.parametrize("name", VARIANTS)
def test_files_are_ours_alone(name, tmp_path):
    model = tiny(**BASE | TABLE_8[name] | {"registers": 0, "attention": "auto"})
    params = params_of(model)
    interop.save(tmp_path / "model.npz", model, params)
    loaded, read = interop.load(tmp_path / "model.npz")
    assert loaded == model
    jax.tree.map(np.testing.assert_array_equal, read, params)
    wider, resampled = interop.load(tmp_path / "model.npz", resolution=64)
    assert jax.tree.map(np.shape, resampled) == jax.tree.map(np.shape, parameter_shapes(wider))
    if name in ("1-D", "none"):
        return
    for layout, suffix in (("google", ".npz"), ("big_vision", ".npz"), ("timm", ".safetensors"), ("huggingface", "")):
        with pytest.raises(UserError, match="position"):
            interop.save(tmp_path / f"other{suffix}", model, params, layout=layout)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in TABLE_8])
def test_training_on_8_devices_is_that_on_one(tiny, name):
    tiny.model.update({"depth": 2, "dropout_rate": 0.0, "stochastic_depth": 0.0} | TABLE_8[name])
    tiny.task.mixup = 0.0
    expected = trained(on({}, tiny))
    found = trained(on({"fsdp": 4, "tensor": 2}, tiny), expected.start)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    blocks = found.state.params["encoder"]["blocks"]
    if "position_x" in blocks:
        assert blocks["position_x"].addressable_shards[0].data.shape[-1] == 16 // 4
    if "relative_heads" in blocks["attention"]:
        assert blocks["attention"]["relative_heads"].addressable_shards[0].data.shape[1] == 2 // 2


def test_the_kernel_computes_relative_positions():
    """The kernel needs tokens with places that follow one another."""

    def calls(**fields):
        model = tiny(depth=1, **fields)
        lowered = jax.jit(model.apply).trace(parameter_shapes(model), images_of()).lower(lowering_platforms=("tpu",))
        return lowered.as_text().count("@tpu_custom_call")

    assert calls(position="learned2d", position_place="shared") == calls(position="relative") > 0
    apart = {"position": "relative", "registers": 1, "position_rows": "class"}
    assert not calls(**apart)
    found = {}
    for platform, kind in (("tpu", "TPU v5e"), ("gpu", "NVIDIA H100"), ("cpu", "cpu")):
        for fields in ({"position": "relative"}, apart):
            chosen = create("ViT-B/16", dtype="bfloat16", **fields).for_device(kind, 8)
            found[platform, len(fields)] = chosen.field("attention"), run_summary.lacks_kernel(chosen, platform)
    assert found == {
        ("tpu", 1): ("fused", None),
        ("tpu", 3): ("tokens_first", run_summary.NO_KERNEL),
        **{("gpu", count): ("tokens_first", run_summary.NO_CUDNN) for count in (1, 3)},
        **{("cpu", count): ("heads_first", None) for count in (1, 3)},
    }


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"relative_tables": "head"}, 1e-5),
        *(
            pytest.param(fields | {"dtype": "bfloat16"}, TOLERANCE, marks=pytest.mark.slow)
            for fields in ({}, {"relative_clip": 1})
        ),
    ],
)
def test_the_kernel_is_compared_with_the_plain_form(fields, limit):
    """Also where the heads of a table are split over two devices."""
    model = create("ViT-mu/8", attention="fused", position="relative", resolution=32, **fields)
    with kernels.interpret_kernels():
        differences = measure_differences(model.spec, jax.devices()[0], tensor=2)
    assert "the gradient of the relative positions" in differences and np.max([*differences.values()]) < limit


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"position": "relative", "position_place": "blocks"}, "with position=relative set position_place=stem"),
        ({"position": "none", "position_place": "shared"}, "with position=none set position_place=stem"),
        ({"position": "sincos2d", "position_place": "blocks"}, "position_place=blocks needs position=learned"),
        ({"relative_clip": 3}, "are fields of position='relative'"),
        ({"position": "relative", "relative_clip": -1}, "relative_clip must be 0 or more"),
        ({"position_std": -0.1}, "position_std must be 0 or more"),
        (
            {"position": "relative", "attention": "fused", "registers": 1, "position_rows": "class"},
            "attention fused computes no relative positions if the class token has a place and registers have none",
        ),
        ({"position": "relative", "attention": "cudnn"}, "attention cudnn computes no relative positions"),
        ({"position": "learned2d", "width": 33, "num_heads": 3}, "learned2d needs an even width"),
        ({"position": "learned3d"}, "did you mean 'learned2d'"),
    ],
)
def test_mistakes_are_reported(fields, sentence):
    with pytest.raises(UserError) as error:
        create("ViT-B/16", **fields)
    assert sentence in str(error.value)


def test_other_images_are_refused():
    model = tiny(position="relative")
    with pytest.raises(UserError, match="do not fit a model of resolution 32x32"):
        model.init(jax.random.key(0), images_of(1, 40, 32, 3))


def test_fields_of_other_positions_do_not_matter():
    assert create("ViT-B/16", position="none", position_std=1.0) == create("ViT-B/16", position="none")
    assert (
        "learned2d positions in every block"
        in create("ViT-B/16", position="learned2d", position_place="blocks").spec.traits
    )
