"""Transformers, hybrids and ResNets over the compute of pre-training: section 4.4, Figure 5, Table 6. JFT-300M.

Paper: 18 runs of 7 or 14 epochs, each fine-tuned on ImageNet, CIFAR-10, CIFAR-100, Pets and Flowers; docs/results.md
has all numbers. ViTs reach the mean of the five with half to a quarter of the compute of ResNets; hybrids are ahead
where it is small. Hardware and time are stated for two of them, in Table 2.
Ours: not run at this size; no number.
    python -m vit_jax.sweep --config=configs/studies/compute.py --config.data.source=array_record:DATA --workdir=RUNS
    python -m vit_jax.finetune --table=6 --config=configs/finetune.py:model=NAME --config.init_from=RUNS/LINE/RUN
    python -m vit_jax.sweep --config=configs/studies/compute.py:small=yes --config.data.data_dir=FOLDER --workdir=RUNS
    python -m vit_jax.sweep --plot=compute.svg RUNS

A run is the recipe of its name, for as many epochs as its name ends with. The paper fine-tunes a ResNet also by
configs/bit_hyperrule.py and takes the better one. The small form pre-trains on CIFAR-10 for half an epoch to two.
"""

from ml_collections import ConfigDict

from configs import jft
from configs.studies import small

# Line -> runs: model, epochs, learning rate (Table 3). R200x3 and the 14 epochs of R152x2 are not in Table 3.
RUNS = {
    "ViT": (
        ("ViT-B/32", 7, 8e-4),
        ("ViT-B/16", 7, 8e-4),
        ("ViT-L/32", 7, 6e-4),
        ("ViT-L/16", 7, 4e-4),
        ("ViT-L/16", 14, 4e-4),
        ("ViT-H/14", 14, 3e-4),
    ),
    "ResNet": (
        ("BiT-R50x1", 7, 1e-3),
        ("BiT-R50x2", 7, 1e-3),
        ("BiT-R101x1", 7, 8e-4),
        ("BiT-R152x1", 7, 6e-4),
        ("BiT-R152x2", 7, 6e-4),
        ("BiT-R152x2", 14, 6e-4),
        ("BiT-R200x3", 14, 6e-4),
    ),
    "hybrid": (
        ("R50+ViT-B/32", 7, 8e-4),
        ("R50+ViT-B/16", 7, 8e-4),
        ("R50+ViT-L/32", 7, 2e-4),
        ("R50+ViT-L/16", 7, 4e-4),
        ("R50+ViT-L/16", 14, 4e-4),
    ),
}
SMALL_EPOCHS = (0.5, 1.0, 2.0)


def get_config(arg: str = "") -> ConfigDict:
    """Returns the recipe that all runs share; `arg` may be small=yes.

    Raises:
        ValueError: `arg` is something else.
    """
    return small.recipe() if small.is_small(arg) else jft.recipe("ViT-B/32", epochs=7.0, base_lr=8e-4)


def get_grid(arg: str = "") -> dict[str, dict[str, object]]:
    """Returns name -> fields of each run."""
    if small.is_small(arg):
        return {
            f"{line}/{epochs}": {"model.name": name, "base_lr": rate, "total_epochs": epochs, **fields}
            for line, (name, rate, fields) in small.FAMILIES.items()
            for epochs in SMALL_EPOCHS
        }
    return {
        f"{line}/{recipe_of(name)}_{epochs}": {
            "model.name": name,
            "model.pre_logits": line != "ResNet",
            "base_lr": rate,
            "total_epochs": float(epochs),
        }
        for line, runs in RUNS.items()
        for name, epochs, rate in runs
    }


def recipe_of(name: str) -> str:
    """Returns the name of a model's recipe on JFT."""
    return f"{name.lower().translate(str.maketrans('-+', '__', '/'))}_jft"
