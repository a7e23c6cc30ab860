"""ViT-L/16 on ImageNet-21k: AugReg, 300 epochs, augmentation `medium2` (big_vision's vit_i21k.py, AugReg's Figure 4).

Paper: no row of this recipe. AugReg: 85.59 % on ImageNet after fine-tuning at 384 pixels, with `aug=strong1` (the
README of vision_transformer, by its best checkpoint). Hardware and time are not stated. Ours: not run.
    python -m vit_jax.main --config=configs/vit_l16_imagenet21k_augreg.py --config.data.source=array_record:DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import imagenet21k


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the recipe; `arg`, aug=LEVEL, chooses another augmentation."""
    return imagenet21k.augmented("ViT-L/16", arg or "aug=medium2")
