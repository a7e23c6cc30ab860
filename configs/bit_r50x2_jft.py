"""BiT-R50x2 on JFT-300M: Table 3, 7 epochs.

Paper: 82.12 % on ImageNet after fine-tuning at 384 pixels; 199 exaFLOPs (Table 6). Hardware and time are not stated.
Ours: not run.
    python -m vit_jax.main --config=configs/bit_r50x2_jft.py --config.data.source=array_record:DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import bit


def get_config() -> ConfigDict:
    """Returns the recipe."""
    return bit.table3("BiT-R50x2", epochs=7.0, base_lr=1e-3)
