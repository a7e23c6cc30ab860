"""ViT-S/16 from scratch on ImageNet-1k in 90 epochs with a linear head (arXiv 2205.01580).

Paper: no row. Others: 76.7 % (that report, "Head: MLP -> linear"); 76.74 % with big_vision's code on all of train, and
76.94 % in PyTorch; 5 h 41 min on eight A100 (README of EIFY/mup-vit). Ours: not run.
    python -m vit_jax.main --config=configs/vit_s16_imagenet2012_90ep_linear.py --config.data.data_dir=DATA --workdir=RUN

docs/imagenet.md: the prepared run (planned: 10 chip-hours of a v5e), and what differs from mup-vit.
"""

from ml_collections import ConfigDict

from configs import vit_s16_imagenet2012_90ep


def get_config() -> ConfigDict:
    """Returns the recipe of 90 epochs without the tanh layer."""
    config = vit_s16_imagenet2012_90ep.get_config()
    config.model.pre_logits = False
    return config
