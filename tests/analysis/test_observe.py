"""What a model does with images: equal to the measures of all its attention at once, with logits to the digit."""

import dataclasses

import jax
import numpy as np
import pytest

import vit_jax
from tests.conftest import ROOT
from vit_jax import kernels, look
from vit_jax.analysis import measure, observe
from vit_jax.evals.loaded_model import open_weights
from vit_jax.inference import make_inference
from vit_jax.model import create

CHECKPOINT = ROOT / "tests" / "fixtures" / "parity" / "google_vit_in21k_tanh.npz"
IMAGES = np.random.default_rng(0).uniform(-1, 1, (11, 32, 32, 3)).astype(np.float32)
BATCH = 8  # the last batch is padded


@pytest.fixture(scope="module")
def loaded():
    return open_weights(CHECKPOINT, 1, None)


def run(program, params):
    on_devices = jax.device_put(params, program.params_shardings)
    seen = observe.observe(program, on_devices, iter(IMAGES), BATCH, len(IMAGES))
    batches = (IMAGES[:BATCH], np.concatenate([IMAGES[BATCH:], np.repeat(IMAGES[-1:], 5, axis=0)]))
    logits = [program.predict(on_devices, jax.device_put(batch, program.batch_sharding)) for batch in batches]
    return seen, np.concatenate(logits)[: len(IMAGES)]


@pytest.fixture(scope="module")
def plain(loaded):
    return run(loaded.program, loaded.read())


def test_batches_on_the_mesh_give_the_measures_of_all_attention(loaded, plain):
    seen, _ = plain
    model, spec = loaded.program.model, loaded.program.model.spec
    _, out = jax.jit(lambda params: model.apply(params, IMAGES, capture=("attention",)))(loaded.read())
    weights, size = np.asarray(out["attention"]), spec.stem.patch_size
    rollout = measure.query_maps(measure.attention_rollout(weights), spec.grid, class_token=True)
    alone = measure.query_maps(measure.attention_rollout(weights, 0.0), spec.grid, class_token=True)
    heads = measure.query_maps(weights, spec.grid, class_token=True)
    np.testing.assert_allclose(seen.rollout, rollout, atol=1e-6)
    np.testing.assert_allclose(seen.rollout_alone, alone, atol=1e-6)
    np.testing.assert_allclose(seen.heads, heads.swapaxes(0, 1), atol=1e-3)  # kept in float16
    np.testing.assert_allclose(seen.distance, measure.attention_distance(weights, spec.grid, size).mean(1), rtol=1e-5)
    np.testing.assert_allclose(seen.entropy, measure.attention_entropy(weights).mean(1), rtol=1e-5)
    tokens = np.asarray(out["blocks"])[:, :, 1:].reshape(spec.depth, -1, spec.width)
    np.testing.assert_allclose(seen.similarity, measure.linear_cka(tokens), atol=1e-5)
    patches = np.asarray(out["tokens"])[:, 1:].reshape(len(IMAGES), *spec.grid, spec.width)
    np.testing.assert_allclose(seen.components, measure.patch_components(patches)[0], atol=1e-3)
    np.testing.assert_allclose(seen.own_components[3], measure.patch_components(patches[3])[0], atol=1e-3)
    assert abs(seen.pixels / 127.5 - 1 - IMAGES).max() <= 1 / 255 + 1e-6 and seen.count == len(IMAGES)


@pytest.mark.slow
@pytest.mark.parametrize("values", [(0.0, 1.0), (-1.0, 1.0), (-0.5, 2.0)])
def test_pictures_are_the_photographs_in_any_range_of_values(tmp_path, values):
    levels = np.random.default_rng(0).integers(0, 255, (2, 8, 8, 3)).astype(np.uint8)
    model = create("ViT-mu/4", num_classes=3, resolution=8)
    pipe = "resize(8)|value_range({:g},{:g})".format(*values)
    model = dataclasses.replace(model, preprocess=pipe)
    vit_jax.save(tmp_path / "m.npz", model, jax.device_get(model.init(jax.random.key(0), np.zeros((1, 8, 8, 3)))))
    _, _, seen = look.examine(tmp_path / "m.npz", list(levels))
    np.testing.assert_array_equal(seen.pixels, levels)


def test_logits_are_those_of_the_model_to_the_digit(plain):
    seen, logits = plain
    np.testing.assert_array_equal(seen.logits, logits)


def test_a_model_with_the_attention_kernel_is_observed_as_the_plain_one(loaded, plain):
    """The kernel computes the logits; the weights are those of the plain form."""
    program = loaded.program
    fused = make_inference(program.model.with_attention("fused"), program.mesh, program.params)
    with kernels.interpret_kernels():
        seen, logits = run(fused, loaded.read())
    np.testing.assert_array_equal(seen.logits, logits)
    for name in ("logits", "rollout", "rollout_alone", "distance", "entropy", "similarity"):
        np.testing.assert_allclose(getattr(seen, name), getattr(plain[0], name), rtol=1e-4, atol=1e-5, err_msg=name)


def test_more_images_than_are_kept_count_in_the_averages(loaded, plain, monkeypatch):
    monkeypatch.setattr(observe, "KEPT_IMAGES", 9)
    seen, _ = run(loaded.program, loaded.read())
    assert len(seen.logits) == len(seen.pixels) == len(seen.rollout) == 9 and seen.count == len(IMAGES)
    np.testing.assert_array_equal(seen.distance, plain[0].distance)


def test_the_batch_fits_the_devices_the_images_and_the_memory(loaded, monkeypatch):
    program = loaded.program
    assert [observe.choose_batch(program, images) for images in (1, 8, 9, 1000)] == [8, 8, 16, 128]
    monkeypatch.setattr(observe, "MOST_ATTENTION_BYTES", 1)
    assert observe.choose_batch(program, 1000) == 8


@pytest.mark.slow
def test_attention_along_columns_follows_that_along_rows(loaded):
    model = create("Axial-ViT-mu/8", depth=2, resolution=32)
    params = model.init(jax.random.key(0), IMAGES[:1])
    program = make_inference(model, loaded.program.mesh, jax.eval_shape(lambda: params))
    seen, _ = run(program, params)
    _, out = jax.jit(lambda params: model.apply(params, IMAGES, capture=("attention",)))(params)
    heads = model.spec.attention.num_heads
    layers = [part for block in np.asarray(out["attention"]) for part in (block[:, :heads], block[:, heads:])]
    rollout = measure.query_maps(measure.attention_rollout(layers), model.spec.grid, class_token=False)
    np.testing.assert_allclose(seen.rollout, rollout, atol=1e-6)
    assert seen.distance.shape == (2, 2 * heads)


@pytest.mark.slow
def test_a_program_never_holds_the_attention_of_all_blocks(loaded):
    """It needs less memory beside that of the logits than half of the attention."""
    model = create("ViT/8", width=24, depth=12, mlp_dim=48, num_heads=6, attention="heads_first")
    tokens = 1 + 28 * 28
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), image)
    program = make_inference(model, loaded.program.mesh, shapes)
    images = jax.ShapeDtypeStruct((8, *image.shape[1:]), np.float32)
    observed = observe.make_observer(program, 1, saliency=False).lower(shapes, images).compile()
    predicted = program.predict.lower(shapes, images).compile()
    more = observed.memory_analysis().temp_size_in_bytes - predicted.memory_analysis().temp_size_in_bytes
    assert more < 12 * 4 * 6 * tokens**2 / 2  # of the image of a device
