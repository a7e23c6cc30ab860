"""Models out of JAX: the logits of their authors by ONNX and StableHLO, every field written or refused."""

import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import vit_jax
from tests.conftest import ROOT, slow_but
from tests.interop.library_outputs import PLAIN_IMAGES
from tests.models.test_later_vits import ALL
from tests.models.test_models import params_of, random_values, tiny
from vit_jax import UserError, convert, models
from vit_jax.config import EXECUTION_FIELDS
from vit_jax.interop import onnx_model
from vit_jax.model import create, parameter_shapes
from vit_jax.models import BitSpec, ModelSpec, PlainOps

onnxruntime = pytest.importorskip("onnxruntime")  # of the extra [test], with flatbuffers
pytest.importorskip("onnx_ir")

PARITY = ROOT / "tests" / "fixtures" / "parity"
# With other outputs, or other arrays.
OTHERS = ("big_vision_flexi", "google_hybrid_stem_only", "hf_flax_vit", "hf_texts_clip", "hf_texts_siglip")
FIXTURES = [
    name for path in sorted(PARITY.glob("*.io.npz")) if (name := path.name.removesuffix(".io.npz")) not in OTHERS
]
USUAL_FIXTURES = ("google_vit_in21k_tanh", "timm_dinov2_registers", "timm_pe", "timm_siglip", "hf_dinov3", "hf_clip")


def load(name):
    """The model and the parameters of a fixture, its images, and the outputs of its authors."""
    path = next(path for end in ("", ".npz", ".safetensors") if (path := PARITY / f"{name}{end}").exists())
    given = {"num_heads": 3} if path.suffix == ".safetensors" else {}
    model, params = vit_jax.load(path, resolution=32, **given)
    stored, first = np.load(PARITY / f"{name}.io.npz"), "logits" if model.field("num_classes") else "features"
    if "images" in stored:
        expected = {first: stored["logits"], "features": stored["pre_logits"]}
        return model, params, stored["images"], expected
    images = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)
    [key] = {"logits/32x32", "pooled/32x32"} & set(stored)
    return model.with_fields(**PLAIN_IMAGES), params, images, {first: stored[key]}


def run_onnx(path, images):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"images": images}), strict=True))


def assert_near(found, expected, tolerance):
    assert abs(found - expected).max() <= tolerance * abs(expected).max()


@pytest.mark.parametrize("name", slow_but(USUAL_FIXTURES, FIXTURES))
def test_onnx_gives_the_outputs_of_the_authors(name, tmp_path):
    model, params, images, expected = load(name)
    if "beit" in name:
        with pytest.raises(UserError, match="ONNX is not written for a model with position=relative_bias"):
            vit_jax.save(tmp_path / "x.onnx", model, params)
        return
    vit_jax.save(tmp_path / "x.onnx", model, params)
    found = run_onnx(tmp_path / "x.onnx", images)
    assert list(found) == (["logits", "probabilities"] if model.field("num_classes") else []) + ["features"]
    for key, values in expected.items():
        assert_near(found[key], values, 1e-5)


# Every form, in a few models. Their fields that no file has are in one of these.
FORMS = {
    "all": ALL,
    "head": {"position": "relative", "relative_tables": "head", "relative_clip": 2, "position_rows": "class"}
    | {"registers": 1, "distilled_head": True, "activation": "gelu"},
    "local": {"position": "learned2d", "position_place": "shared", "position_rows": "patches", "qkv_bias": "none"}
    | {"rotary": "centred", "pooling": "gap", "class_token": "always", "attention_pattern": "local"}
    | {"attention_window": 3},
    "map": {"position": "relative", "relative_tables": "model", "pooling": "map", "pre_logits": True}
    | {"representation_size": 6, "activation": "quick_gelu", "attention_pattern": "strided"}
    | {"map_heads": 4, "map_mlp_dim": 24, "map_prefix": True, "class_token": "always"},
    "axial": {"block": "axial", "position": "sincos2d_moco", "pooling": "gap"},
    "patches": {"head": "patches", "position": "learned2d", "position_place": "blocks", "attention_window": 2}
    | {"attention_pattern": "local2d"},
    "fixed": {"rotary": "axial_xy", "position": "none", "attention_pattern": "fixed", "registers": 2}
    | {"mlp_norm": True},
    "sincos": {"position": "sincos2d", "num_classes": 0, "norm": "rms", "dense_bias": False},
    "hybrid": {"stem": "resnet", "stages": (1, 1), "stem_width": 32, "stem_epsilons": "timm", "patch_size": 16}
    | {"resolution": (32, 64)},
}
USUAL = ("all", "head")
BITS = {
    "bit": {"resolution": (45, 70), "border": "lowest", "se_reduction": 8},
    "zeros": {"resolution": 32},
    "post_activation": {"resolution": 32, "unit": "post_activation", "num_classes": 0, "se_reduction": 4},
}


