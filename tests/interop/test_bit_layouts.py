"""BiT's files in and out: the authors' logits, the same after every layout, and the file again."""

import chex
import jax
import numpy as np
import pytest

import vit_jax
from tests.interop.test_layouts import arrays_of, errors, fixture
from tests.models.test_models import params_of
from vit_jax import UserError

LAYOUTS = {"bit_v2_published": "google", "big_vision_bit_v1": "big_vision"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_equal_the_authors_and_the_file_comes_back(name, tmp_path, capsys):
    path = fixture(name)
    model, params = vit_jax.load(path, border="lowest")
    assert f"{LAYOUTS[name]} layout, BiT, stages (1, 1, 2, 1), width 32, 224x224 pixels" in capsys.readouterr().err
    assert np.max(errors(model, params, name)) < 1e-5
    model, params = vit_jax.load(path)
    vit_jax.save(tmp_path / "ours.npz", model, params)
    again, back = vit_jax.load(tmp_path / "ours.npz")
    assert again == model
    chex.assert_trees_all_equal(back, params)
    vit_jax.save(tmp_path / "x.npz", again, back, layout=LAYOUTS[name])
    written, original = arrays_of(tmp_path / "x.npz"), arrays_of(path)
    assert written.keys() == original.keys()
    assert all(np.array_equal(written[key], original[key]) for key in original)
    [other] = {"google", "big_vision"} - {LAYOUTS[name]}
    with pytest.raises(UserError, match=f"the {other} layout does not support a BiT with"):
        vit_jax.save(tmp_path / "y.npz", model, params, layout=other)


def test_the_border_of_the_root_is_that_of_the_released_weights():
    path = fixture("bit_v2_published")
    expected = np.load(path.with_suffix(".io.npz"))
    model, params = vit_jax.load(path)
    with jax.default_matmul_precision("highest"):
        logits, out = jax.jit(model.apply)(params, expected["images"])
    for ours, name in ((logits, "logits"), (out["pre_logits"], "pre_logits")):
        theirs = expected[f"{name}_zero_border"]
        assert abs(np.asarray(ours) - theirs).max() < 1e-5 * abs(theirs).max()


FORMS = [("google", "pre_activation", "zeros"), ("big_vision", "pre_activation", "lowest")]
FORMS += [("big_vision", "post_activation", "zeros")]


@pytest.mark.parametrize(("layout", "unit", "border"), FORMS)
def test_round_trips_of_a_made_up_checkpoint(layout, unit, border, tmp_path):
    model = vit_jax.create("BiT-R14x1", width=32, num_classes=5, unit=unit, border=border)
    params = params_of(model)
    vit_jax.save(tmp_path / "x.npz", model, params, layout=layout)
    again, back = vit_jax.load(tmp_path / "x.npz")
    assert again.spec == model.spec
    chex.assert_trees_all_equal(back, params)
    arrays = arrays_of(tmp_path / "x.npz")
    last = [name for name in arrays if name.endswith(("norm/gamma", "norm-pre-head/scale"))]
    assert len(arrays) == len(jax.tree.leaves(params)) and (len(last) > 0) == (unit == "pre_activation")
    if layout == "google":  # as in released files of VTAB's tasks
        count = iter(range(1000))
        named = {k.replace("conv2d/", f"conv2d_{next(count)}/") if "standard" in k else k: v for k, v in arrays.items()}
        np.savez(tmp_path / "y.npz", **named)
        chex.assert_trees_all_equal(vit_jax.load(tmp_path / "y.npz")[1], params)
    nested = {f"params/{key.removeprefix('params/')}": value for key, value in arrays.items()}
    np.savez(tmp_path / "z.npz", **nested)
    chex.assert_trees_all_equal(vit_jax.load(tmp_path / "z.npz")[1], params)
    arrays.pop(next(key for key in arrays if "unit" in key))
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UserError, match=r"missing .*block1/unit"):
        vit_jax.load(tmp_path / "x.npz")


def test_without_a_head_and_at_another_resolution(tmp_path):
    model = vit_jax.create("BiT-R50x1", num_classes=0, stages=(1,), resolution=64, preprocess="value_range(-1,1)")
    params = params_of(model)
    vit_jax.save(tmp_path / "x.npz", model, params, layout="google")
    again, back = vit_jax.load(tmp_path / "x.npz", resolution=64)
    assert again.spec == model.spec and again.preprocess == "resize((64,64))|value_range(-1,1)"
    chex.assert_trees_all_equal(back, params)
    vit_jax.save(tmp_path / "y.npz", model, params)
    larger, _ = vit_jax.load(tmp_path / "y.npz", resolution=(96, 128))
    assert larger.image_size == (96, 128) and larger.preprocess == "resize((96,128))|value_range(-1,1)"
    with pytest.raises(UserError, match="patch_size cannot change"):
        vit_jax.load(tmp_path / "y.npz", patch_size=8)
