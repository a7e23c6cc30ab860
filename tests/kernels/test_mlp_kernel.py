"""The kernel of a block's second half: LayerNorm, MLP and residual; interpreted, on CPUs."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import kernels, sharding
from vit_jax.execution import DeviceOps, measure_mlp_differences
from vit_jax.execution.forms_by_chip import allows_fused_mlp
from vit_jax.kernel_trials import correctness
from vit_jax.kernels.mlp_shape import MAX_ROWS, MlpSizes, choose_mlp_step, mlp_vmem_bytes
from vit_jax.model import create
from vit_jax.models.block import Block

EPSILON = 1e-6
VMEM = 128 * 2**20  # bytes of a core of v6e


def draw(rows, width, hidden, dtype, kernel_dtype):
    """Returns the operands of `fused_mlp`, and the gradient of its result."""
    random = np.random.default_rng(0)

    def normal(*shape, scale=1.0, dtype=jnp.float32):
        return (scale * random.standard_normal(shape)).astype(dtype)

    x, grad = normal(rows, width, dtype=dtype), normal(rows, width, dtype=dtype)
    norm = normal(2, width, scale=0.3) + np.array([[1.0], [0.0]], np.float32)
    first = normal(width, hidden, scale=width**-0.5, dtype=kernel_dtype), normal(hidden, scale=0.3)
    second = normal(hidden, width, scale=hidden**-0.5, dtype=kernel_dtype), normal(width, scale=0.3)
    return (x, norm, *first, *second), grad


def in_float64(x, norm, kernel1, bias1, kernel2, bias2):
    centred = x - x.mean(-1, keepdims=True)
    normal = centred / jnp.sqrt(x.var(-1, keepdims=True) + EPSILON) * norm[0] + norm[1]
    return x + jax.nn.gelu(normal @ kernel1 + bias1, approximate=True) @ kernel2 + bias2


def differentiate(function, operands, grad):
    result, transpose = jax.vjp(function, *operands)
    return [result, *transpose(grad)]


exactly = jax.jit(functools.partial(differentiate, in_float64))  # compiled once for all dtypes


def differences(how, operands, grad):
    """Returns the relative differences of result and gradients from those in float64."""
    with jax.enable_x64(True):
        wide = [np.asarray(each, np.float64) for each in (*operands, grad)]
        expected = [np.asarray(each) for each in exactly(wide[:-1], wide[-1])]
    fused = functools.partial(differentiate, lambda *each: kernels.fused_mlp(*each, EPSILON, VMEM))
    with kernels.interpret_kernels() if how == "interpreted" else contextlib.nullcontext():
        actual = jax.jit(fused)(operands, grad)
    chex.assert_trees_all_equal_dtypes(actual[1:], list(operands))
    pairs = zip(actual, expected, strict=True)
    return [np.linalg.norm(np.float64(one) - other) / np.linalg.norm(other) for one, other in pairs]


@pytest.mark.parametrize("how", ["interpreted", "plain"])
@pytest.mark.parametrize(
    ("rows", "width", "hidden"),
    [
        (2 * MAX_ROWS, 128, 256),  # two steps
        (MAX_ROWS + 200, 128, 256),  # two steps, the second of them with 200 rows
        pytest.param(3 * 392, 128, 2048, marks=pytest.mark.slow),  # two products of hidden channels
        (197, 48, 80),  # no tiles, as a batch of evaluation may have: the plain form
    ],
)
def test_values_and_gradients_equal_those_in_float64(how, rows, width, hidden):
    assert np.max(differences(how, *draw(rows, width, hidden, jnp.float32, jnp.float32))) < 2e-6
    assert np.max(differences(how, *draw(rows, width, hidden, jnp.bfloat16, jnp.bfloat16))) < 0.01
    assert np.max(differences(how, *draw(rows, width, hidden, jnp.bfloat16, jnp.float32))) < 0.01


def test_gradients_of_kernels_are_summed_in_float32():
    """4,096 rows in bfloat16, whose sum in bfloat16 would stop growing."""
    operands, grad = draw(8 * MAX_ROWS, 128, 128, jnp.bfloat16, jnp.bfloat16)
    assert np.max(differences("interpreted", operands, jnp.ones_like(grad))) < 0.01


@pytest.mark.parametrize(("rows", "kernels_called"), [(1024, 2), (25000, 2), (100, 0)])
def test_fewer_rows_than_a_step_are_computed_by_the_plain_form(rows, kernels_called):
    """Lowered for TPUs."""
    operands, grad = draw(rows, 128, 256, jnp.bfloat16, jnp.bfloat16)
    fused = jax.jit(functools.partial(differentiate, lambda *each: kernels.fused_mlp(*each, EPSILON, VMEM)))
    text = fused.trace(operands, grad).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == kernels_called


@pytest.mark.parametrize(
    ("rows", "width", "hidden", "expected"),
    [
        (25088, 768, 3072, (512, 1024)),
        (8448, 1280, 5120, (256, 1024)),  # with 384 rows more than the vector memory
        (25088, 1408, 6144, None),  # the weights and the sums of their gradients do not fit
        (12544, 768, 3072, (448, 1024)),
        (12608, 384, 1536, (512, 768)),  # no step divides 64 images of 197 tokens
        (197, 768, 3072, (192, 1024)),
        (50, 768, 3072, None),  # fewer rows than a step has
        (4096, 192, 768, None),  # one and a half tiles of channels
    ],
)
def test_steps_are_whole_tiles_that_fit(rows, width, hidden, expected):
    sizes = MlpSizes(rows, width, hidden, 2, 2, VMEM)
    assert choose_mlp_step(sizes) == expected
    assert expected is None or mlp_vmem_bytes(*expected, sizes) < VMEM


SMALL = {"width": 128, "mlp_dim": 256, "resolution": 64}  # 17 tokens


def block_results(spec, rows, mesh=None):
    """Returns the rows and all gradients of a block with random parameters."""
    ops = DeviceOps(spec=spec, packing=kernels.Packing(17, 1, 17))
    random = np.random.default_rng(0)
    x = random.standard_normal((rows * 17, spec.width)).astype(spec.dtype)
    params = jax.jit(Block(spec, ops).init)(jax.random.key(0), x[:17])["params"]
    params = jax.tree.map(lambda leaf: leaf + 0.1 * random.standard_normal(leaf.shape).astype(np.float32), params)

    def scalar(params, x):
        y, _ = Block(spec, ops).apply({"params": params}, x)
        return (y.astype(jnp.float32) ** 2).mean(), y

    def run(params, x):
        with sharding.use_mesh(mesh) if mesh else contextlib.nullcontext():
            return jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(params, x)

    with kernels.interpret_kernels():
        return jax.jit(run)(params, x)


@pytest.mark.parametrize("axes", [{}, {"data": 2, "fsdp": 4}, {"data": 4, "tensor": 2}])
def test_a_block_equals_that_of_the_layers(axes, tiny):
    """Both have the same parameters, and 272 rows a device on eight; split hidden channels are left to the layers."""
    jit, fused = (create("ViT-mu/16", mlp=mlp, attention="tokens_first", **SMALL).spec for mlp in ("jit", "fused"))
    tiny.mesh.update(axes)
    mesh = sharding.make_mesh(tiny) if axes else None
    chex.assert_trees_all_close(block_results(fused, 128, mesh), block_results(jit, 128), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fields", [{"dropout_rate": 0.1}, {"stochastic_depth": 0.1}, {"layer_scale": 0.1}, {"activation": "swiglu"}]
)
def test_blocks_with_more_than_the_kernel_computes_keep_the_layers(fields):
    spec = create("ViT-mu/16", mlp="fused", **SMALL, **fields).spec
    assert not allows_fused_mlp(spec)
    chosen = create("ViT-B/16", dtype="bfloat16", **fields).for_device("TPU v6 lite", 128)
    assert chosen.field("mlp") == "jit"


@pytest.mark.parametrize(
    ("kind", "name", "images", "tensor", "expected"),
    [
        ("TPU v6 lite", "ViT-B/16", 128, 1, "fused"),
        ("TPU v6 lite", "ViT-L/16", 64, 1, "fused"),
        ("TPU v6 lite", "ViT-S/16", 64, 1, "fused"),  # its 12,608 rows have no step that divides them
        ("TPU v6 lite", "ViT-B/16", 128, 4, "jit"),
        ("TPU v6 lite", "ViT-g/14", 16, 1, "jit"),  # its weights do not fit
        ("TPU v5 lite", "ViT-B/16", 128, 1, "jit"),
        ("cpu", "ViT-B/16", 128, 1, "jit"),
    ],
)
def test_the_kernel_is_chosen_where_it_is_faster(kind, name, images, tensor, expected):
    assert create(name, dtype="bfloat16").for_device(kind, images, tensor).field("mlp") == expected


def test_a_given_form_is_kept():
    assert create("ViT-B/16", mlp="jit").for_device("TPU v6 lite", 128).field("mlp") == "jit"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trial_of_a_kernel_that_is_right_is_within_the_tolerance(dtype):
    spec = create("ViT-mu/16", dtype=dtype, **SMALL).spec
    with kernels.interpret_kernels():
        found = measure_mlp_differences(spec, jax.devices()[0])
    assert len(found) == 7 and np.max(list(found.values())) < (
        2e-6 if dtype == "float32" else correctness.TOLERANCE / 2
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-5), (jnp.bfloat16, 1e-2)])
def test_gelu_and_its_gradient_are_those_of_float64(dtype, tolerance):
    x = np.concatenate([np.linspace(-8, 8, 4001), [-1e9, -1e4, 1e4, 1e9]]).astype(dtype)
    grad = np.full_like(x, 1.5)
    with jax.enable_x64(True):
        wide = [np.asarray(each, np.float64) for each in (x, grad)]
        gelu = functools.partial(differentiate, functools.partial(jax.nn.gelu, approximate=True))
        expected = jax.jit(gelu)(wide[:1], wide[1])
    actual = jax.jit(functools.partial(differentiate, kernels.gelu_tanh))([x], grad)
    chex.assert_trees_all_equal_dtypes(actual, [x, x])
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.float64(one), np.asarray(other), rtol=tolerance, atol=tolerance)
