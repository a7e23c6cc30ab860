"""Training curves: the losses of the authors' own update functions, step for step, from the same weights and batches.

The fixtures hold the first 10 of 30 steps, in float32 with the highest matmul precision.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from tests.authors import authors_params
from vit_jax import models, optim, tasks
from vit_jax.step import Update

PARITY = Path(__file__).parent / "data" / "parity"


def finetune():
    """vision_transformer: SGD with its momentum in bfloat16, two parts, cosine."""
    config = base.get_config()
    config.base_lr, config.accum_steps, config.optim.name = 0.03, 2, "sgd"
    return config, {"pooling": "token"}


def pretrain():
    """big_vision: Adam, decay multiplied by the schedule, rsqrt with cooldown, sigmoid loss."""
    config = base.get_config()
    config.base_lr, config.task.loss = 1e-3, "sigmoid"
    config.decay_type, config.rsqrt_timescale, config.cooldown_steps = "rsqrt", 20, 10
    config.optim.weight_decay, config.optim.decay_factor = 1e-4, "schedule"
    return config, {"pooling": "gap", "position": "sincos2d"}


@pytest.mark.parametrize(("name", "recipe"), [("google_finetune", finetune), ("big_vision_pretrain", pretrain)])
def test_losses_are_the_authors_step_for_step(name, recipe):
    config, fields = recipe()
    config.total_steps, config.warmup_steps, config.grad_norm_clip, config.batch = 30, 5, 1.0, 8
    config.optim.moment_dtype = "bfloat16"
    sizes = {"width": 24, "depth": 2, "num_heads": 2, "mlp_dim": 48}
    model = models.create("ViT-mu/8", resolution=24, num_classes=7, **sizes, **fields)
    update = Update(
        model=model,
        task=tasks.make(config, 7),
        optimizer=optim.make(config),
        schedule=optim.make_schedule(config),
        seed=0,
        accum_steps=config.accum_steps,
        ema_decay=0.0,
    )
    curve = np.load(PARITY / f"curve_{name}.curve.npz")
    state = update.start(jax.tree.map(jnp.asarray, authors_params(PARITY / f"curve_{name}.npz")))
    losses, rates = [], []
    with jax.default_matmul_precision("highest"):
        step = jax.jit(update)
        for images, labels in zip(curve["images"], curve["labels"], strict=True):
            state, metrics = step(state, {"image": jnp.asarray(images), "label": jnp.asarray(labels)})
            losses.append(metrics["train/loss"])
            rates.append(metrics["train/lr"])
    np.testing.assert_allclose(losses, curve["loss"], rtol=5e-6)
    np.testing.assert_allclose(rates, curve["lr"], rtol=1e-5, atol=1e-9)
