"""Class token or mean of the patches, each with its learning rates: appendix D.3, Figure 9.

The class token is read by a head with a hidden layer, the mean by a linear one. ViT-B/16 on JFT-300M, 7 epochs.

Paper: with the class token at 8e-4 and with the mean at 3e-4, the few-shot accuracies on ImageNet are about the same;
with the mean at 8e-4 it is much lower (curves of 25 to 60 %, without numbers). Hardware and time are not stated.
Ours: not run at this size; docs/results.md has the small form.
    python -m vit_jax.sweep --config=configs/studies/pooling.py --config.data.source=array_record:DATA --workdir=RUNS
    python -m vit_jax.sweep --config=configs/studies/pooling.py:small=yes --config.data.data_dir=FOLDER --sweep.seed=0,1

The small form (configs/studies/small.py) adds a third rate, 2.4e-3, since its models are small.

UNCONFIRMED, so chosen here: the model, B/16, whose rate in Table 3 is 8e-4. The paper's class token at 3e-4 is not in
the figure; it is in this grid.
"""

from ml_collections import ConfigDict

from configs import vit_b16_jft
from configs.studies import small

RATES = (3e-4, 8e-4)
HEADS = {
    "token": {"model.pooling": "token", "model.pre_logits": True},
    "gap": {"model.pooling": "gap", "model.pre_logits": False},
}


def get_config(arg: str = "") -> ConfigDict:
    """Returns the recipe that all runs share; `arg` may be small=yes.

    Raises:
        ValueError: `arg` is something else.
    """
    if small.is_small(arg):
        return small.recipe()
    return small.by_five_shots(vit_b16_jft.get_config())


def get_grid(arg: str = "") -> dict[str, dict[str, object]]:
    """Returns name -> fields of each run."""
    rates = (*RATES, 2.4e-3) if small.is_small(arg) else RATES
    return {f"{head}/{rate}": {**fields, "base_lr": rate} for head, fields in HEADS.items() for rate in rates}
