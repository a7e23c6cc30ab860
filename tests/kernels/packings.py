"""How images lie in the rows of the attention kernels where vector memory is no limit."""

from vit_jax import kernels

LARGE = 128 * 2**20  # bytes of vector memory


def choose_packing(tokens, heads, images, division=kernels.NARROW):
    large = division._replace(memory=LARGE)
    return kernels.choose_shape(images, tokens, heads, head_dim=64, itemsize=4, division=large).packing
