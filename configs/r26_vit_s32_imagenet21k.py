"""R26+ViT-S/32 on ImageNet-21k: AugReg, 300 epochs, augmentation `light1`.

Paper: no row. AugReg: 83.85 % on ImageNet after fine-tuning at 384 pixels (the README of vision_transformer, which
calls the level `light1`; UNCONFIRMED that it is the one of this name here). Hardware and time are not stated.
Ours: not run.
    python -m vit_jax.main --config=configs/r26_vit_s32_imagenet21k.py --config.data.source=array_record:DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import imagenet21k


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the recipe; `arg`, aug=LEVEL, chooses another augmentation."""
    return imagenet21k.augmented("R26+ViT-S/32", arg or "aug=light1")
