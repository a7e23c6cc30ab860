"""Each optimizer beside its authors' equations, written here in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import UserError, optim, tree
from vit_jax.config import OPTIMIZERS, check_config, resolve_config

RATE, DECAY, STEPS = 0.05, 0.1, 20
SHAPES = {
    "cls": (6,),
    "encoder/blocks/mlp/dense1/bias": (2, 9),
    "encoder/blocks/mlp/dense1/kernel": (2, 6, 9),
}


@pytest.fixture
def config(tiny):
    tiny.total_steps, tiny.warmup_steps, tiny.base_lr, tiny.decay_type = 100, 0, RATE, "constant"
    tiny.grad_norm_clip, tiny.optim.weight_decay, tiny.optim.ema_decay = None, DECAY, 0.0
    return tiny


def arrays(shapes, seed):
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape) for name, shape in shapes.items()}


def trained(config, shapes):
    """Parameters after 20 steps on random gradients, and the state of the optimizer."""
    config = resolve_config(config)
    optimizer = optim.make_optimizer(config, optim.make_schedule(config))
    params = tree.unflatten({name: jnp.float32(leaf) for name, leaf in arrays(shapes, 0).items()})
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(1, STEPS + 1):
        grads = tree.unflatten({name: jnp.float32(leaf) for name, leaf in arrays(shapes, step).items()})
        changes, state = update(grads, state, params)
        params = jax.tree.map(jnp.add, params, changes)
    return tree.flatten(params), state


def expected(shapes, update):
    """The same in float64 by `update(name, array, gradient, step, memory)`; `memory` starts empty for each array."""
    params, memory = arrays(shapes, 0), {name: {} for name in shapes}
    for step in range(1, STEPS + 1):
        grads = arrays(shapes, step)
        params = {name: update(name, params[name], grads[name], step, memory[name]) for name in shapes}
    return params


def decay_of(name):
    return DECAY if name.endswith("kernel") else 0.0


def compare(found, wanted, rtol=2e-5):
    for name, leaf in wanted.items():
        np.testing.assert_allclose(found[name], leaf, rtol=rtol, atol=rtol, err_msg=name)


def test_lion_follows_its_authors(config):
    """Chen et al., arXiv 2302.06675, algorithm 2."""
    config.optim.name = "lion"

    def update(name, w, g, step, memory):
        m = memory.get("m", 0.0)
        memory["m"] = 0.99 * m + 0.01 * g
        return w - RATE * (np.sign(0.9 * m + 0.1 * g) + decay_of(name) * w)

    compare(trained(config, SHAPES)[0], expected(SHAPES, update))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fields_of_another_optimizer_are_refused(config, name):
    config.optim.name = name
    check_config(config)
    values = {"beta1": 0.5, "beta2": 0.5, "eps": 1e-6, "momentum": 0.9, "moment_dtype": "bfloat16"}
    for field, value in values.items():
        config.optim[field] = value
        if field in OPTIMIZERS[name]:
            check_config(config)
        else:
            with pytest.raises(UserError, match=rf"optim.{field}={value} is a field of .*, and {name} has none; leave"):
                check_config(config)
        config.optim[field] = None


def test_the_values_of_the_authors():
    """Those of the paper (appendix B.1) for Adam and SGD, of algorithm 2 for Lion."""
    assert OPTIMIZERS["adamw"] == {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "moment_dtype": "float32"}
    assert OPTIMIZERS["sgd"] == {"momentum": 0.9, "moment_dtype": "float32"}
    assert OPTIMIZERS["lion"] == {"beta1": 0.9, "beta2": 0.99, "moment_dtype": "float32"}
