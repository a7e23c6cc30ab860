"""The floating point operations (FLOPs) of training runs, as Table 6 counts them."""

from ml_collections import ConfigDict

from vit_jax.macs import macs_per_image, training_flops
from vit_jax.model import Model
from vit_jax.program import model_without_data


def training_exaflops(model: Model, images: float) -> float:
    """Returns the floating point operations of training on a number of images, in units of 1e18."""
    return training_flops(macs_per_image(model)) * images / 1e18


def run_exaflops(config: ConfigDict, teacher_macs: int = 0) -> float:
    """Returns the floating point operations of a run, in units of 1e18, without its evaluations.

    Args:
        config: the configuration as it lies in the folder of the run.
        teacher_macs: the multiply-accumulates of the forward pass of its teacher on an image; 0: it has none.
    """
    images = config.total_steps * config.batch
    return (
        training_flops(macs_per_image(model_without_data(config)), count_passes(config), teacher_macs) * images / 1e18
    )


def count_passes(config: ConfigDict) -> int:
    """Returns the number of gradients that a training step computes: two with SAM (`optim.sam_rho`)."""
    return 2 if config.optim.sam_rho else 1
