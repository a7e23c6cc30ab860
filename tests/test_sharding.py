"""Every mesh computes what one device does, holds its share, and exchanges what the tables explain, no more."""

import contextlib
import math
import re
from types import SimpleNamespace
from unittest.mock import Mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_program import batches, build
from vit_jax import UserError, kernels, sharding, tree
from vit_jax.execution import DeviceOps
from vit_jax.model import create, parameter_shapes
from vit_jax.models import bit_spec, variants
from vit_jax.models.mlp import Mlp
from vit_jax.planning import collectives
from vit_jax.training import run_summary

# Name -> axes of a mesh of eight devices; those left out are 1. Each pair of axes is in one of them.
MESHES = {
    "fsdp": {"fsdp": 8},
    "tensor": {"data": 4, "tensor": 2},
    "slices of fsdp and tensor": {"slice": 2, "fsdp": 2, "tensor": 2},
    "slices of data and fsdp": {"slice": 2, "data": 2, "fsdp": 2},
}
USUAL = "slices of fsdp and tensor"
SPLITS = [name if name == USUAL else pytest.param(name, marks=pytest.mark.slow) for name in MESHES]


def on(axes, config):
    """A config on such a mesh."""
    config = config.copy_and_resolve_references()
    for axis in sharding.AXES:
        config.mesh[axis] = axes.get(axis, 1)
    return config


def without_randomness(config):
    """Takes away what is random, which takes half of the time to compile."""
    config.model.dropout_rate = config.model.stochastic_depth = config.task.mixup = 0.0


def compiled(config):
    """The program of a config and its compiled step."""
    program = build(config, devices=math.prod(config.mesh.values()))
    return program, program.train_step.lower(program.state, program.batch).compile()


def trained(config, start=None):
    """The program of a config, its compiled step as text, the first state, the losses of ten steps, the state then."""
    program, step = compiled(config)
    start = jax.device_get(program.init(jax.random.key(0), {})) if start is None else start
    state, losses = jax.device_put(start, program.state_shardings), []
    for batch in batches(program, 10):
        state, metrics = step(state, batch)
        losses.append(float(metrics["train/loss"]))
    return SimpleNamespace(program=program, text=step.as_text(), start=start, losses=np.array(losses), state=state)


@pytest.fixture(scope="module")
def singles():
    """The training of `tiny` on one device, in a list that is empty until a test needs it."""
    return []


@pytest.fixture
def single(tiny, singles):
    if not singles:
        singles.append(trained(on({}, tiny)))
        losses = singles[0].losses
        assert losses[-1] < losses[0] - 0.1  # it learns, so that equality means something
    return singles[0]


def explained(program):
    """Bytes by kind of collective as the docstring of `sharding` has them, on CPUs."""
    mesh, spec = program.mesh.shape, program.model.spec
    places = tree.flatten(program.state_shardings.params)
    used = sum(
        leaf.size * 4 / (mesh["tensor"] if "tensor" in places[name].spec else 1)
        for name, leaf in tree.flatten(program.state.params).items()
    )
    rows, height, width, _ = program.batch_sharding.shard_shape(program.batch["image"].shape)
    tokens = rows * (math.prod(spec.grid) + spec.class_rows) * spec.width * 4
    result = {"all-reduce": used}
    if program.task.mixup:
        result["collective-permute"] = (height * width * 3 + program.task.num_classes) * 4
    if mesh["fsdp"] > 1:
        result["all-gather"] = used
        result["all-reduce"] += used / mesh["fsdp"] if mesh["slice"] * mesh["data"] > 1 else 0
    if mesh["tensor"] > 1:
        result["all-reduce"] += 4 * spec.depth * tokens
    return result


def exchanged(text, keep=lambda each: True):
    result = {}
    for each in filter(keep, collectives.read_collectives(text)):
        result[each.kind] = result.get(each.kind, 0) + each.bytes * each.times
    return result


def assert_explained(found, expected):
    assert set(found) == set(expected)
    for kind, size in expected.items():
        assert abs(found[kind] / size - 1) < 0.1, (kind, found, expected)


