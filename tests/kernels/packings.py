"""How images lie in the rows of the attention kernels where vector memory is no limit."""

from vit_jax import kernels

NO_LIMIT = 2**40  # bytes of vector memory


def choose_packing(tokens, heads, images, division=kernels.NARROW):
    unlimited = division._replace(memory=NO_LIMIT)
    return kernels.choose_attention_shape(images, tokens, heads, head_dim=64, itemsize=4, division=unlimited).packing
