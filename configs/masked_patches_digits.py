"""Masked patch prediction on the embedded digits, in seconds; then labels for some of them.

    python -m vit_jax.main --config=configs/masked_patches_digits.py --workdir=PRE
    python -m vit_jax.main --config=configs/masked_patches_digits.py:labels=10 --config.init_from=PRE --workdir=RUN

The argument is that of configs/masked_patches_cifar10.py. 144 digits are a tenth.

Ours: 53.9 % of the mean colours of corrupted patches of the 359 held-out digits are predicted (target=full);
docs/results.md has the others, and the digits that are recognised with a tenth of the labels.
"""

from ml_collections import ConfigDict

from configs import digits, masked_patches_cifar10


def get_config(arg: str = "") -> ConfigDict:
    """Returns the recipe; `arg` may be target=TARGET or labels=PERCENT.

    Raises:
        ValueError: `arg` is something else.
    """
    return masked_patches_cifar10.shorten(digits.get_config(), arg, steps=400, warmup=40, images=1438)
