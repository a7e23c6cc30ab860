"""Feature maps of chosen blocks: timm's values, and nothing kept besides them."""

import jax
import numpy as np
import pytest

from tests.conftest import ROOT, slow_but
from tests.interop.test_torch_layouts import opened, random_params, read_file, shapes_of, write
from vit_jax import UserError, tree
from vit_jax.model import create, parameter_shapes

SMALL = {"width": 24, "depth": 2, "mlp_dim": 48, "num_heads": 3, "num_classes": 5, "activation": "gelu"}
REGISTERS = {"registers": 4, "position_rows": "patches", "layer_scale": 1.0, "resolution": (32, 48)}
POOLED = {"pooling": "gap", "class_token": "always", "final_norm": "pooled", "resolution": 32}
MODELS = {  # of tests/fixtures/parity/make_feature_maps.py
    "registers": create("ViT/8", **SMALL, **REGISTERS),
    "pooled_norm": create("ViT/8", **SMALL, **POOLED),
    "bit": create("BiT", stages=(1, 1), width=32, num_classes=5, resolution=(16, 24)),
}


def drawn_as_by_the_script(model):
    """The parameters of arrays in timm's names that are drawn in the order of these names."""
    arrays, generator = write("timm", random_params(model), model.spec), np.random.default_rng(0)
    arrays = {name: generator.uniform(-0.5, 0.5, arrays[name].shape).astype(np.float32) for name in sorted(arrays)}
    return tree.unflatten(read_file(opened(arrays), model.spec, shapes_of(model)))


@pytest.mark.parametrize("name", slow_but(("registers", "bit"), MODELS))
def test_maps_are_those_of_timm(name):
    model = MODELS[name]
    params, expected = drawn_as_by_the_script(model), np.load(ROOT / "tests/fixtures/parity/feature_maps.npz")
    images = np.random.default_rng(1).uniform(-1, 1, (1, *model.image_size, 3)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        both = jax.jit(lambda params: [model.feature_maps(params, images, 2, norm) for norm in (False, True)])(params)
    first = int(name == "bit")  # timm's first map of a ResNet is before the pooling, which is none of ours
    for norm, found in zip((False, True), both, strict=True):
        for index in range(2):
            theirs = expected[f"{name}/{norm}/{index + first}/map"]
            np.testing.assert_allclose(found.maps[index], theirs, rtol=0, atol=1e-5 * abs(theirs).max())
            if name == "bit":
                assert found.prefix[index].shape == (1, 0, theirs.shape[-1])
            else:
                theirs = expected[f"{name}/{norm}/{index}/prefix"]
                np.testing.assert_allclose(found.prefix[index], theirs, rtol=0, atol=1e-5 * abs(theirs).max())


def test_blocks_are_chosen_by_number_from_either_end_and_by_name():
    model = create("ViT/8", stem="resnet", stages=(1, 2), stem_width=32, position="none", **SMALL)
    images = np.zeros((1, 64, 32, 3), np.float32)  # not of the model's resolution
    params = parameter_shapes(model)
    chosen = jax.eval_shape(lambda params: model.feature_maps(params, images, (-1, "stage1", 0)), params)
    assert [each.shape for each in chosen.maps] == [(1, 8, 4, 24), (1, 16, 8, 128), (1, 8, 4, 24)]
    assert [each.shape for each in chosen.prefix] == [(1, 1, 24), (1, 0, 128), (1, 1, 24)]
    for blocks, message in (
        ((2,), "no block 2; there are the numbers from -2 to 1, and the names root, stage1, stage2"),
        (("stage3",), "no block 'stage3'"),
        (3, "no block -3"),
        (-1, "at least 1, or a sequence of them"),
    ):
        with pytest.raises(UserError, match=message):
            model.feature_maps({}, images, blocks)
    with pytest.raises(UserError, match=r"numbers from -2 to 1\.$"):
        MODELS["registers"].feature_maps({}, images, ("stage1",))


@pytest.mark.slow
def test_only_what_is_chosen_is_kept_and_computed():
    """Also where the blocks of the model are a loop, whose result would be the tokens of all of them."""
    model = create("ViT/4", **SMALL | {"depth": 4}, resolution=32)
    images, params = jax.ShapeDtypeStruct((16, 32, 32, 3), np.float32), parameter_shapes(model)
    tokens = 16 * (64 + 1) * 24 * 4  # bytes of the output of a block

    def lowered(blocks, model=model):
        return jax.jit(lambda *given: model.feature_maps(*given, blocks)).lower(params, images)

    def cost(blocks):
        found = lowered(blocks).compile()
        memory = found.memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes, found.cost_analysis()["flops"]

    (all_bytes, all_flops), (last_bytes, last_flops), (_, second_flops) = cost(4), cost((-1,)), cost((1,))
    assert all_bytes - last_bytes > 2.5 * tokens
    assert second_flops < 0.6 * last_flops and last_flops < all_flops < 1.05 * last_flops
    assert lowered(1, model.with_fields(scan=True)).as_text() == lowered((-1,)).as_text()
