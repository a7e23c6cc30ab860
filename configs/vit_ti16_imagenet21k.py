"""ViT-Ti/16 on ImageNet-21k: AugReg, 300 epochs, augmentation `none`.

Paper: no row. AugReg: 78.22 % on ImageNet after fine-tuning at 384 pixels (README of vision_transformer). Hardware
and time are not stated. Ours: not run.
    python -m vit_jax.main --config=configs/vit_ti16_imagenet21k.py --config.data.source=array_record:DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import imagenet21k


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the recipe; `arg`, aug=LEVEL, chooses another augmentation."""
    return imagenet21k.augmented("ViT-Ti/16", arg or "aug=none")