@pytest.mark.parametrize("name", SPLITS)
def test_a_mesh_trains_as_one_device_and_exchanges_what_is_explained(tiny, single, name):
    found = trained(on(MESHES[name], tiny), single.start)
    program = found.program
    np.testing.assert_allclose(found.losses, single.losses, rtol=1e-5)
    assert_explained(exchanged(found.text), explained(program))

    # Each device holds its share of parameters, moments and moving average; heads and MLPs of mu are 90 % of it.
    mesh = program.mesh.shape
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(found.state))
    leaves = tree.flatten(found.state)
    biases = sum(leaf.nbytes for name, leaf in leaves.items() if "bias" in name)
    split = sum(leaf.nbytes for name, leaf in leaves.items() if "/qkv/" in name or "/mlp/" in name or "out/k" in name)
    share = sum(leaf.nbytes for leaf in leaves.values()) - split * (1 - 1 / mesh["tensor"])
    assert share / mesh["fsdp"] - biases <= held <= share / mesh["fsdp"] + biases

    # Between slices pass gradients, those of kernels in parts, and the row that MixUp takes from the next device.
    per_slice = 8 // mesh["slice"]
    between = exchanged(found.text, lambda each: any(len({i // per_slice for i in group}) > 1 for group in each.groups))
    if mesh["slice"] > 1:
        small = sum(leaf.nbytes for name, leaf in leaves.items() if name.startswith("params/") and leaf.ndim < 3)
        small += leaves["params/embed/kernel"].nbytes
        assert set(between) == {"all-reduce", "collective-permute"}
        assert between["all-reduce"] <= explained(program)["all-gather"] / mesh["fsdp"] + small
    else:
        assert between == {}


@pytest.mark.slow  # that the two ways agree in values and gradients is tested below
def test_the_mlp_by_shard_map_trains_as_one_device(tiny, single):
    tiny.model.mlp = "shard_map"
    found = trained(on({"data": 2, "fsdp": 2, "tensor": 2}, tiny), single.start)
    np.testing.assert_allclose(found.losses, single.losses, rtol=1e-5)
    # It scatters the gradients that XLA sums whole on CPUs.
    expected = explained(found.program)
    expected["reduce-scatter"] = 2 * tiny.model.depth * 32 * (128 / 2) * 4
    expected["all-reduce"] -= expected["reduce-scatter"]
    assert_explained(exchanged(found.text), expected)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(), (1,)])
def test_a_hybrid_trains_as_one_device(tiny, monkeypatch, stages):
    monkeypatch.setitem(variants.HYBRIDS, ("R26", 32), (stages, 4))
    tiny.model.name, tiny.model.depth = "R26+ViT-mu/32", 1
    without_randomness(tiny)  # it does not know of the stem
    expected = trained(on({}, tiny))
    found = trained(on({"fsdp": 4, "tensor": 2}, tiny), expected.start)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    assert_explained(exchanged(found.text), explained(found.program))
    root = found.state.params["stem"]["root"]
    assert root["conv"]["kernel"].addressable_shards[0].data.shape == (7, 7, 3, 16)
    assert root["norm"]["scale"].addressable_shards[0].data.shape == (16,)


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["pre_activation", "post_activation"])
def test_a_bit_trains_as_one_device(tiny, monkeypatch, unit):
    """Over `tensor` nothing of it is split: the devices repeat the work, and exchange nothing for it."""
    monkeypatch.setitem(bit_spec.UNITS, 26, (1,))
    tiny.model.name, tiny.model.depth, tiny.model.width, tiny.model.unit = "BiT-R26x1", None, 32, unit
    without_randomness(tiny)
    tiny.base_lr = 1e-3  # at larger rates the difference of sums in another order grows from step to step
    expected = trained(on({}, tiny))
    assert np.ptp(expected.losses) > 0.05
    found = trained(on({"data": 2, "fsdp": 2, "tensor": 2}, tiny), expected.start)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    used = 4 * tree.count(found.program.state.params)
    assert_explained(exchanged(found.text), {"all-gather": used, "all-reduce": used})
    root = found.state.params["root"]
    assert root["conv"]["kernel"].addressable_shards[0].data.shape == (7, 7, 3, 16)


def test_the_mlps_agree(tiny):
    mesh = sharding.make_mesh(on({"data": 2, "fsdp": 2, "tensor": 2}, tiny))
    jit, shard_map = (create("ViT-mu/16", dropout_rate=0.3, mlp=mlp).spec for mlp in ("jit", "shard_map"))
    x = jax.random.normal(jax.random.key(1), (40, 32))
    packing = kernels.Packing(tokens=9, images=1, rows=10)

    def mlp(spec):
        return Mlp(spec, DeviceOps(spec=spec, packing=packing))

    variables, again = (mlp(spec).init(jax.random.key(0), x) for spec in (jit, shard_map))
    chex.assert_trees_all_equal(variables, again)

    def result(spec, mesh):
        def scalar(params, x):
            y = mlp(spec).apply({"params": params}, x, rngs={"dropout": jax.random.key(2)})
            return (y**2).sum(), y

        def run(params, x):
            with sharding.use_mesh(mesh) if mesh else contextlib.nullcontext():
                return jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(params, x)

        return jax.jit(run)(variables["params"], x)

    expected = result(jit, None)
    for spec, where in ((jit, mesh), (shard_map, mesh), (shard_map, None)):
        found = result(spec, where)
        chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("mlp", "constrained"), [("jit", 2), ("shard_map", 0)])
