"""Schedules and optimizers, against their formulas."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import UserError, optim, tree
from vit_jax.config import FIELDS, resolve_config
from vit_jax.model import create, parameter_shapes
from vit_jax.models import add_adapters
from vit_jax.optim import make_lr_multipliers
from vit_jax.optim.optimizer import DECAYED


@pytest.fixture
def config(tiny):
    tiny.total_steps, tiny.warmup_steps, tiny.base_lr = 100, 10, 0.5
    tiny.grad_norm_clip = None
    return tiny


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cosine", lambda p, step: 0.25 * (1 + np.cos(np.pi * p))),
        ("linear", lambda p, step: 1e-5 + (0.5 - 1e-5) * (1 - p)),
        ("rsqrt", lambda p, step: 0.5 / np.sqrt((step + 20 - 10) / 20)),
        ("constant", lambda p, step: 0.5),
    ],
)
def test_schedules_follow_their_formulas(config, kind, expected):
    config.decay_type, config.rsqrt_timescale = kind, 20
    schedule = optim.make_schedule(config)
    for step in range(101):
        rate = expected((step - 10) / 90, step) if step >= 10 else schedule(10) * step / 10
        np.testing.assert_allclose(schedule(step), rate, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("total", "warmup", "decay_at", "ends"),
    [
        (500, 100, (0.4, 0.6, 0.8), (200, 300, 400)),
        (10_000, 500, (0.3, 0.6, 0.9), (3000, 6000, 9000)),
        (20_000, 500, (0.3, 0.6, 0.9), (6000, 12_000, 18_000)),
    ],
)
def test_the_rates_of_the_hyper_rule_fall_where_its_authors_have_it(config, total, warmup, decay_at, ends):
    """big_transfer, bit_hyperrule.py: divided by 10 for each of these steps that has passed."""
    config.decay_type, config.decay_at, config.total_steps, config.warmup_steps = "step", decay_at, total, warmup
    schedule = optim.make_schedule(config)
    for step in (0, 1, warmup - 1, warmup, *(end + after for end in ends for after in (-1, 0, 1)), total - 1):
        expected = 0.5 * min(1, step / warmup) * 0.1 ** sum(end < step for end in ends)
        np.testing.assert_allclose(schedule(step), expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["rsqrt", "constant"])
def test_cooldown_ends_at_zero(config, kind):
    config.decay_type, config.warmup_steps = kind, 0
    whole = optim.make_schedule(config)
    config.cooldown_steps = 20
    cooled = optim.make_schedule(config)
    for step in (0, 50, 80, 90, 99, 100):
        np.testing.assert_allclose(cooled(step), whole(step) * min(1, (100 - step) / 20), rtol=1e-6)


PARAMS = {"dense1": {"kernel": jnp.array([[2.0, -1.0]]), "bias": jnp.array([4.0])}, "cls": jnp.array([3.0])}
GRADS = {"dense1": {"kernel": jnp.array([[0.3, 0.4]]), "bias": jnp.array([0.0])}, "cls": jnp.array([-0.1])}


def make_optimizer(config):
    return optim.make_optimizer(config, optim.make_schedule(config), make_lr_multipliers(config))


def updated(config, steps=1, grads=GRADS):
    config = resolve_config(config)
    optimizer, params = make_optimizer(config), PARAMS
    state = optimizer.init(params)
    for _ in range(steps):
        changes, state = optimizer.update(grads, state, params)
        params = {
            "dense1": {key: params["dense1"][key] + changes["dense1"][key] for key in params["dense1"]},
            "cls": params["cls"] + changes["cls"],
        }
    return params


@pytest.mark.parametrize("decays", ["kernels", "all"])
@pytest.mark.parametrize(("factor", "amount"), [("rate", 0.5 * 0.1), ("schedule", 0.1)])
def test_weight_decay_is_decoupled(config, decays, factor, amount):
    config.decay_type, config.warmup_steps = "constant", 0
    config.optim.weight_decay, config.optim.decays, config.optim.decay_factor = 0.1, decays, factor
    params = updated(config)
    # Adam's first step is the gradient's sign times the rate.
    np.testing.assert_allclose(
        params["dense1"]["kernel"], PARAMS["dense1"]["kernel"] * (1 - amount) - 0.5, rtol=1e-5, atol=1e-5
    )
    bias = 4.0 * (1 - amount) if decays == "all" else 4.0
    np.testing.assert_allclose(params["dense1"]["bias"], bias, rtol=1e-6)
    np.testing.assert_allclose(params["cls"], 3.0 * (1 - amount if decays == "all" else 1) + 0.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ViT-mu/4", {"pooling": "map", "registers": 1, "qk_norm": True, "layer_scale": 0.1}),
        ("R+ViT-mu/16", {"stages": (1, 1, 1), "pre_logits": True, "activation": "swiglu"}),
        ("Axial-ViT-mu/4", {"pooling": "gap"}),
        ("BiT-R26x1", {"unit": "stand_alone", "root": "attention", "se_reduction": 16}),
        ("BiT-R26x1", {"unit": "augmented"}),
    ],
)
def test_every_projection_decays(name, fields):
    """What does not is a vector of each layer, or a table whose rows stand for tokens, offsets or mixtures."""
    model = create(name, **fields, resolution=32, num_classes=3)
    params, key = parameter_shapes(model), jax.random.key(0)
    if "BiT" not in name:  # whose kernels have no adapters
        params = jax.eval_shape(lambda params: add_adapters(params, 1, 1.0, "attention,mlp", key), params)
    decayed = tree.flatten(DECAYED["kernels"](params))
    kept = {name.rpartition("/")[2] for name, decays in decayed.items() if not decays}
    table = "cls|probe|registers|position.*|relative_(line|rows|columns)|mixture_.*"
    assert not [name for name in kept if not re.fullmatch(f"bias|scale|layer_scale[12]|{table}", name)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "rsqrt", "constant"])
@pytest.mark.parametrize("factor", ["rate", "schedule"])
def test_a_rate_of_zero_leaves_the_decay_by_schedule(config, kind, factor):
    config.base_lr, config.decay_type, config.linear_end, config.warmup_steps = 0.0, kind, 0.0, 2
    config.optim.weight_decay, config.optim.decays, config.optim.decay_factor = 0.1, "all", factor
    decayed = updated(config, 4)
    config.base_lr = 1.0
    schedule = optim.make_schedule(config)
    expected = np.prod([1 - 0.1 * schedule(step) for step in range(4)]) if factor == "schedule" else 1.0
    assert factor == "rate" or expected < 0.8
    chex.assert_trees_all_close(decayed, jax.tree.map(lambda leaf: leaf * expected, PARAMS), rtol=1e-6)
    config.base_lr, config.linear_end = 0.0, 1e-5
    assert optim.make_schedule(config)(50) == 0


def test_momentum_and_clipping(config):
    config.decay_type, config.warmup_steps, config.optim.weight_decay = "constant", 0, 0.0
    config.optim.name = "sgd"
    np.testing.assert_allclose(updated(config, 2)["cls"], 3 + 0.5 * (0.1 + 0.1 * 1.9), rtol=1e-6)
    config.grad_norm_clip = 0.1
    norm = np.sqrt(0.3**2 + 0.4**2 + 0.1**2)
    np.testing.assert_allclose(updated(config)["cls"], 3 + 0.5 * 0.1 * 0.1 / norm, rtol=1e-6)
    for no_clipping in (0.0, None):  # as the meaning of the field says
        config.grad_norm_clip = no_clipping
        np.testing.assert_allclose(updated(config)["cls"], 3 + 0.5 * 0.1, rtol=1e-6)
    assert "unset or 0: no clipping" in FIELDS["grad_norm_clip"].meaning


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_the_first_moment_may_be_kept_in_half_precision(config, name):
    config.optim.name, config.optim.moment_dtype = name, "bfloat16"
    config = resolve_config(config)
    state = make_optimizer(config).init(PARAMS)
    assert jnp.dtype("bfloat16") in {leaf.dtype for leaf in jax.tree.leaves(state)}


@pytest.mark.parametrize("factor", ["rate", "schedule"])
def test_lr_multipliers_by_name(config, factor):
    config.decay_type, config.warmup_steps = "constant", 0
    config.optim.weight_decay, config.optim.decays, config.optim.decay_factor = 0.1, "all", factor
    plain = updated(config)
    config.optim.lr_multipliers = "dense1/bias=0,dense1/.*=0.25"  # the first that matches counts
    params = updated(config)
    np.testing.assert_array_equal(params["dense1"]["bias"], PARAMS["dense1"]["bias"])
    before = PARAMS["dense1"]["kernel"]
    np.testing.assert_allclose(params["dense1"]["kernel"] - before, 0.25 * (plain["dense1"]["kernel"] - before), 1e-5)
    np.testing.assert_array_equal(params["cls"], plain["cls"])


@pytest.mark.parametrize("text", ["head", "head=x", "=3", "(=1", "head=-1", "head=nan", "head=inf"])
def test_lr_multipliers_that_cannot_be_parsed(config, text):
    config.optim.lr_multipliers = text
    with pytest.raises(UserError, match=r"cannot parse .* in optim.lr_multipliers; write pairs such as head/"):
        make_lr_multipliers(resolve_config(config))


def test_a_pattern_that_matches_nothing(config):
    params = {"cls": jnp.zeros(1), "head": {"bias": jnp.zeros(1)}}
    config.optim.lr_multipliers = "cls=0,haed/.*=1"
    with pytest.raises(UserError, match=r"no parameter matches 'haed/\.\*'; the parameters are cls, head/bias"):
        make_lr_multipliers(config).by_name(params)
    config.optim.lr_multipliers = "cls=0"
    assert make_lr_multipliers(config).by_name(params) == {"cls": 0.0, "head/bias": 1.0}
