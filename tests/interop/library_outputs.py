"""Compares our outputs with those of the library that made a fixture's weights."""

import jax
import numpy as np

import vit_jax
from tests.conftest import ROOT

PARITY = ROOT / "tests" / "fixtures" / "parity"
PLAIN_IMAGES = {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3}  # the fixtures' pixels are normalised


def assert_outputs_are_those_of_the_library(name, size):
    """Compares logits or pooled features, and tokens, with those stored in NAME.io.npz for images of this size."""
    stored = np.load(PARITY / f"{name}.io.npz")
    model, params = vit_jax.load(PARITY / name, resolution=size)
    images = np.random.default_rng(0).uniform(-1, 1, (2, *size, 3)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        logits, out = jax.jit(model.with_fields(**PLAIN_IMAGES).apply)(params, images)
    height, width = size
    compared = {f"{what}/{height}x{width}": logits for what in ("logits", "pooled")}
    compared = {key: found for key, found in compared.items() if key in stored}
    assert len(compared) == 1
    for key, found in (compared | {f"tokens/{height}x{width}": out["tokens"]}).items():
        assert found.shape == stored[key].shape
        assert np.abs(found - stored[key]).max() < 1e-5 * np.abs(stored[key]).max(), key
