"""Optimizers at equal compute and with equal care: a plain ViT on CIFAR-10, 2e13 FLOPs a run. Not in the paper.

Every optimizer of docs/optimizers.md has three learning rates, a factor of about 2 or 3 apart, and a fourth where the
best of three was the first or the last. The best by `val`, the last tenth of train, which no run sees, is then run with
three seeds; the test split decides. A step of SAM has two passes, so its runs have half the steps. The rest is as in
`plain` of configs/cifar10.py, with label smoothing 0.1 and weight decay 0.05 times the rate; Lion's decay is 0.5, as
its rates are ten times smaller (section 5 of arXiv 2302.06675), and that of SGD 7e-4, as they are 75 times larger.
Schedule-free AdamW has a constant rate after the warm-up, as it must. The head starts with a standard deviation of 0.02
for LAMB, as in DeiT III: updates of LAMB are as small as the array that they change, and a head that starts at 0 does
not learn in so few steps (21 to 25 % on `val`).

Ours: 61.7 ± 0.9 % of the test images by Muon, 53.1 ± 2.6 % by AdamW; all in docs/studies.md. A run
takes 4 minutes on one CPU core. One point alone, and all of them:
    python -m vit_jax.main --config=configs/cifar10_optimizers.py --config.data.data_dir=FOLDER
    python -m vit_jax.sweep --config=configs/cifar10_optimizers.py --config.data.data_dir=FOLDER --workdir=RUNS
"""

from ml_collections import ConfigDict

from configs import cifar10

STEPS = 682  # 6 x 38.14e6 MACs x 128 images x 682 = 2e13 FLOPs
SAM = {"optim.sam_rho": 0.1, "total_steps": STEPS // 2, "warmup_steps": 25, "eval_every": STEPS // 2}
# Name -> fields, rates.
OPTIMIZERS = {
    "adamw": ({}, (5e-4, 1e-3, 2e-3, 4e-3)),
    "sgd": ({"optim.name": "sgd", "optim.weight_decay": 7e-4}, (0.02, 0.05, 0.15, 0.5)),
    "lion": ({"optim.name": "lion", "optim.weight_decay": 0.5}, (1e-4, 2e-4, 4e-4, 8e-4)),
    "lamb": ({"optim.name": "lamb", "model.head_std": 0.02}, (1e-3, 3e-3, 1e-2, 3e-2)),
    "adafactor": ({"optim.name": "adafactor"}, (5e-4, 1e-3, 2e-3, 4e-3)),
    "muon": ({"optim.name": "muon"}, (2e-3, 5e-3, 1e-2)),
    "schedule_free_adamw": (
        {"optim.name": "schedule_free_adamw", "decay_type": "constant"},
        (1e-3, 2e-3, 5e-3, 1e-2),
    ),
    "sam": (SAM, (5e-4, 1e-3, 2e-3, 4e-3)),
}


def get_config() -> ConfigDict:
    """Returns the recipe that all runs share."""
    config = cifar10.plain()
    config.total_steps, config.total_epochs = STEPS, None
    config.warmup_steps, config.warmup_epochs = 50, None
    config.eval_every, config.eval_every_epochs = STEPS, None
    config.checkpoint_every = STEPS
    config.checkpoint.keep_last = 1
    config.checkpoint.keep_best = 0
    cifar10.hold_out(config)
    return config


def get_grid() -> dict[str, dict[str, object]]:
    """Returns name -> fields of each run."""
    return {
        f"{name}/{rate:g}": {**fields, "base_lr": rate}
        for name, (fields, rates) in OPTIMIZERS.items()
        for rate in rates
    }
