"""Transformers, hybrids and ResNets over the compute of pre-training: section 4.4, Figure 5, Table 6. JFT-300M.

Paper: 18 runs of 7 or 14 epochs, each fine-tuned on ImageNet, CIFAR-10, CIFAR-100, Pets and Flowers; docs/results.md
has all numbers. ViTs reach the mean of the five with half to a quarter of the compute of ResNets; hybrids are ahead
where it is small. Hardware and time are stated for two of them, in Table 2.
Ours: not run at this size; no number.
    python -m vit_jax.sweep --config=configs/studies/compute.py --config.data.source=array_record:DATA --workdir=RUNS
    python -m vit_jax.finetune --table=6 --config=configs/finetune.py:model=NAME --config.init_from=RUNS/LINE/RUN
    python -m vit_jax.sweep --config=configs/studies/compute.py:small=yes --sweep.seed=0,1,2 --workdir=RUNS
    python -m vit_jax.sweep --config=configs/studies/compute.py:transfer=RUNS --workdir=TUNED
    python -m vit_jax.sweep --plot=compute.svg TUNED

A run is the recipe of its name, for as many epochs as its name ends with. The paper fine-tunes a ResNet also by
configs/bit_hyperrule.py and takes the better one.

The small form pre-trains ViTs and hybrids of the same 64 tokens on five classes of CIFAR-10, larger ones for more
epochs, and evaluates their features by few-shot regression on the other five, to which `transfer=RUNS` then fine-tunes
each run of the seeds 0, 1 and 2: configs/cifar5.py has the data. Both families have one learning rate.
"""

from ml_collections import ConfigDict

from configs import base, cifar5, jft

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
SMALL_MODELS = {"ViT": "ViT-mu/4", "hybrid": "R+ViT-mu/4"}
SMALL_SIZES = ((32, 2, 2), (64, 4, 4), (96, 4, 6))  # width, blocks, epochs
SEEDS = (0, 1, 2)
ARGUMENT = {"small": ("no", "yes"), "transfer": ""}  # transfer: the folder of the small form's runs


def get_config(arg: str = "") -> ConfigDict:
    """Returns the recipe that all runs share; `arg` may be small=yes or transfer=FOLDER.

    Raises:
        ValueError: `arg` is something else.
    """
    given = base.parse_argument(arg, **ARGUMENT)
    if given["transfer"]:
        return stage("finetune")
    return pretrain() if given["small"] == "yes" else jft.recipe("ViT-B/32", epochs=7.0, base_lr=8e-4)


def get_grid(arg: str = "") -> dict[str, dict[str, object]]:
    """Returns name -> fields of each run."""
    given = base.parse_argument(arg, **ARGUMENT)
    if given["transfer"]:
        return {
            f"{name},seed={seed}": size | {"seed": seed, "init_from": f"{given['transfer']}/{name},seed={seed}"}
            for name, size in small_sizes().items()
            for seed in SEEDS
        }
    if given["small"] == "yes":
        epochs = {f"{width}x{blocks}": float(epochs) for width, blocks, epochs in SMALL_SIZES}
        return {name: size | {"total_epochs": epochs[name.split("/")[1]]} for name, size in small_sizes().items()}
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


def pretrain() -> ConfigDict:
    """Returns the recipe of the small form, on five classes; the other five are evaluated at the end."""
    config = stage("pretrain")
    source = config.data.source.replace("0-4", "5-9")
    fewshot = base.evaluation("fewshot", source=source, train_split="train[:10%]", shots=(5, 10, 25))
    fewshot.preprocess = config.evals.test.preprocess
    with config.unlocked():
        config.evals.fewshot = fewshot
    return config


def stage(name: str) -> ConfigDict:
    """Returns a stage of configs/cifar5.py in batches of 64, evaluated and saved at its end."""
    config = cifar5.get_config(f"stage={name}")
    config.batch = 64
    config.eval_every_epochs = None
    config.checkpoint_every = 2000
    config.checkpoint.keep_best = 0
    return config


def small_sizes() -> dict[str, dict[str, object]]:
    """Returns name -> fields of the model of each run of the small form."""
    return {
        f"{line}/{width}x{blocks}": {
            "model.name": name,
            "model.width": width,
            "model.depth": blocks,
            "model.mlp_dim": 2 * width,
        }
        for line, name in SMALL_MODELS.items()
        for width, blocks, _ in SMALL_SIZES
    }
