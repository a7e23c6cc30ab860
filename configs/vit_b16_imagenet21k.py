"""ViT-B/16 on ImageNet-21k: Table 3, 90 epochs.

Paper: 83.97 % on ImageNet after fine-tuning at 384 pixels (Table 5). Before fine-tuning, 47.88 % of held-out ImageNet-21k (the
authors, vision_transformer issue 62). Hardware and time are not stated. Ours: not run.
    python -m vit_jax.main --config=configs/vit_b16_imagenet21k.py --config.data.source=array_record:DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import imagenet21k


def get_config() -> ConfigDict:
    """Returns the recipe."""
    return imagenet21k.table3("ViT-B/16")
