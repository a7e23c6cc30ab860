"""ViT-B/32 from scratch on ImageNet-1k: Table 3, row ViT-*, 300 epochs.

Paper: 73.38 % after fine-tuning at 384 pixels (Table 5); 69.19 % before, at 224 (the authors, vision_transformer issue
62). Hardware and time are not stated. Ours: not run.
    python -m vit_jax.main --config=configs/vit_b32_imagenet2012.py --config.data.data_dir=DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import imagenet2012


def get_config() -> ConfigDict:
    """Returns the recipe."""
    return imagenet2012.table3("ViT-B/32")
