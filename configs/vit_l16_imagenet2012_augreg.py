"""ViT-L/16 from scratch on ImageNet-1k: AugReg, 300 epochs, augmentation `medium2` (big_vision's vit_i1k.py).

Paper: no number of this recipe. Hardware and time are not stated. Ours: not run.
    python -m vit_jax.main --config=configs/vit_l16_imagenet2012_augreg.py --config.data.data_dir=DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import imagenet2012


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the recipe; `arg`, aug=LEVEL, chooses another augmentation."""
    return imagenet2012.augmented("ViT-L/16", arg or "aug=medium2")
