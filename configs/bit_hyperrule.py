"""Fine-tuning by BiT-HyperRule (arXiv 1912.11370): the number of images and their size determine everything else.

    python -m vit_jax.main --config=configs/bit_hyperrule.py:dataset=cifar10 --config.init_from=WEIGHTS --workdir=RUN
    python -m vit_jax.main --config=configs/bit_hyperrule.py:dataset=folder:PATH,images=25000 --config.init_from=WEIGHTS

The paper fine-tunes ResNets by Table 4 (configs/finetune.py) and by this rule, and takes the better of the two. The
argument holds any of
    model=NAME       [BiT-R50x1] any model
    dataset=NAME     as in configs/finetune.py; so is split=full|dev
    images=NUMBER    of your own training images; needed from 20,000 on
    small=yes        your own images have less than 96x96 pixels, as those of CIFAR have

    images in training     steps   warm-up   the rate is divided by 10 after             MixUp
    below 20,000             500       100   200, 300 and 400 steps                      none
    below 500,000         10,000       500   3,000, 6,000 and 9,000 steps                0.1
    others                20,000       500   6,000, 12,000 and 18,000 steps              0.1

SGD with momentum 0.9, the learning rate 0.003, batches of 512, no weight decay, no dropout, no clipping. Small images
are resized to 160 pixels and cropped to 128, others to 512 and 480; test images are only resized.

Paper: BiT's numbers are not among the paper's own. Hardware and time are not stated.
Ours: no number worth quoting: 12 steps of a tiny BiT, in the tests.

From the authors' code (google-research/big_transfer, bit_hyperrule.py): the warm-up, and 512 and 480 pixels, where
BiT's paper has 448 and 384. That code mirrors every training image; here it is half of them.
"""

from ml_collections import ConfigDict

from configs import base, finetune

SMALL = ("cifar10", "cifar100")  # data sets of images of less than 96x96 pixels
# Images in training, below which the row applies: steps, warm-up, fractions of the steps, alpha of MixUp.
SCHEDULES = {
    20_000: (500, 100, (0.4, 0.6, 0.8), 0.0),
    500_000: (10_000, 500, (0.3, 0.6, 0.9), 0.1),
    float("inf"): (20_000, 500, (0.3, 0.6, 0.9), 0.1),
}


def get_config(arg: str = "") -> ConfigDict:
    """Returns what the rule gives for the data that `arg` names.

    Raises:
        ValueError: `arg` is not of that form.
    """
    given = base.parse_argument(
        arg, **finetune.ARGUMENT | {"model": "BiT-R50x1", "images": "0", "small": ("no", "yes")}
    )
    if not given["images"].isdigit():
        raise ValueError(f"images={given['images']} is not a number of images")
    config = finetune.recipe(given["model"], given["dataset"], given["split"])
    images = config.data.num_examples or int(given["images"])
    row = next(row for below, row in SCHEDULES.items() if images < below)
    config.total_steps, config.warmup_steps, config.decay_at, config.task.mixup = row
    config.decay_type = "step"
    config.base_lr = 0.003
    config.batch = 512
    config.grad_norm_clip = None
    config.eval_every = config.total_steps // 10
    config.model.dropout_rate = 0.0
    config.optim.moment_dtype = "float32"
    is_small = given["small"] == "yes" or given["dataset"].removeprefix("tfds:") in SMALL
    around, config.resolution = (160, 128) if is_small else (512, 480)
    config.data.preprocess = f"resize({around})|random_crop({{resolution}})|flip_lr|value_range(-1,1)"
    return config
