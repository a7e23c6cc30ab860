"""Checks that everything works: a tiny model on the embedded digits, in a few seconds; no number worth quoting.

python -m vit_jax.main --config=configs/smoke.py
"""

from ml_collections import ConfigDict

from configs import digits


def get_config() -> ConfigDict:
    """Returns the digits recipe, cut to 20 steps of a one-block model."""
    config = digits.get_config()
    config.model.width = 16
    config.model.depth = 1
    config.model.mlp_dim = 32
    config.batch = 32
    config.batch_eval = 120
    config.total_epochs = None
    config.total_steps = 20
    config.warmup_epochs = None
    config.warmup_steps = 2
    config.log_every = 5
    config.eval_every_epochs = None
    config.eval_every = 10
    config.checkpoint_every = 10
    return config
