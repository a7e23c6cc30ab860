"""Families of ViTs as timm, transformers and their authors have them: outputs of the library's own code, the arrays of
the file again, and clear refusals.
"""

import contextlib
import json
import re
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

import vit_jax
from tests.conftest import slow_but
from tests.interop.library_outputs import PARITY, assert_outputs_are_those_of_the_library
from vit_jax import UserError, tree
from vit_jax.model import create, parameter_shapes

NAMES = ("timm_clip", "timm_clip_classes", "timm_siglip", "timm_naflex", "timm_mae", "timm_beit")
NAMES += ("hf_siglip", "hf_siglip_classes", "hf_siglip2_naflex", "hf_vit_mae", "hf_beit")
# Of a family each, at a size for which positions are resampled and whose images are not square.
USUAL = ("timm_clip", "hf_siglip", "timm_beit")
FAST = {(name, (24, 40)) for name in USUAL}


def layout_of(name):
    return "timm" if name.startswith("timm") else "huggingface"


SIZES = ((32, 32), (48, 48), (24, 40))  # the first is the native one
CASES = [
    pytest.param(name, size, id=f"{name}-{size[0]}x{size[1]}", marks=[] if (name, size) in FAST else pytest.mark.slow)
    for name in NAMES
    for size in SIZES
]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_outputs_at_any_resolution_are_those_of_the_library(name, size):
    assert_outputs_are_those_of_the_library(name, size)


@pytest.mark.parametrize("name", slow_but(USUAL, NAMES))
def test_the_file_and_its_model_come_back(name, tmp_path):
    """All arrays but those that the library does not use, under the names of models of one size."""
    model, params = vit_jax.load(PARITY / name)
    vit_jax.save(tmp_path, model, params, layout=layout_of(name))
    before, after = (
        {re.sub("^(vision_model|vit)[.]", "", key): array for key, array in safetensors.numpy.load_file(file).items()}
        for file in (PARITY / name / "model.safetensors", tmp_path / "model.safetensors")
    )
    if "naflex" not in name:
        prefix = {"hf_siglip_classes": "head.", "hf_vit_mae": "decoder."}.get(name, "none")
        unused = {key for key in before if key.startswith(prefix)}
        assert before.keys() - unused == after.keys()
        for key, array in after.items():
            np.testing.assert_array_equal(array, before[key], err_msg=key)
    again, back = vit_jax.load(tmp_path)
    assert again.spec == model.spec
    assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(params)))


@pytest.mark.parametrize(("model_type", "name"), [("siglip", "hf_siglip"), ("siglip2", "hf_siglip2_naflex")])
def test_the_image_tower_of_a_whole_siglip_is_read(model_type, name, tmp_path):
    """Its file has the text tower too, and its configuration describes both."""
    arrays = safetensors.numpy.load_file(PARITY / name / "model.safetensors")
    whole = {f"vision_model.{key.removeprefix('vision_model.')}": array for key, array in arrays.items()}
    whole |= {"text_model.head.weight": np.ones((3, 3), np.float32)}
    whole |= {"logit_scale": np.ones(1, np.float32), "logit_bias": np.ones(1, np.float32)}
    safetensors.numpy.save_file(whole, tmp_path / "model.safetensors")
    tower = json.loads((PARITY / name / "config.json").read_text())
    config = {"model_type": model_type, "text_config": {"hidden_size": 3}, "vision_config": tower}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected, found = vit_jax.load(PARITY / name), vit_jax.load(tmp_path)
    assert found[0].fields == expected[0].fields
    assert all(map(np.array_equal, jax.tree.leaves(found[1]), jax.tree.leaves(expected[1])))


def test_an_mae_of_its_authors_is_read(tmp_path):
    """Its names are timm's, beside a mask token and a decoder, which only the training uses."""
    arrays = safetensors.numpy.load_file(PARITY / "timm_mae" / "model.safetensors")
    more = {
        name: np.ones((1, 1, 8), np.float32) for name in ("mask_token", "decoder_pos_embed", "decoder_embed.weight")
    }
    more["decoder_blocks.0.attn.qkv.weight"] = np.ones((24, 8), np.float32)
    safetensors.numpy.save_file(arrays | more, tmp_path / "mae.safetensors")
    expected, found = (vit_jax.load(path, num_heads=3) for path in (PARITY / "timm_mae", tmp_path / "mae.safetensors"))
    assert found[0].spec.sizes == expected[0].spec.sizes
    assert all(map(np.array_equal, jax.tree.leaves(found[1]), jax.tree.leaves(expected[1])))


@pytest.mark.parametrize("layers", [1, 4])
def test_a_dinov2_with_the_linear_head_of_its_authors_is_read(layers, tmp_path):
    """The head of one layer reads the class token and the mean of the patches, as that of transformers' fixture."""
    model, params = vit_jax.load(PARITY / "hf_dinov2")
    bare = create(model.name, **model.fields | {"num_classes": 0, "pooling": "token"})
    head = params.pop("head")
    vit_jax.save(tmp_path / "bare.safetensors", bare, params, layout="timm")
    arrays = safetensors.numpy.load_file(tmp_path / "bare.safetensors")
    arrays = {f"backbone.{name}": array for name, array in arrays.items()}
    kernel = np.concatenate([head["kernel"][:24]] * layers + [head["kernel"][24:]])
    arrays |= {"linear_head.weight": np.ascontiguousarray(kernel.T), "linear_head.bias": head["bias"]}
    safetensors.numpy.save_file(arrays, tmp_path / "dinov2.safetensors")
    if layers > 1:
        with pytest.raises(UserError, match="its linear head reads 120 channels"):
            vit_jax.load(tmp_path / "dinov2.safetensors", num_heads=3)
        return
    found, again = vit_jax.load(tmp_path / "dinov2.safetensors", num_heads=3)
    assert found.field("pooling") == "token_gap"
    np.testing.assert_array_equal(again["head"]["kernel"], head["kernel"])
    assert all(map(np.array_equal, jax.tree.leaves(again["encoder"]), jax.tree.leaves(params["encoder"])))


