"""Positions at another resolution: as the library of each layout resamples them, said, and from the stated pipe."""

import dataclasses

import jax
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.conftest import ROOT
from tests.interop.test_torch_layouts import outputs_of
from vit_jax import UserError, cli, convert, evaluate, look, models, predict, program
from vit_jax.model import create
from vit_jax.training import initial_weights

PARITY = ROOT / "tests" / "fixtures" / "parity"
STORED = np.load(PARITY / "resolutions.npz")  # by make_resolutions.py
METHODS = {
    "timm_vit_map": "bicubic",
    "timm_dinov2_registers": "bicubic",
    "timm_deit_distilled": "bicubic",
    "hf_dinov2": "bicubic_no_antialias",
    "hf_deit_distilled": "bicubic_no_antialias",
    "hf_memory_vit": "bicubic_no_antialias",
    "converted_registers": "bicubic",
    "converted_siglip": "bicubic_no_antialias",
}


def write_converted(folder):
    """Writes the folders of the families of which no file of transformers lies here."""
    sources = {"converted_registers": "timm_dinov2_registers", "converted_siglip": "timm_vit_map"}
    for name, source in sources.items():
        model, params = vit_jax.load(PARITY / f"{source}.safetensors", num_heads=3)
        bare = create(model.name, **model.fields | {"num_classes": 0})
        headless = {key: value for key, value in params.items() if key != "head"}
        vit_jax.save(folder / name, bare, headless, layout="huggingface")


def load(name, folder, **fields):
    """A model of the fixture at a resolution, and its parameters."""
    if name.startswith("converted"):
        write_converted(folder)
        return vit_jax.load(folder / name, **fields)
    if name.startswith("timm"):
        return vit_jax.load(PARITY / f"{name}.safetensors", num_heads=3, **fields)
    return vit_jax.load(PARITY / name, **fields)


FEW = ("timm_dinov2_registers", "hf_dinov2")


@pytest.mark.parametrize("name", [one if one in FEW else pytest.param(one, marks=pytest.mark.slow) for one in METHODS])
def test_outputs_at_any_resolution_are_those_of_the_library(name, tmp_path, capsys):
    """At the native one, a larger, a smaller, and one that is not square."""
    keys = [key for key in STORED if key.startswith(f"{name}/")]
    assert len(keys) == 4
    for key in keys:
        height, width = map(int, key.partition("/")[2].split("x"))
        images = np.random.default_rng(0).uniform(-1, 1, (2, height, width, 3)).astype(np.float32)
        capsys.readouterr()
        model, params = load(name, tmp_path, resolution=(height, width))
        told = f"positions resampled from 32x32 to {height}x{width} pixels ({METHODS[name]})"
        assert (told in capsys.readouterr().err) == ((height, width) != (32, 32))
        outputs = outputs_of(model, params, images)
        found = outputs["logits"]
        assert abs(found - STORED[key]).max() < 1e-5 * abs(STORED[key]).max(), key


def test_the_method_of_the_library_stays_with_the_model(tmp_path):
    model, _ = load("hf_dinov2", tmp_path)
    assert model.resample == "bicubic_no_antialias"
    for name in ("x.npz", "x.safetensors"):
        vit_jax.save(tmp_path / name, *load("hf_dinov2", tmp_path), layout="ours")
        again, params = vit_jax.load(tmp_path / name, resolution=56)
        assert again.resample == model.resample
        np.testing.assert_array_equal(params["position"], load("hf_dinov2", tmp_path, resolution=56)[1]["position"])
    assert vit_jax.load(PARITY / "big_vision_tok.npz")[0].resample == "linear"


@pytest.mark.slow
def test_commands_take_a_resolution(tmp_path, capsys, monkeypatch):
    """predict and look read images of the stated size, or of the one that is asked for; convert keeps the positions."""
    monkeypatch.setattr(cli, "join_hosts", lambda: None)
    model, params = load("hf_deit_distilled", tmp_path)
    pipe = "torch_resize(18,'bicubic')|torch_center_crop(16)|value_range(-1,1)"
    vit_jax.save(tmp_path / "x", dataclasses.replace(model, preprocess=pipe), params, layout="huggingface")
    for label in ("a", "b"):
        (tmp_path / "data" / "test" / label).mkdir(parents=True)
        Image.fromarray(np.full((9, 9, 3), ord(label), np.uint8)).save(tmp_path / "data" / "test" / label / "x.png")
    place, images = str(tmp_path / "x"), str(tmp_path / "data")
    evaluated = [place, f"--evals=knn:source=folder:{images},train_split=test,k=1", "--json"]
    commands = {predict: [place, images, "--json"], evaluate: evaluated}
    for command, words in commands.items():
        for more, size in (([], "16x16"), (["--resolution=24x40"], "24x40")):
            command.main(["command", *words, *more])
            assert f"positions resampled from 32x32 to {size} pixels (bicubic_no_antialias)" in capsys.readouterr().err
    for more, size in ({}, (16, 16)), ({"resolution": (24, 40)}, (24, 40)):
        assert look.examine(place, [tmp_path / "data" / "test" / "a" / "x.png"], **more)[0].image_size == size
    convert.main(["convert", place, str(tmp_path / "y.npz")])
    assert "y.npz: ours layout, ViT/8, 32x32 pixels" in capsys.readouterr().out
    for wrong in ("large", "0", "24x0", "24x24x24", "9" * 5000):
        with pytest.raises(UserError, match="must be one size or HEIGHTxWIDTH"):
            convert.main(["convert", place, str(tmp_path / "z.npz"), f"--resolution={wrong}"])


def test_a_run_starts_from_the_positions_of_the_file(tmp_path, capsys, quick):
    """They are resampled once, not first to the size that the stated preprocessing gives."""
    quick.model.position, quick.model.name = "learned", "ViT-mu/4"
    quick.resolution, quick.data.preprocess = 24, "resize({resolution})|value_range(-1,1)"
    quick.evals.test.preprocess = quick.data.preprocess
    config, _, parts = program.prepare(quick)
    fields = parts.model.fields | {"resolution": 32, "resample": "bicubic_no_antialias"}
    model = create(parts.model.name, **fields | {"preprocess": "resize(8)|value_range(-1,1)"})
    params = model.init(jax.random.key(0), np.zeros((1, 32, 32, 3), np.float32))
    vit_jax.save(tmp_path / "x.npz", model, params)
    adapted, _, loaded = initial_weights.load_init(str(tmp_path / "x.npz"), config, parts, None)
    assert "positions resampled from 32x32 to 24x24 pixels (bicubic_no_antialias)" in capsys.readouterr().err
    expected = models.resample_positions(
        params["position"], (8, 8), (6, 6), model.spec.class_rows, "bicubic_no_antialias"
    )
    np.testing.assert_array_equal(adapted["position"], expected)
    assert loaded.resample == "bicubic_no_antialias"  # the exported model's, too
