"""BiT-R152x2 on JFT-300M by SGD, 7 epochs: Table 7, beside configs/bit_r152x2_jft.py by Adam.

Paper: 84.37 % on ImageNet after fine-tuning, 93.72 % over its five data sets (Table 7); by Adam 84.97 and 94.01 %.
Hardware and time are not stated.
Ours: not run.
    python -m vit_jax.main --config=configs/bit_r152x2_jft_sgd.py --config.data.source=array_record:DATA --workdir=RUN

UNCONFIRMED, so chosen here: the rate falls after the same fractions of the training as in BiT's 40 epochs on JFT; the
loss and the head's bias are those of the recipe by Adam.
"""

from ml_collections import ConfigDict

from configs import bit, bit_r152x2_jft


def get_config() -> ConfigDict:
    """Returns the recipe."""
    return bit.train_by_sgd(bit_r152x2_jft.get_config(), bit.JFT_DECAY)
