"""ViT-B/16 from scratch on ImageNet-1k: DeiT III (arXiv 2204.07118; configs/deit3.py).

Paper: no row. Others: 83.8 % at 224 pixels, after 800 epochs at 192 and fine-tuning at 224 (README_revenge.md of
facebookresearch/deit). Hardware and time are not stated there. Ours: not run.
    python -m vit_jax.main --config=configs/deit3_b16.py --config.data.data_dir=DATA --workdir=RUN
    python -m vit_jax.main --config=configs/deit3_b16.py:stage=finetune --config.data.data_dir=DATA
      --config.init_from=RUN --workdir=TUNED
"""

from ml_collections import ConfigDict

from configs import base, deit3

STAGES = {"pretrain": (deit3.pretrain, 192, 0.003, 0.2), "finetune": (deit3.finetune, 224, 512, 0.2)}


def get_config(arg: str = "") -> ConfigDict:
    """Returns the recipe of a stage, `:stage=pretrain` (the default) or `:stage=finetune`.

    Raises:
        ValueError: there is no such stage.
    """
    recipe, *values = STAGES[base.parse_argument(arg, stage=STAGES)["stage"]]
    return recipe("ViT-B/16", *values)
