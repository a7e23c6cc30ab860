"""ViT-B/16 from scratch on ImageNet-1k as NVIDIA trains it: Table 3's row with AutoAugment and colour jitter.

Paper: 77.91 % without them (Table 5), after fine-tuning at 384 pixels. Others, after fine-tuning: 79.4 % (JAX-Toolbox,
rosetta/projects/vit, 384 pixels; 15 hours on eight A100, then 1.5); 79.47 % (NeMo's user guide, 512 pixels).
Ours: not run.
    python -m vit_jax.main --config=configs/vit_b16_imagenet2012_autoaugment.py --config.data.data_dir=DATA --workdir=RUN

docs/imagenet.md: the prepared run (planned: 139 chip-hours of a v5e), its fine-tuning, what differs from JAX-Toolbox.
"""

from ml_collections import ConfigDict

from configs import imagenet2012

PIXELS = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}
CROP = "inception_crop({resolution},area_min=8,antialias=True)"


def get_config() -> ConfigDict:
    """Returns the recipe: Table 3's with softmax, a head that starts at 0, and JAX-Toolbox's images."""
    config = imagenet2012.table3("ViT-B/16")
    config.total_epochs = None
    config.total_steps = 95_000
    config.model.head_bias = 0.0
    config.model.norm_epsilon = 1e-5
    config.model.update(PIXELS)
    config.task.loss = "softmax"
    config.task.label_smoothing = 0.0
    config.data.preprocess = f"{CROP}|flip_lr|color_jitter|autoaugment|value_range(-1,1)"
    config.evals.test.preprocess = "resize({resolution},antialias=True)|value_range(-1,1)"
    return config
