"""The head of pre-training, with and without its hidden layer, above class token or mean: sections 3.1, 3.2, D.3.

The paper pre-trains with a hidden layer (tanh) below the head and removes both for fine-tuning. ViT-B/16 on JFT-300M,
7 epochs, by 5-shot accuracy on ImageNet, which reads the hidden layer where there is one.

Paper: no number; it calls removing the whole head slightly more robust than initialising its last layer alone anew.
Ours: not run at this size; no number.
    python -m vit_jax.sweep --config=configs/studies/head.py --config.data.source=array_record:DATA --workdir=RUNS
    python -m vit_jax.sweep --config=configs/studies/head.py:small=yes --config.data.data_dir=FOLDER --sweep.seed=0,1,2

Not here: fine-tuning that keeps the hidden layer under a new head, to which the remark refers.
"""

from ml_collections import ConfigDict

from configs import vit_b16_jft
from configs.studies import small

POOLINGS = ("token", "gap", "map")


def get_config(arg: str = "") -> ConfigDict:
    """Returns the recipe that all runs share; `arg` may be small=yes.

    Raises:
        ValueError: `arg` is something else.
    """
    return small.recipe() if small.is_small(arg) else small.by_five_shots(vit_b16_jft.get_config())


def get_grid(arg: str = "") -> dict[str, dict[str, object]]:
    """Returns name -> fields of each run; the mean has the rate that suits it, see configs/studies/pooling.py."""
    rates = dict.fromkeys(POOLINGS, 8e-4) | ({} if small.is_small(arg) else {"gap": 3e-4})
    return {
        f"{pooling}/{layers}": {"model.pooling": pooling, "model.pre_logits": hidden, "base_lr": rates[pooling]}
        for pooling in POOLINGS
        for layers, hidden in (("hidden", True), ("linear", False))
    }
