"""timm's Eva, and RMSNorm: timm's outputs at any resolution, the arrays of the file again, and clear refusals."""

import contextlib
import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

import vit_jax
from tests.conftest import slow_but
from tests.interop.library_outputs import PARITY, assert_outputs_are_those_of_the_library
from tests.interop.test_torch_layouts import arrays_of, infer
from tests.models.test_models import params_of
from vit_jax import UserError, tree
from vit_jax.interop import LAYOUTS
from vit_jax.model import create, parameter_shapes

NAMES = ("timm_dinov3", "timm_dinov3_plus", "timm_eva02_tiny", "timm_eva02_base", "timm_eva_giant")
NAMES += ("timm_pe", "timm_pe_giant", "timm_rms")
USUAL = ("timm_dinov3_plus", "timm_eva02_base", "timm_pe")  # of a family each
SQUARES = ((32, 32), (48, 48))
DINOV3 = {
    **{"position": "none", "rotary": "centred", "rotary_theta": 100.0, "qkv_bias": "none"},
    **{"registers": 4, "layer_scale": 1e-5, "num_classes": 0},
}
SIZE_OF_7B = {"width": 4096, "depth": 40, "num_heads": 32, "mlp_dim": 8192, "activation": "swiglu"}
EVA02 = {
    **{"activation": "swiglu", "rotary": "axial", "rotary_grid": 16, "qkv_bias": "query_value"},
    **{"pooling": "gap", "final_norm": "pooled", "class_token": "always", "num_classes": 0},
}
PE = {
    **{"activation": "gelu", "rotary": "axial_xy", "rotary_grid": 24, "pre_norm": True, "embed_bias": False},
    **{"pooling": "map", "map_heads": 8, "map_prefix": True, "class_token": "always", "num_classes": 1024},
}
SIZE_OF_PE_G = {"width": 1536, "depth": 50, "num_heads": 16, "mlp_dim": 8960, "map_mlp_dim": 6144, "num_classes": 1280}
# As timm 1.0.31 counts its architectures of these sizes; it has the projection of the Perception Encoder as a head.
COUNTS = [
    ("ViT-Ti/16", DINOV3 | {"qkv_bias": "query_value"}, 5_489_664),
    ("ViT/16", DINOV3 | SIZE_OF_7B, 6_716_030_976),
    ("ViT-Ti/14", EVA02 | {"mlp_dim": 512}, 5_502_144),
    pytest.param("ViT-S/14", EVA02 | {"mlp_dim": 1024}, 21_621_120, marks=pytest.mark.slow),
    pytest.param("ViT-B/14", EVA02 | {"mlp_dim": 2048, "mlp_norm": True}, 85_758_720, marks=pytest.mark.slow),
    ("ViT-L/14", EVA02 | {"mlp_dim": 2730, "mlp_norm": True}, 303_268_800),
    ("ViT-Ti/16", PE | {"resolution": 384, "num_classes": 512}, 6_141_056),
    pytest.param("ViT-B/16", PE, 93_673_984, marks=pytest.mark.slow),
    pytest.param("ViT-L/14", PE | {"resolution": 336}, 317_152_256, marks=pytest.mark.slow),
    ("ViT/14", PE | SIZE_OF_PE_G | {"resolution": 448, "class_token": "auto"}, 1_882_033_920),
]


@pytest.mark.parametrize(("name", "fields", "parameters"), COUNTS)
def test_parameter_counts(name, fields, parameters):
    assert tree.count(parameter_shapes(create(name, **fields))) == parameters


@pytest.mark.parametrize("size", [(24, 40), *(pytest.param(size, marks=pytest.mark.slow) for size in SQUARES)], ids=str)
@pytest.mark.parametrize("name", slow_but(USUAL, NAMES))
def test_outputs_at_any_resolution_are_those_of_timm(name, size):
    """At the native one, at a larger one, and at one that is not square."""
    assert_outputs_are_those_of_the_library(name, size)


@pytest.mark.parametrize("name", slow_but(USUAL, NAMES))
def test_the_file_and_its_model_come_back(name, tmp_path):
    """From a folder, and from a bare file, which states its model in its header."""
    model, params = vit_jax.load(PARITY / name, resolution=32)
    arrays = safetensors.numpy.load_file(PARITY / name / "model.safetensors")
    for path, file in ((tmp_path / "x", tmp_path / "x" / "model.safetensors"), (tmp_path / "y.safetensors",) * 2):
        vit_jax.save(path, model, params, layout="timm")
        written = safetensors.numpy.load_file(file)
        assert written.keys() == arrays.keys()
        for key, array in arrays.items():
            np.testing.assert_array_equal(written[key], array, err_msg=key)
        assert vit_jax.load(path)[0].fields == model.fields


