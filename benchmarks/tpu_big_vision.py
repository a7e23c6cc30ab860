"""big_vision's training step, built from a checkout of its code, for `benchmarks.tpu`.

big_vision's trainer defines the step inside its `main`, so the step is put together here from its model, loss,
optimizer and the norms that it logs. Everything but the batch is replicated on all devices, as in big_vision's recipes.
"""

import sys
import types
from typing import Any

import flax.io  # noqa: F401  (looks for the real modules of UNUSED)
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.planning.compiler import Function

UNUSED = ("tensorflow", "tensorflow.io", "tensorflow.io.gfile")
POOLINGS = {"gap": "gap", "token": "tok"}


class Traced:
    """A jitted function that is traced under a mesh, with big_vision's logical name of the batch axes."""

    def __init__(self, jitted: Any, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self.jitted, self.mesh, self.rules = jitted, mesh, (("act_batch", axes),)

    def trace(self, *args: Any) -> Any:
        with self.mesh, nn.logical_axis_rules(self.rules):
            return self.jitted.trace(*args)


def train_step(checkout: str, variant: str, mesh: Mesh, config: ml_collections.ConfigDict, pooling: str) -> Function:
    """Returns big_vision's step on a mesh, with the batch, resolution, schedule and decay of our configuration.

    Args:
        checkout: the folder of big_vision's code.
        variant: the model, such as `B/16`.
        mesh: the mesh over which the batch is split.
        config: our configuration.
        pooling: the pooling by our name, a key of `POOLINGS`.
    """
    sys.path.insert(0, checkout)
    for name in UNUSED:  # big_vision imports them to read and write files, which does not happen here
        sys.modules.setdefault(name, types.ModuleType(name))
    from big_vision import optax as optimizers
    from big_vision import utils
    from big_vision.models import vit

    classes = config.data.num_classes
    model = vit.Model(
        classes, variant=variant, pool_type=POOLINGS[pooling], posemb="learn", dtype_mm="bfloat16", scan=False
    )
    settings = ml_collections.ConfigDict(
        {
            "optax_name": "scale_by_adam",
            "optax": {"mu_dtype": config.optim.moment_dtype},
            "lr": 1e-3,
            "wd": config.optim.weight_decay,
            "grad_clip_norm": config.grad_norm_clip,
            "schedule": {"warmup_steps": config.warmup_steps, "decay_type": "cosine"},
        }
    )
    image = jax.ShapeDtypeStruct((config.batch, config.resolution, config.resolution, 3), jnp.float32)
    few = jnp.zeros((2, *image.shape[1:]))
    params = jax.eval_shape(lambda: model.init(jax.random.PRNGKey(0), few))["params"]
    times = {"total_steps": config.total_steps, "batch_size": config.batch, "data_size": config.data.num_examples}
    optimizer, _ = optimizers.make(settings, params, sched_kw=times)

    def norm(arrays: Any) -> jax.Array:
        return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(arrays)))

    def step(state: Any, key: jax.Array, images: jax.Array, labels: jax.Array) -> Any:
        key = jax.random.fold_in(key, optimizers.get_count(state["opt"], jittable=True))

        def loss_of(params: Any) -> jax.Array:
            logits, _ = model.apply({"params": params}, images, train=True, rngs={"dropout": key})
            return utils.sigmoid_xent(logits=logits, labels=labels)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, (loss, norm(grads), norm(params), norm(updates))

    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1)
    whole, divided = NamedSharding(mesh, P()), NamedSharding(mesh, P(axes))
    state = {"params": params, "opt": jax.eval_shape(optimizer.init, params)}
    key = jax.ShapeDtypeStruct((2,), "uint32")
    labels = jax.ShapeDtypeStruct((config.batch, classes), jnp.float32)
    shardings = jax.tree.map(lambda _: whole, state)
    jitted = jax.jit(
        step,
        in_shardings=(shardings, whole, divided, divided),
        out_shardings=(shardings, whole),
        donate_argnums=0,
    )
    return Function(Traced(jitted, mesh, axes), (state, key, image, labels), shardings, {})
