"""How much data pre-training needs: random subsets of JFT-300M, section 4.3, Figure 4; by 5-shot accuracy on ImageNet.

All subsets have the same hyper-parameters and no further regularisation; early stopping chooses the step.

Paper: curves of 30 to 70 %, without numbers. On 9 million images ViT-B/32 is much worse than a ResNet of its speed,
from 90 million on better; likewise ViT-L/16 and R152x2. Hardware and time are not stated.
Ours: not run at this size; no number.
    python -m vit_jax.sweep --config=configs/studies/data_size.py --config.data.source=array_record:DATA --workdir=RUNS
    python -m vit_jax.sweep --plot=size.svg RUNS --against=data.num_examples --metric=fewshot/5shot --stop=test/accuracy
    python -m vit_jax.sweep --config=configs/studies/data_size.py:small=yes --config.data.data_dir=FOLDER --workdir=RUNS
    python -m vit_jax.sweep --plot=size.svg RUNS --against=data.num_examples --metric=test/accuracy --stop=val/accuracy

`test` is what JFT's recipe holds out. The small form has a ViT, a hybrid and BiT-R14x1 on 1,500 to 45,000 images of
CIFAR-10; 2,000 of the others, `val`, stop it, and 2,000 test images decide. Figure 3's points are other runs:
configs/vit_*_imagenet2012.py, _imagenet21k and _jft, fine-tuned by `python -m vit_jax.finetune --table=5
--datasets=imagenet2012`.

UNCONFIRMED, so chosen here: the subsets are the first images; every run has the steps of 7 epochs of all; ViT-b, half
as wide as B, has heads of 64 channels and the rate of B.
"""

from ml_collections import ConfigDict

from configs import jft
from configs.studies import small

IMAGES = 303_000_000
SIZES = (9_000_000, 30_000_000, 90_000_000, IMAGES)
HALF = {"model.width": 384, "model.mlp_dim": 1536, "model.num_heads": 6}
# Line -> model, learning rate (Table 3), other fields.
MODELS = {
    "ViT-L16": ("ViT-L/16", 4e-4, {}),
    "ViT-L32": ("ViT-L/32", 6e-4, {}),
    "ViT-B32": ("ViT-B/32", 8e-4, {}),
    "ViT-b32": ("ViT-B/32", 8e-4, HALF),
    "R50x1": ("BiT-R50x1", 1e-3, {"model.pre_logits": False}),
    "R152x2": ("BiT-R152x2", 6e-4, {"model.pre_logits": False}),
}
SMALL_SIZES = (1_500, 5_000, 15_000, 45_000)


def get_config(arg: str = "") -> ConfigDict:
    """Returns the recipe that all runs share, on all images; `arg` may be small=yes.

    Raises:
        ValueError: `arg` is something else.
    """
    if not small.is_small(arg):
        config = small.by_five_shots(jft.recipe("ViT-B/32", epochs=7.0, base_lr=8e-4))
        config.total_steps, config.total_epochs = int(7 * IMAGES / config.batch), None
        return config
    return small.early_stopped()


def get_grid(arg: str = "") -> dict[str, dict[str, object]]:
    """Returns name -> fields of each run."""
    sizes, models = (SMALL_SIZES, small.FAMILIES) if small.is_small(arg) else (SIZES, MODELS)
    return {
        f"{line}/{size}": {
            "model.name": name,
            "base_lr": rate,
            "data.split": f"train[:{size}]",
            "data.num_examples": size,
            **fields,
        }
        for line, (name, rate, fields) in models.items()
        for size in sizes
    }