def copied(name, folder, **arguments):
    """A copy of a fixture with other arguments in its configuration."""
    shutil.copytree(PARITY / name, folder)
    content = json.loads((folder / "config.json").read_text())
    content["model_args"] |= arguments
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", slow_but(USUAL, NAMES))
def test_what_is_written_is_read_without_the_header(name, tmp_path):
    """`config.json` states the model to timm, and to us."""
    model, params = vit_jax.load(PARITY / name)
    vit_jax.save(tmp_path, model, params, layout="timm")
    arrays = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    assert vit_jax.load(tmp_path)[0].fields == model.fields


@pytest.mark.parametrize("name", ["timm_eva02_base", "timm_pe"])
def test_places_that_are_not_scaled_stay_so(name, tmp_path):
    source, params = vit_jax.load(PARITY / name, resolution="native", rotary_grid=0)
    vit_jax.save(tmp_path / "x", source, params, layout="timm")
    assert vit_jax.load(tmp_path / "x", resolution="native")[0].field("rotary_grid") == 0


def test_a_perception_encoder_with_what_dinov3_has_stays_one(tmp_path):
    known = vit_jax.load(PARITY / "timm_pe", resolution=32)[0]
    model = create(known.name, **known.fields | {"registers": 2, "layer_scale": 1e-5})
    vit_jax.save(tmp_path / "x", model, params_of(model), layout="timm")
    assert vit_jax.load(tmp_path / "x")[0].spec == model.spec


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("timm_dinov3", {"rope_type": "mixed"}, "rope_type in its configuration is 'mixed', not 'dinov3'"),
        ("timm_dinov3", {"rope_rotate_half": False}, "rope_rotate_half in its configuration is False"),
        ("timm_dinov3", {"use_post_norm": True}, "use_post_norm in its configuration is True"),
        ("timm_dinov3", {"num_kv_heads": 1}, "model_args states num_kv_heads, which vit_jax does not know"),
        ("timm_eva02_tiny", {"rope_grid_offset": 1.0}, "rope_grid_offset in its configuration is 1.0"),
        ("timm_eva02_tiny", {"ref_feat_shape": [16, 12]}, "ref_feat_shape in its configuration must be a square"),
        ("timm_eva02_tiny", {"ref_feat_shape": []}, "ref_feat_shape in its configuration must be a square"),
        ("timm_pe", {"rope_grid_indexing": "ij"}, "rope_grid_indexing in its configuration is 'ij', not 'xy'"),
        ("timm_pe", {"attn_pool_num_heads": 5}, "width 24 is not divisible by map_heads 5"),
        ("timm_dinov3", {"rope_temperature": "hot"}, "rope_temperature in its configuration must be a number"),
    ],
)
def test_what_is_not_computed_is_refused(name, arguments, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        vit_jax.load(copied(name, tmp_path / "model", **arguments))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"layer_scale": 0.0}, "layer_scale 0 in a DINOv3"),
        ({"norm_epsilon": 1e-6}, "norm_epsilon 1e-06"),
        ({"activation": "gelu_tanh"}, "activation gelu_tanh"),
    ],
)
def test_what_timm_does_not_compute_is_not_written(fields, sentence):
    sizes = {"width": 24, "depth": 1, "mlp_dim": 48, "num_heads": 3, "resolution": 32, "num_classes": 3}
    model = create("ViT/8", **DINOV3 | sizes | {"activation": "gelu", "norm_epsilon": 1e-5} | fields)
    with pytest.raises(UserError, match=sentence):
        LAYOUTS["timm"].choose_family(model.spec)


def test_a_model_of_a_published_size_gets_the_name_of_its_architecture():
    known = {"resolution": 256, "activation": "gelu", "norm_epsilon": 1e-5, "depth": 12}
    for bias, name in (("none", "vit_small_patch16_dinov3"), ("query_value", "vit_small_patch16_dinov3_qkvb")):
        model = create("ViT-S/16", **DINOV3 | known | {"qkv_bias": bias})
        written = LAYOUTS["timm"].choose_family(model.spec).config("x", model)["config.json"]
        assert json.loads(written)["architecture"] == name


@pytest.mark.parametrize("name", slow_but(USUAL, NAMES))
def test_arrays_of_any_shape_are_refused_in_a_sentence(name):
    """Each array in turn absent, without its first dimension, without any, or empty; or it does not matter."""
    arrays = arrays_of(name)
    for key, array in arrays.items():
        for wrong in (array[0], np.float32(0).reshape(()), array[:0]):
            with contextlib.suppress(UserError):
                infer(arrays | {key: wrong})
        with contextlib.suppress(UserError):
            infer({other: array for other, array in arrays.items() if other != key})
