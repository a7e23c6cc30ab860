"""timm's and Hugging Face's layouts: the logits of their own code, the arrays of the file again, and clear refusals."""

import contextlib
import dataclasses
import re
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

import vit_jax
from tests.interop.test_layouts import FOLDERS
from vit_jax import UserError, models, tree
from vit_jax.interop import LAYOUTS
from vit_jax.interop.archives import Archive, Header, open_archive
from vit_jax.interop.layout import read_file, recognise, required_defaults, write_file
from vit_jax.interop.timm_vit import FAMILY, STATED
from vit_jax.model import create, parameter_shapes

DISTILLED = ("timm_deit_distilled", "hf_deit_distilled")  # of tests/fixtures/parity/make_distilled.py
HERE = ("timm_dinov2_registers", "timm_vit_map", "hf_dinov2", *DISTILLED)
IN_MEMORY = ("hf_memory_vit", "hf_memory_dinov2_swiglu")
ELSEWHERE = (
    *("timm_vit_token", "timm_vit_gap_fc_norm", "timm_vit_gap_no_class", "timm_deit3_layerscale", "timm_vit_qk_norm"),
    *("timm_hybrid", "timm_bit", "hf_vit"),
)
CONFIG = {"num_heads": 3, "activation": "gelu", "norm_epsilon": 1e-6}  # what no array states


class Arrays(Archive):
    """An archive in memory."""

    def __init__(self, arrays):
        self.arrays = arrays
        self._headers = {name: Header(array.shape, array.dtype) for name, array in arrays.items()}

    def read_array(self, name, into):
        into[...] = self.arrays[name].reshape(into.shape)


def fixture(name):
    for folder in FOLDERS:
        for path in (folder / f"{name}.safetensors", folder / name / "model.safetensors"):
            if path.is_file():
                return path, np.load(folder / f"{name}.io.npz")
    return pytest.skip(f"{name} is not here")


def arrays_of(name):
    return read_arrays(fixture(name)[0])


def read_arrays(path):
    with open_archive(path) as archive:
        arrays = {key: np.empty(header.shape, np.float32) for key, header in archive.items()}
        for key, array in arrays.items():
            archive.read_array(key, array)
    return arrays


def shapes_of(model):
    return {name: leaf.shape for name, leaf in tree.flatten(parameter_shapes(model)).items()}


def random_params(model):
    generator = np.random.default_rng(0)
    return {name: generator.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes_of(model).items()}


def opened(arrays):
    """Arrays as a file, recognised."""
    return recognise(Arrays(arrays), LAYOUTS.values())


def infer(arrays, size=None):
    file = opened(arrays)
    return file.family.fields(file.arrays, file.family.names, size, None)


def read(arrays, **config):
    """The model and the parameters of arrays by either layout, of which only one accepts them."""
    fitting = [
        layout for layout in LAYOUTS.values() if any(one.find_prefix(arrays) is not None for one in layout.families)
    ]
    file = opened(arrays)
    assert fitting == [file.layout, LAYOUTS["ours"]]
    untold = {name: CONFIG[name] for name in file.family.untold}
    fields = infer(arrays) | untold | config
    model = create(models.model_name(fields), **fields)
    return model, read_file(file, model.spec, shapes_of(model))


def write(layout, params, spec):
    return write_file(LAYOUTS[layout], params, spec)


def outputs_of(model, params, images):
    with jax.default_matmul_precision("highest"):
        logits, out = jax.jit(model.apply)(params, images)
    return {"logits": logits} | {key: out[key] for key in ("pre_logits", "head_logits") if key in out}


