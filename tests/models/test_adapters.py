"""Adapters: merged weights against a loop over layers in float64, what is trained, and the file for PEFT."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vit_jax
from tests.conftest import ROOT
from tests.test_program import batches, build
from vit_jax import UserError, interop, tree
from vit_jax.config import check_config
from vit_jax.interop.layout import file_views
from vit_jax.interop.transformers_families import IN_MEMORY, VIT, parameter_table
from vit_jax.model import create
from vit_jax.models import is_head
from vit_jax.models.adapters import add_adapters, is_adapter, merge_adapters
from vit_jax.optim import Adapters
from vit_jax.train import train

RANK, ALPHA = 3, 6.0
PEFT = ROOT / "tests" / "fixtures" / "parity" / "peft_vit"  # of make_peft.py beside it


def adapted(activation="gelu_tanh", where="attention,mlp", **fields):
    """A model of transformers' kind, its random parameters, and the same with random adapters."""
    common = {"resolution": 8, "depth": 2, "num_classes": 5, "pooling": "token", "position": "learned"}
    model = create("ViT-mu/4", **(common | fields), activation=activation)
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)))
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), shapes)
    leaves = tree.flatten(jax.jit(lambda: add_adapters(params, RANK, ALPHA, where, jax.random.key(1)))())
    for name, leaf in leaves.items():
        if name.endswith("/up"):
            assert not leaf.any()
            leaves[name] = random.normal(size=leaf.shape)
    return model, params, jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), tree.unflatten(leaves))


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_merged_weights_are_those_of_a_loop_over_layers(activation):
    model, params, with_adapters = adapted(activation)
    merged, leaves = tree.flatten(merge_adapters(with_adapters)), tree.flatten(with_adapters)
    assert set(merged) == set(tree.flatten(params))
    width, mlp_dim = model.spec.width, model.spec.mlp_dim
    inputs = {"qkv": width, "out": width, "dense1": width, "dense1_gated": width, "dense2": mlp_dim}
    for name, leaf in merged.items():
        layer = name.removesuffix("/kernel")
        if f"{layer}/lora/down" not in leaves:
            assert np.array_equal(leaf, tree.flatten(params)[name])
            continue
        for block in range(2):
            down, up = (np.float64(leaves[f"{layer}/lora/{part}"][block]) for part in ("down", "up"))
            assert np.abs(down).max() <= inputs[layer.rpartition("/")[2]] ** -0.5
            if "qkv" in layer:
                change = np.stack([down[:, part] @ up[part].reshape(RANK, -1) for part in range(3)], axis=1)
            else:
                change = down.reshape(-1, RANK) @ up.reshape(RANK, -1)
            expected = np.float64(leaves[name][block]) + ALPHA / RANK * change.reshape(leaf.shape[1:])
            np.testing.assert_allclose(leaf[block], expected, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("where", "count"), [("attention", 8), ("mlp", 4), ("attention,mlp", 12)])