def test_kernels_pass_in_bfloat16_and_their_gradients_in_float32(tiny, mlp, constrained):
    mesh = sharding.make_mesh(on({"data": 2, "fsdp": 2, "tensor": 2}, tiny))
    spec = create("ViT-mu/16", dtype="bfloat16", grad_dtype="float32", mlp=mlp).spec
    x = jax.random.normal(jax.random.key(1), (40, 32), jnp.bfloat16)
    layers = Mlp(spec, DeviceOps(spec=spec, packing=kernels.Packing(len(x), 1, len(x))))
    params = layers.init(jax.random.key(0), x)["params"]

    def loss(params):
        with sharding.use_mesh(mesh):
            return (layers.apply({"params": params}, x).astype(jnp.float32) ** 2).sum()

    lowered = jax.jit(jax.grad(loss)).lower(params)
    # Kernels and the hidden activations; of those in float32, both are gradients of kernels.
    passed = re.findall(r"(?:all_gather|sharding_constraint).*x(\w+)>$", lowered.as_text(), re.MULTILINE)
    assert passed.count("bf16") >= 3 and passed.count("f32") == constrained
    for name, leaf in tree.flatten(lowered.compile()(params)).items():
        assert name.endswith("bias") or not np.array_equal(leaf, leaf.astype(jnp.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mlp", "fields"), [("shard_map", {"remat": "full"}), ("jit", {"scan": True, "remat": "dots"})]
)
def test_remat_and_loops_train_as_one_device(tiny, single, fields, mlp):
    tiny.model.update({"mlp": mlp} | fields)
    found = trained(on({"data": 2, "fsdp": 2, "tensor": 2}, tiny), single.start)
    np.testing.assert_allclose(found.losses, single.losses, rtol=1e-5)
    if tiny.model.scan:  # the blocks, a share of 0.8, gather again; on CPUs, XLA takes it back outside of loops
        gathered, once = exchanged(found.text)["all-gather"], explained(found.program)["all-gather"]
        assert 1.7 * once < gathered < 2.1 * once


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"attention": "tokens_first"}, {"pooling": "map"}, {"pooling": "gap"}])
def test_attention_stays_on_its_device(tiny, fields):
    tiny.model.update(fields)
    tiny.model.dropout_rate = tiny.model.stochastic_depth = 0.0
    program, step = compiled(on({"data": 2, "fsdp": 2, "tensor": 2}, tiny))
    assert_explained(exchanged(step.as_text()), explained(program))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [{}, {"qk_norm": True, "rotary": "axial"}, {"position": "relative", "relative_tables": "head"}],
)
def test_the_attention_kernel_trains_as_one_device(tiny, fields):
    """Each device runs it on its images and heads."""
    tiny.model.update({"attention": "fused", "depth": 1} | fields)
    without_randomness(tiny)
    with kernels.interpret_kernels():
        one = trained(on({}, tiny))
        found = trained(on(MESHES[USUAL], tiny), one.start)
    assert np.ptp(one.losses) > 0.05
    np.testing.assert_allclose(found.losses, one.losses, rtol=1e-5)


def test_images_stay_whole_where_the_mesh_divides_their_rows_only():
    """Four devices and six images of 24 rows: the compiler splits them."""
    model = create("ViT-mu/8", resolution=32, depth=1, attention="fused", num_classes=3)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(1, 4, 1, 1), sharding.AXES)
    images = jax.ShapeDtypeStruct((6, 32, 32, 3), jnp.float32)
    params = parameter_shapes(model)
    with sharding.use_mesh(mesh):
        logits, _ = jax.eval_shape(model.apply, params, images)
    assert logits.shape == (6, 3)


