"""ViT-L/16 on ImageNet-21k: Table 3, 90 epochs.

Paper: 85.15 % on ImageNet after fine-tuning at 384 pixels (Table 5). Before fine-tuning, 49.90 % of held-out ImageNet-21k (the
authors, vision_transformer issue 62). 230 TPUv3-core-days (Table 2), about 30 days on 8 cores. Ours: not run.
    python -m vit_jax.main --config=configs/vit_l16_imagenet21k.py --config.data.source=array_record:DATA --workdir=RUN

The row's other run: `--config.total_epochs=30`.
"""

from ml_collections import ConfigDict

from configs import imagenet21k


def get_config() -> ConfigDict:
    """Returns the recipe."""
    return imagenet21k.table3("ViT-L/16")
