"""BiT-R200x3 on JFT-300M, 14 epochs.

Paper: 87.22 % on ImageNet after fine-tuning at 384 pixels; 3,306 exaFLOPs (Table 6). Hardware and time are not stated.
Ours: not run.
    python -m vit_jax.main --config=configs/bit_r200x3_jft.py --config.data.source=array_record:DATA --workdir=RUN

UNCONFIRMED, so chosen here: all settings are those of R152x2 in Table 3, which does not have this model.
"""

from ml_collections import ConfigDict

from configs import bit


def get_config() -> ConfigDict:
    """Returns the recipe."""
    return bit.table3("BiT-R200x3", epochs=14.0, base_lr=6e-4)
