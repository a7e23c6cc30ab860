"""Training curves: the losses of the authors' own update functions, step for step, from the same weights and batches.

The fixtures here hold the first 10 of 30 steps, in float32 with the highest matmul precision.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from tests.conftest import ROOT
from vit_jax import kernels, load, optim, tasks
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
    model, params = load(folder / f"curve_{name}.npz", resolution=24, attention=attention)
    update = TrainStep(
        model=model,
        task=tasks.make_task(config, model, 7),
        optimizer=optim.make_optimizer(config, optim.make_schedule(config)),
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
    np.testing.assert_allclose(losses, curve["loss"], rtol=5e-6)
    np.testing.assert_allclose(rates, curve["lr"], rtol=1e-5, atol=1e-9)
    if folder == WHOLE:
        final = {key.removeprefix("final/"): curve[key] for key in curve.files if key.startswith("final/")}
        np.savez(tmp_path / "final.npz", **final)
        # The gradient of a key's bias is zero: Adam turns the last bits of its rounding into steps.
        atol = 1e-4 if attention == "heads_first" else 3e-4
        chex.assert_trees_all_close(state.params, load(tmp_path / "final.npz", resolution=24)[1], rtol=1e-7, atol=atol)
