"""Positions at another resolution: as the library of each layout resamples them, said, and from the stated pipe."""

import numpy as np
import pytest

import vit_jax
from tests.conftest import ROOT
from tests.interop.test_torch_layouts import outputs_of
from vit_jax import models

PARITY = ROOT / "tests" / "fixtures" / "parity"
STORED = np.load(PARITY / "resolutions.npz") if (PARITY / "resolutions.npz").is_file() else {}  # by make_resolutions.py
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
        bare = models.create(model.name, **model.fields | {"num_classes": 0})
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


FEW = ("timm_dinov2_registers", "hf_dinov2", "converted_registers")


@pytest.mark.parametrize("name", [one if one in FEW else pytest.param(one, marks=pytest.mark.slow) for one in METHODS])
def test_outputs_at_any_resolution_are_those_of_the_library(name, tmp_path, capsys):
    """At the native one, a larger, a smaller, and one that is not square."""
    for key in (key for key in STORED if key.startswith(f"{name}/")):
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
