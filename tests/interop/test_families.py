"""DINOv3 and CLIP: the outputs of transformers' own code, the arrays of the file again, and clear refusals."""

import copy
import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

import vit_jax
from tests.conftest import slow_but
from tests.interop.library_outputs import PARITY, assert_outputs_are_those_of_the_library
from vit_jax import UserError, interop, models, tree
from vit_jax.interop.layout_table import LAYOUTS
from vit_jax.model import create, parameter_shapes

NAMES = ("hf_dinov3", "hf_dinov3_plus", "hf_clip", "hf_clip_bare")
DINOV3 = {
    "registers": 4,
    "position": "none",
    "rotary": "centred",
    "rotary_theta": 100.0,
    "qkv_bias": "none",
    "layer_scale": 1e-5,
    "num_classes": 0,
}
CLIP = {"pre_norm": True, "embed_bias": False, "final_norm": "pooled", "num_classes": 0}
GATED = {"activation": "swiglu"}

# The sizes that timm 1.0.31 counts for its DINOv3 without biases of the projections, and those of the image towers of
# openai/clip-vit-base-patch16 and clip-vit-large-patch14, without and with the projection.
COUNTS = [
    ("ViT-S/16", DINOV3, 21_586_944),
    ("ViT-S/16", DINOV3 | GATED | {"mlp_dim": 1536}, 28_683_264),
    ("ViT-B/16", DINOV3, 85_641_216),
    pytest.param("ViT-L/16", DINOV3, 303_079_424, marks=pytest.mark.slow),
    pytest.param("ViT-H/16", DINOV3 | GATED | {"mlp_dim": 5120, "num_heads": 20}, 840_509_440, marks=pytest.mark.slow),
    ("ViT-B/16", CLIP, 85_799_424),
    ("ViT-B/16", CLIP | {"projection": 512}, 86_192_640),
    pytest.param("ViT-L/14", CLIP, 303_179_776, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "fields", "parameters"), COUNTS)
def test_parameter_counts(name, fields, parameters):
    assert tree.count(parameter_shapes(create(name, **fields))) == parameters


@pytest.mark.parametrize("name", slow_but(("hf_dinov3", "hf_clip"), NAMES))
def test_outputs_at_any_resolution_are_those_of_the_library(name):
    """At the native one, and at one that is not square; DINOv3 has no positions that could be resampled."""
    for size in ((32, 32), (24, 40)):
        assert_outputs_are_those_of_the_library(name, size)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_and_its_configuration_come_back(name, tmp_path):
    """All but the mask embedding, which only the training uses; transformers reads CLIP with and without its prefix."""
    model, params = vit_jax.load(PARITY / name)
    vit_jax.save(tmp_path, model, params, layout="huggingface")
    before, after = (
        {key.removeprefix("vision_model."): array for key, array in safetensors.numpy.load_file(file).items()}
        for file in (PARITY / name / "model.safetensors", tmp_path / "model.safetensors")
    )
    assert before.keys() == after.keys()
    for key in before.keys() - {"embeddings.mask_token"}:
        np.testing.assert_array_equal(after[key], before[key], err_msg=key)
    stated, written = (json.loads((folder / "config.json").read_text()) for folder in (PARITY / name, tmp_path))
    own = {"layerscale_value"}  # the initial value, which a trained file does not tell
    own |= set() if model.field("projection") else {"projection_dim"}
    assert {key: stated[key] for key in written.keys() & stated.keys() - own} == {
        key: written[key] for key in written.keys() & stated.keys() - own
    }
    again = vit_jax.load(tmp_path)[0]
    assert again.fields == model.fields


def changed(name, folder, **keys):
    """A copy of a fixture with other values in its configuration."""
    shutil.copytree(PARITY / name, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))
    return folder


