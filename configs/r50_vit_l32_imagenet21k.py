"""R50+ViT-L/32 on ImageNet-21k: Table 3's row of ViT-L/32, 90 epochs.

Paper: no row, so no number; hybrids train as their ViT counterparts do (appendix B.1). Hardware and time are not
stated. Ours: not run.
    python -m vit_jax.main --config=configs/r50_vit_l32_imagenet21k.py --config.data.source=array_record:DATA --workdir=RUN

The row's other run: `--config.total_epochs=30`.
"""

from ml_collections import ConfigDict

from configs import imagenet21k


def get_config() -> ConfigDict:
    """Returns the recipe."""
    return imagenet21k.table3("R50+ViT-L/32")
