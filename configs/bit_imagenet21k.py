"""BiT on ImageNet-21k as its authors pre-trained it (BiT-M, arXiv 1912.11370): SGD, 90 epochs, divided by 10 at 30, 60, 80.

Not in the paper's Table 3; its Figure 3 has models trained so. The argument model=NAME [BiT-R50x1] chooses the size; the
released ones are BiT-R50x1, R50x3, R101x1, R101x3, R152x2 and R152x4.

Paper: not stated. Hardware and time are not stated.
Ours: not run.
    python -m vit_jax.main --config=configs/bit_imagenet21k.py --config.data.source=array_record:DATA --workdir=RUN

From BiT's paper: the learning rate 0.03 for each 256 images of a batch, 5,000 steps of warm-up, weight decay 1e-4. The
head's bias is that of the other recipes on ImageNet-21k, and of big_vision's for BiT.
"""

from ml_collections import ConfigDict

from configs import base, bit, imagenet21k


def get_config(arg: str = "") -> ConfigDict:
    """Returns the recipe of a size, `:model=NAME`.

    Raises:
        ValueError: `arg` is not of that form.
    """
    name = base.parse_argument(arg, model="BiT-R50x1")["model"]
    if not name.startswith("BiT-"):
        raise ValueError(f"model={name} is not the name of a BiT, such as BiT-R101x3")
    config = bit.train_by_sgd(imagenet21k.start(name), decay_at=(30 / 90, 60 / 90, 80 / 90))
    config.total_epochs = 90.0
    return config
