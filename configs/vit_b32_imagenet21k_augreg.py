"""ViT-B/32 on ImageNet-21k: AugReg, 300 epochs, augmentation `light2` (big_vision's vit_i21k.py, AugReg's Figure 4).

Paper: no row of this recipe. AugReg: 83.59 % on ImageNet after fine-tuning at 384 pixels (the README of
vision_transformer, whose best checkpoint is called `light1`; UNCONFIRMED that it is `light2` here). Hardware and time
are not stated. Ours: not run.
    python -m vit_jax.main --config=configs/vit_b32_imagenet21k_augreg.py --config.data.source=array_record:DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import imagenet21k


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the recipe; `arg`, aug=LEVEL, chooses another augmentation."""
    return imagenet21k.augmented("ViT-B/32", arg or "aug=light2")
