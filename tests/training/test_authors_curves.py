"""Training curves: the losses of the authors' own update functions, step for step, from the same weights and batches.

Those of fine-tuning and pre-training hold the first 10 of 30 steps here, that of big_vision's S/16 all 50 of its
trainer; all are in float32 with the highest matmul precision.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base, vit_s16_imagenet2012_90ep
from tests.conftest import ROOT
from vit_jax import kernels, load, optim, tasks, tree
from vit_jax.config import set_optimizer_fields
from vit_jax.data.preprocess import value_range
from vit_jax.step import TrainStep

FIRST = ROOT / "tests" / "fixtures" / "parity"  # 10 steps
WHOLE = ROOT.parent / "shared" / "parity"  # 30 steps and the final weights


def finetune():
    """vision_transformer: SGD with its momentum in bfloat16, two parts, cosine."""
    config = base.get_config()
    config.base_lr, config.accum_steps, config.optim.name = 0.03, 2, "sgd"
    return config


def pretrain():
    """big_vision: Adam, decay multiplied by the schedule, rsqrt with cooldown, sigmoid loss."""
    config = base.get_config()
    config.base_lr, config.task.loss = 1e-3, "sigmoid"
    config.decay_type, config.rsqrt_timescale, config.cooldown_steps = "rsqrt", 20, 10
    config.optim.weight_decay, config.optim.decay_factor = 1e-4, "schedule"
    return config


@pytest.mark.parametrize("attention", ["heads_first", pytest.param("fused", marks=pytest.mark.slow)])
@pytest.mark.parametrize("folder", [FIRST, WHOLE], ids=["first", "whole"])
@pytest.mark.parametrize(
    ("name", "recipe"),
    [("google_finetune", finetune), pytest.param("big_vision_pretrain", pretrain, marks=pytest.mark.slow)],
)
def test_losses_are_the_authors_step_for_step(name, recipe, folder, attention, tmp_path):
    if not folder.is_dir():
        pytest.skip("the whole curves are not here")
    config = recipe()
    config.total_steps, config.warmup_steps, config.grad_norm_clip, config.batch = 30, 5, 1.0, 8
    config.optim.moment_dtype = "bfloat16"
    set_optimizer_fields(config.optim)
    model, params = load(folder / f"curve_{name}.npz", resolution=24, attention=attention)
    update = TrainStep(
        model=model,
        task=tasks.make_task(config, model, 7),
        optimizer=optim.make_optimizer(config, optim.make_schedule(config), optim.UNSCALED),
        schedule=optim.make_schedule(config),
        seed=0,
        accum_steps=config.accum_steps,
        ema_decay=0.0,
    )
    curve = np.load(folder / f"curve_{name}.curve.npz")
    state = update.init(jax.tree.map(jnp.asarray, params))
    losses, rates = [], []
    numbers = curve["labels"] if curve["labels"].ndim == 2 else curve["labels"].argmax(-1)  # from one-hot rows
    with jax.default_matmul_precision("highest"), kernels.interpret_kernels():
        step = jax.jit(update)
        for images, labels in zip(curve["images"], numbers, strict=True):
            state, metrics = step(state, {"image": jnp.asarray(images), "label": jnp.asarray(labels)})
            losses.append(metrics["train/loss"])
            rates.append(metrics["train/lr"])
    np.testing.assert_allclose(losses, curve["loss"], rtol=1e-4 if jax.default_backend() == "gpu" else 5e-6)
    np.testing.assert_allclose(rates, curve["lr"], rtol=1e-5, atol=1e-9)
    if folder == WHOLE:
        final = {key.removeprefix("final/"): curve[key] for key in curve.files if key.startswith("final/")}
        np.savez(tmp_path / "final.npz", **final)
        wanted = tree.flatten(load(tmp_path / "final.npz", resolution=24)[1])
        assert not tree.differences(state.params, tree.unflatten(wanted))
        for name, leaf in tree.flatten(state.params).items():
            # The gradient of a key's bias is zero: Adam turns the last bits of its rounding into steps.
            key = np.arange(3)[:, None, None] == 1 if name.endswith("qkv/bias") else False
            assert np.all(np.abs(leaf - wanted[name]) <= np.where(key, 3e-4, 1e-4)), name


def s16_losses(config):
    """Returns losses and norms of a recipe on the images of big_vision's run, and that run.

    benchmarks/curve_big_vision.py wrote it. The images are as RandAugment left them; MixUp's ratio of each step is
    given, what it mixes is ours.
    """
    curve = np.load(FIRST / "curve_big_vision_s16.curve.npz")
    # In size as that run, and with its rate and clipping.
    config.total_steps, config.warmup_steps, config.batch = 50, 10, 8
    config.optim.weight_decay *= 3e-3 / config.base_lr
    config.base_lr *= 3
    config.grad_norm_clip *= 0.5
    set_optimizer_fields(config.optim)
    model, params = load(FIRST / "curve_big_vision_s16.npz", resolution=32)
    schedule = optim.make_schedule(config)
    update = TrainStep(
        model=model,
        task=tasks.make_task(config, model, 8),
        optimizer=optim.make_optimizer(config, schedule, optim.UNSCALED),
        schedule=schedule,
        seed=0,
        accum_steps=1,
        ema_decay=0.0,
    )
    generator = np.random.default_rng(0)
    batches = [[value_range(image, generator, -1, 1) for image in images] for images in curve["pixels"]]
    np.testing.assert_array_equal(batches[0], curve["images"])

    @jax.jit
    def step(state, batch, ratio):
        with mock.patch.object(jax.random, "beta", lambda key, a, b: ratio if a == b == 0.2 else np.nan):
            return update(state, batch)

    state, losses, rates, norms = update.init(jax.tree.map(jnp.asarray, params)), [], [], []
    with jax.default_matmul_precision("highest"):
        for images, labels, ratio in zip(batches, curve["labels"].astype(np.int32), curve["ratio"], strict=True):
            state, metrics = step(state, {"image": np.stack(images), "label": labels}, 1 - ratio)
            losses.append(metrics["train/loss"])
            rates.append(metrics["train/lr"])
            norms.append(metrics["norm/grads"])
    np.testing.assert_allclose(rates, curve["lr"], rtol=1e-5)
    return losses, norms, curve


@pytest.mark.slow
def test_losses_of_the_s16_recipe_are_big_vision_s_over_50_steps():
    losses, norms, curve = s16_losses(vit_s16_imagenet2012_90ep.get_config())
    np.testing.assert_allclose(losses, curve["loss"], rtol=1e-5)  # 1.6e-6 where it was written
    np.testing.assert_allclose(norms, curve["norm"], rtol=1e-3)
    assert (curve["norm"] > 0.5).sum() > 20 and len(losses) == 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("grad_norm_clip", 2.0),
        ("optim.moment_dtype", "float32"),
        ("optim.decay_factor", "rate"),
        ("task.mixup_probability", 0.9),
    ],
)
def test_losses_tell_recipes_apart(field, value):
    config = vit_s16_imagenet2012_90ep.get_config()
    config.update_from_flattened_dict({field: value})
    losses, _, curve = s16_losses(config)
    assert np.abs(np.array(losses) / curve["loss"] - 1).max() > 5e-5
