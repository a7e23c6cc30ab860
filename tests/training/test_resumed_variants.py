"""A run of a variant of the studies that was stopped and started again is bitwise the one that was not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import masked_patches, smoke
from vit_jax import interop, train
from vit_jax.model import create
from vit_jax.models import bit_spec

RESNET = {"width": 32, "depth": None, "mlp_dim": None, "num_heads": None, "pooling": "token", "position": "learned"}
MODELS = {  # one of each family; the state of others differs in the names of arrays alone
    "Axial-ViT": {"name": "Axial-ViT-mu/4", "pooling": "gap"},
    "SASA-ResNet": RESNET | {"name": "BiT-R26x1", "unit": "stand_alone", "root": "attention", "se_reduction": 16},
}


def recipe(variant):
    config = smoke.get_config()
    config.task.label_smoothing = config.task.mixup = 0.0
    config.mesh.data, config.mesh.fsdp = 4, 2
    config.total_steps = config.eval_every = 6
    config.log_every, config.checkpoint_every = 1, 2
    if variant == "frozen blocks":
        config.model.depth, config.optim.frozen_blocks, config.optim.layer_decay = 3, 1, 0.5
        return config
    if variant == "teacher":
        config.task.kind, config.task.mixup = "distill", 0.5
        config.model.pooling, config.model.position = "token", "learned"
        config.model.registers, config.model.distilled_head = 1, True
        return config
    if variant == "adapters":
        config.adapt.rank, config.optim.lr_multipliers = 2, "encoder/blocks/0/.*lora/up=3"
        return config
    if variant not in MODELS:
        return masked_patches.mask(config, variant)
    config.model.update(MODELS[variant])
    return config


def save_teacher(path):
    """Writes random weights of another small ViT for digits; returns the path."""
    model = create("ViT-mu/4", resolution=16, depth=1, num_classes=10)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32)))
    random = np.random.default_rng(0)
    interop.save(path, model, jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), shapes))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*MODELS, "frozen blocks", "adapters", "teacher", "patch4"])
def test_a_stopped_run_ends_bitwise_as_a_whole_one(variant, tmp_path, monkeypatch):
    def stop(step, metrics):
        if step == 4:
            raise KeyboardInterrupt

    monkeypatch.setitem(bit_spec.UNITS, 26, (1,))
    config = recipe(variant)
    if config.task.kind == "distill":
        config.task.teacher = save_teacher(tmp_path / "teacher.npz")
    train.train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train.train(config, tmp_path / "stopped", stop)
    assert not (tmp_path / "stopped/model.npz").exists()
    train.train(config, tmp_path / "stopped")
    whole, stopped = (np.load(tmp_path / name / "model.npz") for name in ("whole", "stopped"))
    assert set(whole) == set(stopped) and all((whole[name] == stopped[name]).all() for name in whole)
