"""Rates by depth and by name against a loop over layers in float64, and blocks that are frozen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import UserError, optim, tree
from vit_jax.config import resolve_config
from vit_jax.model import create
from vit_jax.optim import LastBlocks, check_blocks, make_lr_multipliers

DEPTH = 5
SHAPES = {
    "cls": (4,),
    "embed/kernel": (2, 4),
    "position": (3, 4),
    "encoder/pre_norm/scale": (4,),
    "encoder/blocks/norm1/scale": (DEPTH, 4),
    "encoder/blocks/mlp/dense1/kernel": (DEPTH, 4, 8),
    "encoder/norm/scale": (4,),
    "pre_logits/kernel": (4, 4),
    "head/kernel": (4, 2),
}
AFTER = ("encoder/norm/scale", "pre_logits/kernel", "head/kernel")


def draw(seed):
    random = np.random.default_rng(seed)
    return tree.unflatten({name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()})


def layers(params):
    """Each layer's arrays by name in float64: 0 before the blocks, i + 1 block i, DEPTH + 1 the rest."""
    found = {}
    for name, leaf in tree.flatten(params).items():
        leaf = np.asarray(leaf, np.float64)
        if "blocks" in name:
            found |= {(i + 1, name.replace("blocks", f"blocks/{i}")): leaf[i] for i in range(DEPTH)}
        else:
            found[DEPTH + 1 if name in AFTER else 0, name] = leaf
    return found


def adamw(config, params, grads, rate):
    """Two steps of AdamW on one array, in float64."""
    optim, first, second = config.optim, 0.0, 0.0
    for step in (1, 2):
        first = optim.beta1 * first + (1 - optim.beta1) * grads
        second = optim.beta2 * second + (1 - optim.beta2) * grads**2
        update = first / (1 - optim.beta1**step) / (np.sqrt(second / (1 - optim.beta2**step)) + optim.eps)
        params = params - rate * (update + optim.weight_decay * params)
    return params


@pytest.fixture
def config(tiny):
    tiny.base_lr, tiny.decay_type, tiny.warmup_steps, tiny.grad_norm_clip = 0.1, "constant", 0, None
    tiny.optim.decays = "all"
    return resolve_config(tiny)


def make_optimizer(config):
    return optim.make_optimizer(config, optim.make_schedule(config), make_lr_multipliers(config))


def trained(config, params, grads):
    """The parameters after two steps with the same gradients."""
    part, optimizer = LastBlocks(config.optim.frozen_blocks), make_optimizer(config)

    @jax.jit
    def train(params, grads):
        state = optimizer.init(part.select(params))
        for _ in range(2):
            now = part.select(params)
            changes, state = optimizer.update(part.select(grads), state, now)
            params = part.replace(params, jax.tree.map(jnp.add, now, changes))
        return params

    return train(params, grads)


@pytest.mark.parametrize(
    ("decay", "frozen", "patterns", "by_name"),
    [
        (0.75, 0, "", {}),
        (1.0, 2, "", {}),
        (0.6, 3, "", {}),
        (0.5, 0, "encoder/blocks/[02]/mlp/.*=3,encoder/blocks/2/.*=0,head/.*=10", {0: (3, 1), 2: (3, 0)}),
        (
            0.8,
            1,
            "encoder/blocks/4/.*=0,encoder/blocks/.*=2,head/.*=10",
            {**dict.fromkeys(range(4), (2, 2)), 4: (0, 0)},
        ),
    ],
)
def test_each_layer_has_the_rate_of_a_loop_over_layers(config, decay, frozen, patterns, by_name):
    config.optim.layer_decay, config.optim.frozen_blocks, config.optim.lr_multipliers = decay, frozen, patterns
    before, grads = draw(0), draw(1)
    found, slopes = layers(trained(config, before, grads)), layers(grads)
    for (layer, name), leaf in layers(before).items():
        in_mlp, elsewhere = by_name.get(layer - 1, (1, 1))
        rate = 0.1 * decay ** (DEPTH + 1 - layer) * (in_mlp if "mlp" in name else elsewhere)
        rate *= 10 if "head" in name and patterns else 1
        rate = 0 if frozen and layer <= frozen else rate
        expected = adamw(config, leaf, slopes[layer, name], rate)
        np.testing.assert_allclose(found[layer, name], expected, rtol=2e-5, atol=2e-6, err_msg=name)
        assert rate or (found[layer, name] == leaf).all()


def test_the_state_of_the_optimizer_covers_the_blocks_that_are_trained(config):
    config.optim.frozen_blocks = 2
    state = make_optimizer(config).init(LastBlocks(2).select(draw(0)))
    shapes = {name.partition("/mu/")[2]: leaf.shape for name, leaf in tree.flatten(state).items() if "/mu/" in name}
    rows = {name: (DEPTH - 2, *shape[1:]) for name, shape in SHAPES.items() if "blocks" in name}
    assert shapes == rows | {name: SHAPES[name] for name in AFTER}


def test_the_multipliers_by_name(config):
    config.optim.layer_decay, config.optim.frozen_blocks = 0.5, 2
    config.optim.lr_multipliers = "encoder/blocks/3/.*=3"
    found = make_lr_multipliers(config).by_name(draw(0))
    np.testing.assert_array_equal(found["encoder/blocks/norm1/scale"], [0, 0, 0.125, 0.75, 0.5])
    assert found["cls"] == found["encoder/pre_norm/scale"] == 0 and found["head/kernel"] == 1
    config.optim.lr_multipliers = f"encoder/blocks/{DEPTH}/.*=3"
    with pytest.raises(UserError, match=r"no parameter matches 'encoder/blocks/5/\.\*'"):
        make_lr_multipliers(config).by_name(draw(0))


def test_gradients_of_a_block_are_stopped_by_name(config):
    config.optim.lr_multipliers = "encoder/blocks/(1|3)/.*=0,cls=0"
    freeze = make_lr_multipliers(config).freeze
    grads = jax.grad(lambda params: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(freeze(params))))(draw(0))
    assert grads["encoder"]["blocks"]["norm1"]["scale"][:, 0].tolist() == [1, 0, 1, 0, 1]
    assert not grads["cls"].any() and grads["head"]["kernel"].all()


@pytest.mark.parametrize(
    ("name", "frozen", "decay", "message"),
    [
        ("ViT-B/16", 13, 1.0, r"optim.frozen_blocks=13 must be at most 12, the blocks of ViT-B/16\."),
        (
            "ViT-B/16",
            12,
            0.75,
            r"optim.layer_decay=0.75 changes no rate while optim.frozen_blocks=12 freezes all blocks",
        ),
        ("BiT-R50x1", 0, 0.75, r"BiT-R50x1 has no encoder blocks: set .* stages set .*, as in root/\.\*=0,stage1"),
        ("BiT-R50x1", 1, 1.0, r"BiT-R50x1 has no encoder blocks: set optim.frozen_blocks=0"),
    ],
)
def test_blocks_that_are_not_there(config, name, frozen, decay, message):
    check_blocks(config.optim, create(name))
    config.optim.frozen_blocks, config.optim.layer_decay = frozen, decay
    with pytest.raises(UserError, match=message):
        check_blocks(config.optim, create(name))
