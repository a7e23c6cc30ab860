"""A small hybrid from scratch on CIFAR-10, on one GPU: the root of a ResNet, then 8 blocks, which do most of the FLOPs.

Ours: 91.42 % of the 10,000 test images, seed 0, after 1.099e16 training FLOPs (6 x 305.2e6 MACs x 5,999,616 images), in
3.9 minutes on one H200. The same batches then came from one .npz file of the pixels (docs/data.md). After 40 and 80
epochs: 86.7 and 90.0 %. On a CPU, in float32, from TFDS's files, the same weights classify 91.41 %.
    python -m vit_jax.main --config=configs/cifar10_gpu.py --config.data.data_dir=FOLDER

FOLDER holds CIFAR-10 as TFDS prepares it (ArrayRecord). From there 14 worker processes prepared 22,000 images/s, and
the GPU waited for data in nearly half of the time; with the .npz file the GPU took 31,000 images/s.

What was tried before: after 8 epochs on the first nine tenths of train, the rates 5e-3 and 1e-2 had 82.0 and 81.3 % of
the last tenth. 100 epochs that mixed half of the batches ended at a training loss of 0.507 for the other half. The
minimum is 0.500 under this label smoothing, so the model had memorised the images, and all batches are mixed since.
That run was preempted after 4,001 steps and resumed, and had 89.88 % of the test images.
"""

from ml_collections import ConfigDict

from configs import cifar10_long


def get_config() -> ConfigDict:
    """Returns the recipe: blocks of width 256 on 8x8 positions, 120 epochs."""
    config = cifar10_long.get_config()
    config.batch = 512
    config.total_epochs = 120.0
    config.warmup_epochs = 2.0
    config.eval_every_epochs = 40.0
    config.checkpoint_every = 2000
    config.data.preprocess = "reflect_pad(4)|random_crop(32)|flip_lr|value_range(-1,1)"
    config.data.workers = "auto"
    config.evals.test.preprocess = "resize(32)|value_range(-1,1)"

    config.model.width = 256
    config.model.depth = 8
    config.model.mlp_dim = 384
    config.model.num_heads = 8
    config.model.stochastic_depth = 0.1
    config.task.mixup_probability = 1.0
    return config
