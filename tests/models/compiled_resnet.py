"""Compiles a unit of a ResNet and its gradient for an absent TPU slice, as for training.

python -m tests.models.compiled_resnet TOPOLOGY
"""

import os
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax import sharding
from vit_jax.models.resnet import Unit
from vit_jax.planning import targets


def compile_unit(device):
    """Compiles a unit with a stride, as the first one of a stage has, for eight images."""
    mesh = Mesh(np.reshape([device], [1] * len(sharding.AXES)), sharding.AXES)
    unit, shape = Unit(width=128, stride=2), (8, 56, 56, 256)

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    x = array(shape, "bfloat16")
    params = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), jax.eval_shape(unit.init, jax.random.key(0), x))

    def run(params, x):
        with sharding.use_mesh(mesh):
            return jax.grad(lambda params, x: unit.apply(params, x).astype("float32").sum(), (0, 1))(params, x)

    jax.jit(run).lower(params, x).compile()


if __name__ == "__main__":
    os.environ.update(targets.NO_POD)
    compile_unit(targets.find_devices(sys.argv[1], 1)[0])
