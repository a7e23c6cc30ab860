"""A ResNet with attention from scratch on CIFAR-10: those before the ViT, which section 2 of the paper names.

Ours: not run to the end; no number. SASA-ResNet-26 needs about as many MACs an image as the recipe of configs/cifar10.
    python -m vit_jax.main --config=configs/cifar10_resnet.py:model=AA-ResNet-26 --config.data.data_dir=FOLDER

FOLDER holds CIFAR-10 as TFDS prepares it (ArrayRecord). The argument is one of
    model=NAME    [SASA-ResNet-26] any ResNet of docs/models.md: SASA-ResNet-38, AA-ResNet-50, SE-ResNet-26, BiT-R26x1

The papers of these models have other recipes, for ImageNet; this one is that of configs/cifar10.py with plain=yes.
"""

from ml_collections import ConfigDict

from configs import base, cifar10


def get_config(arg: str = "") -> ConfigDict:
    """Returns the recipe; `arg` may be model=NAME.

    Raises:
        ValueError: `arg` is something else.
    """
    config = cifar10.plain()
    config.model = base.get_config().model
    config.model.name = base.parse_argument(arg, model="SASA-ResNet-26")["model"]
    return config
