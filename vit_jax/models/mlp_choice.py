"""Which implementation of the MLP is the fastest on a kind of device."""

import jax.numpy as jnp

from vit_jax.kernels import MlpSizes, choose_step
from vit_jax.models.attention import choose_packing
from vit_jax.models.attention_choice import attention_sizes, choose_division
from vit_jax.models.part_specs import MlpKind
from vit_jax.models.spec import ModelSpec

# Beginning of the names of the kinds of device on which the kernel is faster. Cycles of a layer of B/16 with 128 images
# by schedule (libtpu 0.0.42, no chip), forward and backward, with LayerNorm and residual: v6e 2.26 million by the
# compiler, 1.55 by the kernel. On v5e the products take as long as the chip can do them either way. On v4 and v5p the
# kernel would use one of the two cores of a chip.
FUSED = ("TPU v6",)


def choose_mlp(device_kind: str, spec: ModelSpec, images: int, tensor: int = 1) -> MlpKind:
    """Returns the fastest implementation of a model's MLPs, `fused` or `jit`.

    Args:
        device_kind: the kind of device, as JAX names it.
        spec: the spec of the model, whose attention is chosen.
        images: the number of images that one device computes at a time, in one of the `accum_steps` parts of a batch.
        tensor: the number of devices over which the hidden channels are split.
    """
    if not device_kind.startswith(FUSED) or not spec.block.allows_fused_mlp or tensor > 1:
        return "jit"
    itemsize, grad_itemsize = (jnp.dtype(each).itemsize for each in (spec.dtype, spec.kernel_dtype))
    rows, memory = count_rows(device_kind, spec, images), choose_division(device_kind).memory
    sizes = MlpSizes(rows, spec.width, spec.mlp_dim, itemsize, grad_itemsize, memory)
    return "fused" if choose_step(sizes) else "jit"


def count_rows(device_kind: str, spec: ModelSpec, images: int) -> int:
    """Returns the rows in which the blocks of a model hold images on one device."""
    packing = choose_packing(spec.attention.kind, attention_sizes(spec, images), device_kind)
    return images // packing.images * packing.rows