@pytest.mark.parametrize("name", slow_but(USUAL, FORMS))
def test_onnx_gives_the_outputs_of_every_form(name, tmp_path):
    model = tiny(**FORMS[name])
    params = params_of(model)
    vit_jax.save(tmp_path / "x.onnx", model, params, blocks=[1])
    images = np.random.default_rng(0).uniform(-1, 1, (3, *model.image_size, 3)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        logits, out = jax.jit(lambda *given: model.apply(*given, ops=PlainOps()))(params, images)
    found = run_onnx(tmp_path / "x.onnx", images)
    expected = {"logits": logits, "features": out["pre_logits"], "block_1": out["blocks"][1]}
    if model.field("num_classes") and name != "patches":
        expected["probabilities"] = jax.nn.softmax(logits)
    elif name != "patches":
        del expected["logits"]
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key].shape == values.shape
        assert_near(found[key], np.asarray(values), 2e-5)


def bit(**fields):
    return create("BiT", **{"stages": (1, 2), "width": 32, "num_classes": 5} | fields)


@pytest.mark.parametrize("name", slow_but(("bit",), BITS))
def test_onnx_gives_the_outputs_of_a_bit(name, tmp_path):
    model = bit(**BITS[name])
    params = params_of(model)
    vit_jax.save(tmp_path / "x.onnx", model, params)
    images = np.random.default_rng(0).uniform(-1, 1, (3, *model.image_size, 3)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        logits, out = jax.jit(model.apply)(params, images)
    found = run_onnx(tmp_path / "x.onnx", images)
    expected = {"features": out["pre_logits"]}
    if model.field("num_classes"):
        expected |= {"logits": logits, "probabilities": jax.nn.softmax(logits)}
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert_near(found[key], np.asarray(values), 5e-5)


@pytest.mark.parametrize(
    ("family", "written", "tried"),
    [
        (ModelSpec, onnx_model.WRITTEN, [tiny(**fields) for fields in FORMS.values()]),
        (BitSpec, onnx_model.BIT_WRITTEN, [bit(**fields) for fields in BITS.values()]),
    ],
)
def test_every_field_is_written_and_tried_or_refused(family, written, tried):
    """A new field, or a new word of one, is refused until it is written here and one of FORMS has it."""
    words, defaults = models.field_words(family()), models.flatten_spec(family())
    values = [model.values for model in tried]
    for name, default in defaults.items():
        if name in (*EXECUTION_FIELDS, *onnx_model.TRAINING):
            continue
        of_file = written.get(name, (default,))
        for word in words.get(name, ()):
            assert word not in of_file or word in {default} | {each[name] for each in values}, f"{name}={word}"
        if name in written and name not in words:
            assert any(each[name] != default for each in values), name
    assert set(written) <= set(defaults)


@pytest.mark.parametrize("field", ["rotary", "qk_norm"])
def test_a_field_that_is_not_written_is_refused_by_name(field, tmp_path, monkeypatch):
    written = {name: words for name, words in onnx_model.WRITTEN.items() if name != field}
    monkeypatch.setattr(onnx_model, "WRITTEN", written)
    model = tiny(**ALL)
    value = model.field(field)
    with pytest.raises(UserError, match=rf"ONNX is not written for a model with {field}={value}; write a .stablehlo"):
        vit_jax.save(tmp_path / "x.onnx", model, params_of(model))
    vit_jax.save(tmp_path / "x.onnx", tiny(), params_of(tiny()))
    assert run_onnx(tmp_path / "x.onnx", np.zeros((7, 32, 32, 3), np.float32))["logits"].shape == (7, 7)


@pytest.mark.parametrize("fields", [{"unit": "axial"}, {"root": "attention"}])
def test_resnets_with_attention_are_refused(fields, tmp_path):
    model = create("BiT", stages=(1,), width=32, resolution=32, **fields)
    [(name, value)] = fields.items()
    with pytest.raises(UserError, match=rf"ONNX is not written for a model with {name}={value};"):
        vit_jax.save(tmp_path / "x.onnx", model, random_values(parameter_shapes(model)))


def test_pixels_narrow_weights_and_weights_beside(tmp_path, monkeypatch):
    model, params, images, _ = load("timm_dinov2_registers")
    pixels = np.uint8(255 * (images + 1) / 2)
    model = create(
        model.name,
        **model.fields | {"image_std": (0.2, 0.25, 0.3)},
        preprocess="resize(32)|value_range(0,1)",
        class_names=[f"class {number}" for number in range(11)],
    )
    vit_jax.save(tmp_path / "plain.onnx", model, params)
    expected = run_onnx(tmp_path / "plain.onnx", np.float32(pixels / np.float32(255)))
    vit_jax.save(tmp_path / "pixels.onnx", model, params, preprocess=True)
    assert_near(run_onnx(tmp_path / "pixels.onnx", pixels)["logits"], expected["logits"], 1e-5)
    vit_jax.save(tmp_path / "narrow.onnx", model, params, dtype="float16", preprocess=True)
    assert_near(run_onnx(tmp_path / "narrow.onnx", pixels)["logits"], expected["logits"], 1e-2)
    monkeypatch.setattr(onnx_model, "MOST_BYTES", 1000)
    vit_jax.save(tmp_path / "beside.onnx", model, params)
    assert (tmp_path / "beside.onnx").stat().st_size < (tmp_path / "beside.onnx.data").stat().st_size
    np.testing.assert_array_equal(
        run_onnx(tmp_path / "beside.onnx", np.float32(pixels / np.float32(255)))["logits"], expected["logits"]
    )
    session = onnxruntime.InferenceSession(tmp_path / "pixels.onnx", providers=["CPUExecutionProvider"])
    described = json.loads(session.get_modelmeta().custom_metadata_map["vit_jax"])
    assert described["class_names"] == list(model.class_names) and described["preprocess"] == model.preprocess
    large = {**params, "head": {**params["head"], "bias": np.full(11, 1e30, np.float32)}}
    vit_jax.save(tmp_path / "large.onnx", model, large, dtype="float16")  # the head stays in float32
    large = {**params, "registers": np.full_like(params["registers"], 1e30)}
    with pytest.raises(UserError, match=r"^a weight is beyond the range of float16; write the file in float32\.$"):
        vit_jax.save(tmp_path / "large.onnx", model, large, dtype="float16")


def run_stablehlo(path, images):
    return jax.jit(jax.export.deserialize(bytearray(path.read_bytes())).call)(images)


def test_stablehlo_gives_the_outputs_of_the_authors(tmp_path, capsys):
    _, _, images, expected = load("big_vision_tok")
    target = tmp_path / "x.stablehlo"
    convert.main(["convert", str(PARITY / "big_vision_tok.npz"), str(target), "--blocks", "1"])
    said = capsys.readouterr()
    assert "images float32 [batch, 32, 32, 3] -> logits, probabilities, features, block_1" in said.out
    assert "jax is only promised to run a .stablehlo file for 6 months after the release that wrote it" in said.err
    found = run_stablehlo(target, images)
    for key, values in expected.items():
        assert_near(np.asarray(found[key]), values, 1e-5)
    assert found["block_1"].shape == (3, 17, 24)
    assert json.loads((tmp_path / "x.json").read_text())["model"] == "ViT/8"
    with pytest.raises(ValueError, match="value >= 1 for dimension variable 'batch'"):
        run_stablehlo(target, images[:0])


ALONE = """
import sys
import jax, numpy as np
model = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
images = np.load(sys.argv[2])
for size in map(int, sys.argv[4:]):
    np.save(f"{sys.argv[3]}{size}.npy", jax.jit(model.call)(images[:size])["logits"])
assert not {"flax", "vit_jax", "onnx_ir"} & set(sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [tiny(), create("R+ViT-Ti/16", depth=1, resolution=32), create("BiT-R50x1", stages=(1, 1), resolution=64)]
)
def test_jax_alone_runs_stablehlo(model, tmp_path):
    """Images are pixels, and batches are of 1, 7 and 64."""
    model = create(model.name, **model.fields, preprocess="value_range(-1,1)")
    params = random_values(parameter_shapes(model))
    pixels = np.random.default_rng(0).integers(0, 256, (64, *model.image_size, 3), np.uint8)
    vit_jax.save(tmp_path / "x.stablehlo", model, params, preprocess=True)
    np.save(tmp_path / "images.npy", pixels)
    given = [tmp_path / "x.stablehlo", tmp_path / "images.npy", tmp_path / "out", "1", "7", "64"]
    subprocess.run([sys.executable, "-c", ALONE, *given], check=True, cwd=tmp_path)
    logits = np.asarray(jax.jit(model.apply)(params, np.float32(pixels / 127.5 - 1))[0])
    for size in (1, 7, 64):
        assert_near(np.load(tmp_path / f"out{size}.npy"), logits[:size], 1e-5)


def test_adapters_are_merged(tmp_path):
    model, params = tiny(depth=1), params_of(tiny(depth=1))
    adapted = models.add_adapters(params, 2, 4.0, "attention,mlp", jax.random.key(0))
    for layer in (adapted["encoder"]["blocks"]["attention"]["qkv"], adapted["encoder"]["blocks"]["mlp"]["dense1"]):
        layer["lora"]["up"] = np.full(layer["lora"]["up"].shape, 0.1, np.float32)
    images = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)
    for name, given in (("adapted", adapted), ("merged", models.merge_adapters(adapted)), ("without", params)):
        vit_jax.save(tmp_path / f"{name}.onnx", model, given)
    found = [run_onnx(tmp_path / f"{name}.onnx", images)["logits"] for name in ("adapted", "merged", "without")]
    np.testing.assert_array_equal(found[0], found[1])
    assert abs(found[0] - found[2]).max() > 1e-3


def test_what_cannot_be_written_is_a_sentence(tmp_path, monkeypatch):
    model, params = tiny(depth=1), params_of(tiny(depth=1))
    for name, given, words in (
        ("x.onnx", {"layout": "timm"}, "a .onnx file has no layout; leave out layout timm"),
        ("x.onnx", {"dtype": "bfloat16"}, "a .onnx file has the dtype float32 or float16, not bfloat16."),
        ("x.stablehlo", {"dtype": "float16"}, "a .stablehlo file has the dtype float32 or bfloat16, not float16."),
        ("x.onnx", {"blocks": [0, 5]}, "ViT-mu/8 has 1 blocks, numbered from 0; there is no block 5."),
        ("x.onnx", {"preprocess": True}, "ViT-mu/8 does not state how images are preprocessed"),
        ("x.npz", {"preprocess": True}, "preprocess and blocks are for .onnx and .stablehlo files, not for"),
        ("x.tflite", {}, "ends in .npz, .safetensors, .onnx or .stablehlo, or a folder."),
        ("nowhere/x.onnx", {}, "cannot write .*: No such file or directory"),
    ):
        with pytest.raises(UserError, match=words):
            vit_jax.save(tmp_path / name, model, params, **given)
    with pytest.raises(UserError, match=r"class_names must be 7 strings, one for each class\."):
        create(model.name, **model.fields, class_names=["one"])
    (tmp_path / "x.json").write_text('{"of": "another program"}')
    with pytest.raises(UserError, match="the file that is there does not describe a model; choose another name"):
        vit_jax.save(tmp_path / "x.stablehlo", model, params)
    for missing, name, extra in (("onnx_ir", "x.onnx", "onnx"), ("flatbuffers", "x.stablehlo", "stablehlo")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            patch.delitem(sys.modules, "jax._src.export.serialization", raising=False)
            words = re.escape(f"needs {missing.replace('_', '-')}: pip install -e '.[{extra}]'")
            with pytest.raises(UserError, match=words):
                vit_jax.save(tmp_path / name, model, params)
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*.onnx"))