@pytest.mark.slow
def test_parts_of_a_batch_exchange_gradients_each(tiny):
    tiny.accum_steps = 2
    found = trained(on({"fsdp": 8}, tiny))
    once = explained(found.program)
    assert_explained(exchanged(found.text), once | {"all-reduce": 2 * once["all-reduce"]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": 12}, "batch=12 is not divisible by accum_steps=1 x 8 devices"),
        ({"accum_steps": 4}, "is not divisible by accum_steps=4 x 8 devices"),
        ({"batch_eval": 9}, "batch_eval=9 is not divisible"),
        ({"mesh.fsdp": 3}, "mesh.tensor=1: the sizes other than -1 multiply to 3, which does not divide 8,"),
        ({"mesh.data": 4}, "mesh sizes multiply to 4, but 8 devices are available"),
        ({"mesh.fsdp": -1}, "mesh sizes must be at least 1; a single one may be -1; use -1 for all remaining"),
        ({"mesh.tensor": 2, "batch": 18}, r"accum_steps=1 x 4 parts \(slice x data x fsdp\); choose a multiple"),
        ({"mesh.tensor": 4}, r"mesh.tensor=4 does not divide the model's heads, 2; choose from 1, 2\."),
        ({"mesh.tensor": 8, "model.num_heads": 8, "model.mlp_dim": 12}, "model's mlp, 12; choose from 1, 2, 4."),
    ],
)
def test_a_mesh_that_does_not_fit_is_told_in_a_sentence(tiny, change, words):
    tiny.update_from_flattened_dict(change)
    with pytest.raises(UserError, match=words):
        build(tiny, devices=8)


def test_a_batch_is_split_over_all_but_the_tensor_axis(tiny):
    tiny.batch, tiny.mesh.slice, tiny.mesh.tensor = 4, 2, 2
    program = build(tiny, devices=8)
    assert program.batch_sharding.shard_shape((4,)) == (1,)
    kernel = program.state_shardings.params["encoder"]["blocks"]["mlp"]["dense1"]["kernel"]
    assert kernel.spec == jax.P(None, "fsdp", "tensor")
    lines = "\n".join(run_summary.banner_lines(tiny, program))
    assert "\nNot of the size ViT-mu/4, as the configuration sets depth 2 instead of 1\n" in lines
    assert "mesh slice=2 x data=2 x fsdp=1 x tensor=2" in lines and "1 per device" in lines


def chip(slice_index, index):
    """A stand-in for a TPU device: number `index` of a slice of 2x2."""
    fields = {"platform": "tpu", "device_kind": "TPU v5 lite", "core_on_chip": 0, "process_index": slice_index}
    place = {"slice_index": slice_index, "id": 4 * slice_index + index, "coords": [index % 2, index // 2, 0]}
    return Mock(spec=jax.Device, **fields | place)


def test_slices_are_the_outermost_axis(tiny):
    chips = [chip(i % 2, i // 2) for i in range(8)]
    tiny.mesh.slice, tiny.mesh.fsdp = 2, 2
    mesh = sharding.make_mesh(tiny, chips)
    assert mesh.axis_names == ("slice", "data", "fsdp", "tensor") and mesh.devices.shape == (2, 2, 2, 1)
    assert [{each.slice_index for each in part.flat} for part in mesh.devices] == [{0}, {1}]
    tiny.mesh.slice = 1
    with pytest.raises(
        UserError, match=r"mesh.slice=1, but the devices belong to 2 slices; set --config.mesh.slice=2\."
    ):
        sharding.make_mesh(tiny, chips)
    emulated = sharding.make_mesh(tiny)
    assert [device.id for device in emulated.devices.flat] == list(range(8))


def test_a_dimension_that_its_axes_do_not_divide_stays_whole(tiny):
    tiny.mesh.fsdp = 4
    mesh = sharding.make_mesh(tiny)

    def pinned(x):
        with sharding.use_mesh(mesh):
            return sharding.constrain(x, ("batch", "width"))

    assert jax.jit(pinned)(jnp.ones((8, 3))).sharding.shard_shape((8, 3)) == (1, 3)
    assert jax.jit(pinned)(jnp.ones((6, 3))).sharding.shard_shape((6, 3)) == (6, 3)
