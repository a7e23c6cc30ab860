"""Which forms of attention and MLP are the fastest on a kind of device, and how they pack the rows of a batch."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from vit_jax import kernels, refuse
from vit_jax.kernels import Packing
from vit_jax.models import AttentionKind, Dtype, MlpKind, ModelSpec
from vit_jax.sharding import traced_device_kind

CHIP_KERNELS = ("fused", "cudnn")  # forms that a chip may execute wrongly
# The kind of TPU whose cores have the least vector memory.
SMALLEST_TPU = min(kernels.TPU_KINDS, key=lambda tpu: tpu.division.memory).device_kinds[0]
PLAIN_FORMS = {"attention": "tokens_first", "mlp": "jit"}  # field -> what replaces them


class AttentionSizes(NamedTuple):
    """The sizes of the attention on one device, on which the choice depends."""

    images: int  # computed at a time, in one of the `accum_steps` parts of a batch
    tokens: int  # of an image
    heads: int
    head_dim: int
    dtype: Dtype
    change: kernels.QKChange | None = None  # of queries and keys, after their projection
    relative: kernels.RelativeKind | None = None  # the relative positions that the TPU kernel computes
    unsupported_scores: bool = False  # whether the scores have a pattern or positions that the TPU kernel does not know


def _suits_cudnn(device_kind: str, sizes: AttentionSizes) -> bool:
    added = sizes.unsupported_scores or sizes.relative is not None
    return not added and sizes.dtype == "bfloat16" and sizes.head_dim % 8 == 0 and sizes.head_dim <= 128


def choose_shape(sizes: AttentionSizes, device_kind: str) -> kernels.AttentionShape | None:
    """Returns how the TPU kernel divides its work on a kind of device, as JAX names it.

    Returns None if it needs more vector memory than the device has, or does not compute what is added to the scores.
    """
    itemsize, division = jnp.dtype(sizes.dtype).itemsize, kernels.choose_division(device_kind)
    if sizes.unsupported_scores:
        return None
    return kernels.choose_attention_shape(*sizes[:4], itemsize, sizes.change, sizes.relative, division)


def _suits_kernel(device_kind: str, sizes: AttentionSizes) -> bool:
    return kernels.find_tpu_kind(device_kind) is not None and choose_shape(sizes, device_kind) is not None


def _always(device_kind: str, sizes: AttentionSizes) -> bool:
    return True


# Beginning of the kind of device, form, condition on the kind and the sizes; the first row that applies is chosen.
# `attention=auto` chooses by it, too, where no device is known.
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
# The TPU kernel with qk_norm, rotary, both, and relative positions, with the backward pass, 196 tokens, 128 images:
# 1,171, 755, 1,313, 1,429; without, 586.
#
# CPUs: forward and backward pass of a layer of S/16, 32 images, 2 cores: heads_first 155 ms, tokens_first 280 ms,
# jax.nn.dot_product_attention 307 ms. GPUs: the same of 256 images in bfloat16 on an H200: cudnn 0.78 ms, tokens_first
# 1.88 ms (results/hardware/h200.json).
FASTEST_ATTENTION: tuple[tuple[str, AttentionKind, Callable[[str, AttentionSizes], bool]], ...] = (
    ("cpu", "heads_first", _always),
    ("TPU", "fused", _suits_kernel),
    ("NVIDIA", "cudnn", _suits_cudnn),
    ("", "tokens_first", _always),
)


def choose_attention(device_kind: str, sizes: AttentionSizes) -> AttentionKind:
    """Returns the fastest form of attention on a kind of device, as JAX names it; empty: a kind that is not known."""
    rows = (row for row in FASTEST_ATTENTION if device_kind.startswith(row[0]))
    return next(attention for _, attention, suits in rows if suits(device_kind, sizes))


def attention_sizes(spec: ModelSpec, images: int, tensor: int = 1) -> AttentionSizes:
    """Returns the sizes of a model's attention on one device; of axial blocks, that of the longer lines of patches.

    Args:
        spec: the spec of the model.
        images: the number of images on the device, in one of the `accum_steps` parts of a batch.
        tensor: the number of devices over which the heads are split.
    """
    heads = spec.attention.num_heads // tensor
    if spec.block.kind == "axial":
        return sizes_of_images(spec, images * min(spec.grid), max(spec.grid), heads)
    return sizes_of_images(spec, images, spec.tokens, heads)


def sizes_of_images(spec: ModelSpec, images: int, tokens: int, heads: int) -> AttentionSizes:
    """Returns the sizes of attention among the tokens of each image, or of each line of patches in axial blocks.

    Args:
        spec: the spec of the model.
        images: the number of images (or lines) on the device, in one of the `accum_steps` parts of a batch.
        tokens: the number of tokens of an image (or line).
        heads: the number of heads on the device.
    """
    return AttentionSizes(
        *(images, tokens, heads, spec.head_dim, spec.dtype),
        change=qk_change(spec),
        relative=relative_kind(spec),
        unsupported_scores=spec.attention.is_sparse or (spec.position.is_relative and relative_kind(spec) is None),
    )


def qk_change(spec: ModelSpec) -> kernels.QKChange | None:
    """Returns how the TPU kernel changes queries and keys before their products; None: it does not."""
    norm, rotates = spec.attention.qk_norm, spec.position.rotary != "none"
    return kernels.QKChange(spec.block.norm_epsilon if norm else None, rotates) if norm or rotates else None


def relative_kind(spec: ModelSpec) -> kernels.RelativeKind | None:
    """Returns a model's relative positions as the TPU kernel takes them; None: there are none, or it takes none."""
    if spec.position.kind != "relative" or spec.position_rows not in (0, spec.prefix_rows):
        return None
    return kernels.RelativeKind(spec.prefix_rows - spec.position_rows, spec.position.relative_tables == "head")


