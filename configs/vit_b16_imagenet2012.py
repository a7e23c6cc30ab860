"""ViT-B/16 from scratch on ImageNet-1k: Table 3, row ViT-*, 300 epochs.

Paper: 77.91 % after fine-tuning at 384 pixels (Table 5); 74.79 % before, at 224 (the authors, vision_transformer issue
62). Hardware and time are not stated. Ours: not run. Others reach 79.4 % with AutoAugment and colour jitter, in
vit_b16_imagenet2012_autoaugment.
    python -m vit_jax.main --config=configs/vit_b16_imagenet2012.py --config.data.data_dir=DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import imagenet2012


def get_config() -> ConfigDict:
    """Returns the recipe."""
    return imagenet2012.table3("ViT-B/16")
