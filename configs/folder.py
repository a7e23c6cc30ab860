"""ViT-S/16 on your own folder of images, `<class>/<image>` or `train/<class>/<image>`; a tenth is held out.

Ours: no number, it depends on the images. Hardware: a GPU or a TPU; on a laptop use a smaller model and resolution.
    python -m vit_jax.main --config=configs/folder.py --config.data.source=folder:PATH
    python -m vit_jax.main --config=configs/folder.py --config.data.source=folder:PATH --config.init_from=WORKDIR

`configs/folder.py:answers=several` is for images with any number of classes each, and `answers=numbers` for regression;
a CSV file says which:
    python -m vit_jax.main --config=configs/folder.py:answers=several
      --config.data.source=folder:PATH,table=FILE.csv
    python -m vit_jax.main --config=configs/folder.py:answers=numbers
      --config.data.source=folder:PATH,table=FILE.csv,targets=COLUMN+COLUMN
"""

from ml_collections import ConfigDict

from configs import base

ANSWERS = ("one", "several", "numbers")


def get_config(arg: str = "") -> ConfigDict:
    """Returns a recipe for some thousand images: 50 epochs of AdamW with mild augmentation.

    Args:
        arg: may be answers=one, a class for each image; several, any number of them; or numbers.

    Raises:
        ValueError: `arg` is something else.
    """
    answers = base.parse_argument(arg, answers=ANSWERS)["answers"]
    config = base.get_config()
    config.batch = 128
    config.total_epochs = 50.0
    config.warmup_epochs = 5.0
    config.base_lr = 5e-4
    config.grad_norm_clip = 1.0
    config.eval_every_epochs = 1.0

    config.model.name = "ViT-S/16"
    config.model.stochastic_depth = 0.1

    config.data.source = "folder:"  # the command line says where
    config.data.split = "train[:90%]"
    config.data.preprocess = "inception_crop({resolution}, 30)|flip_lr|value_range(-1,1)"
    config.optim.weight_decay = 0.1
    config.evals.test.split = "train[90%:]"
    config.evals.test.preprocess = "resize({resolution})|value_range(-1,1)"
    if answers == "one":
        config.task.label_smoothing = 0.1
    elif answers == "several":
        config.task.loss = "sigmoid"
        config.evals.test.kind = "multi_label"
        config.checkpoint.best_metric = "test/map"
    else:
        config.task.kind = "regress"
        config.task.loss = "huber"
        config.evals.test.kind = "regression"
        config.checkpoint.best_metric = "test/mae"
    return config
