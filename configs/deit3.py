"""The recipes of DeiT III (arXiv 2204.07118) on ImageNet-1k: 800 epochs from scratch, then 20 at 224 pixels.

Values are those of the commands in facebookresearch/deit, README_revenge.md, and of the defaults of its main.py and
models_v2.py. Their loss is the mean of the binary cross-entropies of 1000 classes, here the sum: `optim.eps` and
`grad_norm_clip`, of Apex's FusedLAMB, are 1000 times theirs, so that the updates are the same.

UNCONFIRMED, so chosen here: MixUp and CutMix draw the share of the other image below 1/2, theirs any; the cosine ends
at 0 and the warm-up begins there, theirs at 1e-5 and 1e-6; kernels but the head's start with the released ViT's
standard deviations, the class token at 0, theirs with 0.02; RandAugment of the fine-tuning is big_vision's, theirs
timm's rand-m9-mstd0.5-inc1; weights are not averaged, as in what they evaluate.
"""

from ml_collections import ConfigDict

from configs import imagenet2012

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASSES = 1000
RESIZED = "torch_random_resized_crop({resolution})|flip_lr"


def pretrain(name: str, resolution: int, base_lr: float, stochastic_depth: float) -> ConfigDict:
    """Returns the recipe of 800 epochs: LAMB, 3-Augment, three copies of each image in a batch."""
    config = _start(name, resolution, stochastic_depth)
    config.batch = 2048
    config.total_epochs = 800.0
    config.warmup_epochs = 5.0
    config.base_lr = base_lr
    config.grad_norm_clip = 1.0 * CLASSES
    config.data.preprocess = f"{RESIZED}|three_augment|color_jitter(0.3,0.3,0.3)|value_range(-1,1)"
    config.data.repeats = 3
    config.model.head_std = 0.02
    config.task.loss = "sigmoid"
    config.task.mixed_labels = "one"
    config.optim.name = "lamb"
    config.optim.eps = 1e-8 * CLASSES
    config.optim.weight_decay = 0.05
    return config


def finetune(name: str, resolution: int, batch: int, stochastic_depth: float) -> ConfigDict:
    """Returns the recipe of 20 epochs at another resolution, from the weights of `config.init_from`."""
    config = _start(name, resolution, stochastic_depth)
    config.batch = batch
    config.total_epochs = 20.0
    config.warmup_epochs = 5.0
    config.base_lr = 1e-5
    config.keep_head = True
    config.grad_norm_clip = None
    config.data.preprocess = f"{RESIZED}|randaug(2,9)|value_range(-1,1)"
    config.task.label_smoothing = 0.1
    config.optim.weight_decay = 0.1
    return config


def _start(name: str, resolution: int, stochastic_depth: float) -> ConfigDict:
    config = imagenet2012.start(name)
    config.resolution = resolution
    config.warmup_steps = None
    config.model.pre_logits = False
    config.model.activation = "gelu"
    config.model.layer_scale = 1e-4
    config.model.position_rows = "patches"
    config.model.stochastic_depth = stochastic_depth
    config.model.stochastic_depth_schedule = "constant"
    config.model.image_mean, config.model.image_std = MEAN, STD
    config.task.mixup, config.task.cutmix = 0.8, 1.0
    config.evals.test.preprocess = "torch_resize({resolution})|torch_center_crop({resolution})|value_range(-1,1)"
    return config
