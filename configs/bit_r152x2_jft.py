"""BiT-R152x2 on JFT-300M: Table 3, 7 epochs.

Paper: 84.97 % on ImageNet after fine-tuning at 384 pixels; 563 exaFLOPs (Table 6); with
`--config.total_epochs=14`, whose other settings the paper does not state, 85.56 % and 1,126. Hardware and time are not
stated.
Ours: not run.
    python -m vit_jax.main --config=configs/bit_r152x2_jft.py --config.data.source=array_record:DATA --workdir=RUN
"""

from ml_collections import ConfigDict

from configs import bit


def get_config() -> ConfigDict:
    """Returns the recipe."""
    return bit.table3("BiT-R152x2", epochs=7.0, base_lr=6e-4)
