"""Fine-tuning of vit_b16_imagenet2012_autoaugment at 384 pixels: SGD, with the same augmentation.

Paper: 77.91 % for B/16 on ImageNet alone, without the augmentation (Table 5). Others: 79.4 % (JAX-Toolbox, rosetta/
projects/vit, 1.5 hours on eight A100). Ours: not run.
    python -m vit_jax.main --config=configs/finetune_autoaugment.py --config.init_from=PRETRAINED --config.data.data_dir=DATA --workdir=RUN

docs/imagenet.md: the prepared run, and what differs from JAX-Toolbox.
"""

from ml_collections import ConfigDict

from configs import finetune, vit_b16_imagenet2012_autoaugment


def get_config() -> ConfigDict:
    """Returns Table 4's row with JAX-Toolbox's rate and images."""
    pretraining = vit_b16_imagenet2012_autoaugment.get_config()
    config = finetune.recipe("ViT-B/16", "imagenet2012")
    config.base_lr = 3e-3
    config.warmup_steps = 0
    config.model.update(vit_b16_imagenet2012_autoaugment.PIXELS)
    config.model.norm_epsilon = pretraining.model.norm_epsilon
    config.optim.moment_dtype = "float32"
    config.data.preprocess = pretraining.data.preprocess
    config.evals.test.preprocess = pretraining.evals.test.preprocess
    return config
