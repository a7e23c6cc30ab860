"""The operations by ordinary differentiation, beside the forms that devices have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import slow_but
from tests.models.test_models import images_of, params_of, tiny, tiny_hybrid
from vit_jax import kernels
from vit_jax.execution import DeviceOps
from vit_jax.kernel_trials.correctness import TOLERANCE
from vit_jax.model import create
from vit_jax.models import PlainOps

ALL = {
    "registers": 2,
    "qk_norm": True,
    "layer_scale": 0.3,
    "activation": "swiglu",
    "position_place": "blocks",
    "dropout_rate": 0.2,
    "stochastic_depth": 0.4,
}
MODELS = {
    "all at once": tiny(**ALL, scan=True),
    "kernels": tiny(attention="fused", mlp="fused", position="relative", rotary="axial"),
    "all at once in packed rows": tiny(**ALL, attention="fused", remat="dots"),
    "masked patches in packed rows": tiny(head="patches", attention="fused", position_place="shared"),
    "rows of several images": tiny(attention="fused", pooling="gap", remat="full"),
    "two products a device": tiny(mlp="shard_map", pooling="map", attention="tokens_first"),
    "masked patches": tiny(head="patches", attention_pattern="local", attention_window=3),
    "axial": create("Axial-ViT-mu/8", resolution=32, pooling="gap", num_classes=7, stochastic_depth=0.4, depth=2),
    "hybrid": tiny_hybrid(pre_logits=True),
    "BiT": create("BiT", stages=(1,), width=32, resolution=32, num_classes=7, unit="post_activation", se_reduction=16),
}
USUAL = ("all at once",)


def gradients(model, ops):
    """Returns the logits, and the gradients of all parameters and of the images."""
    masked = {"masked": np.arange(4 * 16).reshape(4, 16) % 3 == 0} if model.field("head") == "patches" else {}
    key = None if model.field("stochastic_depth") is None else jax.random.key(3)

    def loss(params, images):
        logits, _ = model.apply(params, images, key, ops=ops, **masked)
        return (logits * jnp.cos(jnp.arange(logits.size)).reshape(logits.shape)).sum(), logits

    with kernels.interpret_kernels():
        (_, logits), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params_of(model), images_of())
    return logits, grads


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_values_and_gradients_are_those_of_the_device_forms(name):
    (logits, grads), (plain, plain_grads) = (gradients(MODELS[name], ops) for ops in (None, PlainOps()))
    np.testing.assert_allclose(logits, plain, rtol=0, atol=1e-5 * abs(plain).max())
    largest = max(abs(leaf).max() for leaf in jax.tree.leaves(plain_grads))
    for (path, grad), expected in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(plain_grads), strict=True):
        # A key's bias has a gradient of zero, but for rounding.
        size = max(abs(expected).max(), 0.03 * largest)
        np.testing.assert_allclose(grad, expected, rtol=0, atol=1e-5 * size, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kernels", "all at once in packed rows", "axial"])
def test_device_forms_in_bfloat16_are_within_the_tolerance_of_a_kernel(name):
    """The difference from the plain form in float32 is measured by its Euclidean norm, in the norm of the array."""
    logits, grads = gradients(MODELS[name].with_fields(dtype="bfloat16"), None)
    plain, plain_grads = gradients(MODELS[name], PlainOps())
    pairs = list(zip(jax.tree.leaves((logits, grads)), jax.tree.leaves((plain, plain_grads)), strict=True))
    largest = max(np.linalg.norm(np.ravel(expected)) for _, expected in pairs)
    for found, expected in pairs:
        size = max(np.linalg.norm(np.ravel(expected)), 1e-2 * largest)
        assert np.linalg.norm(np.ravel(np.asarray(found, np.float32) - expected)) < TOLERANCE * size


@pytest.mark.parametrize(
    "name", ["all at once", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "all at once")]
)
def test_the_batch_may_be_unknown(name):
    model, (batch,) = MODELS[name], jax.export.symbolic_shape("batch")
    params = params_of(model)
    images = jax.ShapeDtypeStruct((batch, 32, 32, 3), jnp.float32)
    exported = jax.export.export(jax.jit(lambda images: model.apply(params, images, ops=PlainOps())[0]))(images)
    expected = jax.jit(lambda images: model.apply(params, images, ops=PlainOps())[0])(images_of(3, 32, 32, 3))
    np.testing.assert_allclose(
        exported.call(images_of(3, 32, 32, 3)), expected, rtol=0, atol=1e-5 * abs(expected).max()
    )


BITS = {"stages": (1,), "width": 32, "resolution": 32, "num_classes": 7}
DIFFERENTIATED = {
    "ViT": tiny(qk_norm=True, pooling="map", depth=1),
    "relative": tiny(position="relative", rotary="axial"),
    "axial": MODELS["axial"],
    "hybrid": MODELS["hybrid"],
    "BiT": create("BiT", **BITS),
    "stand-alone": create("BiT", **BITS, unit="stand_alone"),
}


@pytest.mark.parametrize("name", slow_but(("BiT",), DIFFERENTIATED))
def test_derivatives_are_taken_forwards_too(name):
    """Also of derivatives, of several models at once, and of a batch of unknown size."""
    model = DIFFERENTIATED[name].with_attention("heads_first")  # a kernel has no second derivatives
    params = params_of(model)
    images, moved = images_of(2, 32, 32, 3, seed=10), images_of(2, 32, 32, 3, seed=20)

    def logits(images, params=params, ops=None):
        return model.apply(params, images, ops=ops)[0]

    def change(function, images, moved):
        return jax.jvp(function, (images,), (moved,))[1]

    def score(images, ops):
        return jax.nn.log_softmax(logits(images, ops=ops))[:, 3].sum()

    def forwards(images, moved):
        """The changes of the logits and of the gradient along `moved`."""
        plain = functools.partial(logits, ops=PlainOps()), functools.partial(jax.grad(score), ops=PlainOps())
        return [change(function, images, moved) for function in plain]

    @jax.jit
    def backwards(images, moved):
        """The former, summed, and the latter, by the gradients that are written out."""
        _, pull = jax.vjp(logits, images)
        along = jax.grad(lambda images: (jax.grad(score)(images, None) * moved).sum())(images)
        return (pull(jnp.ones((2, 7)))[0] * moved).sum(), along

    batch = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("batch"), 32, 32, 3), jnp.float32)
    changed, along = jax.export.export(jax.jit(forwards))(batch, batch).call(images, moved)
    expected, expected_along = backwards(images, moved)
    np.testing.assert_allclose(changed.sum(), expected, rtol=1e-3)
    np.testing.assert_allclose(along, expected_along, rtol=0, atol=1e-4 * abs(expected_along).max())

    several = jax.tree.map(lambda leaf: jnp.stack([leaf, 1.5 * leaf]), params)
    both = jax.jit(jax.vmap(functools.partial(logits, images)))(several)
    one = jax.jit(logits)(images, jax.tree.map(lambda leaf: leaf[1], several))
    np.testing.assert_allclose(both[1], one, rtol=0, atol=1e-5 * abs(one).max())


def test_every_operation_has_a_form_on_devices():
    """One that is inherited would take rows for tokens."""
    assert {name for name in vars(PlainOps) if not name.startswith("_")} - vars(DeviceOps).keys() == {"lines"}
