"""BiT-R50x1 on JFT-300M by SGD, 7 epochs: Table 7, beside configs/bit_r50x1_jft.py by Adam.

Paper: 78.24 % on ImageNet after fine-tuning, 88.79 % over its five data sets (Table 7); by Adam 77.54 and 89.33 %.
Hardware and time are not stated.
Ours: not run.
    python -m vit_jax.main --config=configs/bit_r50x1_jft_sgd.py --config.data.source=array_record:DATA --workdir=RUN

UNCONFIRMED, so chosen here: the rate falls after the same fractions of the training as in BiT's 40 epochs on JFT; the
loss and the head's bias are those of the recipe by Adam.
"""

from ml_collections import ConfigDict

from configs import bit, bit_r50x1_jft


def get_config() -> ConfigDict:
    """Returns the recipe."""
    return bit.train_by_sgd(bit_r50x1_jft.get_config(), bit.JFT_DECAY)