def assert_same_arrays(found, expected):
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.shape == expected[name].shape, name
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("name", [*HERE, *(pytest.param(name, marks=pytest.mark.slow) for name in ELSEWHERE)])
def test_logits_equal_the_authors_and_the_file_comes_back(name, tmp_path):
    """The file is a bare one of timm, which does not state the number of heads, or a folder of transformers."""
    layout = "timm" if name.startswith("timm") else "huggingface"
    path, expected = fixture(name)
    given = {"timm_bit": {"resolution": 64}}.get(name, {"num_heads": 3} if layout == "timm" else {})
    model, params = vit_jax.load(path if layout == "timm" else path.parent, **given)
    for key, ours in outputs_of(model, params, expected["images"]).items():
        assert abs(ours - expected[key]).max() < (2e-5 if name == "timm_bit" else 1e-5) * abs(expected[key]).max()
    vit_jax.save(tmp_path / "x.safetensors", model, params, layout=layout)
    arrays = read_arrays(path)
    if (mask_token := "dinov2.embeddings.mask_token") in arrays:  # of training
        arrays[mask_token] = np.zeros_like(arrays[mask_token])
    assert_same_arrays(read_arrays(tmp_path / "x.safetensors"), arrays)


def test_a_distilled_model_passes_between_the_layouts():
    model, params = read(arrays_of("timm_deit_distilled"))
    assert (model.field("registers"), model.field("distilled_head")) == (1, True)
    arrays = write("huggingface", params, model.spec)
    assert arrays.keys() == arrays_of("hf_deit_distilled").keys()
    other, again = read(arrays)
    assert other.spec == model.spec
    assert_same_arrays(write("timm", again, other.spec), arrays_of("timm_deit_distilled"))


@pytest.mark.parametrize("name", IN_MEMORY)
def test_names_of_models_in_memory_are_read(name, tmp_path):
    """The names are those of `state_dict` of transformers 5.23, not of `save_pretrained`, which are written."""
    path, expected = fixture(name)
    model, params = vit_jax.load(path.parent)
    for key, ours in outputs_of(model, params, expected["images"]).items():
        assert abs(ours - expected[key]).max() < 1e-5 * abs(expected[key]).max()
    vit_jax.save(tmp_path / "x", model, params, layout="huggingface")
    again, back = vit_jax.load(tmp_path / "x")
    assert again.spec == model.spec
    assert_same_arrays(tree.flatten(back), tree.flatten(params))


def test_dinov2_with_registers_passes_between_the_layouts():
    """transformers has a position of the class token, which timm adds to the token."""
    model, params = read(arrays_of("timm_dinov2_registers"))
    headless = {name: array for name, array in params.items() if not name.startswith("head/")}
    bare = create(model.name, **model.fields | {"num_classes": 0})
    arrays = write("huggingface", headless, bare.spec)
    assert arrays["embeddings.position_embeddings"].shape == (1, 17, 24)
    other, again = read(arrays)
    assert other.field("position_rows") == "class" and other.field("registers") == 4
    again["position"][0] = 0.5
    back = write("timm", again, other.spec)
    np.testing.assert_array_equal(back["cls_token"][0, 0], params["cls"] + 0.5)
    assert_same_arrays({**back, "cls_token": params["cls"][None, None]}, write("timm", headless, bare.spec))


@pytest.mark.parametrize(
    ("layout", "fields"),
    [("timm", {"registers": 4, "position_rows": "class"}), ("huggingface", {"position_rows": "patches"})],
)
def test_a_file_that_describes_its_model_may_have_other_rows_of_positions(layout, fields, tmp_path):
    """timm adds the class token's position to the token, and transformers has one in any case."""
    shape = {"width": 24, "depth": 1, "mlp_dim": 48, "num_heads": 3, "resolution": 32, "num_classes": 5}
    model = create("ViT/8", activation="gelu", **shape, **fields)
    params = tree.unflatten(random_params(model))
    vit_jax.save(tmp_path / "x.safetensors", model, params, layout=layout)
    again, back = vit_jax.load(tmp_path / "x.safetensors")
    assert again.spec == model.spec
    images = np.random.default_rng(1).normal(size=(2, 32, 32, 3)).astype(np.float32)
    expected, found = (outputs_of(model, each, images)["logits"] for each in (params, back))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_older_names_are_read():
    arrays = arrays_of("timm_dinov2_registers")
    older = {re.sub(r"ls([12])\.gamma", r"gamma_\1", name): array for name, array in arrays.items()}
    older["register_tokens"], older["mask_token"] = older.pop("reg_token"), np.zeros((1, 24), np.float32)
    (model, params), (expected_model, expected) = read(older), read(arrays)
    assert model == expected_model
    for name, array in expected.items():
        np.testing.assert_array_equal(params[name], array)


