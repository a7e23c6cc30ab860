"""R50+ViT-L/32 on JFT-300M: Table 3, 7 epochs.

Paper: 85.68 % on ImageNet after fine-tuning at 384 pixels; 246 exaFLOPs (Table 6). Hardware and time are not stated.
Ours: not run.
    python -m vit_jax.main --config=configs/r50_vit_l32_jft.py --config.data.source=array_record:DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import jft


def get_config() -> ConfigDict:
    """Returns the recipe."""
    return jft.recipe("R50+ViT-L/32", epochs=7.0, base_lr=2e-4)
