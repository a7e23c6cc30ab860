"""Each optimizer beside its authors' equations, written here in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import UserError, optim, tree
from vit_jax.config import OPTIMIZERS, check_config, check_resumes, resolve_config

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
    optimizer = optim.make_optimizer(config, optim.make_schedule(config), optim.make_lr_multipliers(config))
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


def of_each_layer(name, function, *leaves):
    """The function of arrays, or of each layer of stacked ones."""
    if not name.startswith("encoder/blocks/"):
        return function(*leaves)
    return np.stack([function(*layer) for layer in zip(*leaves, strict=True)])


def adam(memory, g, step, beta1, beta2, eps):
    m = memory["m"] = beta1 * memory.get("m", 0.0) + (1 - beta1) * g
    v = memory["v"] = beta2 * memory.get("v", 0.0) + (1 - beta2) * g**2
    return m / (1 - beta1**step) / (np.sqrt(v / (1 - beta2**step)) + eps)


@pytest.mark.parametrize("decays", ["kernels", "all"])
def test_lamb_follows_its_authors(config, decays):
    """You et al., arXiv 1904.00962, algorithm 2; arrays that do not decay are not adapted, as in the authors' code."""
    config.optim.name, config.optim.decays = "lamb", decays

    def update(name, w, g, step, memory):
        u = adam(memory, g, step, 0.9, 0.999, 1e-6)
        if decays == "kernels" and not name.endswith("kernel"):
            return w - RATE * u
        u = u + DECAY * w
        return w - RATE * of_each_layer(name, lambda w, u: np.linalg.norm(w) / np.linalg.norm(u) * u, w, u)

    compare(trained(config, SHAPES)[0], expected(SHAPES, update))


# Layers and heads enough to be mistaken for dimensions to factor; the bias has none of 32 by 32.
FACTORED = {
    "encoder/blocks/mlp/dense1/bias": (33, 40),
    "encoder/blocks/mlp/dense1/kernel": (33, 32, 40),
    "encoder/blocks/attention/qkv/kernel": (33, 48, 3, 2, 32),
    "head/kernel": (36, 10),
    "position": (32, 34),
}


def test_adafactor_follows_big_vision(config):
    """Zhai et al., arXiv 2106.04560, section 3.4, and big_vision's optax.py: scale_by_adafactor."""
    config.optim.name, config.optim.moment_dtype = "adafactor", "float32"

    def second_moment(name, g, step, memory):
        decay, square = min(0.999, 1 - step**-0.8), g**2 + 1e-30
        axes = np.argsort(g.shape, kind="stable")[-2:] if g.ndim > 1 else (0, 0)
        if min(g.shape[axis] for axis in axes) < 32 or g.ndim < 2:
            memory["v"] = decay * memory.get("v", 0.0) + (1 - decay) * square
            return memory["v"]
        small, large = (int(axis) for axis in axes)
        for key, axis in (("row", large), ("column", small)):
            memory[key] = decay * memory.get(key, 0.0) + (1 - decay) * square.mean(axis, keepdims=True)
        return memory["row"] / memory["row"].mean(small, keepdims=True) * memory["column"]

    def update(name, w, g, step, memory):
        layers = range(len(g)) if name.startswith("encoder/blocks/") else [...]
        v = [second_moment(name, g[layer], step, memory.setdefault(layer, {})) for layer in layers]
        u = g / np.sqrt(np.stack(v) if layers != [...] else v[0])
        memory["m"] = 0.9 * memory.get("m", 0.0) + 0.1 * u
        return w - RATE * (memory["m"] + decay_of(name) * w)

    found, state = trained(config, FACTORED)
    compare(found, expected(FACTORED, update))
    sizes = {name: leaf.size for name, leaf in tree.flatten(state).items() if "v_" in name or "/v/" in name}
    assert sum(size for name, size in sizes.items() if name.endswith("dense1/kernel")) == 33 * (32 + 40 + 1)


