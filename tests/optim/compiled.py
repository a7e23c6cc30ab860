"""Compiles AdamW's update, with all metrics of a step, for absent TPUs; prints as JSON the bytes moved per parameter.

python -m tests.optim.compiled TOPOLOGY...
"""

import json
import os
import sys

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from configs import base
from vit_jax import optim, step, tree
from vit_jax.planning import targets

SHAPES = {"dense1": (24, 1024, 4096), "dense2": (24, 4096, 1024)}  # the MLPs of L/16


def bytes_per_parameter(topology, ema_decay):
    place = SingleDeviceSharding(targets.find_devices(topology, 1)[0])
    config = base.get_config()
    config.optim.beta1, config.optim.beta2, config.optim.eps = 0.9, 0.999, 1e-8
    config.optim.weight_decay, config.optim.moment_dtype, config.grad_norm_clip = 1e-4, "bfloat16", 1.0
    config.total_steps, config.warmup_steps = 100, 10
    schedule = optim.make_schedule(config)
    optimizer = optim.make_optimizer(config, schedule, optim.UNSCALED)
    update = step.TrainStep(None, None, optimizer, schedule, 0, accum_steps=1, ema_decay=ema_decay)

    def run(state, loss, grads):
        grads = jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
        return update.apply_grads(state, state.params, loss, grads)

    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    grads = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in SHAPES.items()}  # after the exchange
    shapes = jax.eval_shape(update.init, params), jax.ShapeDtypeStruct((), jnp.float32), grads
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
    analysis = jax.jit(run, donate_argnums=0).lower(*arguments).compile().cost_analysis()
    return analysis["bytes accessed"] / tree.count(params)


if __name__ == "__main__":
    os.environ.update(targets.NO_POD)
    print(json.dumps({each: [bytes_per_parameter(each, decay) for decay in (0.0, 0.9)] for each in sys.argv[1:]}))
