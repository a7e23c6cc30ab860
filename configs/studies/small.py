"""The common part of the studies: the paper's few-shot evaluation, and the small forms, on CIFAR-10 and two CPU cores.

The paper compares models that were pre-trained on JFT-300M, which is not public, mostly by 5-shot accuracy on ImageNet.
The small forms, `:small=yes`, compare one epoch on CIFAR-10 (`--config.data.data_dir=FOLDER`) by the accuracy on its
test split. What holds at this size need not hold at that of the paper.
"""

from ml_collections import ConfigDict

from configs import base, cifar10

UNSET = dict.fromkeys(("model.width", "model.depth", "model.mlp_dim", "model.num_heads"))  # of a ResNet
# Line -> model, learning rate, other fields: a small model of each family.
FAMILIES = {
    "ViT": ("ViT-mu/8", 1e-3, {}),
    "hybrid": ("R+ViT-mu/16", 1e-3, {"resolution": 96}),  # whose patches have 32x32 pixels
    "BiT": ("BiT-R14x1", 1e-3, UNSET),
}


def recipe() -> ConfigDict:
    """Returns the small recipe: 16 patches of 8x8 pixels, 4 blocks of width 64, one epoch."""
    config = cifar10.plain()
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

    around = "resize({resolution*36/32})"
    config.data.preprocess = f"{around}|random_crop({{resolution}})|flip_lr|value_range(-1,1)"
    config.evals.test.preprocess = f"{around}|central_crop({{resolution}})|value_range(-1,1)"
    return config


def early_stopped() -> ConfigDict:
    """Returns 200 steps of the small recipe on 45,000 images, which 2,000 of the others, `val`, stop.

    `--stop=val/accuracy` of vit_jax.sweep takes the best step; 2,000 test images decide.
    """
    config = recipe()
    config.total_steps, config.total_epochs = 200, None
    config.warmup_steps, config.warmup_epochs = 20, None
    config.eval_every = 50
    config.data.split = "train[:45000]"
    config.data.num_examples = 45_000
    with config.unlocked():
        config.evals.val = base.evaluation("classify", split="train[45000:47000]")
    config.evals.test.split = "test[:20%]"
    config.evals.val.preprocess = config.evals.test.preprocess
    config.checkpoint.best_metric = "val/accuracy"
    return config


def by_five_shots(config: ConfigDict) -> ConfigDict:
    """Adds the evaluation of most studies to a recipe: 5 images of each class of ImageNet, which decides."""
    images = {"train_split": "train[:65000]", "split": "validation"}
    with config.unlocked():
        config.evals.fewshot = base.evaluation("fewshot", source="tfds:imagenet2012", shots=(5,), **images)
    config.checkpoint.best_metric = "fewshot/5shot"
    return config


def is_small(arg: str) -> bool:
    """Returns whether the argument of a study is small=yes; without an argument, it is not.

    Raises:
        ValueError: it is something else.
    """
    return base.parse_argument(arg, small=("no", "yes"))["small"] == "yes"
