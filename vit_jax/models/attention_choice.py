"""Which implementation of attention is the fastest: one table by kind of device, with a condition on the sizes."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from vit_jax import kernels
from vit_jax.models.part_specs import AttentionKind, Dtype
from vit_jax.models.spec import ModelSpec


class AttentionSizes(NamedTuple):
    """The sizes of the attention on one device, on which the choice depends."""

    images: int  # computed at a time, in one of the `accum_steps` parts of a batch
    tokens: int  # of an image
    heads: int
    head_dim: int
    dtype: Dtype
    change: kernels.QKChange | None = None  # of queries and keys, after their projection
    relative: kernels.RelativeKind | None = None  # the relative positions that the TPU kernel computes
    unsupported_scores: bool = False  # whether something is added to the scores that the TPU kernel does not compute


def _suits_cudnn(sizes: AttentionSizes) -> bool:
    added = sizes.unsupported_scores or sizes.relative is not None
    return not added and sizes.dtype == "bfloat16" and sizes.head_dim % 8 == 0 and sizes.head_dim <= 128


# Beginning of the kind of device -> how the kernel divides its work there; the first row that applies. The last row is
# of v4, whose cores have the least vector memory, and of devices that are not known. Larger steps need more of it. The
# matrix units of v6e have 256 columns, those of the others 128. Cycles of a layer, forward and backward, by schedule
# (libtpu 0.0.42, no chip), with 1,300 registers and 128 queries, and as below: B/16, 128 images, on v5e 0.940 and 0.899
# million, on v5p 0.476 and 0.461, on v6e 0.769 and 0.494; L/16, 64 images, 0.648 and 0.601, 0.329 and 0.313, 0.540 and
# 0.347.
DIVISIONS: tuple[tuple[str, kernels.Division], ...] = (
    ("TPU v5 lite", kernels.Division(128, 5200, 128 * 2**20)),
    ("TPU v5e", kernels.Division(128, 5200, 128 * 2**20)),
    ("TPU v5", kernels.Division(128, 2600, 64 * 2**20)),
    ("TPU v6", kernels.Division(256, 5200, 128 * 2**20)),
    ("", kernels.NARROW),
)


def choose_division(device_kind: str) -> kernels.Division:
    """Returns how the TPU kernel divides its work on a kind of device, as JAX names it."""
    return next(division for kind, division in DIVISIONS if device_kind.startswith(kind))


def choose_shape(sizes: AttentionSizes, device_kind: str) -> kernels.Shape | None:
    """Returns how the TPU kernel divides its work on a kind of device, as JAX names it.

    Returns None if it needs more vector memory than the device has, or does not compute what is added to the scores.
    """
    itemsize, division = jnp.dtype(sizes.dtype).itemsize, choose_division(device_kind)
    if sizes.unsupported_scores:
        return None
    return kernels.choose_shape(*sizes[:4], itemsize, sizes.change, sizes.relative, division)


def _suits_kernel(kind: str) -> Callable[[AttentionSizes], bool]:
    return lambda sizes: choose_shape(sizes, kind) is not None


# Beginning of the kind of device, implementation, condition on the sizes; the first row that applies is chosen.
#
# TPUs, forward and with the backward pass: cycles of v5e for each head and image by schedule (libtpu 0.0.42, no chip),
# in bfloat16, from the fused layout of the projections to [batch, tokens, width]; in brackets without the changes of
# layout that JAX's kernels need, which take heads first and multiples of 128 tokens.
#
#                       196 tokens, 12 x 64      257 tokens, 16 x 80        577 tokens, 16 x 64
#                       (128 images)             (32 images)                (32 images)
#     fused             194, 586                 443, 1,382                 1,480, 5,987
#     flash attention   1,970 (646), 6,874       3,444 (1,218), 11,470      5,402 (2,407), 22,306
#     splash attention  2,072 (928), 3,407       3,735 (1,632), 5,902       5,298 (2,796), 9,764
#     jax.nn, xla       1,237, 3,913             3,293, 7,220               7,463, 24,843
#     tokens_first      1,801, 4,481             4,262, 8,190               12,351, 29,730
#
# The kernel with qk_norm, rotary, both, and relative positions, with the backward pass, 196 tokens, 128 images: 1,171,
# 755, 1,313, 1,429; without, 586.
#
# CPUs: forward and backward pass of a layer of S/16, 32 images, 2 cores: heads_first 155 ms, tokens_first 280 ms,
# jax.nn.dot_product_attention 307 ms. GPUs: the same of 256 images in bfloat16 on an H200: cudnn 0.78 ms, tokens_first
# 1.88 ms (results/hardware/h200.json).
TABLE: tuple[tuple[str, AttentionKind, Callable[[AttentionSizes], bool]], ...] = (
    ("cpu", "heads_first", lambda sizes: True),
    *((kind, "fused", _suits_kernel(kind)) for kind in ("TPU v4", "TPU v5 lite", "TPU v5e", "TPU v5", "TPU v6")),
    ("TPU", "tokens_first", lambda sizes: True),
    ("NVIDIA", "cudnn", _suits_cudnn),
    ("", "tokens_first", lambda sizes: True),
)


def choose_attention(device_kind: str, sizes: AttentionSizes) -> AttentionKind:
    """Returns the fastest implementation on a kind of device, as JAX names it."""
    return next(attention for kind, attention, allows in TABLE if device_kind.startswith(kind) and allows(sizes))


def has_kernel(device_kind: str) -> bool:
    """Returns whether there is a kernel for a kind of TPU, if it fits the vector memory."""
    return any(device_kind.startswith(kind) for kind, attention, _ in TABLE if attention == "fused")


def attention_sizes(spec: ModelSpec, images: int, tensor: int = 1) -> AttentionSizes:
    """Returns the sizes of a model's attention on one device.

    Args:
        spec: the spec of the model.
        images: the number of images on the device, in one of the `accum_steps` parts of a batch.
        tensor: the number of devices over which the heads are split.
    """
    tokens = spec.tokens
    if spec.block.kind == "axial":  # the longer lines of patches are what images are otherwise
        tokens, images = max(spec.grid), images * min(spec.grid)
    return AttentionSizes(
        *(images, tokens, spec.attention.num_heads // tensor, spec.head_dim, spec.dtype),
        change=spec.qk_change,
        relative=spec.relative_kind,
        unsupported_scores=spec.position.is_relative and spec.relative_kind is None,
    )
