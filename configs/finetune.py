"""Fine-tuning as the paper does it, Table 4: SGD at 384 pixels, cosine to 0, no weight decay.

    python -m vit_jax.main --config=configs/finetune.py:dataset=folder:PATH --config.init_from=WEIGHTS --workdir=RUN
    python -m vit_jax.main --config=configs/finetune.py:model=ViT-L/16,dataset=cifar10 --config.init_from=WEIGHTS

The argument holds any of
    model=NAME       [ViT-B/16] ViT-L/16, R50+ViT-B/16, ...; --config.model.FIELD changes the rest, if WEIGHTS need it;
                     or init_from, the model of WEIGHTS, whatever it is
    dataset=NAME     imagenet2012, cifar10, cifar100, oxford_iiit_pet or oxford_flowers102, all of TFDS; any other
                     classification dataset of TFDS, tfds:NAME; or your own images, folder:PATH or array_record:PATTERN
    split=full|dev   full: trains on the whole split train and evaluates on test (ImageNet: validation); dev: holds out
                     a part of train and evaluates it as val, to choose the learning rate (10 % of Pets, Flowers and own
                     images, 2 % of CIFAR, 1 % of ImageNet). The default is full, but dev for own images and tfds:NAME,
                     which need splits train and test for full
    polyak=yes       ImageNet in Table 2: a moving average of the weights (0.9999), 512 pixels; H/14 518

                                steps   warm-up   learning rates to choose from
    imagenet2012               20,000       500   0.003, 0.01, 0.03, 0.06 (0.06 for hybrids and ResNets)
    cifar10, cifar100          10,000       500   0.001, 0.003, 0.01, 0.03
    Pets, Flowers, own images     500       100   0.001, 0.003, 0.01, 0.03

Paper, from ImageNet-21k, on ImageNet, CIFAR-10, CIFAR-100, Pets, Flowers (Table 5): B/16 83.97, 98.95, 91.67, 94.43,
99.38 %; B/32 81.28, 98.79, 91.97, 93.02, 99.11 %; L/16 85.15, 99.16, 93.44, 94.73, 99.61 %; L/32 80.99, 99.13, 93.04,
93.09, 99.19 %; H/14 85.13, 99.27, 93.82, 94.82, 99.51 %. With polyak=yes, L/16 85.30 % of ImageNet (Table 2).
Ours: not run. Hardware and time are not stated; a single accelerator needs --config.accum_steps=8, as in the release.

From the authors' release, not from the paper: the warm-up; momentum in bfloat16; the learning rate 0.03 unless given,
0.01 for B/16 on CIFAR-10; dropout 0.1 for L/16, H/14 and R50+B/16; inception crops, where the paper mentions BiT's.
H/14 uses 378 pixels, 27 patches on a side: the release's convolution ignores the rest of 384. UNCONFIRMED, so chosen
here: Flowers' train is TFDS's, 1,020 images, as in big_vision's transfer.py; the 1,020 of its validation are not used.

For own images and tfds:NAME, which are not in the paper: as many steps as for Pets, with batches of 128 at 0.01, about
13 epochs of 5,000 images.
"""

from ml_collections import ConfigDict

from configs import base

# Dataset -> steps, warm-up, classes, images in train, split to evaluate, percent of train that dev trains on.
DATASETS = {
    "imagenet2012": (20_000, 500, 1000, 1_281_167, "validation", 99),
    "cifar10": (10_000, 500, 10, 50_000, "test", 98),
    "cifar100": (10_000, 500, 100, 50_000, "test", 98),
    "oxford_iiit_pet": (500, 100, 37, 3_680, "test", 90),
    "oxford_flowers102": (500, 100, 102, 1_020, "test", 90),
}
OWN = ("folder:", "array_record:", "tfds:")
ARGUMENT = {"model": "ViT-B/16", "dataset": "folder:", "split": ("default", "full", "dev")}
DROPOUT = {"ViT-L/16": 0.1, "ViT-H/14": 0.1, "R50+ViT-B/16": 0.1}


def get_config(arg: str = "") -> ConfigDict:
    """Returns the row of Table 4 that `arg` asks for.

    Raises:
        ValueError: `arg` is not of that form.
    """
    given = base.parse_argument(arg, **ARGUMENT, polyak=("no", "yes"))
    return recipe(given["model"], given["dataset"], given["split"], polyak=given["polyak"] == "yes")


def recipe(name: str, dataset: str, split: str = "default", polyak: bool = False) -> ConfigDict:
    """Returns the row of Table 4 of a model and a data set; the arguments are those of the file's docstring.

    Raises:
        ValueError: there is no such data set, or it has no row with a moving average.
    """
    if dataset.removeprefix("tfds:") in DATASETS:
        dataset = dataset.removeprefix("tfds:")
    own = dataset.startswith(OWN)
    if not own and dataset not in DATASETS:
        raise ValueError(f"unknown dataset {dataset!r}; choose from {', '.join(DATASETS)}, tfds:NAME, folder:PATH")
    steps, warmup, classes, images, eval_split, kept = DATASETS.get(dataset, (500, 100, None, None, "test", 90))
    dev = split == "dev" or (split == "default" and own)
    if polyak and dataset != "imagenet2012":
        raise ValueError("polyak=yes is for dataset=imagenet2012: in a short run the average stays near its start")

    config = base.get_config()
    config.resolution = {14: (378, 518)}.get(patch_size(name), (384, 512))[polyak]
    config.batch = 128 if own else 512
    config.total_steps = steps
    config.warmup_steps = warmup
    config.base_lr = 0.01 if own or (name, dataset) == ("ViT-B/16", "cifar10") else 0.03
    config.grad_norm_clip = 1.0
    config.eval_every = steps // 10

    config.model.name = name
    config.model.dropout_rate = DROPOUT.get(name, 0.0)

    config.data.source = dataset if own else f"tfds:{dataset}"
    config.data.split = f"train[:{kept}%]" if dev else "train"
    config.data.num_classes = classes
    config.data.num_examples = round(images * kept / 100) if images and dev else images
    config.optim.name = "sgd"
    config.optim.moment_dtype = "bfloat16"
    config.optim.ema_decay = 0.9999 if polyak else 0.0
    config.evals.test.split = f"train[{kept}%:]" if dev else eval_split
    config.evals.test.preprocess = "resize({resolution})|value_range(-1,1)"
    if dev:
        with config.unlocked():
            config.evals.val = config.evals.test
            del config.evals.test
    config.checkpoint.best_metric = "val/accuracy" if dev else "test/accuracy"
    return config


def patch_size(name: str) -> int | None:
    """Returns the number after the slash in a model's name, if there is one."""
    _, _, size = name.rpartition("/")
    return int(size) if size.isdigit() else None