def test_muon_follows_its_authors(config):
    """Jordan et al., kellerjordan.github.io/posts/muon, with the scale of Liu et al., arXiv 2502.16982, equation 4."""
    shapes = {
        "encoder/blocks/attention/qkv/kernel": (2, 6, 3, 2, 4),
        "encoder/blocks/attention/out/kernel": (2, 2, 4, 6),
        "encoder/blocks/mlp/dense1/kernel": (2, 6, 9),
        "encoder/blocks/mlp/dense1/bias": (2, 9),
        "head/kernel": (6, 5),
    }
    matrices = {  # name -> to [matrix, inputs, outputs], and back
        "qkv/kernel": (
            lambda g: np.moveaxis(g, 2, 1).reshape(6, 6, 8),
            lambda o: np.moveaxis(o.reshape(2, 3, 6, 2, 4), 1, 2),
        ),
        "out/kernel": (lambda g: g.reshape(2, 8, 6), lambda o: o.reshape(2, 2, 4, 6)),
        "dense1/kernel": (lambda g: g, lambda o: o),
    }
    config.optim.name = "muon"

    def orthogonal(x):
        x = x / (np.linalg.norm(x) + 1e-8)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return 0.2 * np.sqrt(max(x.shape)) * x

    def update(name, w, g, step, memory):
        m = memory["m"] = 0.95 * memory.get("m", 0.0) + 0.05 * g
        ending = "/".join(name.split("/")[-2:])
        if ending in matrices:
            split, join = matrices[ending]
            u = join(
                np.stack(
                    [orthogonal(x) for x in split(0.95 * m / (1 - 0.95 ** (step + 1)) + 0.05 * g / (1 - 0.95**step))]
                )
            )
        else:  # Dozat's Nesterov form of Adam
            m = memory["n"] = 0.9 * memory.get("n", 0.0) + 0.1 * g
            v = memory["v"] = 0.999 * memory.get("v", 0.0) + 0.001 * g**2
            m = 0.9 * m / (1 - 0.9 ** (step + 1)) + 0.1 * g / (1 - 0.9**step)
            u = m / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        return w - RATE * (u + decay_of(name) * w)

    compare(trained(config, shapes)[0], expected(shapes, update), rtol=1e-3)


def test_schedule_free_adamw_follows_its_authors(config):
    """Defazio et al., arXiv 2405.15682, algorithm 1, whose weights are squares of the largest rate so far."""
    config.optim.name, config.optim.lr_multipliers = "schedule_free_adamw", "cls=0"

    def update(name, y, g, step, memory):
        rate = 0.0 if name == "cls" else RATE
        z, x, weight = memory.get("z", y), memory.get("x", y), RATE**2
        v = memory["v"] = 0.999 * memory.get("v", 0.0) + 0.001 * g**2
        z = memory["z"] = z - rate * (g / (np.sqrt(v / (1 - 0.999**step)) + 1e-8) + decay_of(name) * y)
        x = memory["x"] = x + (z - x) * weight / (weight * step)
        return 0.1 * z + 0.9 * x

    found, _ = trained(config, SHAPES)
    compare(found, expected(SHAPES, update))
    np.testing.assert_array_equal(found["cls"], np.float32(arrays(SHAPES, 0)["cls"]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fields_of_another_optimizer_are_refused(config, name):
    config.optim.name = name
    check_config(config)
    values = {"beta1": 0.5, "beta2": 0.5, "eps": 1e-6, "momentum": 0.9, "moment_dtype": "bfloat16"}
    for field, value in values.items():
        config.optim[field] = value
        if field in OPTIMIZERS[name].defaults:
            check_config(config)
        else:
            with pytest.raises(UserError, match=rf"optim.{field}={value} is not used by optim.name={name}, only by"):
                check_config(config)
        config.optim[field] = None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_keeps_the_numbers_that_the_state_contains(config, name):
    """The field of every number that `init` writes is refused, and those alone of an optimizer's own."""
    config.optim.name = name
    config = resolve_config(config)

    def state(config):
        params = tree.unflatten({name: jnp.ones(shape) for name, shape in SHAPES.items()})
        rate = optim.make_schedule(config)
        return optim.make_optimizer(config, rate, optim.UNSCALED).init(params)

    numbers = [field for field, value in OPTIMIZERS[name].defaults.items() if isinstance(value, float)]
    for field in numbers:
        changed = config.copy_and_resolve_references()
        changed.optim[field] *= 0.5
        one, other = jax.tree.leaves(state(config)), jax.tree.leaves(state(changed))
        if all(np.array_equal(*pair) for pair in zip(one, other, strict=True)):
            check_resumes(config, changed, "here")
        else:
            with pytest.raises(UserError, match=rf"other settings \(optim.{field}: {config.optim[field]} -> "):
                check_resumes(config, changed, "here")


def test_the_values_of_the_authors():
    """Those of the paper: appendix B.1 for Adam, section 4.1 for SGD."""
    assert OPTIMIZERS["adamw"].defaults == {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "moment_dtype": "float32"}
    assert OPTIMIZERS["sgd"].defaults == {"momentum": 0.9, "moment_dtype": "float32"}
