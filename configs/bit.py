"""The common part of the recipes of BiT: the rows of Table 3, trained by Adam, and BiT's own pre-training by SGD.

UNCONFIRMED: the paper does not say which of its authors' two forms its baselines have. The released one is chosen here;
`--config.model.unit=post_activation` is the other. Both have the compute of Table 6.
"""

from ml_collections import ConfigDict

from configs import jft

# Fractions of the training: the rate falls after 10, 23, 30 and 37 of BiT's 40 epochs on JFT.
JFT_DECAY = (10 / 40, 23 / 40, 30 / 40, 37 / 40)


def table3(name: str, epochs: float, base_lr: float) -> ConfigDict:
    """Returns the row of the model `name` on JFT-300M; a BiT has no layer before its head."""
    config = jft.recipe(name, epochs, base_lr)
    config.model.pre_logits = False
    return config


def train_by_sgd(config: ConfigDict, decay_at: tuple[float, ...]) -> ConfigDict:
    """Changes a recipe to BiT's optimizer: SGD with momentum, the rate divided by 10 at fractions of the training.

    Its weight decay of 1e-4 is part of the gradient, where momentum multiplies it by 10. Decoupled, it is 1e-3 of the
    learning rate, as in big_vision's bit_i1k.py and bit_i21k.py; kernels decay, as there.
    """
    config.base_lr = 0.03 * config.batch / 256
    config.warmup_steps = 5_000
    config.decay_type = "step"
    config.decay_at = decay_at
    config.optim.name = "sgd"
    config.optim.weight_decay = 1e-3
    config.optim.decays = "kernels"
    return config