def test_the_file_for_peft_changes_the_weights_of_transformers_to_the_merged_ones(where, count, tmp_path):
    """PEFT: W + lora_alpha / r B A, with weights [outputs, inputs]."""
    model, params, with_adapters = adapted("gelu", where)
    interop.save_adapter(tmp_path, model, Adapters().select(with_adapters), RANK, ALPHA)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (described["peft_type"], described["r"], described["lora_alpha"]) == ("LORA", RANK, ALPHA)
    assert len(described["target_modules"]) == count and described["modules_to_save"] == ["classifier"]
    file = load_file(tmp_path / "adapter_model.safetensors")
    table = parameter_table(model.spec, IN_MEMORY["vit"].names)
    theirs, merged = (
        {VIT.name_in_file(name, "vit."): array for name, array in arrays.items()}
        for arrays in (
            file_views(table, jax.tree.map(np.asarray, tree.flatten(each)))
            for each in (params, merge_adapters(with_adapters))
        )
    )
    for module in described["target_modules"]:
        a, b = (file[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
        assert a.shape[0] == b.shape[1] == RANK
        theirs[f"{module}.weight"] = theirs[f"{module}.weight"] + ALPHA / RANK * b @ a
    for name, leaf in merged.items():
        np.testing.assert_allclose(theirs[name], leaf, rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(file["base_model.model.classifier.weight"], theirs["classifier.weight"])


def test_the_file_has_the_names_that_peft_gives(tmp_path):
    """The adapters are those of all layers of the blocks, and of the classifier."""
    model, params = vit_jax.load(PEFT / "base")
    leaves = add_adapters(jax.tree.map(jnp.asarray, params), 2, 6.0, "attention,mlp", jax.random.key(0))
    interop.save_adapter(tmp_path, model, Adapters().select(jax.tree.map(np.asarray, leaves)), 2, 6.0, "hf-hub:a/b")
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, PEFT / "adapter"))
    assert {name: leaf.shape for name, leaf in ours.items()} == {name: leaf.shape for name, leaf in theirs.items()}
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    endings = json.loads((PEFT / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert {module.rpartition(".")[2] for module in described["target_modules"]} == set(endings)
    assert described["base_model_name_or_path"] == "a/b"


def test_adapters_by_peft_have_its_logits(monkeypatch):
    monkeypatch.chdir(PEFT)  # where the path of the base leads to it
    model, params = vit_jax.load(PEFT / "adapter")
    given = np.load(PEFT / "io.npz")
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(model.apply)(params, given["images"])[0]
    np.testing.assert_allclose(logits, given["logits"], atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "names"),
    [({}, ["cls_classifier", "distillation_classifier"]), ({"qk_norm": True}, ["head", "distilled_head"])],
)
def test_the_file_for_peft_has_both_heads_of_a_distilled_model(fields, names, tmp_path):
    """The names are those of transformers, or ours where it has no such model."""
    model, params, with_adapters = adapted("gelu", registers=1, distilled_head=True, **fields)
    interop.save_adapter(tmp_path, model, Adapters().select(with_adapters), RANK, ALPHA)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert described["modules_to_save"] == sorted(names)
    file = load_file(tmp_path / "adapter_model.safetensors")
    for ours, theirs in zip(("head", "distilled_head"), names, strict=True):
        np.testing.assert_array_equal(file[f"base_model.model.{theirs}.weight"], params[ours]["kernel"].T)
        np.testing.assert_array_equal(file[f"base_model.model.{theirs}.bias"], params[ours]["bias"])


def written(folder, model, params, with_adapters):
    """The weights in a file, and in the folder the adapters, which name it.

    The head of the weights is another one.
    """
    folder.mkdir()
    base = {name: leaf + is_head(name) for name, leaf in tree.flatten(params).items()}
    vit_jax.save(folder.parent / "base.npz", model, tree.unflatten(base))
    trained = Adapters().select(with_adapters)
    weights = str(folder.parent / "base.npz")
    interop.save_adapter(folder, model, trained, RANK, ALPHA, weights, digest=interop.digest_weights(weights))
    return tree.flatten(merge_adapters(with_adapters))


@pytest.mark.parametrize(
    "fields",
    [
        {"activation": "gelu"},
        {"activation": "gelu", "registers": 1, "distilled_head": True},
        {"activation": "swiglu"},
        {"activation": "gelu", "qk_norm": True},
        {"activation": "gelu_tanh", "pooling": "map", "num_classes": 0},
        {"activation": "gelu", "pre_logits": True, "representation_size": 7},
        {"activation": "gelu", "pre_logits": True, "num_classes": 0},
        {"activation": "gelu", "head": "patches"},
    ],
    ids=["vit", "deit", "ours_gated", "ours", "siglip", "tanh", "tanh_alone", "masked_patches"],
)
def test_a_folder_of_adapters_is_loaded_as_the_merged_weights(fields, tmp_path):
    model, params, with_adapters = adapted(**fields)
    expected = written(tmp_path / "adapter", model, params, with_adapters)
    found, read = vit_jax.load(tmp_path / "adapter")
    assert found.fields == model.fields
    assert tree.flatten(read).keys() == expected.keys()
    for name, leaf in tree.flatten(read).items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
    digests = [interop.digest_weights(tmp_path / name) for name in ("base.npz", "adapter")]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 2 * ALPHA}))
    assert len({*digests, interop.digest_weights(tmp_path / "adapter")}) == 3


