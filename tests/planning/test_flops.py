"""Multiply-accumulates: by numbers, and those of Table 6."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from docs.plans import JFT_IMAGES, TABLE_6, table_6_model, training_exaflops
from vit_jax import program
from vit_jax.macs import count_macs, macs_per_image
from vit_jax.model import create, parameter_shapes
from vit_jax.planning import time_estimate


@pytest.mark.parametrize("stride, padding, spread, holes", [(1, (1, 1), 1, 1), (2, (3, 2), 1, 1), (1, (2, 0), 2, 3)])
def test_a_convolution_counts_products_that_lie_on_the_image(stride, padding, spread, holes):
    """In a convolution of ones with ones, each result is the count of its products."""
    image, kernel = np.ones((2, 9, 7, 6), np.float32), np.ones((3, 3, 2, 12), np.float32)

    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(
            image,
            kernel,
            (stride, 1),
            (padding, (1, 1)),
            lhs_dilation=(holes, 1),
            rhs_dilation=(spread, 1),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=3,
        )

    assert count_macs(convolve, image, kernel) == convolve(image, kernel).sum()


def test_matmuls_count_in_loops_and_whatever_they_are_wrapped_in():
    def step(x, w):
        return jax.checkpoint(jnp.dot)(x, w), None

    def loop(x, w):
        return jax.jit(lambda x: jax.lax.scan(step, x, w)[0])(x) + jnp.einsum("bij,bjk->ik", w, w).sum()

    x, w = jnp.zeros((5, 4)), jnp.zeros((3, 4, 4))
    assert count_macs(loop, x, w) == 3 * 5 * 4 * 4 + 3 * 4 * 4 * 4
    gradient = jax.value_and_grad(lambda x, w: step(x, w)[0].sum(), argnums=(0, 1))
    assert count_macs(gradient, x, w[0]) == 3 * 5 * 4 * 4

    def either(flag, x, w):
        return jax.lax.cond(flag, lambda: x @ w[0], lambda: x @ w[0] @ w[1])

    assert count_macs(either, True, x, w) == 2 * 5 * 4 * 4
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    per_device = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert count_macs(per_device, jnp.zeros((16, 4)), w[0]) == 16 * 4 * 4


# Table 6, except where the paper contradicts itself: paper.md, E.5.
OUTLIERS = {("ViT-B/32", 7): 0.025, ("R50+ViT-L/16", 7): 0.035}


NAMES = dict.fromkeys(run.model for run in TABLE_6)
USUAL = ("ViT-B/16", "R50+ViT-B/16")  # the others are made of the same parts


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_exaflops_are_those_of_table_6(name):
    one = training_exaflops(table_6_model(name), JFT_IMAGES)
    for run in (run for run in TABLE_6 if run.model == name):
        assert one * run.epochs == pytest.approx(run.exaflops, rel=OUTLIERS.get((name, run.epochs), 0.015))


def test_a_run_counts_the_images_that_it_trains_on(tiny):
    """Square or not: the size is that of the preprocessing."""
    square = time_estimate.run_exaflops(tiny)
    tiny.data.preprocess = tiny.evals.test.preprocess = "resize((16,48))|value_range(-1,1)"
    model = program.program_without_data(tiny)[1].model
    assert model.image_size == (16, 48)
    assert time_estimate.run_exaflops(tiny) == training_exaflops(model, tiny.total_steps * tiny.batch) > 3 * square


@pytest.mark.parametrize("tokens_of", ["gap", pytest.param("token", marks=pytest.mark.slow)])
def test_a_kernel_counts_as_its_plain_form(tokens_of):
    """Without padding the numbers are equal; a plan's model FLOPs are equal with it, too."""
    plain, fused = (
        create("ViT-mu/8", resolution=32, num_classes=7, pooling=tokens_of, attention=kind)
        for kind in ("heads_first", "fused")
    )
    images = jnp.zeros((2, 32, 32, 3))
    params = parameter_shapes(plain)
    macs = [count_macs(lambda params, m=m: m.apply(params, images)[0], params) for m in (plain, fused)]
    assert macs_per_image(plain) == macs_per_image(fused) == macs[0] / 2
    assert (macs[0] == macs[1]) is (tokens_of == "gap")  # 16 tokens are not padded, 17 are
    gradients = [
        count_macs(jax.grad(lambda params, m=m: m.apply(params, images)[0].sum()), params) for m in (plain, fused)
    ]
    spec = plain.spec
    scores = 2 * spec.depth * 16 * 16 * spec.width  # computed again in the backward pass
    assert tokens_of == "token" or gradients[1] == gradients[0] + scores
