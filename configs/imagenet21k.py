"""The common part of the recipes on ImageNet-21k: the data, the sigmoid loss, the head's bias; and Table 3's two rows.

No prepared copy is public: `--config.data.source` names a folder of ArrayRecord files with one split, train, of which
the first 51,200 images are held out, as in big_vision.

UNCONFIRMED, so chosen here: the copy has ImageNet's 14,197,122 images (the paper: 14 million); in Table 3's rows all
parameters decay, by a multiple of the learning rate, as with the Adam of that time.
"""

from ml_collections import ConfigDict

from configs import augreg, base


def table3(name: str) -> ConfigDict:
    """Returns the row of the model `name`: 90 epochs, linear decay, weight decay 0.03, dropout 0.1.

    A hybrid trains exactly as the ViT that it contains (appendix B.1).
    """
    config = start(name)
    config.total_epochs = 90.0
    config.base_lr = 1e-3
    config.decay_type, config.linear_end = "linear", 1e-5
    config.model.pre_logits = True
    config.model.dropout_rate = 0.1
    config.optim.weight_decay = 0.03
    config.optim.decays = "all"
    return config


def augmented(name: str, arg: str) -> ConfigDict:
    """Returns AugReg's recipe (configs/augreg.py), with mean pooling as in big_vision.

    The released checkpoints have a class token: `--config.model.pooling=token`.
    """
    config = augreg.apply(start(name), arg)
    config.model.pooling = "gap"
    return config


def start(name: str) -> ConfigDict:
    """Returns what all recipes share."""
    config = base.get_config()
    config.warmup_steps = 10_000
    config.eval_every = 10_000

    config.model.name = name
    config.model.head_bias = -10.0

    config.data.source = "array_record:imagenet21k"
    config.data.split = "train[51200:]"
    config.data.num_classes = 21_843
    config.data.num_examples = 14_197_122 - 51_200
    config.data.workers = "auto"

    config.task.loss = "sigmoid"
    config.evals.test.split = "train[:51200]"
    return config