@pytest.mark.parametrize(
    ("name", "keys", "sentence"),
    [
        ("hf_dinov3", {"mlp_bias": False}, "mlp_bias in its configuration is False"),
        ("hf_dinov3", {"hidden_act": "silu"}, "no DINOv3 with use_gated_mlp=False and hidden_act='silu'"),
        ("hf_dinov3_plus", {"hidden_act": "gelu"}, "no DINOv3 with use_gated_mlp=True and hidden_act='gelu'"),
        ("hf_dinov3", {"key_bias": True}, "missing layer.0.attention.k_proj.bias"),
        ("hf_dinov3", {"query_bias": False}, "only value has a bias"),
        ("hf_clip", {"hidden_act": "relu"}, "hidden_act"),
        ("hf_clip", {"use_gated_mlp": True}, "use_gated_mlp"),
    ],
)
def test_what_is_not_computed_is_refused(name, keys, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        vit_jax.load(changed(name, tmp_path / "model", **keys))


def test_the_image_tower_of_a_whole_clip_is_read(tmp_path):
    """Its file has the text tower too, and its configuration describes both."""
    arrays = safetensors.numpy.load_file(PARITY / "hf_clip" / "model.safetensors")
    more = {"text_model.final_layer_norm.weight": np.ones(3, np.float32), "logit_scale": np.array(2, np.float32)}
    more |= {"text_projection.weight": np.ones((10, 3), np.float32)}
    safetensors.numpy.save_file(arrays | more, tmp_path / "model.safetensors")
    tower = json.loads((PARITY / "hf_clip" / "config.json").read_text())
    whole = {"model_type": "clip", "projection_dim": 10, "text_config": {"hidden_size": 3}, "vision_config": tower}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    expected, found = vit_jax.load(PARITY / "hf_clip"), vit_jax.load(tmp_path)
    assert found[0].fields == expected[0].fields
    assert all(map(np.array_equal, jax.tree.leaves(found[1]), jax.tree.leaves(expected[1])))


def test_rotated_channels_are_stored_in_halves():
    """Channel i of a head in transformers' file is turned with channel i + half: they are neighbours in our kernel."""
    arrays = safetensors.numpy.load_file(PARITY / "hf_dinov3" / "model.safetensors")
    kernel = vit_jax.load(PARITY / "hf_dinov3")[1]["encoder"]["blocks"]["attention"]["qkv"]["kernel"]
    for part, name in enumerate(("q", "k", "v")):
        stored = arrays[f"layer.1.attention.{name}_proj.weight"].reshape(3, 8, 24)  # heads, channels, inputs
        order = [0, 4, 1, 5, 2, 6, 3, 7] if part < 2 else range(8)
        np.testing.assert_array_equal(kernel[1, :, part].transpose(1, 2, 0), stored[:, order])


def test_adapters_of_rotated_channels_are_stored_in_halves_too(tmp_path):
    """PEFT's adapters of transformers' layers are those of the adapted file, and ours come back."""
    base, random = PARITY / "hf_dinov3", np.random.default_rng(0)
    arrays, factors = safetensors.numpy.load_file(base / "model.safetensors"), {}
    shutil.copytree(base, tmp_path / "adapted")
    for name in ("q", "k", "v"):
        layer = f"layer.1.attention.{name}_proj"
        a, b = random.normal(size=(2, 24)).astype(np.float32), random.normal(size=(24, 2)).astype(np.float32)
        factors |= {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}
        arrays[f"{layer}.weight"] = arrays[f"{layer}.weight"] + 4 / 2 * b @ a
    safetensors.numpy.save_file(arrays, tmp_path / "adapted" / "model.safetensors")
    (tmp_path / "adapter").mkdir()
    safetensors.numpy.save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(base)}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(stated))
    expected, found = (vit_jax.load(tmp_path / name)[1] for name in ("adapted", "adapter"))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), expected, found)


def test_adapters_that_are_written_are_those_that_are_read(tmp_path):
    model, params = vit_jax.load(PARITY / "hf_dinov3")
    with_adapters = models.add_adapters(params, 2, 4.0, "attention", jax.random.key(0))
    factors = tree.flatten(with_adapters)
    factors = {
        name: leaf + 0.1 * np.arange(np.size(leaf)).reshape(np.shape(leaf)) % 0.7 if name.endswith("up") else leaf
        for name, leaf in factors.items()
    }
    merged = models.merge_adapters(tree.unflatten(factors))
    trained = tree.unflatten({name: np.asarray(leaf) for name, leaf in factors.items() if "/lora/" in name})
    interop.save_adapter(tmp_path, model, trained, 2, 4.0, str(PARITY / "hf_dinov3"))
    found = vit_jax.load(tmp_path)[1]
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), dict(merged), found)


@pytest.mark.parametrize("layout", ["timm", "huggingface"])
def test_quick_gelu_is_written_and_read(layout, tmp_path):
    epsilon = {"timm": 1e-6, "huggingface": 1e-12}[layout]
    model = create("ViT-mu/8", resolution=32, num_classes=3, activation="quick_gelu", norm_epsilon=epsilon, depth=1)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), parameter_shapes(model))
    vit_jax.save(tmp_path, model, params, layout=layout)
    assert vit_jax.load(tmp_path)[0].field("activation") == "quick_gelu"


@pytest.mark.parametrize(
    ("layout", "fields", "sentence"),
    [
        ("huggingface", DINOV3 | {"class_token": "always", "registers": 0}, "registers 0 in a DINOv3"),
        ("timm", CLIP | {"pooling": "map", "norm_epsilon": 1e-5}, "attention pooling after pre_norm"),
    ],
)
def test_what_a_library_would_take_for_another_model_is_not_written(layout, fields, sentence):
    model = create("ViT-mu/8", **{"resolution": 32, "activation": "gelu", "norm_epsilon": 1e-5} | fields)
    with pytest.raises(UserError, match=sentence):
        interop.LAYOUTS[layout].choose_family(model.spec)


def test_a_dinov3_of_transformers_is_read_with_its_names_in_memory(tmp_path):
    arrays = safetensors.numpy.load_file(PARITY / "hf_dinov3" / "model.safetensors")
    renamed = {f"model.{name}" if name.startswith("layer.") else name: array for name, array in arrays.items()}
    shutil.copy(PARITY / "hf_dinov3" / "config.json", tmp_path)
    safetensors.numpy.save_file(renamed, tmp_path / "model.safetensors")
    found, expected = (vit_jax.load(path, resolution="native") for path in (tmp_path, PARITY / "hf_dinov3"))
    assert found[0].spec == expected[0].spec
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])


def test_a_family_refuses_words_that_it_does_not_list():
    """A new form of a part is not written as another one."""
    families = [family for layout in LAYOUTS.values() for family in layout.families]
    written = [family for family in families if family.spec is models.ModelSpec and family.is_written]
    assert len(written) > 10
    for family in written:
        for part, name in (("block", "norm"), ("block", "activation"), ("head", "pooling"), ("stem", "kind")):
            spec = copy.deepcopy(create("ViT-Ti/16").spec)
            object.__setattr__(getattr(spec, part), name, "other")
            values, features = family.lacks(spec)
            assert [each for each in values + features if each.endswith(" other")], (family.name, name)
