"""ViT-S/16 from scratch on ImageNet-1k in 90 epochs: "Better plain ViT baselines" (arXiv 2205.01580), as in big_vision.

Paper: no row. Others: 76.5 % after 6 to 7 hours on a TPU v3-8 (big_vision). Ours: not run.
    python -m vit_jax.main --config=configs/vit_s16_imagenet2012_90ep.py --config.data.data_dir=DATA --workdir=RUN

With `--config.total_epochs=300`: 80 % (the report). docs/imagenet.md: the prepared run (planned: 10
chip-hours of a v5e), and what differs from big_vision.
"""

from ml_collections import ConfigDict

from configs import augreg, imagenet2012


def get_config() -> ConfigDict:
    """Returns the recipe: AugReg's light2 with smaller batches, fixed positions, mean pooling and softmax."""
    config = augreg.apply(imagenet2012.held_out("ViT-S/16"), "aug=light2")
    config.batch = 1024
    config.total_epochs = 90.0
    config.model.pooling = "gap"
    config.model.position = "sincos2d"
    return config
