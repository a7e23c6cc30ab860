"""The common part of the rows of Table 3 on JFT-300M: linear decay, weight decay 0.1, no dropout.

JFT is not public: `--config.data.source` names a folder of ArrayRecord files with the splits train and test;
`synthetic` runs the same program on random images.

UNCONFIRMED, so chosen here: 303 million images and 18,291 classes, which reproduce the paper's compute; all parameters
decay, by a multiple of the learning rate, as with the Adam of that time; the learning rate ends at 1e-5 and the head's
bias starts at -10, as in the authors' recipe for ImageNet-21k.
"""

from ml_collections import ConfigDict

from configs import base


def recipe(name: str, epochs: float, base_lr: float) -> ConfigDict:
    """Returns the row of the model `name`."""
    config = base.get_config()
    config.total_epochs = epochs
    config.base_lr = base_lr
    config.decay_type, config.linear_end = "linear", 1e-5
    config.warmup_steps = 10_000
    config.eval_every = 10_000
    config.checkpoint_every = 2_000

    config.model.name = name
    config.model.pre_logits = True
    config.model.head_bias = -10.0

    config.data.source = "array_record:jft300m"
    config.data.num_classes = 18_291
    config.data.num_examples = 303_000_000
    config.data.workers = "auto"

    config.task.loss = "sigmoid"
    config.optim.weight_decay = 0.1
    config.optim.decays = "all"
    config.evals.test.split = "test[:50000]"
    return config
