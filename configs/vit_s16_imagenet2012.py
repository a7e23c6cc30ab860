"""ViT-S/16 from scratch on ImageNet-1k: AugReg, 300 epochs, augmentation `medium2`.

Paper: no number. Table 3's row ViT-* was tuned for B and L; AugReg's recipe covers this size, so it is used here.
Hardware and time are not stated. Ours: not run.
    python -m vit_jax.main --config=configs/vit_s16_imagenet2012.py --config.data.data_dir=DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import imagenet2012


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the recipe; `arg`, aug=LEVEL, chooses another augmentation."""
    return imagenet2012.augmented("ViT-S/16", arg or "aug=medium2")
