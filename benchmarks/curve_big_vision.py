"""Trains with big_vision's own trainer, and writes the reference of tests/training/test_authors_curves.py and
tests/data/test_augment.py.

Example, in an environment of its own (requirements_big_vision.txt), with a checkout of big_vision and a folder of
photographs, one folder a class:
  python benchmarks/curve_big_vision.py CHECKOUT PHOTOGRAPHS --write=tests/fixtures

Its `train.main` runs 50 steps of its `configs/vit_s16_i1k.py` on photographs, with smaller sizes: images of 32 pixels,
batches of 8, 8 classes, 2 blocks of width 24, 10 steps of warm-up. The learning rate is three times as large, so that
50 steps learn something. Gradients are clipped at a norm of 0.5, which half of them exceed. The files have the weights
before the first step, and for each step the images after RandAugment, the labels, MixUp's ratio, the loss, the learning
rate and the norm of the gradient. A further file has two images after each of RandAugment's operations, at the
magnitudes of AugReg, and after each of AutoAugment's sub-policies.
"""

import argparse
import importlib
import itertools
import json
import sys
import tempfile
import types
from pathlib import Path

import numpy as np

STEPS, WARMUP, BATCH, RESOLUTION, CLASSES = 50, 10, 8, 32, 8
RATE, CLIP = 3e-3, 0.5
SIZES = {"width": 24, "depth": 2, "num_heads": 2, "mlp_dim": 48, "patch_size": (8, 8)}
MAGNITUDES = (0, 10, 15, 20)


def find_photographs(folder):
    """Returns the path of one photograph of each of the first classes."""
    return [str(next(one.iterdir())) for one in sorted(folder.iterdir())[:CLASSES]]


def add_data_source(photographs):
    """Makes the photographs a data source of big_vision, `bv:photographs`."""
    import tensorflow as tf

    class DataSource:
        def __init__(self, **_):
            self.total_examples = len(photographs)

        def get_tfdata(self, ordered, **_):
            data = tf.data.Dataset.from_tensor_slices({"path": photographs, "label": list(range(CLASSES))})
            return data.map(lambda one: {"image": tf.io.read_file(one["path"]), "label": one["label"]})

    module = types.ModuleType("big_vision.datasets.photographs")
    module.DataSource = DataSource
    sys.modules[module.__name__] = module


def shrink(config):
    """Makes the recipe small, in place, and returns it."""
    config.input.pp = config.input.pp.replace("(224)", f"({RESOLUTION})").replace("(1000,", f"({CLASSES},")
    config.input.data = {"name": "bv:photographs"}
    config.input.batch_size, config.num_classes = BATCH, CLASSES
    config.lr, config.wd, config.grad_clip_norm = RATE, config.wd * RATE / config.lr, CLIP
    del config.total_epochs
    config.total_steps, config.log_training_steps, config.schedule.warmup_steps = STEPS, 1, WARMUP
    del config.model.variant
    config.model.update(SIZES)
    config.evals = {}
    return config


def train(config, workdir):
    """Runs the trainer, and returns the batches of its steps: name -> array."""
    from absl import flags

    trainer = importlib.import_module("big_vision.train")
    batches, start = [], trainer.input_pipeline.start_global

    def recorded(*args, **kwargs):
        for batch in start(*args, **kwargs):
            batches.append({name: np.asarray(array) for name, array in batch.items()})
            yield batch

    trainer.input_pipeline.start_global = recorded
    flags.FLAGS(["train", f"--workdir={workdir}"])
    flags.FLAGS.config = config
    trainer.main(None)
    return batches[:STEPS]


def initial_weights(config):
    """Returns name -> array of newly initialised weights of big_vision's model."""
    import flax
    import jax

    model = importlib.import_module("big_vision.models.vit").Model(num_classes=config.num_classes, **config.model)
    params = model.init(jax.random.PRNGKey(config.seed), np.zeros((1, RESOLUTION, RESOLUTION, 3)))["params"]
    return flax.traverse_util.flatten_dict({"params": params}, sep="/")


