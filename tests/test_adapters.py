"""Adapters: merged weights against a loop over layers in float64, what is trained, and the file for PEFT."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_program import batches, build
from vit_jax import UserError, interop, models, tree
from vit_jax.adapters import add_adapters, is_adapter, merge_adapters
from vit_jax.config import check_config
from vit_jax.interop import huggingface_layout
from vit_jax.optim import Adapters

RANK, ALPHA = 3, 6.0


def adapted(activation="gelu_tanh", where="attention,mlp", **fields):
    """A model of transformers' kind, its random parameters, and the same with random adapters."""
    common = {"resolution": 8, "depth": 2, "num_classes": 5, "pooling": "token", "position": "learned"}
    model = models.create("ViT-mu/4", **common, activation=activation, **fields)
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
    from safetensors.numpy import load_file

    file = load_file(tmp_path / "adapter_model.safetensors")
    theirs = huggingface_layout.to_layout(tree.flatten(params), model.spec)
    merged = huggingface_layout.to_layout(
        jax.tree.map(np.asarray, tree.flatten(merge_adapters(with_adapters))), model.spec
    )
    for module in described["target_modules"]:
        a, b = (file[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
        assert a.shape[0] == b.shape[1] == RANK
        theirs[f"{module}.weight"] = theirs[f"{module}.weight"] + ALPHA / RANK * b @ a
    for name, leaf in merged.items():
        np.testing.assert_allclose(theirs[name], leaf, rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(file["base_model.model.classifier.weight"], theirs["classifier.weight"])


@pytest.mark.parametrize(
    ("fields", "names"),
    [({}, ["cls_classifier", "distillation_classifier"]), ({"qk_norm": True}, ["head", "distilled_head"])],
)
def test_the_file_for_peft_has_both_heads_of_a_distilled_model(fields, names, tmp_path):
    """By transformers' names, or by ours where it has no such model."""
    model, params, with_adapters = adapted("gelu", registers=1, distilled_head=True, **fields)
    interop.save_adapter(tmp_path, model, Adapters().select(with_adapters), RANK, ALPHA)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert described["modules_to_save"] == sorted(names)
    from safetensors.numpy import load_file

    file = load_file(tmp_path / "adapter_model.safetensors")
    for ours, theirs in zip(("head", "distilled_head"), names, strict=True):
        np.testing.assert_array_equal(file[f"base_model.model.{theirs}.weight"], params[ours]["kernel"].T)
        np.testing.assert_array_equal(file[f"base_model.model.{theirs}.bias"], params[ours]["bias"])


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