def check_forms(spec: ModelSpec) -> None:
    """Checks that the chosen form of attention computes what a model adds to equations 5 to 7.

    Raises:
        UserError: it does not.
    """
    kind, is_relative = spec.attention.kind, spec.position.is_relative
    refuse(
        (
            kind == "cudnn" and is_relative,
            "attention cudnn computes no relative positions; set model.attention=auto or tokens_first.",
        ),
        (
            kind == "fused" and spec.position.kind == "relative_bias",
            "attention fused computes no relative_bias; set model.attention=auto or tokens_first.",
        ),
        (
            kind == "fused" and is_relative and relative_kind(spec) is None,
            "attention fused computes no relative positions if the class token has a place and registers have none; "
            "set model.attention=auto, or position_rows=all or patches for another model.",
        ),
        (
            kind in CHIP_KERNELS and spec.attention.is_sparse,
            f"attention {kind} computes no attention_pattern; set model.attention=auto.",
        ),
    )


def choose_packing(kind: AttentionKind, sizes: AttentionSizes, device_kind: str | None = None) -> Packing:
    """Returns the packing in which a form of attention needs the tokens of the images.

    Args:
        kind: the form of attention.
        sizes: the sizes of the attention on one device.
        device_kind: the kind of device, as JAX names it; None: that of the devices for which a model is traced.
    """
    tokens = sizes.tokens
    if kind == "fused":
        device_kind = device_kind or traced_device_kind()
        shape = choose_shape(sizes, device_kind)
        alone = Packing(tokens, 1, kernels.round_up(tokens, kernels.ROW_TILE), kernels.choose_division(device_kind))
        return shape.packing if shape else alone
    # cuDNN's backward pass refuses odd numbers of rows.
    return Packing(tokens, 1, kernels.round_up(tokens, 2) if kind == "cudnn" else tokens)


def choose_mlp(device_kind: str, spec: ModelSpec, images: int, tensor: int = 1) -> MlpKind:
    """Returns the fastest form of a model's MLPs, `fused` or `jit`.

    Args:
        device_kind: the kind of device, as JAX names it.
        spec: the spec of the model, whose attention is chosen.
        images: the number of images that one device computes at a time, in one of the `accum_steps` parts of a batch.
        tensor: the number of devices over which the hidden channels are split.
    """
    tpu = kernels.find_tpu_kind(device_kind)
    if not (tpu and tpu.fused_mlp) or not allows_fused_mlp(spec) or tensor > 1:
        return "jit"
    itemsize, grad_itemsize = (jnp.dtype(each).itemsize for each in (spec.dtype, spec.kernel_dtype))
    rows = count_rows(device_kind, spec, images)
    sizes = kernels.MlpSizes(rows, spec.width, spec.mlp_dim, itemsize, grad_itemsize, tpu.division.memory)
    return "fused" if kernels.choose_mlp_step(sizes) else "jit"


def allows_fused_mlp(spec: ModelSpec) -> bool:
    """Returns whether one TPU kernel computes the branch of an MLP with its residual.

    The branch then has nothing but LayerNorm, dense layers and the approximate GELU: no dropout, no stochastic depth,
    no LayerScale, no norm of the hidden channels.
    """
    block = spec.block
    more = block.norm != "layer" or block.layer_scale or block.mlp_norm or block.dropout_rate or block.stochastic_depth
    return block.activation == "gelu_tanh" and block.kind == "standard" and not more


def count_rows(device_kind: str, spec: ModelSpec, images: int) -> int:
    """Returns the rows in which the blocks of a model hold images on one device."""
    packing = choose_packing(spec.attention.kind, attention_sizes(spec, images), device_kind)
    return images // packing.images * packing.rows