# What timm 1.0.31 counts for its models without classes: vit_base_patch32_clip_224, vit_base_patch16_siglip_224,
# vit_so400m_patch14_siglip_224, vit_so400m_patch16_siglip_256, vit_giantopt_patch16_siglip_256.
CLIP = {"pre_norm": True, "embed_bias": False, "num_classes": 0}
SIGLIP = {"pooling": "map", "num_classes": 0}
BEIT = {"position": "relative_bias", "qkv_bias": "query_value", "layer_scale": 1e-5, "class_token": "always"}
BEIT |= {"pooling": "gap", "final_norm": "pooled", "num_classes": 0}
GIANTOPT = SIGLIP | {"width": 1536, "depth": 40, "mlp_dim": 6144, "num_heads": 16, "resolution": 256}
COUNTS = [
    ("ViT-B/32", CLIP, 87_456_000),
    ("ViT-B/16", {"num_classes": 0}, 85_798_656),  # MAE, DINO
    ("ViT-B/16", BEIT, 85_761_984),
    ("ViT-B/16", SIGLIP, 92_884_224),
    ("ViT-So400m/14", SIGLIP, 427_680_704),
    ("ViT-So400m/16", SIGLIP | {"resolution": 256}, 427_888_064),
    ("ViT/16", GIANTOPT, 1_163_168_256),
]


@pytest.mark.parametrize(
    ("name", "fields", "parameters"), [COUNTS[1], *(pytest.param(*row, marks=pytest.mark.slow) for row in COUNTS)]
)
def test_parameter_counts(name, fields, parameters):
    assert tree.count(parameter_shapes(create(name, **fields))) == parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_array_of_any_shape_is_refused_in_a_sentence(name, tmp_path):
    """Each array in turn without its first dimension, without any, or with no elements; or it does not matter."""
    arrays = safetensors.numpy.load_file(PARITY / name / "model.safetensors")
    shutil.copy(PARITY / name / "config.json", tmp_path)
    for key, array in arrays.items():
        for wrong in (array[0], np.float32(0).reshape(()), array[:0]):
            safetensors.numpy.save_file(arrays | {key: np.array(wrong)}, tmp_path / "model.safetensors")
            with contextlib.suppress(UserError):
                vit_jax.load(tmp_path)


def test_a_mean_of_the_tokens_is_written_as_a_siglip(tmp_path):
    model = create("ViT-mu/8", resolution=32, num_classes=3, pooling="gap", depth=1)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), parameter_shapes(model))
    vit_jax.save(tmp_path, model, params, layout="huggingface")
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["SiglipForImageClassification"], "siglip")
    assert vit_jax.load(tmp_path)[0].spec == model.spec


@pytest.mark.parametrize(
    ("name", "keys", "sentence"),
    [
        ("timm_clip", {"model_args": {"pre_norm": False, "num_heads": 3}}, "pre_norm is False, not True"),
        ("timm_clip", {"architecture": "vit_of_tomorrow", "model_args": {}}, "attention heads is not known"),
        ("hf_siglip", {"model_type": "siglip2_vision_model"}, "vit_jax reads only siglip_vision_model"),
        ("hf_siglip2_naflex", {"hidden_act": "relu"}, "hidden_act"),
        ("hf_beit", {"use_mean_pooling": False}, "use_mean_pooling in its configuration is False"),
    ],
)
def test_what_is_not_computed_is_refused(name, keys, sentence, tmp_path):
    shutil.copytree(PARITY / name, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))
    with pytest.raises(UserError, match=sentence):
        vit_jax.load(tmp_path / "model")


def test_a_beit_of_transformers_is_read_with_its_names_in_memory(tmp_path):
    renamed = {
        r"encoder\.layer\.": "layers.",
        r"attention\.attention\.(q|k|v)(uery|ey|alue)\.": r"attention.\1_proj.",
        r"attention\.attention\.relative": "relative",
        r"attention\.output\.dense": "attention.o_proj",
        r"intermediate\.dense": "mlp.fc1",
        r"(layers\.\d+\.)output\.dense": r"\1mlp.fc2",
    }
    arrays = {}
    for name, array in safetensors.numpy.load_file(PARITY / "hf_beit" / "model.safetensors").items():
        for pattern, replacement in renamed.items():
            name = re.sub(pattern, replacement, name)
        arrays[name] = array
    shutil.copy(PARITY / "hf_beit" / "config.json", tmp_path)
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    found, expected = (vit_jax.load(path, resolution="native") for path in (tmp_path, PARITY / "hf_beit"))
    assert found[0].spec == expected[0].spec
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])
