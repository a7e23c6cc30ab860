"""How far an implementation of attention is from its plain form: the result and all gradients, of random numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from vit_jax.models.attention import ATTENTIONS, Attention, QKVBias, QKVKernel, padded_rows
from vit_jax.models.attention_choice import AttentionSizes, attention_sizes
from vit_jax.models.layers import Rows
from vit_jax.models.spec import AttentionKind, ModelSpec

KERNELS: tuple[AttentionKind, ...] = ("fused", "cudnn")  # which a chip may execute wrongly
IMAGES = 8
SEED = np.uint32(0)
NAMES = ("the result", "the gradient of the input", "the gradient of the kernel", "the gradient of the bias")
PADDING = 3.0  # what stands in rows that are no tokens, and must not be attended to


def measure_differences(spec: ModelSpec, device: jax.Device, tensor: int = 1) -> dict[str, float]:
    """Returns, by name, how far a model's attention is from the plain form on a device; see `compare`.

    Args:
        spec: of the model.
        device: executes both.
        tensor: devices over which the heads are split.
    """
    kind, sizes = spec.attention.kind, attention_sizes(spec, IMAGES, tensor)
    # The seed is an argument: of constants, the compiler would compute the random numbers itself, for minutes.
    jitted = jax.jit(functools.partial(compare, ATTENTIONS[kind], kind, sizes))
    return {name: float(value) for name, value in jitted(jax.device_put(SEED, device)).items()}


def compare(
    attention: Attention, kind: AttentionKind, sizes: AttentionSizes, seed: Integer[Array | np.ndarray, ""]
) -> dict[str, Float[Array, ""]]:
    """Returns the relative difference, by Euclidean norms, of the result and of each gradient, over `IMAGES` images.

    Args:
        attention: compared with the plain form.
        kind: says how its images are padded.
        sizes: of one device.
        seed: of the random numbers.
    """
    _, tokens, heads, head_dim, dtype = sizes
    width, rows = heads * head_dim, padded_rows(kind, tokens)
    keys = jax.random.split(jax.random.key(seed), 4)
    x, grad = (jax.random.normal(key, (IMAGES, tokens, width)).astype(dtype) for key in keys[:2])
    kernel = (jax.random.normal(keys[2], (width, 3, heads, head_dim)) * width**-0.5).astype(dtype)
    bias = jax.random.normal(keys[3], (3, heads, head_dim))

    def run(x: Array, kernel: QKVKernel, bias: QKVBias) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, rows - tokens), (0, 0)), constant_values=PADDING)
        attended, _ = attention(padded.reshape(-1, width), kernel, bias, tokens)
        return attended.reshape(padded.shape)[:, :tokens]

    def run_plain(x: Array, kernel: QKVKernel, bias: QKVBias) -> Array:
        return ATTENTIONS["tokens_first"](x.reshape(-1, width), kernel, bias, tokens)[0].reshape(x.shape)

    result, transpose = jax.vjp(run, x, kernel, bias)
    found = dict(zip(NAMES, (result, *transpose(grad)), strict=True))
    with jax.default_matmul_precision("highest"):
        result, transpose = jax.vjp(run_plain, *(array.astype("float32") for array in (x, kernel)), bias)
        expected = dict(zip(NAMES, (result, *transpose(grad.astype("float32"))), strict=True))
    return {name: _difference(found[name], expected[name]) for name in NAMES}


def _difference(found: Rows, expected: Rows) -> Float[Array, ""]:
    return jnp.linalg.norm((found - expected).ravel()) / jnp.linalg.norm(expected.ravel())
