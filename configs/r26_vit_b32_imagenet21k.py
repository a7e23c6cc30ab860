"""R26+ViT-B/32 on ImageNet-21k: Table 3's row of ViT-B/32, 90 epochs.

Paper: no row, so no number. Released later; UNCONFIRMED that it, too, was trained as its ViT counterpart (appendix B.1).
Hardware and time are not stated. Ours: not run.
    python -m vit_jax.main --config=configs/r26_vit_b32_imagenet21k.py --config.data.source=array_record:DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import imagenet21k


def get_config() -> ConfigDict:
    """Returns the recipe."""
    return imagenet21k.table3("R26+ViT-B/32")
