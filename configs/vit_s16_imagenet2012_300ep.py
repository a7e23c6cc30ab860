"""ViT-S/16 from scratch on ImageNet-1k in 300 epochs: "Better plain ViT baselines" (arXiv 2205.01580), as big_vision.

Paper: no row. Others: 80 % (that report, Table 1); hardware and time are not stated. Ours: not run.
    python -m vit_jax.main --config=configs/vit_s16_imagenet2012_300ep.py --config.data.data_dir=DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import vit_s16_imagenet2012_90ep


def get_config() -> ConfigDict:
    """Returns the recipe of 90 epochs, for 300."""
    config = vit_s16_imagenet2012_90ep.get_config()
    config.total_epochs = 300.0
    return config
