"""What the small forms of the studies share: CIFAR-10, one epoch, and a model for two CPU cores.

The studies of the paper compare models that were pre-trained on JFT-300M, which is not public. Their small forms,
`:small=yes`, compare training on CIFAR-10 (`--config.data.data_dir=FOLDER`) by the accuracy on its test split. What
holds at this size need not hold at that of the paper.
"""

from ml_collections import ConfigDict

from configs import cifar10


def recipe() -> ConfigDict:
    """Returns the recipe: 16 patches of 8x8 pixels, 4 blocks of width 64, one epoch."""
    config = cifar10.get_config()
    config.total_epochs = 1.0
    config.warmup_epochs = 0.1
    config.eval_every_epochs = None
    config.checkpoint_every = 1000
    config.checkpoint.keep_last = 1
    config.checkpoint.keep_best = 0

    config.model.name = "ViT-mu/8"
    config.model.width = 64
    config.model.mlp_dim = 128
    config.model.position = "learned"
    config.model.pooling = "token"
    return config


def is_small(arg: str) -> bool:
    """Returns whether the argument of a study is small=yes; without an argument, it is not.

    Raises:
        ValueError: it is something else.
    """
    if arg not in ("", "small=yes"):
        raise ValueError(f"the argument {arg!r} is not small=yes")
    return arg == "small=yes"
