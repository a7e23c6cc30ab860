"""Files as other people name, change and move them, and files of ours that lie alone."""

import dataclasses
import json
import os
import stat
import sys

import chex
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import vit_jax
from tests.conftest import ROOT
from tests.interop.test_safetensors import save_without_notes, small
from tests.interop.test_torch_layouts import random_params
from vit_jax import UserError, tree
from vit_jax.interop import layout, timm_config
from vit_jax.interop.archives import open_archive
from vit_jax.model import create

# As timm's `test_vit`, but of another depth, which the heads do not depend on.
NAMED = {"width": 64, "depth": 2, "mlp_dim": 192, "num_heads": 2, "resolution": 32, "activation": "gelu"}


@pytest.fixture(scope="module")
def named():
    model = create("ViT/8", num_classes=5, **NAMED)
    return model, tree.unflatten(random_params(model))


@pytest.mark.parametrize(
    "name", ["test_vit.safetensors", "test_vit.r160_in1k.safetensors", "test_vit.r160_in1k/model.safetensors"]
)
def test_the_name_of_an_architecture_states_its_heads(name, named, tmp_path):
    model, params = named
    (tmp_path / name).parent.mkdir(exist_ok=True)
    save_without_notes(tmp_path / name, model, params)
    for path in {tmp_path / name, (tmp_path / name).parent}:
        found, again = vit_jax.load(path)
        assert found.field("num_heads") == 2 and found.spec == model.spec
        chex.assert_trees_all_equal(again, params)


def test_a_name_that_does_not_fit_is_not_believed(named, tmp_path):
    path = tmp_path / "vit_base_patch16_224.safetensors"
    save_without_notes(path, *named)
    with pytest.raises(UserError, match="a timm architecture of width 64; give num_heads="):
        vit_jax.load(path)
    assert vit_jax.load(path, num_heads=4)[0].field("num_heads") == 4


@pytest.mark.parametrize("layout", ["timm", "huggingface"])
def test_a_file_alone_says_what_it_contains(layout, tmp_path):
    """Everything that a folder would say, and more: heads, preprocessing, classes and the loss."""
    model, params = small()
    model = dataclasses.replace(
        model, preprocess="resize(18)|central_crop(16)|value_range(-1,1)", class_names=tuple("abcde"), loss="sigmoid"
    )
    old = os.umask(0o022)
    try:
        vit_jax.save(tmp_path / "x.safetensors", model, params, layout=layout)
    finally:
        os.umask(old)
    found, again = vit_jax.load(tmp_path / "x.safetensors")
    assert found == model
    chex.assert_trees_all_equal(again, params)
    assert vit_jax.load(tmp_path / "x.safetensors", num_heads=2)[0].field("num_heads") == 2
    assert stat.S_IMODE((tmp_path / "x.safetensors").stat().st_mode) == 0o644
    with safetensors.safe_open(tmp_path / "x.safetensors", "np") as file:
        assert file.metadata()["format"] == "pt"  # which PyTorch's libraries require


@pytest.mark.parametrize("note", ["{", "3", '{"model": "ViT-B/16"}', '{"model": 3}'])
def test_a_header_that_describes_nothing_is_refused(note, tmp_path):
    vit_jax.save(tmp_path / "x.safetensors", *small())
    arrays = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt", "vit_jax": note})
    with pytest.raises(UserError, match="the description"):
        vit_jax.load(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("layout", "changed", "words"),
    [
        ("timm", {"model_args": {"embed_dim": 48}}, "embed_dim is 48, not 24"),
        ("timm", {"model_args": {"depth": 1e9}}, "depth is 1000000000.0, not 2"),
        ("timm", {"model_args": {"patch_size": [16, 16]}}, "patch_size is 16, not 8"),
        ("timm", {"model_args": {"embed_dim": None}}, "the width of its architecture is 768, not 24"),
        ("timm", {"num_classes": 7}, "num_classes is 7, not 5"),
        ("huggingface", {"hidden_size": 48}, "hidden_size is 48, not 24"),
        ("huggingface", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, not 2"),
        ("huggingface", {"intermediate_size": "48"}, "intermediate_size is '48', not 48"),
        ("huggingface", {"image_size": 64}, r"image_size is \(64, 64\), not \(16, 16\)"),
        ("huggingface", {"id2label": {"0": "a"}}, "the number of classes in id2label is 1, not 5"),
    ],
)
def test_a_configuration_that_contradicts_its_arrays_is_refused(layout, changed, words, tmp_path):
    vit_jax.save(tmp_path / "x", *small(), layout=layout)
    path = tmp_path / "x" / "config.json"
    content = json.loads(path.read_text())
    for key, value in changed.items():
        content[key] = content[key] | value if key == "model_args" else value
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"config\.json contradicts the arrays of the file: {words}"):
        vit_jax.load(tmp_path / "x")


