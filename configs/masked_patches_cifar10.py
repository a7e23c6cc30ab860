"""Masked patch prediction on CIFAR-10, small enough for minutes on two CPU cores; then labels for some of the images.

    python -m vit_jax.main --config=configs/masked_patches_cifar10.py --config.data.data_dir=FOLDER --workdir=PRE
    python -m vit_jax.main --config=configs/masked_patches_cifar10.py:labels=10 --config.data.data_dir=FOLDER
      --config.init_from=PRE --workdir=RUN

FOLDER holds CIFAR-10 as TFDS prepares it. The argument is one of
    target=TARGET    pre-training without labels: mean_color (the default), patch4 or full; see configs/masked_patches
    labels=PERCENT   classification with so many percent of the labels, from PRE or, without init_from, from scratch

The model has 2 blocks of width 64 and 64 patches of 4x4 pixels, of which patch4 predicts every pixel. The paper has no
such experiment; it fine-tunes with all labels of ImageNet. Docs: docs/finetune.md, "Without labels".

Ours: 10.2 % (patch4) and 11.8 % (mean_color) of the colours of 500 test images are predicted after 200 steps, of which
5.5 and 6.1 % are of the most frequent colour, at cross-entropies of 3.85 and 3.69 (4.25 and 4.18 by the frequencies of
the colours); full: 18.7 % of the mean colours, at a squared error of 0.089 (0.223 for the mean pixel). This was
    --config.total_steps=200 --config.warmup_steps=20 --config.evals.patches.split=test[:500]
"""

from ml_collections import ConfigDict

from configs import base, cifar10, masked_patches


def get_config(arg: str = "") -> ConfigDict:
    """Returns the recipe; `arg` may be target=TARGET or labels=PERCENT.

    Raises:
        ValueError: `arg` is something else.
    """
    config = cifar10.plain()
    config.model.width = 64
    config.model.mlp_dim = 128
    config.evals.test.split = "test[:20%]"
    return shorten(config, arg, steps=600, warmup=50, images=50_000)


def shorten(config: ConfigDict, arg: str, steps: int, warmup: int, images: int) -> ConfigDict:
    """Returns a recipe of classification with 2 blocks and few steps, without labels or with those of some images.

    Args:
        config: changed and returned.
        arg: target=TARGET, or nothing, or labels=PERCENT, of the first images.
        steps: of the training.
        warmup: steps of the warm-up.
        images: in the training split.

    Raises:
        ValueError: `arg` is something else.
    """
    config.total_epochs = config.warmup_epochs = config.eval_every_epochs = None
    config.total_steps, config.warmup_steps, config.eval_every = steps, warmup, 200
    config.model.depth = 2
    config.task.label_smoothing = config.task.mixup = 0.0
    given = base.parse_argument(arg, target=masked_patches.TARGETS, labels="")
    if not (percent := given["labels"]):
        return masked_patches.mask(config, given["target"])
    if not percent.isdecimal() or not 1 <= int(percent) <= 100:
        raise ValueError(f"labels={percent} must be labels=PERCENT with a whole number from 1 to 100")
    config.data.split = f"train[:{percent}%]"
    config.data.num_examples = round(images * int(percent) / 100)
    return config
