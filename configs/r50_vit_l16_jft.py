"""R50+ViT-L/16 on JFT-300M: Table 3, 14 epochs.

Paper: 87.12 % on ImageNet after fine-tuning at 384 pixels; 1,668 exaFLOPs (Table 6). Hardware and time are not stated.
Ours: not run.
    python -m vit_jax.main --config=configs/r50_vit_l16_jft.py --config.data.source=array_record:DATA --workdir=RUN

The row's other run, `--config.total_epochs=7`: 86.60 %, 859 exaFLOPs.
"""

from ml_collections import ConfigDict

from configs import jft


def get_config() -> ConfigDict:
    """Returns the recipe."""
    return jft.recipe("R50+ViT-L/16", epochs=14.0, base_lr=4e-4)