def test_what_vit_jax_does_not_compute_says_what_it_is(tmp_path):
    vit_jax.save(tmp_path / "x", *small(), layout="huggingface")
    config = tmp_path / "x" / "config.json"
    stated = json.loads(config.read_text())
    for kind in ("blip_vision_model", ["vit"]):
        config.write_text(json.dumps({"vision_config": stated | {"model_type": kind}, "model_type": "blip"}))
        with pytest.raises(UserError, match=r"of the models of transformers .* vit_jax reads only vit") as caught:
            vit_jax.load(tmp_path / "x")
        assert "its model_type is blip_vision_model" in str(caught.value) or kind == ["vit"]
    safetensors.numpy.save_file({"layers.0.weight": np.zeros(3)}, tmp_path / "x" / "model.safetensors")
    for content, words in (({"architecture": "swin_tiny"}, "timm's swin_tiny"), (stated, "a vit of transformers")):
        config.write_text(json.dumps(content))
        with pytest.raises(UserError, match=f"it is {words}, which vit_jax does not read"):
            vit_jax.load(tmp_path / "x")


def test_a_configuration_of_a_bit_is_read(tmp_path):
    """It has none of the fields of a ViT."""
    model = create("BiT-R50x1", resolution=32, num_classes=3)
    text = timm_config.describe_bit("x", model)["config.json"]
    small_one = create("BiT", stages=(1, 1), width=32, resolution=32, num_classes=3)
    save_without_notes(tmp_path / "model.safetensors", small_one, tree.unflatten(random_params(small_one)))
    (tmp_path / "config.json").write_text(text)
    assert vit_jax.load(tmp_path, resolution=32)[0].spec == small_one.spec


@pytest.mark.parametrize(
    ("name", "fields", "architecture"),
    [
        ("ViT-Ti/16", {}, "vit_tiny_patch16_224"),
        ("ViT-S/32", {"resolution": 384}, "vit_small_patch32_384"),
        ("ViT-B/16", {"resolution": 512}, "vit_base_patch16_384"),
        ("ViT-B/16", {"layer_scale": 1e-5}, "deit3_base_patch16_224"),
        ("ViT-S/14", {"layer_scale": 1e-5, "registers": 4}, "vit_small_patch14_dinov2"),
        ("ViT-L/16", {"pooling": "map", "resolution": 256}, "vit_large_patch16_siglip_256"),
        ("ViT-mu/16", {}, "vit_base_patch16_224"),
        ("ViT-Ti/4", {"resolution": 32}, "vit_tiny_patch16_224"),
        ("ViT-Ti/16", {"depth": 4, "mlp_dim": 384}, "vit_tiny_patch16_224"),
        ("ViT-S/8", {"resolution": 32, "layer_scale": 1e-5}, "deit3_small_patch16_224"),
    ],
)
def test_what_is_written_for_timm_has_the_name_of_its_sizes(name, fields, architecture):
    model = create(name, **fields)
    assert timm_config.nearest_name(model) == architecture
    stated = json.loads(timm_config.describe_vit("x", model)["config.json"])
    assert stated["architecture"] == architecture and stated["model_args"]["embed_dim"] == model.field("width")


def test_a_file_has_the_permissions_of_the_others(tmp_path):
    old = os.umask(0o027)
    try:
        for name in ("x.safetensors", "x.npz"):
            vit_jax.save(tmp_path / name, *small())
    finally:
        os.umask(old)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o640}
    with open_archive(tmp_path / "x.npz") as archive:
        assert not archive.notes


def test_threads_read_the_arrays_that_they_ask_for(monkeypatch):
    """Many threads that often interrupt one another: from Python 3.12 on, they may not share a ZipFile."""
    monkeypatch.setattr(layout, "READ_THREADS", 8)
    before = sys.getswitchinterval()
    path = ROOT / "tests" / "fixtures" / "parity" / "google_vit_in21k_tanh.npz"
    _, expected = vit_jax.load(path)
    try:
        sys.setswitchinterval(1e-6)
        for _ in range(20):
            chex.assert_trees_all_equal(vit_jax.load(path)[1], expected)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("target", ["x.npz", "x.safetensors", "timm/", "huggingface/"])
def test_weights_that_are_not_finite_are_refused(target, value, tmp_path):
    """The sentence names the first array of the file that has such a value, however few they are."""
    model, params = small()
    params = params | {"head": params["head"] | {"bias": np.array([0, 0, 0, value, 0], np.float32)}}
    vit_jax.save(tmp_path / target, model, params, layout=target[:-1] if target.endswith("/") else None)
    with pytest.raises(UserError, match=r"(head/bias|head\.bias|classifier\.bias) contains values that are not finite"):
        vit_jax.load(tmp_path / target)


def test_large_weights_are_finite(tmp_path):
    """Though their sum is not."""
    model, params = small()
    params = params | {"head": {name: np.full_like(leaf, 3e38) for name, leaf in params["head"].items()}}
    vit_jax.save(tmp_path / "x.npz", model, params)
    chex.assert_trees_all_equal(vit_jax.load(tmp_path / "x.npz")[1], params)
