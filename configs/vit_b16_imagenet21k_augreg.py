"""ViT-B/16 on ImageNet-21k: AugReg, 300 epochs, augmentation `light2` (big_vision's vit_i21k.py, AugReg's Figure 4).

Paper: no row of this recipe. AugReg: 85.49 % on ImageNet after fine-tuning at 384 pixels, with `aug=medium1` (the
README of vision_transformer, by its best checkpoint). Hardware and time are not stated. Ours: not run.
    python -m vit_jax.main --config=configs/vit_b16_imagenet21k_augreg.py --config.data.source=array_record:DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import imagenet21k


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the recipe; `arg`, aug=LEVEL, chooses another augmentation."""
    return imagenet21k.augmented("ViT-B/16", arg or "aug=light2")