def write_renamed(path, name, rename):
    """A file of timm or a folder of transformers whose arrays have other names; the path to load, and the fields."""
    source, _ = fixture(name)
    renamed = {new: array for key, array in read_arrays(source).items() for new in rename(key)}
    file = path / "model.safetensors"
    safetensors.numpy.save_file(renamed, file, metadata={"format": "pt"})
    if name.startswith("timm"):
        return file, {"num_heads": 3}
    shutil.copy(source.with_name("config.json"), path)
    return path, {}


PREFIXES = ("_orig_mod.", "module._orig_mod.", "model.", "backbone.", "state_dict_ema.module.", "visual.trunk.")


@pytest.mark.parametrize("name", ["timm_vit_map", "timm_dinov2_registers", "hf_dinov2", "hf_deit_distilled"])
def test_prefixes_that_all_arrays_have_are_removed(name, tmp_path):
    """Those of torch.compile, DistributedDataParallel, Lightning and others, in any order."""
    model, params = vit_jax.load(*(fixture(name)[0],), **({"num_heads": 3} if name.startswith("timm") else {}))
    inner = re.compile(r"(?<=\.)(?=norm1\.)")  # of a model whose blocks are compiled one by one
    cases = {prefix: (lambda key, prefix=prefix: [prefix + key]) for prefix in PREFIXES}
    for rename in (*cases.values(), lambda key: [inner.sub("_orig_mod.", key)]):
        path, given = write_renamed(tmp_path, name, rename)
        found, again = vit_jax.load(path, **given)
        assert found.spec == model.spec
        assert_same_arrays(tree.flatten(again), tree.flatten(params))


@pytest.mark.parametrize("name", ["timm_vit_map", "hf_dinov2"])
def test_two_arrays_for_one_parameter_are_refused(name, tmp_path):
    path, given = write_renamed(tmp_path, name, lambda key: [key, f"module.{key}"])
    with pytest.raises(UserError, match=r"module\."):
        vit_jax.load(path, **given)
    path, given = write_renamed(tmp_path, name, lambda key: [key, f"_orig_mod.{key}"])
    with pytest.raises(UserError, match=r"contains both \S+ and \S+, of which only one can be meant"):
        vit_jax.load(path, **given)
    if name.startswith("timm"):
        names = {"blocks.0.attn.proj.bias": ["blocks.0.gamma_1", "blocks.0.ls1.gamma"]}
        path, given = write_renamed(tmp_path, name, lambda key: [key, *names.get(key, [])])
        with pytest.raises(UserError, match=r"contains both blocks\.0\.\S+ and blocks\.0\.\S+, of which only one"):
            vit_jax.load(path, **given)


@pytest.mark.parametrize("name", ["timm_vit_map", "hf_dinov2"])
def test_a_prefix_that_some_arrays_lack_is_named(name, tmp_path):
    """Such files come from a head trained beside a backbone, or from two sets of weights saved together."""
    path, given = write_renamed(tmp_path, name, lambda key: ["loss.weight" if "fc1.bias" in key else f"backbone.{key}"])
    with pytest.raises(UserError, match=r"loss\.weight"):
        vit_jax.load(path, **given)
    path, given = write_renamed(tmp_path, name, lambda key: [f"student.{key}", f"teacher.{key}"])
    with pytest.raises(UserError, match=r"student\."):
        vit_jax.load(path, **given)


WRITTEN = {
    "vit": {"pre_logits": True, "representation_size": 16, "num_classes": 0},
    "deit": {"registers": 1, "num_classes": 5},
    "dinov2": {"layer_scale": 1.0, "activation": "swiglu", "num_classes": 5, "pooling": "token_gap"},
    "siglip_vision_model": {"pooling": "map", "num_classes": 0, "activation": "gelu_tanh"},
}


