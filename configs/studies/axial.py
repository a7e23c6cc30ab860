"""Axial attention beside full attention and convolutions: appendix D.6, Figure 13. JFT-300M, 7 epochs.

Paper: 5-shot accuracies on ImageNet of 50 to 65 % over the compute of pre-training and over the speed of inference,
points without numbers. Axial-ViTs are more accurate than their ViTs and cost more; the AxialResNet is slow on TPUs.
Hardware and time are not stated.
Ours: not run at this size; no number.
    python -m vit_jax.sweep --config=configs/studies/axial.py --config.data.source=array_record:DATA --workdir=RUNS
    python -m vit_jax.sweep --plot=axial.svg RUNS
    python -m vit_jax.sweep --config=configs/studies/axial.py:small=yes --config.data.data_dir=FOLDER --workdir=RUNS

UNCONFIRMED, so chosen here: 7 epochs and Table 3's rates of the models without axial attention; the mean of the patches
instead of a class token in an Axial-ViT, with the rate that suits it (configs/studies/pooling.py).
"""

from ml_collections import ConfigDict

from configs import jft
from configs.studies import small

RESNET = {"model.pre_logits": False}
MEAN = {"model.pooling": "gap", "model.pre_logits": False}
# Line -> model, learning rate, other fields.
MODELS = {
    "ResNet50": ("BiT-R50x1", 1e-3, RESNET),
    "AxialResNet50": ("AxialResNet-50", 1e-3, RESNET),
    "ViT-B32": ("ViT-B/32", 8e-4, {}),
    "Axial-ViT-B32": ("Axial-ViT-B/32", 3e-4, MEAN),
    "ViT-B16": ("ViT-B/16", 8e-4, {}),
    "Axial-ViT-B16": ("Axial-ViT-B/16", 3e-4, MEAN),
}
SMALL_MODELS = {
    "ResNet14": ("BiT-R14x1", 1e-3, small.UNSET),
    "AxialResNet14": ("AxialResNet-14", 1e-3, small.UNSET),
    "ViT-mu8": ("ViT-mu/8", 1e-3, {"model.pooling": "gap"}),
    "Axial-ViT-mu8": ("Axial-ViT-mu/8", 1e-3, {"model.pooling": "gap"}),
    "ViT-mu4": ("ViT-mu/4", 1e-3, {"model.pooling": "gap"}),
    "Axial-ViT-mu4": ("Axial-ViT-mu/4", 1e-3, {"model.pooling": "gap"}),
}


def get_config(arg: str = "") -> ConfigDict:
    """Returns the recipe that all runs share; `arg` may be small=yes.

    Raises:
        ValueError: `arg` is something else.
    """
    if small.is_small(arg):
        return small.recipe()
    return small.by_five_shots(jft.recipe("ViT-B/32", epochs=7.0, base_lr=8e-4))


def get_grid(arg: str = "") -> dict[str, dict[str, object]]:
    """Returns name -> fields of each run."""
    models = SMALL_MODELS if small.is_small(arg) else MODELS
    return {name: {"model.name": model, "base_lr": rate, **fields} for name, (model, rate, fields) in models.items()}
