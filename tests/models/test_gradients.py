"""Gradients in bfloat16: of every parameter of two blocks, from float64."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import kernels, tree
from vit_jax.models import create

WIDTH, HEADS, LABELS = 128, 2, np.arange(4)
SHAPE = {"resolution": 64, "depth": 2, "width": WIDTH, "mlp_dim": 256, "num_heads": HEADS, "num_classes": 7}


def loss_of(logits):
    return -jax.nn.log_softmax(logits)[LABELS, LABELS].mean()


def plain_logits(params, images):
    """The logits of the model, as plain formulas in the dtype of the parameters."""

    def norm(x, p):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]

    def dense(x, p, inputs=1):
        return jnp.tensordot(x, p["kernel"], inputs) + p["bias"]

    def block(x, p):
        query, key, value = jnp.moveaxis(dense(norm(x, p["norm1"]), p["attention"]["qkv"]), 2, 0)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(WIDTH / HEADS))
        x = x + dense(jnp.einsum("bhqk,bkhd->bqhd", weights, value), p["attention"]["out"], 2)
        hidden = nn.gelu(dense(norm(x, p["norm2"]), p["mlp"]["dense1"]), approximate=True)
        return x + dense(hidden, p["mlp"]["dense2"])

    patches = images.reshape(-1, 8, 8, 8, 8, 3).swapaxes(2, 3).reshape(-1, 64, 8, 8, 3)
    patches = dense(patches, params["embed"], 3)
    x = jnp.concatenate([jnp.broadcast_to(params["cls"], (len(patches), 1, WIDTH)), patches], 1) + params["position"]
    for layer in range(2):
        x = block(x, jax.tree.map(lambda leaf: leaf[layer], params["encoder"]["blocks"]))
    return dense(norm(x, params["encoder"]["norm"])[:, 0], params["head"])


@pytest.fixture(scope="module")
def start():
    """Parameters, images, and the gradient in float64."""
    images = jax.random.uniform(jax.random.key(0), (4, 64, 64, 3), minval=-1, maxval=1)
    params = jax.jit(create("ViT-mu/8", **SHAPE).init)(jax.random.key(0), images)
    params["head"]["kernel"] += 0.02 * jax.random.normal(jax.random.key(1), (WIDTH, 7))
    with jax.enable_x64(True):
        wide, pixels = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (params, images))
        exact = jax.jit(jax.grad(lambda params: loss_of(plain_logits(params, pixels))))(wide)
        return params, images, {name: np.asarray(leaf) for name, leaf in tree.flatten(exact).items()}


def errors(start, **fields):
    """The relative error of the gradient of every parameter, through the attention kernel, and the gradient."""
    params, images, exact = start
    model = create("ViT-mu/8", **SHAPE, attention="fused", **fields)
    with kernels.interpret_kernels(), jax.default_matmul_precision("highest"):
        found = tree.flatten(jax.jit(jax.grad(lambda params: loss_of(model.apply(params, images)[0])))(params))
    norm = np.linalg.norm
    assert set(found) == set(exact) and {leaf.dtype for leaf in exact.values()} == {np.dtype("float64")}
    return {name: norm(found[name] - exact[name]) / norm(exact[name]) for name in exact}, found
