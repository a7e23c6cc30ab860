"""Compares the losses of 200 steps of a small model with those recorded on a CPU: do the devices compute right?"""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import data, sharding
from vit_jax.config import get_config, resolve_config
from vit_jax.measurements.bench import Bench
from vit_jax.measurements.measurement import Measurement
from vit_jax.program import make_program

RECORDED = Path(__file__).parent / "cpu_losses.json"  # one CPU device, float32
STEPS, BATCH = 200, 256
EARLY = 20  # steps in which differences of rounding have not grown
# Relative differences. Between 1, 2 and 8 CPU devices, which sum in other orders, they are at most 2e-7 and 3e-6; other
# chips also have other exponentials and roots.
EARLY_TOLERANCE, TOLERANCE = 1e-4, 1e-3
FIELDS = {
    "batch": BATCH,
    "resolution": 16,
    "total_steps": STEPS,
    "warmup_steps": 20,
    "base_lr": 2e-3,
    "grad_norm_clip": 1.0,
    "model.name": "ViT/4",
    "model.width": 64,
    "model.depth": 2,
    "model.mlp_dim": 128,
    "model.num_heads": 2,
    "model.pooling": "gap",
    "model.dtype": "float32",
    "model.dropout_rate": 0.1,
    "data.source": "digits",
    "data.preprocess": "resize(16)|value_range(-1,1)",
    "evals.test.preprocess": "resize(16)|value_range(-1,1)",
    "optim.weight_decay": 0.1,
}


def measure_curve(bench: Bench) -> Iterator[Measurement]:
    """Yields the largest relative difference from the recorded losses, over all steps and over the first `EARLY`."""
    parts = bench.mesh.devices.size // bench.mesh.shape["tensor"]
    if BATCH % parts:
        note = f"its batch of {BATCH} cannot be split over {parts} devices"
        yield Measurement("losses", "relative", None, note=note)
        return
    losses = train(bench.mesh, lambda: bench.agree_seconds_left() > 0)
    recorded = np.array(json.loads(RECORDED.read_text()))[: len(losses)]
    difference = np.abs(losses - recorded) / recorded
    for steps, tolerance in {len(losses): TOLERANCE, EARLY: EARLY_TOLERANCE}.items():
        largest = float(difference[:steps].max())
        yield Measurement(
            f"losses of {steps} steps in float32, the largest difference",
            "relative",
            largest if np.isfinite(largest) else None,
            0.0,
            tolerance,
            "tolerated difference from a CPU",
            "limit",
            margin=0.0,
            advice="curve",
            note=f"the last loss is {losses[steps - 1]:.4f}, recorded: {recorded[steps - 1]:.4f}",
        )


def make_config(mesh: jax.sharding.Mesh) -> ConfigDict:
    """Returns the recipe of the curve for the devices of a mesh: digits, without random augmentation on the host."""
    config = get_config()
    config.update_from_flattened_dict(FIELDS)
    config.mesh.update(dict(mesh.shape))
    return config


def train(mesh: jax.sharding.Mesh, goes_on: Callable[[], bool] = lambda: True) -> np.ndarray:
    """Trains the small model, and returns the loss of each step.

    Matrix products are computed in full float32 on any device.

    Args:
        mesh: the mesh of the devices.
        goes_on: called after every `EARLY` steps; training ends before the last step if it returns False.
    """
    config, info = data.complete_config(make_config(mesh))
    config = resolve_config(config)
    with jax.default_matmul_precision("highest"):
        program = make_program(config, mesh, data.spec(config))
        state, losses = program.init(jax.random.key(config.seed), {}), list[jax.Array]()
        with closing(data.train_batches(config, sharding.batch_sharding(mesh), 0, info.opened)) as batches:
            while len(losses) < STEPS and (not losses or len(losses) % EARLY or goes_on()):
                state, metrics = program.train_step(state, next(batches))
                losses.append(jax.block_until_ready(metrics["train/loss"]))
    return np.array([float(loss) for loss in losses])
