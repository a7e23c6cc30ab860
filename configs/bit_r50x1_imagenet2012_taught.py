"""BiT-R50x1 on ImageNet-1k, taught by a larger BiT: function matching with a patient teacher (arXiv 2106.05237).

Teacher and student are given the same crop and the same MixUp with a share drawn uniformly, and the student learns from
the teacher's probabilities alone, for 1,200 epochs. The teacher is the published BiT-R152x2 for 224 pixels, which is
downloaded, 82.9 % by timm's evaluation; --config.task.teacher=WEIGHTS names another one of the same classes.

Theirs: the published student of 224 pixels has 82.8 % (big_transfer README.md); 300 epochs take about 15 hours on
TPUv3-32 (the recipe's text). Ours: not run.
    python -m vit_jax.main --config=configs/bit_r50x1_imagenet2012_taught.py --config.data.data_dir=DATA --workdir=RUN

Source: big_vision, configs/proj/distill/bit_i1k.py; without its evaluations of the teacher, which is evaluated once.
"""

from ml_collections import ConfigDict

from configs import imagenet2012


def get_config() -> ConfigDict:
    """Returns the recipe."""
    config = imagenet2012.held_out("BiT-R50x1")
    config.total_epochs = 1200.0
    config.base_lr = 0.03
    config.warmup_steps = 5_000
    config.model.pre_logits = False
    config.data.split = "train[:98%]"
    config.data.num_examples = 1_255_544
    config.data.preprocess = "inception_crop({resolution})|flip_lr|value_range(-1,1)"
    config.task.kind = "distill"
    config.task.teacher = "timm/resnetv2_152x2_bit.goog_teacher_in21k_ft_in1k"
    config.task.teacher_weight = 1.0
    config.task.mixup = 1.0
    config.optim.weight_decay = 3e-4
    config.optim.moment_dtype = "bfloat16"
    config.optim.decay_factor = "schedule"
    return config
