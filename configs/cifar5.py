"""TODO.

Ours: not run
    python -m vit_jax.main --config=configs/cifar5.py
"""

from ml_collections import ConfigDict

from configs import cifar10

# Stage -> classes of CIFAR-10, pixels on a side, pixels that a crop is cut from.
STAGES = {"pretrain": ("0-4", 32, 36), "finetune": ("5-9", 48, 54)}


def get_config(arg: str = "stage=pretrain") -> ConfigDict:
    """Returns the recipe of a stage, `:stage=pretrain` or `:stage=finetune`.

    Raises:
        ValueError: there is no such stage.
    """
    key, _, stage = arg.partition("=")
    if key != "stage" or stage not in STAGES:
        raise ValueError(f"the argument {arg!r} is not stage=STAGE with one of the stages {', '.join(STAGES)}")
    classes, resolution, around = STAGES[stage]
    config = cifar10.get_config()
    config.resolution = resolution
    config.log_every = 50
    config.model.pooling = "token"
    config.model.position = "learned"

    config.data.source = f"array_record:packed/cifar10_{classes}"
    config.data.num_classes = 5
    config.data.num_examples = 25_000
    config.data.preprocess = f"resize({around})|random_crop({resolution})|flip_lr|value_range(-1,1)"
    config.evals.test.preprocess = f"resize({around})|central_crop({resolution})|value_range(-1,1)"
    if stage == "pretrain":
        config.total_epochs = 12.0
    else:
        config.total_epochs = None
        config.total_steps = 400
        config.warmup_epochs = None
        config.warmup_steps = 40
    return config
