"""R+ViT-Ti/16 on ImageNet-21k: AugReg, 300 epochs, augmentation `none`.

Paper: no row. AugReg: 75.40 % on ImageNet after fine-tuning at 384 pixels, with `--config.optim.weight_decay=3e-5` (the
README of vision_transformer). Hardware and time are not stated. Ours: not run.
    python -m vit_jax.main --config=configs/r_vit_ti16_imagenet21k.py --config.data.source=array_record:DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import imagenet21k


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the recipe; `arg`, aug=LEVEL, chooses another augmentation."""
    return imagenet21k.augmented("R+ViT-Ti/16", arg or "aug=none")
