"""Masked patch prediction on CIFAR-10, small: 64 patches of 4x4 pixels, the model of configs/cifar10.py.

    python -m vit_jax.main --config=configs/masked_patches_cifar10.py --config.data.data_dir=FOLDER --workdir=PRE
    python -m vit_jax.main --config=configs/cifar10.py --config.data.data_dir=FOLDER --config.init_from=PRE

Ours: no number yet.

The argument target=mean_color, patch4 or full says what is predicted; see configs/masked_patches.py.
"""

from ml_collections import ConfigDict

from configs import cifar10, masked_patches


def get_config(arg: str = "") -> ConfigDict:
    """Returns the recipe; `arg` may be target=TARGET.

    Raises:
        ValueError: `arg` is something else.
    """
    config = cifar10.get_config()
    config.total_epochs = 4.0
    config.task.label_smoothing = 0.0
    config = masked_patches.mask(config, arg)
    config.evals.patches.split = "test[:2000]"
    return config
