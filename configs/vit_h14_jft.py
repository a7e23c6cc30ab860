"""ViT-H/14 on JFT-300M: Table 3, 14 epochs.

Paper: 88.08 % on ImageNet after fine-tuning at 384 pixels (Table 6; 88.04 in Table 5); 4,262 exaFLOPs, 2,500
TPUv3-core-days (Table 2). Ours: not run.
    python -m vit_jax.main --config=configs/vit_h14_jft.py --config.data.source=array_record:DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import jft


def get_config() -> ConfigDict:
    """Returns the recipe."""
    return jft.recipe("ViT-H/14", epochs=14.0, base_lr=3e-4)
