"""R50+ViT-L/32 on ImageNet-21k: AugReg, 300 epochs, augmentation `medium1`, dropout and stochastic depth 0.1.

Paper: no row of this recipe. AugReg: 85.99 % on ImageNet after fine-tuning at 384 pixels; augmentation and dropout are
those of its best checkpoint (the README of vision_transformer: aug_medium1, do_0.1, sd_0.1), since big_vision has no
hybrids. Hardware and time are not stated. Ours: not run.
    python -m vit_jax.main --config=configs/r50_vit_l32_imagenet21k_augreg.py --config.data.source=array_record:DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import imagenet21k


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the recipe; `arg`, aug=LEVEL, chooses another augmentation."""
    config = imagenet21k.augmented("R50+ViT-L/32", arg or "aug=medium1")
    config.model.dropout_rate = 0.1
    config.model.stochastic_depth = 0.1
    return config
