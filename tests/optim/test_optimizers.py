"""Each optimizer in a run: on any mesh, stopped and resumed, with a bad batch; and what is evaluated."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import smoke
from tests.test_program import batches, build, losses
from vit_jax import UserError, checkpoint, load, optim, train, tree
from vit_jax.config import OPTIMIZERS, check_config, resolve_config
from vit_jax.optim import Sharpness, make_sharpness
from vit_jax.planning import run_exaflops

KINDS = {name: {"name": name} for name in OPTIMIZERS if name not in ("adamw", "sgd")}
KINDS |= {"sam": {"name": "sgd", "sam_rho": 0.05}, "gsam": {"name": "adamw", "sam_rho": 0.1, "sam_alpha": 0.3}}
KINDS["gsam"]["sam_rho_min"] = 0.02
RATES = {"lion": 1e-3, "sam": 0.1}


def choose(config, kind):
    config.optim.update(KINDS[kind])
    config.base_lr = RATES.get(kind, 1e-2)
    config.optim.ema_decay, config.task.mixup, config.task.label_smoothing = 0.0, 0.0, 0.0
    config.model.depth, config.model.dropout_rate, config.model.stochastic_depth = 2, 0.0, 0.0
    return config


def two_layers(params, images):
    return jnp.tanh(images @ params["a"]) @ params["b"]


@jax.jit
def toy_loss_and_grads(params):
    images = jnp.asarray(np.random.default_rng(1).normal(size=(8, 3)), jnp.float32)
    return jax.value_and_grad(lambda params: jnp.square(two_layers(params, images) - 1).mean())(params)


def toy_params():
    random = np.random.default_rng(0)
    return {"a": jnp.float32(random.normal(size=(3, 4))), "b": jnp.float32(random.normal(size=(4, 1)))}


def test_sam_is_that_of_optax():
    optimizer = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    sam = optax.contrib.sam(optax.sgd(0.3), optimizer, opaque_mode=True)
    params = toy_params()
    state, ours, sharpness = sam.init(params), params, Sharpness(lambda step: 0.1, 0.0)
    for step in range(20):
        grads = toy_loss_and_grads(params)[1]
        updates, state = sam.update(grads, state, params, grad_fn=lambda params, _: toy_loss_and_grads(params)[1])
        params = optax.apply_updates(params, updates)
        loss, grads = sharpness(toy_loss_and_grads, ours, step)
        assert loss == toy_loss_and_grads(ours)[0]
        ours = jax.tree.map(lambda p, g: p - 0.3 * g, ours, grads)
    chex.assert_trees_all_close(ours, params, rtol=1e-5)


def test_gsam_follows_its_authors(tiny):
    """Zhuang et al., arXiv 2203.08065, algorithm 1, on the gradients of this package."""
    tiny.optim.sam_rho, tiny.optim.sam_rho_min, tiny.optim.sam_alpha = 0.6, 0.1, 0.4
    tiny.warmup_steps, tiny.base_lr = 0, 0.01
    config = resolve_config(tiny)
    rate = optim.make_schedule(config)
    sharpness, params = make_sharpness(config, rate.relative), toy_params()

    def flat(tree):
        return np.concatenate([np.float64(leaf).ravel() for leaf in jax.tree.leaves(tree)])

    for step in (0, 5, 9):
        g = toy_loss_and_grads(params)[1]
        rho = 0.1 + (0.6 - 0.1) * float(rate(step)) / 0.01
        length = rho / np.linalg.norm(flat(g))
        moved = {name: params[name] + length * g[name] for name in params}
        sharp = flat(toy_loss_and_grads(moved)[1])
        unit = sharp / np.linalg.norm(sharp)
        wanted = sharp - 0.4 * (flat(g) - flat(g) @ unit * unit)
        np.testing.assert_allclose(flat(sharpness(toy_loss_and_grads, params, step)[1]), wanted, rtol=1e-4, atol=1e-6)


def test_both_passes_of_sam_count(tiny):
    one = run_exaflops(tiny)
    tiny.optim.sam_rho = 0.05
    assert run_exaflops(tiny) == 2 * one


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": "lamb", "decay_factor": "schedule"}, "lamb scales the weight decay together with the update; set "),
        ({"name": "schedule_free_adamw", "ema_decay": 0.9}, "already averages the parameters that are evaluated"),
        ({"name": "schedule_free_adamw", "beta1": 0.0, "ema_decay": 0.0}, "by optim.beta1, which must be above 0; set"),
        ({"sam_alpha": 0.1}, "optim.sam_alpha and optim.sam_rho_min need optim.sam_rho above 0; set"),
        ({"sam_rho": 0.1, "sam_rho_min": 0.2}, r"optim.sam_rho_min=0.2 must be at most optim.sam_rho=0.1"),
    ],
)
def test_fields_that_contradict_each_other(tiny, fields, sentence):
    tiny.optim.update(fields)
    with pytest.raises(UserError, match=sentence):
        check_config(tiny)


def test_the_factored_moment_is_split_as_its_parameter(tiny):
    tiny.model.width, tiny.model.mlp_dim, tiny.model.num_heads = 64, 128, 2
    tiny.mesh.data, tiny.mesh.fsdp, tiny.mesh.tensor = 2, 2, 2
    program = build(choose(tiny, "adafactor"), devices=8)
    leaves, places = tree.flatten(program.state.opt_state), tree.flatten(program.state_shardings.opt_state)
    ending = "encoder/blocks/mlp/dense1/kernel"  # [2, 64, 128]
    [row], [column] = (
        [name for name in leaves if f"/{key}/" in name and name.endswith(ending)] for key in ("v_row", "v_col")
    )
    assert (leaves[row].shape, places[row].shard_shape((2, 64))) == ((2, 64), (2, 32))
    assert (leaves[column].shape, places[column].shard_shape((2, 128))) == ((2, 128), (2, 64))


# The orthogonalisation and the signs of small values turn rounding into differences.
TOLERANCES = {"muon": 2e-2, "lion": 2e-2, "gsam": 5e-3}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_trains_as_one_device(tiny, kind):
    tiny.accum_steps = 2
    config = choose(tiny, kind)
    one, _ = losses(build(config))
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 2, 2, 2
    eight, state = losses(build(config, devices=8))
    np.testing.assert_allclose(eight, one, rtol=TOLERANCES.get(kind, 1e-3))
    assert np.ptp(eight) > 0.05
    chex.assert_tree_all_finite(state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_batch_changes_nothing_but_the_counters(tiny, kind):
    program = build(choose(tiny, kind))
    good, bad = batches(program, 2)
    bad = bad | {"image": bad["image"].at[3].set(jnp.nan)}
    state, _ = program.train_step(program.init(jax.random.key(0), {}), good)
    before = tree.flatten(jax.device_get(state))
    state, metrics = program.train_step(state, bad)
    assert metrics["train/skips"] == 1
    after = tree.flatten(jax.device_get(state))
    changed = {name for name, leaf in after.items() if np.any(leaf != before[name])}
    assert {name for name in changed if not name.endswith("count")} == {"step", "skips"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adafactor", "muon", "schedule_free_adamw", "gsam"])
def test_a_stopped_run_ends_bitwise_as_a_whole_one(kind, tmp_path):
    """The states of these optimizers have forms of their own; those of the others are trees like AdamW's or SGD's."""

    def stop(step, metrics):
        if step == 4:
            raise KeyboardInterrupt

    config = choose(smoke.get_config(), kind)
    config.mesh.data, config.mesh.fsdp = 4, 2
    config.total_steps = config.eval_every = 6
    config.log_every, config.checkpoint_every = 1, 2
    train.train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train.train(config, tmp_path / "stopped", stop)
    train.train(config, tmp_path / "stopped")
    whole, stopped = (np.load(tmp_path / name / "model.npz") for name in ("whole", "stopped"))
    assert set(whole) == set(stopped) and all((whole[name] == stopped[name]).all() for name in whole)
    weights, _ = checkpoint.read_weights(tmp_path / "whole/checkpoints/6")  # what was evaluated is what is exported
    exported = tree.flatten(load(tmp_path / "whole/model.npz")[1])
    chex.assert_trees_all_close(tree.flatten(weights), exported, rtol=1e-6, atol=1e-7)
    other = choose(smoke.get_config(), "lamb" if kind != "lamb" else "lion")
    with pytest.raises(UserError, match="contains a run with other settings"):
        train.train(other, tmp_path / "whole")
