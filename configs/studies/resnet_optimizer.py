"""Adam or SGD for the pre-training of ResNets: appendix D.1, Table 7. BiT-R50x1 and BiT-R152x2 on JFT-300M, 7 epochs.

Paper, after fine-tuning, by Adam and by SGD: R50x1 on ImageNet 77.54 and 78.24 %, mean of five data sets 89.33 and
88.79 %; R152x2 84.97 and 84.37 %, mean 94.01 and 93.72 %. Hardware and time are not stated.
Ours: not run at this size; no number.
    python -m vit_jax.sweep --config=configs/studies/resnet_optimizer.py --config.data.source=array_record:DATA
    python -m vit_jax.finetune --table=5 --config=configs/finetune.py:model=BiT-R50x1 --config.init_from=RUNS/R50x1/sgd
    python -m vit_jax.sweep --config=configs/studies/resnet_optimizer.py:small=yes --config.data.data_dir=FOLDER

The runs are those of configs/bit_r50x1_jft.py, bit_r50x1_jft_sgd.py and of R152x2's, where it says what is UNCONFIRMED.
The small form has BiT-R14x1, half an epoch, and three rates for each.
"""

from ml_collections import ConfigDict

from configs import bit
from configs.studies import small

SGD = {"optim.name": "sgd", "decay_type": "step", "decay_at": bit.JFT_DECAY, "optim.decays": "kernels"}
SGD |= {"optim.weight_decay": 1e-3}
RATES = {"R50x1": 1e-3, "R152x2": 6e-4}  # of Adam, Table 3
SGD_RATE, SGD_WARMUP = 0.03 * 4096 / 256, 5_000


def get_config(arg: str = "") -> ConfigDict:
    """Returns the recipe that all runs share, by Adam; `arg` may be small=yes.

    Raises:
        ValueError: `arg` is something else.
    """
    if not small.is_small(arg):
        return bit.table3("BiT-R50x1", epochs=7.0, base_lr=RATES["R50x1"])
    config = small.recipe()
    config.total_epochs = 0.5
    config.warmup_epochs = 0.05
    config.model.name = "BiT-R14x1"
    for field in ("width", "depth", "mlp_dim", "num_heads"):
        config.model[field] = None
    return config


def get_grid(arg: str = "") -> dict[str, dict[str, object]]:
    """Returns name -> fields of each run."""
    if small.is_small(arg):
        adam = {f"adam/{rate}": {"base_lr": rate} for rate in (3e-4, 1e-3, 3e-3)}
        return adam | {f"sgd/{rate}": SGD | {"base_lr": rate} for rate in (0.015, 0.06, 0.24)}
    sgd = SGD | {"base_lr": SGD_RATE, "warmup_steps": SGD_WARMUP}
    optimizers = {name: {"adam": {"base_lr": rate}, "sgd": sgd} for name, rate in RATES.items()}
    return {
        f"{name}/{optimizer}": {"model.name": f"BiT-{name}", **fields}
        for name, both in optimizers.items()
        for optimizer, fields in both.items()
    }
