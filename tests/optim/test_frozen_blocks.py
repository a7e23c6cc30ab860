"""Training with frozen blocks: what stays, what is learnt, and what it costs, on any mesh."""

import chex
import jax
import numpy as np
import pytest

from tests.test_program import batches, build
from vit_jax import UserError, tree
from vit_jax.training import run_summary

BY_NAME = "encoder/blocks/[01]/.*=0,encoder/blocks/.*=1,encoder/norm/.*=1,head/.*=1,.*=0"


@pytest.fixture
def config(tiny):
    tiny.optim.name = "sgd"  # AdamW enlarges rounding where a gradient is 0, as that of the keys' bias
    tiny.model.depth, tiny.optim.frozen_blocks, tiny.optim.layer_decay = 3, 2, 0.5
    return tiny


def trained(config, devices=1, steps=3):
    """The program, and its states at the start and after some steps."""
    program = build(config, devices)
    given = np.random.default_rng(1).normal(size=(32, 10))
    state = program.init(jax.random.key(0), {"head/kernel": given.astype(np.float32)})  # else one step has no gradient
    before = jax.device_get(state)
    for batch in batches(program, steps):
        state, _ = program.train_step(state, batch)
    return program, before, jax.device_get(state)


def test_the_state_of_trained_blocks_is_split_as_all_blocks_are(config):
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 2, 2, 2
    program = build(config, devices=8)
    places = {name: place.spec for name, place in tree.flatten(program.state_shardings).items()}
    names = [name for name in places if name.startswith("opt_state") and "encoder/blocks/" in name]
    moments = {name: "params/encoder/blocks/" + name.partition("encoder/blocks/")[2] for name in names}
    assert moments and all(places[name] == places[parameter] for name, parameter in moments.items())
    assert any("fsdp" in places[name] for name in names) and any("tensor" in places[name] for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_frozen_blocks_stay_and_the_others_learn_as_if_frozen_by_name(config, scan):
    config.model.scan = scan
    config.optim.layer_decay = 1.0
    program, before, after = trained(config)
    for kept in (after.params, after.ema):
        for name, leaf in tree.flatten(kept).items():
            now, then = (x[:2] if "blocks" in name else x for x in (leaf, tree.flatten(before.params)[name]))
            frozen = "blocks" in name or name.split("/")[0] not in ("encoder", "head")
            assert np.array_equal(now, then) == frozen, name
            assert "blocks" not in name or not np.array_equal(leaf[2], tree.flatten(before.params)[name][2])
    config.optim.frozen_blocks, config.optim.lr_multipliers = 0, BY_NAME
    whole, _, by_name = trained(config)
    chex.assert_trees_all_close(after.params, by_name.params, rtol=1e-5, atol=1e-6)
    assert tree.count(program.state.opt_state) < 0.4 * tree.count(whole.state.opt_state)
    flops = [step.train_step.lower(step.state, step.batch).cost_analysis()["flops"] for step in (program, whole)]
    assert scan or flops[0] < 0.65 * flops[1]


@pytest.mark.slow
def test_a_mesh_and_parts_of_the_batch_change_nothing(config):
    config.model.dropout_rate = config.model.stochastic_depth = config.grad_norm_clip = 0.0
    config.accum_steps = 2
    _, _, one = trained(config)
    config.mesh.fsdp, config.mesh.tensor = 2, 2
    program, _, eight = trained(config, devices=8)
    chex.assert_trees_all_close(one.params, eight.params, rtol=1e-4, atol=1e-5)
    table = {line.split()[0]: line.split("  ")[-1].strip() for line in run_summary.parameter_table(program)}
    assert table["encoder/blocks/norm1/scale"] == "rate x 0.5, 2 of 3 blocks frozen, split over fsdp"
    assert table["cls"] == "frozen, split over fsdp" and table["head/bias"] == "10"


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_all_blocks_may_be_frozen(config, scan):
    config.model.scan, config.optim.frozen_blocks, config.optim.layer_decay = scan, 3, 1.0
    _, before, after = trained(config, steps=2)
    changed = {
        name for name, leaf in tree.flatten(after.params).items() if (leaf != tree.flatten(before.params)[name]).any()
    }
    assert changed == {"encoder/norm/bias", "encoder/norm/scale", "head/bias", "head/kernel"}


def test_blocks_that_a_model_lacks_are_refused_before_anything_is_compiled(config):
    config.optim.frozen_blocks = 4
    with pytest.raises(UserError, match=r"optim.frozen_blocks=4 must be at most 3, the blocks of ViT-mu/4\."):
        build(config)
