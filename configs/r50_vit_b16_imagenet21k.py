"""R50+ViT-B/16 on ImageNet-21k: Table 3's row of ViT-B/16, 90 epochs.

Paper: no row; hybrids train as their ViT counterparts do (appendix B.1). The authors' checkpoint: 85.08 % on ImageNet
after fine-tuning at 384 pixels with dropout 0.1 (README of vision_transformer). Hardware and time are not stated.
Ours: not run.
    python -m vit_jax.main --config=configs/r50_vit_b16_imagenet21k.py --config.data.source=array_record:DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import imagenet21k


def get_config() -> ConfigDict:
    """Returns the recipe."""
    return imagenet21k.table3("R50+ViT-B/16")
