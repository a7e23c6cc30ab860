"""Small hybrids from scratch on CIFAR-10 for longer: the root of a ResNet, then 6 blocks, which do most of the FLOPs.

The argument is `:size=small`, blocks of width 192 on 8x8 positions for 80 epochs, or `:size=large`, blocks of width 256
on the 16x16 positions of images that are enlarged to 64 pixels, for 30 epochs.
The last tenth of train, `val`, is not trained on: it chooses between the two.

Ours: not run yet.
    python -m vit_jax.main --config=configs/cifar10_long.py --config.data.data_dir=FOLDER

FOLDER holds CIFAR-10 as TFDS prepares it (ArrayRecord).
"""

from ml_collections import ConfigDict

from configs import base, cifar10

# Size -> pixels on a side, epochs, width of the blocks, hidden units of an MLP, heads, stochastic depth.
SIZES = {"small": (32, 80.0, 192, 256, 6, 0.0), "large": (64, 30.0, 256, 384, 4, 0.1)}


def get_config(arg: str = "size=small") -> ConfigDict:
    """Returns the recipe of a size, `:size=small` or `:size=large`.

    Raises:
        ValueError: there is no such size.
    """
    resolution, epochs, width, hidden, heads, depth_rate = base.choose_stage(arg, SIZES, "size")
    config = cifar10.get_config()
    config.resolution = resolution
    config.batch = 256
    config.total_epochs = epochs
    config.base_lr = 7e-3
    config.warmup_epochs = 2.0
    config.eval_every_epochs = epochs / 4
    config.checkpoint_every = 1000

    config.model.width = width
    config.model.depth = 6
    config.model.mlp_dim = hidden
    config.model.num_heads = heads
    config.model.stochastic_depth = depth_rate

    enlarged = "" if resolution == 32 else f"resize({resolution})|"
    config.data.preprocess = f"resize(36)|random_crop(32)|flip_lr|randaug(2,5)|{enlarged}value_range(-1,1)"
    config.data.workers = "auto"
    config.task.mixup = 0.2
    config.task.cutmix = 1.0
    config.task.mixup_probability = 0.5
    config.evals.test.preprocess = f"resize(36)|central_crop(32)|{enlarged}value_range(-1,1)"
    cifar10.hold_out(config)
    return config