def test_adapters_of_some_layers_by_the_names_of_files_for_other_classes(tmp_path):
    """transformers 4 has the names of files in memory, too; rsLoRA divides by the root of the rank."""
    model, params, with_adapters = adapted("gelu")
    expected = written(tmp_path / "adapter", model, params, with_adapters)
    folder, random = tmp_path / "adapter", np.random.default_rng(1)
    path = folder / "adapter_model.safetensors"
    old, new = (f"{names.blocks}1.{names.attention[0]}" for names in (IN_MEMORY["vit"].names, VIT.names))
    renamed = {name.replace(old, new): array for name, array in load_file(path).items() if old in name}
    assert len(renamed) == 2 and old != new
    head = {"weight": random.normal(size=(3, 32)).astype(np.float32), "bias": np.arange(3, dtype=np.float32)}
    save_file(renamed | {f"base_model.model.classifier.{name}": array for name, array in head.items()}, path)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": True}))
    found, read = vit_jax.load(folder)
    assert found.field("num_classes") == 3
    np.testing.assert_array_equal(read["head"]["kernel"], head["weight"].T)
    before, after = params["encoder"]["blocks"]["attention"]["qkv"]["kernel"], tree.flatten(read)
    kernel = after.pop("encoder/blocks/attention/qkv/kernel")
    full = expected["encoder/blocks/attention/qkv/kernel"][1, :, 0] - before[1, :, 0]
    np.testing.assert_allclose(kernel[1, :, 0] - before[1, :, 0], RANK**0.5 * full, rtol=1e-4, atol=1e-5)
    kernel[1, :, 0] = before[1, :, 0]
    np.testing.assert_array_equal(kernel, before)
    for name in after.keys() - {"head/kernel", "head/bias"}:
        np.testing.assert_array_equal(after[name], tree.flatten(params)[name], err_msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "adapter_config.json states peft_type=LOHA, which is not supported"),
        ({"use_dora": True}, "states use_dora=True, which is not supported"),
        ({"init_lora_weights": "pissa"}, "states init_lora_weights=pissa, which is not supported"),
        ({"lora_alpha": None}, "adapter_config.json does not describe adapters: "),
        ({"base_model_name_or_path": None}, "write their path or their name into its field base_model_name_or_path"),
        ({"base_model_name_or_path": "absent.npz"}, "cannot load the weights to adapt: absent.npz: does not exist"),
        ({"base_model_name_or_path": "adapter"}, "adapter_config.json names its own folder as the weights to adapt"),
    ],
)
def test_adapters_that_cannot_be_read(change, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "adapter", *adapted("gelu"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message):
        vit_jax.load(tmp_path / "adapter")


def test_adapters_that_name_each_other_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {"a": "../b", "b": "c", "c": "../a"}  # relative to the adapter's folder, or to the current one
    for name, base in places.items():
        written(tmp_path / name, *adapted("gelu"))
        config = json.loads((tmp_path / name / "adapter_config.json").read_text())
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
    for read in (vit_jax.load, interop.digest_weights):
        with pytest.raises(UserError, match=r"names .* as the weights to adapt, which are adapted from these again"):
            read(tmp_path / "a")


def test_incomplete_folders_of_adapters(tmp_path):
    written(tmp_path / "adapter", *adapted("gelu"))
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(UserError, match=r"adapter_config.json, which names the weights to adapt, is missing; copy"):
        vit_jax.load(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(
        UserError, match=r"adapter_model.bin, which only PyTorch can read; .* adapter_model.safetensors"
    ):
        vit_jax.load(tmp_path / "adapter")


def test_weights_that_were_replaced_are_told(tmp_path, caplog):
    """The adapters fit them, but the sum is another model."""
    model, params, with_adapters = adapted("gelu")
    written(tmp_path / "adapter", model, params, with_adapters)
    vit_jax.load(tmp_path / "adapter")
    assert not caplog.messages
    vit_jax.save(tmp_path / "base.npz", model, jax.tree.map(lambda leaf: leaf + 1, params))
    vit_jax.load(tmp_path / "adapter")
    [message] = caplog.messages
    assert "base.npz: these weights are not the file with which the adapters were trained" in message


def test_adapters_of_another_model_are_refused(tmp_path):
    written(tmp_path / "adapter", *adapted("gelu"))
    other, params, _ = adapted("gelu", width=48, num_heads=2)
    vit_jax.save(tmp_path / "base.npz", other, params)
    with pytest.raises(UserError, match=r"the adapters do not fit .*base.npz, the weights that they name: .* width 48"):
        vit_jax.load(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(path), path)  # without the notes that describe the model
    with pytest.raises(UserError, match=r"have the shapes \[3, \d+\] and \[\d+, 3\], which do not fit"):
        vit_jax.load(tmp_path / "adapter")
    layer = "base_model.model.vit.layers.0.mlp.fc9.lora_A.weight"
    save_file({layer: np.zeros((2, 48), np.float32)}, path)
    with pytest.raises(UserError, match=r"fc9\.lora_A\.weight, which cannot be added to ViT-mu/4"):
        vit_jax.load(tmp_path / "adapter")


@pytest.mark.parametrize("fields", [{}, {"qk_norm": True}], ids=["transformers", "ours"])
@pytest.mark.parametrize("noted", [True, False])
def test_the_head_of_the_base_is_left_out(fields, noted, tmp_path):
    """Fine-tuning leaves it out so, with the tanh layer. `noted`: our file, which describes the model."""
    model, params, with_adapters = adapted("gelu", **fields)
    random = np.random.default_rng(2)
    expected = written(tmp_path / "adapter", model, params, with_adapters)
    base = create(model.name, **(model.fields | {"num_classes": 7, "pre_logits": True}), preprocess="resize(8)")
    tanh = {"kernel": random.normal(size=(32, 32)), "bias": random.normal(size=32)}
    head = {"kernel": random.normal(size=(32, 7)), "bias": random.normal(size=7)}
    changed = params | {"pre_logits": tanh, "head": head}
    vit_jax.save(tmp_path / "base.npz", base, jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), changed))
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    if not noted:
        save_file(load_file(path), path)
    found, read = vit_jax.load(tmp_path / "adapter", class_names=tuple("abcde"))
    assert (found.fields, found.class_names) == (model.fields, tuple("abcde"))
    chex.assert_trees_all_close(tree.flatten(read), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_folder_of_a_run_is_loaded_as_its_model(tiny, tmp_path):
    """The first run starts from weights with a tanh layer, other classes and another resolution, a second from it."""
    tiny.optim.name, tiny.total_steps, tiny.model.dropout_rate, tiny.model.position = "sgd", 2, 0.0, "learned"
    tiny.checkpoint_every = tiny.eval_every = 2
    smaller = create(
        tiny.model.name,
        **{name: tiny.model[name] for name in ("width", "depth", "mlp_dim", "num_heads", "pooling", "position")},
        resolution=8,
        num_classes=3,
        pre_logits=True,
    )
    shapes = jax.eval_shape(lambda: smaller.init(jax.random.key(0), jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)))
    draw = np.random.default_rng(0).standard_normal
    base = jax.tree.map(lambda leaf: draw(leaf.shape, np.float32), shapes)
    vit_jax.save(tmp_path / "base.npz", smaller, base)
    start = tmp_path / "base.npz"
    for number in range(2):
        tiny.adapt.rank, tiny.init_from = 2, str(start)
        run, start = tmp_path / f"run{number}", tmp_path / f"adapter{number}"
        train(tiny, run)
        start.mkdir()
        for path in run.glob("adapter_*"):
            path.rename(start / path.name)
        (model, params), (found, read) = vit_jax.load(run), vit_jax.load(start)
        assert found.fields == model.fields
        assert (found.preprocess, found.class_names, found.loss) == (model.preprocess, model.class_names, model.loss)
        chex.assert_trees_all_close(read, params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"adapt.rank": 33},
            r"adapt.rank=33 must be at most 32, the shorter side of encoder/blocks/attention/out/kernel",
        ),
        ({"adapt.rank": 2, "model.name": "BiT-R50x1"}, "adapt.rank needs a model with encoder blocks"),
        ({"adapt.rank": 2, "optim.frozen_blocks": 1}, "adapt.rank freezes all but the adapters and the head: set"),
    ],
)
def test_adapters_that_cannot_be(tiny, change, message):
    if "model.name" in change:
        for field in ("depth", "mlp_dim", "num_heads"):
            tiny.model[field] = None
        tiny.model.pooling, tiny.model.position, tiny.model.width = "token", "learned", 32
        tiny.model.dropout_rate = tiny.model.stochastic_depth = 0.0
    tiny.update_from_flattened_dict(change)
    with pytest.raises(UserError, match=message):
        check_config(tiny)
        build(tiny)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_adapters_and_the_head_are_trained_on_any_mesh(tiny, scan):
    tiny.optim.name, tiny.accum_steps, tiny.model.scan = "sgd", 2, scan
    tiny.adapt.rank, tiny.model.dropout_rate, tiny.model.stochastic_depth = 2, 0.0, 0.0
    found = []
    for devices, (fsdp, tensor) in ((1, (1, 1)), (8, (2, 2))):
        tiny.mesh.fsdp, tiny.mesh.tensor = fsdp, tensor
        program = build(tiny, devices)
        given = {"head/kernel": np.random.default_rng(1).normal(size=(32, 10)).astype(np.float32)}
        state = program.init(jax.random.key(0), given)
        before = tree.flatten(jax.device_get(state.params))
        for batch in batches(program, 3):
            state, _ = program.train_step(state, batch)
        for name, leaf in tree.flatten(jax.device_get(state.params)).items():
            trained = name.startswith("head/") or (is_adapter(name) and not name.endswith("scale"))
            assert np.array_equal(leaf, before[name]) != trained, name
        images = np.random.default_rng(2).normal(size=program.batch["image"].shape).astype(np.float32)
        logits, _ = program.model.apply(jax.device_get(state.merged_params), images)
        np.testing.assert_allclose(program.predict(state.eval_params, images), logits, rtol=1e-4, atol=1e-4)
        assert tree.count(program.state.opt_state) < 0.2 * tree.count(program.state.params)
        found.append(jax.device_get(state.params))
    chex.assert_trees_all_close(*found, rtol=1e-4, atol=1e-5)