def mixup_ratios(config):
    """Returns MixUp's ratio of each step, computed with the trainer's random keys and its function."""
    import jax

    utils = importlib.import_module("big_vision.utils")
    key, _ = jax.random.split(jax.random.PRNGKey(config.seed))
    _, key = jax.random.split(key, 2)
    keys = [jax.random.fold_in(key, step) for step in range(STEPS)]
    mixed = [utils.get_mixup(key, config.mixup.p)(np.float32([1, 0]))[1][0] for key in keys]
    return np.float32([one[0] for one in mixed])


def augmented_pixels(images):
    """Returns the images after each of RandAugment's operations and AutoAugment's sub-policies.

    Keys are `OPERATION/MAGNITUDE` and `autoaugment/NUMBER`. Random choices are replaced by fixed ones: signs are
    positive, the centre of Cutout is three quarters down and across, and an operation of a sub-policy is applied unless
    its probability is 0.
    """
    ops = importlib.import_module("big_vision.pp.archive.autoaugment")
    ops._randomly_negate_tensor = lambda tensor: tensor
    ops.tf.random_uniform = lambda shape, minval, maxval, dtype: ops.tf.cast(maxval * 3 // 4, dtype)
    randaug = ops.HParams(cutout_const=40, translate_const=100)
    autoaugment = ops.HParams(cutout_const=100, translate_const=250)
    chains = {
        f"{name}/{magnitude}": ([(name, 1.0, magnitude)], randaug)
        for name, magnitude in itertools.product(ops.NAME_TO_FUNC, MAGNITUDES)
    }
    chains |= {f"autoaugment/{number}": (chain, autoaugment) for number, chain in enumerate(ops.policy_v0())}
    return {name: apply(ops, images, *chain) for name, chain in chains.items()}


def apply(ops, images, chain, settings):
    """Returns the images after a chain of (operation, probability, magnitude)."""
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(images)
    for name, _, magnitude in (one for one in chain if one[1]):
        function, _, arguments = ops._parse_policy_info(name, 1.0, float(magnitude), [128] * 3, settings)
        data = data.map(lambda image, function=function, arguments=arguments: function(image, *arguments))
    return np.stack(list(data.as_numpy_iterator()))


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("photographs", type=Path)
    parser.add_argument("--write", type=Path, required=True, help="folder of what is written")
    args = parser.parse_args(argv[1:])
    sys.path.insert(0, str(args.checkout))

    import jax
    import tensorflow as tf

    tf.random.set_seed(0)
    jax.config.update("jax_default_matmul_precision", "highest")
    add_data_source(find_photographs(args.photographs))
    config = shrink(importlib.import_module("big_vision.configs.vit_s16_i1k").get_config())
    config.model_init = str(args.write / "parity" / "curve_big_vision_s16.npz")
    np.savez_compressed(config.model_init, **initial_weights(config))
    with tempfile.TemporaryDirectory() as workdir:
        batches = train(config, workdir)
        [log] = Path(workdir).glob("*metrics.txt")
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    jax.config.update("jax_transfer_guard", "allow")
    images = np.stack([batch["image"] for batch in batches])
    pixels = np.rint((images + 1) * 127.5).astype(np.uint8)
    rows = [row for row in rows if "training_loss" in row][:STEPS]  # the last one is written twice
    np.savez_compressed(
        args.write / "parity" / "curve_big_vision_s16.curve.npz",
        pixels=pixels,
        images=images[0],
        labels=np.stack([batch["labels"] for batch in batches]).argmax(-1).astype(np.uint8),
        ratio=mixup_ratios(config),
        norm=np.float32([row["l2_grads"] for row in rows]),
        loss=np.float32([row["training_loss"] for row in rows]),
        lr=np.float32([row["global_schedule"] * config.lr for row in rows]),
    )
    few = pixels[0][:2]
    np.savez_compressed(args.write / "augmented_pixels.npz", images=few, **augmented_pixels(few))


if __name__ == "__main__":
    main(sys.argv)
