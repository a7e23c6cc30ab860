"""Compiles attention and its gradient for an absent TPU slice; prints as JSON what the programs contain.

python -m tests.kernels.compiled TOPOLOGY CASE...

A case is a name in `PROGRAMS`, the sizes `batch,tokens,heads,head_dim,dtype` of a call on one device, or the form of a
model on one device: `<name of the model> <images> <fields as JSON>`.
"""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from vit_jax import kernels, sharding
from vit_jax.execution import AttentionSizes, choose_packing
from vit_jax.model import create, parameter_shapes
from vit_jax.planning import collectives, hlo, targets


def array(sharding, dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def gradient(packing, heads):
    def loss(projected, bias):
        return kernels.fused_attention(projected, bias, packing, heads).astype(jnp.float32).sum()

    return jax.value_and_grad(loss, argnums=(0, 1))


def one_device(devices, batch, tokens, heads, head_dim, dtype):
    here, wide = SingleDeviceSharding(devices[0]), 3 * heads * head_dim
    sizes = AttentionSizes(batch, tokens, heads, head_dim, dtype)
    packing = choose_packing("fused", sizes, devices[0].device_kind)
    projected = array(here, dtype, batch // packing.images, packing.rows, wide)
    return jax.jit(gradient(packing, heads)), projected, array(here, "float32", wide)


def sharded_arrays(devices):
    """Without a mesh in the program: the arrays say where they are."""
    mesh = Mesh(devices, ("batch",))
    arrays = (
        array(NamedSharding(mesh, P("batch")), "bfloat16", 8, 56, 384),
        array(NamedSharding(mesh, P()), "float32", 384),
    )
    return jax.jit(gradient(kernels.Packing(50, 1, 56), 2)), *arrays


def mapped(devices):
    _, projected, bias = one_device(devices, 8, 48, 2, 64, "bfloat16")
    alone = kernels.Packing(48, 1, 48)
    return jax.jit(jax.vmap(lambda x, bias: gradient(alone, 2)(x[None], bias), (0, None))), projected, bias


def block(devices, batch=16, fields=(), **axes):
    """A model of one block on a mesh: 65 tokens, four images in 264 rows; activations are larger than any parameter."""
    sizes = {"width": 128, "mlp_dim": 256, "num_heads": 2, "num_classes": 8, "resolution": 32}
    return on_mesh(devices, "ViT/4", batch, axes, attention="fused", **sizes, **dict(fields))


def on_mesh(devices, name, batch, axes, **fields):
    """A model of one block, with its gradient."""
    mesh = Mesh(np.reshape(devices, [axes.get(axis, 1) for axis in sharding.AXES]), sharding.AXES)
    model = create(name, dtype="bfloat16", depth=1, **fields).for_device(devices[0].device_kind, batch)
    rows = sharding.batch_sharding(mesh) if batch % mesh.size == 0 else NamedSharding(mesh, P())
    images = array(rows, "float32", batch, *model.image_size, 3)
    params = parameter_shapes(model)
    places = sharding.state_shardings(params, mesh)
    params = jax.tree.map(lambda x, place: array(place, x.dtype, *x.shape), params, places)

    def run(params, images):
        with sharding.use_mesh(mesh):
            return jax.value_and_grad(lambda params: (model.apply(params, images)[0] ** 2).sum())(params)

    return jax.jit(run, out_shardings=(None, places)), params, images


PROGRAMS = {
    "mlp in a block": lambda devices: block(devices, 64, fields={"mlp": "fused"}, data=2, fsdp=2),
    "mlp over tensor": lambda devices: block(devices, 64, fields={"mlp": "fused"}, data=2, tensor=2),
    "sharded arrays": sharded_arrays,
    "vmap": mapped,
    "data": lambda devices: block(devices, data=4),
    "undivided": lambda devices: block(devices, batch=6, data=4),
    "fsdp, tensor": lambda devices: block(devices, fsdp=2, tensor=2),
    "changed": lambda devices: block(devices, fields={"qk_norm": True, "rotary": "axial"}, fsdp=2, tensor=2),
    "relative": lambda devices: block(
        devices, fields={"position": "relative", "relative_tables": "head"}, fsdp=2, tensor=2
    ),
    "slices": lambda devices: block(devices, slice=2, data=2, fsdp=2),
}


def facts(devices, case):
    """How many kernels a program contains, and by kind of collective the bytes of the largest array."""
    sizes, form = case.split(","), case.split(maxsplit=2)
    if case in PROGRAMS:
        function, *arguments = PROGRAMS[case](devices)
    elif len(form) == 3:
        function, *arguments = on_mesh(devices[:1], form[0], int(form[1]), {}, **json.loads(form[2]))
    else:
        function, *arguments = one_device(devices, *map(int, sizes[:-1]), sizes[-1])
    text = function.lower(*arguments).compile().as_text()
    found = {"kernels": sum(each.is_kernel for each in hlo.read_instructions(text))}
    for each in collectives.read_collectives(text):
        found[each.kind] = max(each.bytes, found.get(each.kind, 0))
    return found


if __name__ == "__main__":
    os.environ.update(targets.NO_POD)
    _, topology, *cases = sys.argv
    slices = 2 if "slices" in cases else 1
    devices = targets.find_devices(topology, slices)
    print(json.dumps({case: facts(devices, case) for case in cases}))