@pytest.mark.parametrize("family", WRITTEN)
def test_families_are_recognised_by_what_is_written(family):
    shape = {"width": 24, "depth": 2, "mlp_dim": 48, "num_heads": 3, "resolution": 32, "activation": "gelu"}
    model = create("ViT/8", **shape | WRITTEN[family])
    params = random_params(model)
    arrays = write("huggingface", params, model.spec)
    assert opened(arrays).family.name == family
    given = {"layer_scale": 1.0} if "layer_scale" in WRITTEN[family] else {}
    found_model, found = read(arrays, activation=model.field("activation"), **given)
    assert found_model.spec == model.spec
    assert_same_arrays(found, params)


def test_several_parameters_are_consecutive_rows_of_one_array():
    model = create("ViT/8", width=24, depth=1, mlp_dim=48, num_heads=3, resolution=32, pooling="map", num_classes=0)
    params = random_params(model)
    timm, theirs = write("timm", params, model.spec), write("huggingface", params, model.spec)
    kernels = [params[f"map_head/attention/{part}/kernel"].reshape(24, 24).T for part in ("query", "key", "value")]
    np.testing.assert_array_equal(timm["attn_pool.kv.weight"], np.concatenate(kernels[1:]))
    np.testing.assert_array_equal(theirs["vision_model.head.attention.in_proj_weight"], np.concatenate(kernels))
    qkv = params["encoder/blocks/attention/qkv/kernel"][0]
    np.testing.assert_array_equal(timm["blocks.0.attn.qkv.weight"], qkv.reshape(24, 72).T)
    first = theirs["vision_model.encoder.layers.0.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(first, qkv[:, 1].reshape(24, 24).T)


def test_swiglu_is_the_gate_and_then_the_linear_half():
    shape = {"width": 24, "depth": 1, "mlp_dim": 48, "num_heads": 3, "resolution": 32, "num_classes": 0}
    model = create("ViT/8", activation="swiglu", layer_scale=1.0, **shape)
    params = random_params(model)
    kernel = params["encoder/blocks/mlp/dense1_gated/kernel"][0]
    rows = np.concatenate([kernel[:, 0].T, kernel[:, 1].T])
    np.testing.assert_array_equal(write("timm", params, model.spec)["blocks.0.mlp.fc1.weight"], rows)
    theirs = write("huggingface", params, model.spec)
    np.testing.assert_array_equal(theirs["encoder.layer.0.mlp.weights_in.weight"], rows)


def test_what_is_wrong_with_a_file_is_said():
    with pytest.raises(UserError, match=r"the number of attention heads is not known: .*; give num_heads="):
        vit_jax.load(fixture("timm_vit_map")[0])
    arrays = arrays_of("timm_vit_map")
    wrong = arrays | {"norm_post.weight": arrays["norm.weight"], "norm.bias": arrays["norm.bias"][:5]}
    with pytest.raises(UserError, match=r"unexpected norm_post\.weight; norm\.bias is \[5\], not \[24\]"):
        read(wrong)
    with pytest.raises(UserError, match=r"missing norm_pre\.bias"):
        read(arrays | {"norm_pre.weight": arrays["norm.weight"]})
    with pytest.raises(UserError, match=r"arrays are missing: blocks\.0\.mlp\.fc2\.weight"):
        read({name: array for name, array in arrays.items() if name != "blocks.0.mlp.fc2.weight"})
    with pytest.raises(UserError, match="its 15 position embeddings do not form a square grid"):
        read(arrays | {"pos_embed": arrays["pos_embed"][:, 1:]})
    distilled = arrays_of("timm_deit_distilled")
    with pytest.raises(UserError, match=r"its distillation token has no head \(head_dist\)"):
        read({name: array for name, array in distilled.items() if not name.startswith("head_dist.")})
    flat = arrays | {"patch_embed.proj.weight": arrays["norm.weight"]}
    with pytest.raises(UserError, match=r"patch_embed\.proj\.weight has the shape \[24\]"):
        read(flat)


@pytest.mark.parametrize("name", ["embeddings.position_embeddings", "embeddings.patch_embeddings.projection.bias"])
def test_what_every_file_of_transformers_has_is_missed(name):
    arrays = arrays_of("hf_dinov2")
    [found] = [one for one in arrays if one.endswith(name)]
    with pytest.raises(UserError, match=f"arrays are missing: {re.escape(found)}"):
        read({one: array for one, array in arrays.items() if one != found})


def test_an_mlp_that_the_file_does_not_have_is_refused():
    path, _ = fixture("hf_deit_distilled")
    with pytest.raises(UserError, match=r"intermediate\.dense\.weight is \[\d+, \d+\], not"):
        vit_jax.load(path.parent, activation="swiglu")


TWO_HEADS = {"pooling": "token", "position": "learned", "registers": 1, "distilled_head": True}


@pytest.mark.parametrize(
    ("layout", "fields", "sentence"),
    [
        ("timm", {"position": "sincos2d"}, "timm layout does not support position embeddings of type sincos2d"),
        ("timm", {"pooling": "token_gap", "norm_epsilon": 1e-5}, "pooling token_gap, norm_epsilon"),
        ("timm", {"pre_norm": True}, "timm layout does not support pre_norm True; use"),
        ("timm", {"projection": 8}, "timm layout does not support projection 8, a classifier after a projection"),
        ("timm", {"rotary": "axial"}, "rotary positions; use --layout=ours"),
        (
            "timm",
            TWO_HEADS | {"position_rows": "class", "activation": "swiglu"},
            "timm layout does not support position_rows class with a second head, activation swiglu with a second head",
        ),
        ("huggingface", {"qk_norm": True}, "huggingface layout does not support qk_norm True"),
        ("huggingface", {"pre_norm": True}, "huggingface layout does not support pre_norm True"),
        ("huggingface", {"pooling": "gap", "num_classes": 0}, "does not support a mean without a classifier"),
        ("huggingface", TWO_HEADS | {"registers": 2}, "huggingface layout does not support registers 2; use"),
        ("huggingface", {"pre_logits": True}, "a tanh layer before a classifier"),
        (
            "google",
            {"registers": 4, "activation": "gelu"},
            "google layout does not support registers 4, activation",
        ),
        ("google", TWO_HEADS, "google layout does not support registers 1, distilled_head True"),
        ("big_vision", TWO_HEADS, "big_vision layout does not support registers 1, distilled_head True"),
        (
            "big_vision",
            {"image_mean": (0.4, 0.5, 0.5)},
            "layout does not support image_mean (0.4, 0.5, 0.5)",
        ),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(layout, fields, sentence):
    spec = create("ViT-mu/8", resolution=32, **fields).spec
    with pytest.raises(UserError) as error:
        write(layout, {}, spec)
    assert sentence in str(error.value)


def test_a_field_that_timm_does_not_know_is_refused():
    family = dataclasses.replace(FAMILY, requires=required_defaults(set(STATED) - {"qk_norm"}))
    layout = dataclasses.replace(LAYOUTS["timm"], families=(family,))
    with pytest.raises(UserError, match="the timm layout does not support qk_norm True; use --layout=ours"):
        write_file(layout, {}, create("ViT-mu/8", resolution=32, qk_norm=True).spec)


@pytest.mark.parametrize("name", [*HERE, pytest.param("timm_bit", marks=pytest.mark.slow)])
def test_arrays_of_any_shape_are_refused_in_a_sentence(name):
    """Each array in turn without its first dimension, without any, and with no elements; or it does not matter."""
    arrays = arrays_of(name)
    for key, array in arrays.items():
        for wrong in (array[0], np.float32(0).reshape(()), array[:0]):
            with contextlib.suppress(UserError):
                infer(arrays | {key: wrong})
