"""AugReg ("How to train your ViT?", arXiv 2106.10270) as in big_vision: Adam, weight decay 0.1 of kernels, no dropout.

The augmentation has named levels; a recipe's argument chooses another one, `--config=FILE.py:aug=medium1`. big_vision's
`mixup.p` is the parameter of the Beta distribution, here `task.mixup`; every step mixes.

Learned positions start with a standard deviation of 0.02, as in the release; big_vision uses 1 / sqrt(width). Some
released checkpoints had another weight decay, S/16 and Ti/16 on ImageNet-21k 0.03: `--config.optim.weight_decay=3e-5`.
"""

from ml_collections import ConfigDict

from configs import base

# Level -> (MixUp's alpha, RandAugment's layers and magnitude). Magnitude 0 still changes images.
LEVELS = {
    "none": (0.0, None),
    "light1": (0.0, (2, 0)),
    "light2": (0.2, (2, 10)),
    "medium1": (0.2, (2, 15)),
    "medium2": (0.5, (2, 15)),
    "strong1": (0.5, (2, 20)),
    "strong2": (0.8, (2, 20)),
}


def apply(config: ConfigDict, arg: str) -> ConfigDict:
    """Changes the common part of a recipe into AugReg's, at the level that `arg` names: aug=LEVEL.

    Raises:
        ValueError: `arg` is something else.
    """
    alpha, randaug = LEVELS[base.parse_argument(arg, aug=LEVELS)["aug"]]
    config.total_epochs = 300.0
    config.base_lr = 1e-3
    config.decay_type = "cosine"
    config.grad_norm_clip = 1.0
    if randaug:
        layers, magnitude = randaug
        augment = f"randaug({layers},{magnitude})"
        config.data.preprocess = f"inception_crop({{resolution}})|flip_lr|{augment}|value_range(-1,1)"
    config.task.mixup = alpha
    config.optim.moment_dtype = "bfloat16"
    config.optim.weight_decay = 1e-4  # 0.1 times base_lr
    config.optim.decay_factor = "schedule"
    return config
