"""Methods of fine-tuning with equal care: from five classes of CIFAR-10 to the other five. Not in the paper.

Plain fine-tuning, rates that fall with depth, LoRA adapters, and distillation from a teacher that was fine-tuned so
for four times as many steps. Each has three learning rates, or a fourth where the best of three was the last. The best
by `val`, the last tenth of the images, which no run sees, is tested. configs/cifar5.py has the data, the model and
the weights to start from; here the images have 32 pixels, as in the pre-training.

Ours: 81.05 % of the test images with a teacher of 83.94 %, 80.39 % with layer decay, 80.03 % plain and 78.81 % with
LoRA, means of three seeds; docs/studies.md has all rates. A run takes 4 to 7 minutes on one CPU core, the teacher 20.
The argument names the weights, and for distillation the teacher:
    python -m vit_jax.main --config=configs/cifar5_methods.py:RUN --config.total_steps=1200
      --config.base_lr=0.001 --workdir=TEACHER
    python -m vit_jax.sweep --config=configs/cifar5_methods.py:RUN --workdir=RUNS
    python -m vit_jax.sweep --config=configs/cifar5_methods.py:RUN,TEACHER --workdir=RUNS
"""

from ml_collections import ConfigDict

from configs import cifar5, cifar10

# Name -> fields, rates.
METHODS = {
    "plain": ({}, (3e-4, 1e-3, 3e-3)),
    "layer_decay": ({"optim.layer_decay": 0.75}, (1e-3, 3e-3, 6e-3)),
    "lora": ({"adapt.rank": 8}, (1e-3, 3e-3, 1e-2, 3e-2)),
}
DISTILLED = {"distilled": ({}, (3e-4, 1e-3, 3e-3))}
WEIGHTS = "workdirs/cifar5"


def get_config(arg: str = WEIGHTS) -> ConfigDict:
    """Returns the recipe that all runs share; `arg` is the folder of the weights, or WEIGHTS,TEACHER."""
    config = cifar5.get_config("stage=finetune")
    before = cifar5.get_config("stage=pretrain")
    config.resolution, config.data.preprocess = before.resolution, before.data.preprocess
    config.evals.test.preprocess = before.evals.test.preprocess
    config.init_from, _, teacher = arg.partition(",")
    if teacher:
        config.task.kind, config.task.teacher = "distill", teacher
    config.eval_every_epochs, config.eval_every = None, config.total_steps
    config.checkpoint_every = config.total_steps
    config.checkpoint.keep_last = 1
    config.checkpoint.keep_best = 0
    cifar10.hold_out(config)
    return config


def get_grid(arg: str = WEIGHTS) -> dict[str, dict[str, object]]:
    """Returns name -> fields of each run."""
    methods = DISTILLED if "," in arg else METHODS
    return {
        f"{name}/{rate:g}": {**fields, "base_lr": rate} for name, (fields, rates) in methods.items() for rate in rates
    }
