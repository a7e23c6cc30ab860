"""Checkpoints in and out: the authors' logits from their files, the same after every layout, and clear refusals."""

import dataclasses
import io
import json
import shutil
import zipfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests.conftest import ROOT, slow_but
from vit_jax import UserError, convert, kernels, models, predict
from vit_jax.interop import LAYOUTS, check_class_order
from vit_jax.model import create, parameter_shapes

FOLDERS = (ROOT / "tests" / "fixtures" / "parity", ROOT.parent / "shared" / "parity")
HERE = {"google_vit_in21k_tanh", "google_hybrid_stem_only"}
HERE |= {"big_vision_tok", "big_vision_gap_scan", "big_vision_gap_sincos", "big_vision_map"}
ELSEWHERE = {"google_vit_token", "google_vit_gap", "google_hybrid_3stage", "google_hybrid_4stage"}


def fixture(name):
    for folder in FOLDERS:
        if (folder / f"{name}.npz").is_file():
            return folder / f"{name}.npz"
    pytest.skip(f"{name} is not here")


def load(name, **fields):
    """Loads a fixture; no file states the resolution of fixed positions."""
    return vit_jax.load(fixture(name), **({"resolution": 32} if "sincos" in name else {}) | fields)


def errors(model, params, name):
    """The largest differences from the authors' logits and pre_logits, relative to the largest value."""
    expected = np.load(fixture(name).with_suffix(".io.npz"))
    with jax.default_matmul_precision("highest"):
        logits, out = jax.jit(model.apply)(params, expected["images"])
    pairs = ((logits, expected["logits"]), (out["pre_logits"], expected["pre_logits"]))
    return [float(abs(np.asarray(ours) - theirs).max() / abs(theirs).max()) for ours, theirs in pairs]


def arrays_of(path):
    return dict(np.load(path))


def layout_of(name):
    return "google" if name.startswith("google") else "big_vision"


@pytest.fixture
def changed(tmp_path):
    """Writes the arrays of a fixture after `change`, which works in place or returns other arrays."""

    def make(name, change=lambda arrays: None):
        arrays = arrays_of(fixture(name))
        path = tmp_path / "changed.npz"
        np.savez(path, **(change(arrays) or arrays))
        return path

    return make


KERNEL = ("google_vit_in21k_tanh", "big_vision_gap_scan")  # with which it is always tested
USUAL = ("google_vit_in21k_tanh", "google_hybrid_stem_only", "big_vision_map")  # one of each kind


OTHER_FORMS = [
    pytest.param(name, attention, marks=() if attention == "fused" and name in KERNEL else pytest.mark.slow)
    for name in sorted(HERE | ELSEWHERE)
    for attention in ("tokens_first", "fused")
]


@pytest.mark.parametrize(
    ("name", "attention"), [*((name, "heads_first") for name in sorted(HERE | ELSEWHERE)), *OTHER_FORMS]
)
def test_logits_equal_the_authors(name, attention):
    model, params = load(name, attention=attention)
    with kernels.interpret_kernels():
        assert np.max(errors(model, params, name)) < 2e-6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", slow_but(USUAL, sorted(HERE | ELSEWHERE)))
def test_round_trips_through_every_layout_that_can_hold_the_model(name, layout, tmp_path):
    model, params = load(name)
    tanh = ("tanh", "big_vision_tok")
    impossible = {
        "google": ("sincos", "map"),
        "big_vision": ("hybrid",),
        "timm": ("sincos", "hybrid", *tanh),
        "huggingface": ("sincos", "map", "hybrid", *tanh),
        "ours": (),
    }[layout]
    path = tmp_path / ("x" if layout in ("timm", "huggingface") else "x.npz")
    if any(word in name for word in impossible):
        with pytest.raises(UserError, match=f"the {layout} layout does not support"):
            vit_jax.save(path, model, params, layout=layout)
        return assert_nothing_is_left(tmp_path)
    vit_jax.save(path, model, params, layout=layout)
    again, back = vit_jax.load(path, resolution=model.field("resolution"))
    assert again.spec == model.spec
    if layout == "big_vision" and name in ("google_vit_token", "google_vit_in21k_tanh"):
        # There the class token's position is added to the class token: the same model in other numbers.
        assert not back["position"][0].any()
        np.testing.assert_array_equal(back["cls"], params["cls"] + params["position"][0])
        assert np.max(errors(again, back, name)) < 2e-6
    else:
        chex.assert_trees_all_equal(back, params)


@pytest.mark.parametrize("name", sorted(HERE - {"big_vision_gap_scan"}))  # blocks are written one by one
def test_what_is_written_in_its_own_layout_is_the_file_again(name, tmp_path):
    vit_jax.save(tmp_path / "x.npz", *load(name), layout=layout_of(name))
    written, original = arrays_of(tmp_path / "x.npz"), arrays_of(fixture(name))
    assert written.keys() == original.keys()
    assert all(np.array_equal(written[key], original[key]) for key in original)


def assert_nothing_is_left(folder):
    assert not list(folder.iterdir())


def test_prints_what_it_inferred(capsys):
    load("google_hybrid_stem_only")
    printed = capsys.readouterr().err
    words = "google layout, ViT/16, width 24, depth 2, mlp_dim 48, stem resnet, num_heads 3, 64x64 pixels, learned"
    assert words in printed and "11 classes, 44,635 parameters" in printed


def test_names_of_files_do_not_matter_but_their_content(changed):
    """In a training state, the model has a prefix, and the optimizer's arrays are beside it."""
    inside = {"opt/target/": "google_vit_in21k_tanh", "params/": "big_vision_map"}
    for prefix, name in inside.items():

        def nest(arrays, prefix=prefix):
            nested = {prefix + key.removeprefix("params/"): value for key, value in arrays.items()}
            return nested | {"opt/state/step": np.int32(7), "opt/state/cls/grad_ema": arrays.popitem()[1]}

        model, params = vit_jax.load(changed(name, nest))
        chex.assert_trees_all_equal(params, load(name)[1])
        assert np.max(errors(model, params, name)) < 2e-6


def test_a_file_may_have_any_name(tmp_path):
    path = shutil.copy(fixture("google_vit_in21k_tanh"), tmp_path / "ViT-B_16.npz?download=true")
    chex.assert_trees_all_equal(vit_jax.load(path)[1], load("google_vit_in21k_tanh")[1])


def test_old_positions_of_big_vision_have_a_row_for_the_class_token(changed):
    first = np.random.default_rng(0).normal(size=24).astype(np.float32)

    def age(arrays):
        rows = arrays.pop("params/pos_embedding")
        arrays["params/Transformer/posembed_input/pos_embedding"] = np.concatenate([first[None, None], rows], 1)
        arrays["params/cls"] = arrays["params/cls"] - first

    model, params = vit_jax.load(changed("big_vision_tok", age))
    assert np.max(errors(model, params, "big_vision_tok")) < 5e-6


def test_kinds_of_numbers(changed):
    _, params = load("google_vit_in21k_tanh")

    def vary(arrays):
        arrays["cls"] = arrays["cls"].astype(np.float64)
        arrays["head/bias"] = arrays["head/bias"].astype(np.float16)
        arrays["head/kernel"] = np.asfortranarray(arrays["head/kernel"])
        arrays["pre_logits/bias"] = arrays["pre_logits/bias"].astype(jnp.bfloat16).view("V2")

    _, varied = vit_jax.load(changed("google_vit_in21k_tanh", vary))
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(varied))
    np.testing.assert_array_equal(varied["head"]["bias"], params["head"]["bias"].astype(np.float16))
    np.testing.assert_array_equal(varied["pre_logits"]["bias"], params["pre_logits"]["bias"].astype(jnp.bfloat16))
    chex.assert_trees_all_equal([varied["cls"], varied["head"]["kernel"]], [params["cls"], params["head"]["kernel"]])


def test_names_every_array_that_does_not_fit(changed):
    def spoil(arrays):
        del arrays["Transformer/encoderblock_1/LayerNorm_2/bias"]
        arrays["Transformer/encoderblock_1/surplus"] = np.zeros(3, np.float32)
        arrays["Transformer/encoderblock_0/LayerNorm_0/scale"] = np.zeros(23, np.float32)
        arrays["head/bias"] = np.zeros(11, np.int64)

    with pytest.raises(UserError) as caught:
        vit_jax.load(changed("google_vit_in21k_tanh", spoil))
    for words in (
        "missing Transformer/encoderblock_1/LayerNorm_2/bias",
        "unexpected Transformer/encoderblock_1/surplus",
        "Transformer/encoderblock_0/LayerNorm_0/scale is [23], not [24]",
        "head/bias is int64, not float32",
    ):
        assert words in str(caught.value)


def test_given_fields_take_precedence():
    with pytest.raises(UserError, match=r"head/kernel is \[24, 11\], not \[24, 5\]"):
        load("google_vit_in21k_tanh", num_classes=5)
    with pytest.raises(
        UserError, match="dense1/kernel, but a model with the given fields has no such parameter; leave out the field"
    ):
        load("google_vit_in21k_tanh", activation="swiglu")
    model, _ = load(
        "google_vit_in21k_tanh", class_names=list("abcdefghijk"), preprocess="value_range(0,1)", loss="sigmoid"
    )
    assert model.class_names[2] == "c" and (model.preprocess, model.loss) == ("value_range(0,1)", "sigmoid")


@pytest.mark.parametrize("name", slow_but(USUAL[:1], USUAL))
@pytest.mark.parametrize(("method", "size"), [("linear", 96), ("linear", 16), ("bicubic", 16), ("linear", (32, 64))])
def test_another_resolution_resamples_the_positions(name, method, size):
    model, params = load(name)
    other, resampled = load(name, resolution=size, resample=method)
    assert other.spec.position.image_size == (size if isinstance(size, tuple) else (size, size))
    expected = models.resample_positions(
        params["position"], model.spec.grid, other.spec.grid, model.spec.class_rows, method
    )
    np.testing.assert_array_equal(resampled["position"], expected)
    height, width = other.spec.position.image_size
    cropped = "central_crop" in model.preprocess and height == width
    pipe = f"resize_small({height})|central_crop({height})" if cropped else f"resize(({height},{width}))"
    assert other.preprocess == f"{pipe}|value_range(-1,1)"
    images = jax.ShapeDtypeStruct((1, height, width, 3), jnp.float32)
    assert jax.eval_shape(other.apply, resampled, images)[0].shape == (1, 11)


def test_positions_of_images_that_are_not_square(changed, tmp_path):
    def stretch(arrays):
        arrays["Transformer/posembed_input/pos_embedding"] = np.ones((1, 1 + 2 * 4, 24), np.float32)

    path = changed("google_vit_in21k_tanh", stretch)
    with pytest.raises(UserError, match=r"9 position embeddings .* give resolution=\(height, width\)"):
        vit_jax.load(path)
    model, params = vit_jax.load(path, resolution=(16, 32))
    assert model.spec.grid == (2, 4)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), params)
    vit_jax.save(tmp_path / "x.npz", model, params, layout="google")
    again, back = vit_jax.load(tmp_path / "x.npz", resolution=(16, 32))
    assert again.spec == model.spec
    chex.assert_trees_all_equal(back, params)
    assert arrays_of(tmp_path / "x.npz")["Transformer/posembed_input/pos_embedding"].shape == (1, 9, 24)
    with pytest.raises(UserError, match="big_vision layout supports position embeddings for square images only"):
        vit_jax.save(tmp_path / "x.npz", model, params, layout="big_vision")
    wide, positions = load("google_vit_in21k_tanh", resolution=(16, 64))
    with pytest.raises(UserError, match="does not store the patch grid, so 2x8 patches would be read as 4x4"):
        vit_jax.save(tmp_path / "x.npz", wide, positions, layout="google")
    vit_jax.save(tmp_path / "x.npz", model, params)
    again, back = vit_jax.load(tmp_path / "x.npz")
    assert again == model
    chex.assert_trees_all_equal(back, params)


@pytest.mark.parametrize(("count", "first", "loss"), [(1000, "tench", "softmax"), (21843, "organism", "sigmoid")])
def test_heads_with_the_classes_of_imagenet(changed, count, first, loss):
    def widen(arrays):
        arrays |= {"head/kernel": np.ones((24, count), np.float32), "head/bias": np.zeros(count, np.float32)}
        return arrays

    model, _ = vit_jax.load(changed("google_vit_in21k_tanh", widen))
    assert len(set(model.class_names)) == count and model.loss == loss
    assert count != 1000 or first in model.class_names[0]


@pytest.mark.parametrize("name", ["google_vit_in21k_tanh", "big_vision_tok"])
def test_the_representation_has_a_width_of_its_own(name, changed, tmp_path, capsys):
    random = np.random.default_rng(0)

    def widen(arrays):
        prefix = "params/" if layout_of(name) == "big_vision" else ""
        shapes = {"pre_logits/kernel": (24, 40), "pre_logits/bias": (40,), "head/kernel": (40, 11)}
        return arrays | {prefix + key: random.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}

    model, params = vit_jax.load(changed(name, widen))
    assert (model.field("pre_logits"), model.field("representation_size")) == (True, 40)
    assert "a tanh layer of width 40" in capsys.readouterr().err
    with jax.default_matmul_precision("highest"):
        logits, out = jax.jit(model.apply)(params, np.load(fixture(name).with_suffix(".io.npz"))["images"])
    hidden = np.tanh(out["tokens"][:, 0] @ params["pre_logits"]["kernel"] + params["pre_logits"]["bias"])
    np.testing.assert_allclose(out["pre_logits"], hidden, atol=1e-5)
    np.testing.assert_allclose(logits, hidden @ params["head"]["kernel"] + params["head"]["bias"], atol=1e-4)
    for layout in ("ours", layout_of(name)):
        vit_jax.save(tmp_path / "x.npz", model, params, layout=layout)
        again, back = vit_jax.load(tmp_path / "x.npz")
        assert again.spec == model.spec
        chex.assert_trees_all_equal(back, params)


def test_a_head_of_zeros_is_reported(changed, caplog):
    def clear(arrays):
        arrays["head/kernel"][:] = 0

    vit_jax.load(changed("google_vit_in21k_tanh", clear))
    assert "fine-tune it before" in caplog.text


def test_a_head_is_for_its_classes_in_their_order(caplog):
    check_class_order(["cat", "dog"], ("cat", "dog"))
    check_class_order(None, ["cat"])
    with pytest.raises(UserError, match="class 'cat' has label 0 in the checkpoint's head, but label 1 in the data"):
        check_class_order(["cat", "dog"], ["dog", "cat"])
    assert not caplog.text
    check_class_order(["tench, Tinca tinca", "goldfish", "shark", "ray"], ["tench", "goldfish", "cat", "dog"])
    first = "head are tench, Tinca tinca, goldfish, shark, ...; those of the data are tench, goldfish, cat, ..."
    assert caplog.messages == [f"the classes of the {first}: check that they are the same."]


def test_named_models_are_recognised(tmp_path):
    for name in ("ViT-Ti/16", "R+ViT-Ti/16"):
        model = create(name, num_classes=3)
        shapes = parameter_shapes(model)
        params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
        vit_jax.save(tmp_path / "x.npz", model, params, layout="google")
        again, _ = vit_jax.load(tmp_path / "x.npz")
        assert (again.name, again.spec) == (name, model.spec)


def test_convert(tmp_path, capsys):
    source, target = str(fixture("big_vision_tok")), str(tmp_path / "x.npz")
    convert.main(["convert", source, target, "--layout=google", "--resolution=64x64", "--resample=bicubic"])
    assert capsys.readouterr().out == f"{target}: google layout, ViT/8, 64x64 pixels\n"
    model, params = vit_jax.load(target)
    assert model.field("resolution") == 64
    chex.assert_trees_all_equal(params, load("big_vision_tok", resolution=64, resample="bicubic")[1])
    named = str(tmp_path / "named.npz")
    vit_jax.save(named, dataclasses.replace(model, class_names=tuple("abcdefghijk")), params)
    for layout, lost in (("google", True), ("big_vision", True), ("ours", False)):
        convert.main(["convert", named, target, f"--layout={layout}"])
        assert ("layout does not store the names of the 11 classes" in capsys.readouterr().err) == lost
    with pytest.raises(UserError, match="unknown layout 'googel'; did you mean 'google'"):
        convert.main(["convert", source, target, "--layout=googel"])
    with pytest.raises(UserError, match="is the source itself"):
        convert.main(["convert", source, source])
    with pytest.raises(UserError, match=r"--resolution=64X64 must be one size or HEIGHTxWIDTH"):
        convert.main(["convert", source, target, "--resolution=64X64"])


def test_unknown_things_are_reported(tmp_path):
    with pytest.raises(UserError, match=r"^nowhere\.npz: does not exist, .*; vit_jax\.list_models\(\) lists"):
        vit_jax.load("nowhere.npz")
    with pytest.raises(UserError, match=r"did you mean 'ViT-B/16-imagenet21k'\?"):
        vit_jax.load("ViT-B/16-ImageNet21k")
    with pytest.raises(UserError, match=r"did you mean 'ViT-B/16-imagenet21k'\?"):
        vit_jax.load("vit-b/16")
    (tmp_path / "model.safetensors").write_bytes(b"hello")
    with pytest.raises(
        UserError,
        match=r"is not an \.npz or \.safetensors file; vit_jax reads the \.npz files of vit_jax, vision_tr",
    ):
        vit_jax.load(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"it contains model/data\.pkl, which is not an array; vit_jax reads"):
        vit_jax.load(zip_of(tmp_path / "model.pth", ("model/data.pkl", b"hello")))
    with pytest.raises(UserError, match="unknown resample 'cubic'"):
        load("google_vit_in21k_tanh", resample="cubic")
    with pytest.raises(UserError, match="resolution must be"):
        load("google_vit_in21k_tanh", resolution="large")
    with pytest.raises(UserError, match=r"resolution \d+ would fit"):
        load("google_vit_in21k_tanh", resolution=33)


@pytest.mark.parametrize("size", slow_but([8, 48], [8, 16, 30, 32, 48]))
def test_flexible_patches_are_resized_as_by_their_authors(size):
    expected = np.load(fixture("big_vision_flexi").with_suffix(".io.npz"))
    kernel, images = expected[f"kernel_{size}"], expected[f"images_{size}"]
    model, params = load("big_vision_flexi", patch_size=size, resolution=images.shape[1])
    assert model.name == f"ViT/{size}" and model.spec.grid == (images.shape[1] // size,) * 2
    np.testing.assert_allclose(params["embed"]["kernel"][..., : kernel.shape[-1]], kernel, rtol=0, atol=1e-5)
    with jax.default_matmul_precision("highest"):
        logits, out = jax.jit(model.apply)(params, images)
    for ours, name in ((logits, "logits"), (out["pre_logits"], "pre_logits")):
        theirs = expected[f"{name}_{size}"]
        assert float(abs(np.asarray(ours) - theirs).max()) < 1e-5 * abs(theirs).max()


def test_patches_of_another_size(tmp_path, capsys):
    model, _ = load("big_vision_flexi")
    assert (model.name, model.spec.grid) == ("ViT/32", (7, 7))
    other, params = load("big_vision_flexi", patch_size=16)
    assert (other.name, other.spec.grid, other.field("resolution")) == ("ViT/16", (14, 14), 224)
    assert "ViT/16: patches resized from 32x32 to 16x16 pixels" in capsys.readouterr().err
    vit_jax.save(tmp_path / "x.npz", other, params)
    again, back = vit_jax.load(tmp_path / "x.npz")
    assert again == other
    chex.assert_trees_all_equal(back, params)
    target = str(tmp_path / "y.npz")
    convert.main(["convert", str(fixture("big_vision_flexi")), target, "--patch-size=16"])
    chex.assert_trees_all_equal(vit_jax.load(target)[1], params)
    linear = load("big_vision_flexi", patch_size=16, resample="linear")[1]
    assert not np.array_equal(linear["position"], params["position"])
    with pytest.raises(UserError, match=r"patches of 30 pixels do not tile 224x224 images; resolution 210 would fit"):
        load("big_vision_flexi", patch_size=30)
    with pytest.raises(UserError, match="patch_size must be a whole number"):
        load("big_vision_flexi", patch_size="16")
    with pytest.raises(UserError, match="patch_size cannot change"):
        load("google_hybrid_stem_only", patch_size=32)


# Malicious or damaged files.


def zip_of(path, *entries, **options):
    """Writes a zip archive of (name, bytes) entries."""
    with zipfile.ZipFile(path, "w", **options) as file:
        for name, content in entries:
            file.writestr(name, content)
    return path


def npy(array, **header):
    """An array as an .npy file, with any header."""
    stream = io.BytesIO()
    said = {"descr": "<f4", "fortran_order": False, "shape": array.shape} | header
    np.lib.format.write_array_header_1_0(stream, said)
    return stream.getvalue() + array.tobytes()


def test_refuses_what_unpacks_to_far_more_than_it_is(tmp_path):
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, **{"embedding/kernel": np.zeros((16, 16, 3, 52_000), np.float32)})
    assert path.stat().st_size < 200_000
    with pytest.raises(UserError, match=r"declares an unpacked size of 0\.16 GB"):
        vit_jax.load(path)


ONE = np.ones(4, np.float32)
HOSTILE = {
    "shape": ([("embedding/kernel.npy", npy(ONE, shape=(2**40,)))], "contradicts its size"),
    "negative": ([("a.npy", npy(ONE, shape=(-4,)))], "a shape that no array of a model has"),
    "short": ([("a.npy", npy(ONE)[:-4])], "contradicts its size"),
    "long": ([("a.npy", npy(ONE) + b"....")], "contradicts its size"),
    "twice": ([("a.npy", npy(ONE)), ("a.npy", npy(ONE))], "two arrays named a"),
    "no array": ([("readme.txt", b"hello")], "cannot be read"),
    "headers": ([(f"{i}.npy", npy(ONE, shape=(1,) * 300 + (4,))) for i in range(2)], "cannot be read"),
    "dimensions": ([("a.npy", npy(ONE, shape=(1,) * 8 + (4,)))], "a shape that no array of a model has"),
    "many": ([(f"{i}.npy", b"") for i in range(10_001)], "contains 10,001 arrays"),
    "nested": ([("a.npy", npy(ONE)[:10] + b"(" * 100 + npy(ONE)[110:])], "cannot be read"),
    "empty": ([], "match no known layout"),
    "up": ([("../../up.npy", npy(ONE))], "match no known layout"),
    "other": ([("resnet/stem/conv/kernel.npy", npy(ONE))], "match no known layout"),
    "BiT": ([("resnet/root_block/standardized_conv2d/kernel.npy", npy(ONE))], "from which no field can be inferred"),
    "half a BiT": ([("resnet/root_block/standardized_conv2d/kernel.npy", npy(np.ones((7, 32), np.float32)))], "stage"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("kind", HOSTILE)
def test_refuses_files_that_are_not_what_they_say(kind, tmp_path):
    entries, words = HOSTILE[kind]
    with pytest.raises(UserError, match=words):
        vit_jax.load(zip_of(tmp_path / "x.npz", *entries))
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


def test_refuses_python_objects(changed, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (tmp_path.joinpath("exploded").touch, ())

    def load_bomb(arrays):
        arrays["head/bias"] = np.array([Bomb()] * 11, object)

    with pytest.raises(UserError, match="contains Python objects"):
        vit_jax.load(changed("google_vit_in21k_tanh", load_bomb))
    assert not (tmp_path / "exploded").exists()


def test_refuses_other_compressions_and_damaged_values(tmp_path):
    with pytest.raises(UserError, match="by a method that NumPy does not use"):
        vit_jax.load(zip_of(tmp_path / "x.npz", ("a.npy", npy(ONE)), compression=zipfile.ZIP_LZMA))
    for name, share in (("google_vit_in21k_tanh", 0.5), ("google_hybrid_stem_only", 0.8)):  # a small array, a large one
        content = bytearray(fixture(name).read_bytes())
        content[int(share * len(content))] ^= 1
        (tmp_path / "x.npz").write_bytes(content)
        with pytest.raises(UserError, match=r"cannot be read as an \.npz file: Bad CRC-32"):
            vit_jax.load(tmp_path / "x.npz")
    (tmp_path / "x.npz").write_bytes(b"hello")
    with pytest.raises(UserError, match=r"is not an \.npz or \.safetensors file; vit_jax"):
        vit_jax.load(tmp_path / "x.npz")


def test_refuses_a_compressed_array_that_ends_early(tmp_path):
    """Old content of memory must never be returned as weights."""
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as file:
        for name, array in arrays_of(fixture("google_hybrid_stem_only")).items():
            content = npy(array)
            file.writestr(f"{name}.npy", content[:5000])  # the longer ones are cut
            file.getinfo(f"{name}.npy").file_size = len(content)
    with pytest.raises(UserError, match="cut short"):
        vit_jax.load(tmp_path / "x.npz")


def test_refuses_numbers_that_float32_cannot_hold(changed):
    def enlarge(arrays):
        arrays["cls"] = arrays["cls"].astype(np.float64) + 1e300

    with pytest.raises(UserError, match="overflow"):
        vit_jax.load(changed("google_vit_in21k_tanh", enlarge))


def test_names_in_a_file_cannot_control_the_terminal(changed):
    def name(arrays):
        arrays["Transformer/encoderblock_0/a\nvit_jax: all is well\x1b[2J"] = ONE

    with pytest.raises(UserError) as caught:
        vit_jax.load(changed("google_vit_in21k_tanh", name))
    assert r"a\nvit_jax: all is well\x1b[2J" in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        (["Transformer/posembed_input/pos_embedding"], "arrays are missing: Transformer/posembed_input/pos_embedding"),
        (["cls"], "cls is missing, but one of the 17 position embeddings"),
        (
            ["embedding/kernel", "Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel"],
            "arrays are missing: embedding/kernel, Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel",
        ),
    ],
)
def test_names_the_arrays_that_the_model_is_inferred_from(lost, told, changed):
    with pytest.raises(UserError, match=told):
        vit_jax.load(changed("google_vit_in21k_tanh", lambda arrays: [arrays.pop(name) for name in lost] and None))


def test_a_square_of_positions_with_a_class_row_is_not_taken_for_another_shape(changed):
    def age(arrays):  # 1 + 7x7 rows are as many as 5x10
        arrays.pop("params/pos_embedding")
        arrays["params/Transformer/posembed_input/pos_embedding"] = np.ones((1, 50, 24), np.float32)

    model, params = vit_jax.load(changed("big_vision_tok", age), resolution=(40, 80))
    assert model.spec.grid == (5, 10) and params["position"].shape == (51, 24)


@pytest.mark.parametrize(
    "fields",
    [{"class_names": ["a"]}, {"loss": "mse"}, {"pooling": np.ones(2)}, {"resolution": np.ones(3)}],
)
def test_refuses_wrong_keywords(fields):
    with pytest.raises(UserError):
        load("google_vit_in21k_tanh", **fields)


def test_failed_writes_leave_nothing(tmp_path):
    model, params = load("google_vit_in21k_tanh")
    (tmp_path / "x.npz").mkdir()
    for path in (tmp_path / "x.npz", tmp_path / "absent" / "x.npz", tmp_path / f"{'x' * 300}.npz"):
        with pytest.raises(UserError, match=r"cannot write .*x\.npz: |at most 255 bytes"):
            vit_jax.save(path, model, params)
    with pytest.raises(UserError, match="local path"):
        vit_jax.save("s3://bucket/x.npz", model, params)
    with pytest.raises(UserError, match=r"cls is float64"):
        vit_jax.save(tmp_path / "y.npz", model, params | {"cls": params["cls"].astype(np.float64)})
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


def test_strings_that_are_not_paths():
    for path in ("~nobody/x.npz", "x" * 300, "\0"):
        with pytest.raises(UserError, match=r"is not a path|does not exist|at most 255 bytes"):
            vit_jax.load(path)


def test_predicting_without_a_head(changed, tmp_path):
    path = changed(
        "google_vit_in21k_tanh", lambda arrays: [arrays.pop(f"head/{kind}") for kind in ("kernel", "bias")] and None
    )
    with pytest.raises(UserError, match="has no head"):
        predict.predict(path, ["x.png"])
    with pytest.raises(UserError, match="top must be at least 1"):
        predict.predict(fixture("google_vit_in21k_tanh"), ["x.png"], top=0)


DESCRIPTIONS = ("[]", "{}", "null", "[" * 100_000, "{", '{"model": 3}', "\x00")


@pytest.mark.parametrize("about", DESCRIPTIONS)
def test_refuses_descriptions_of_no_model(about, tmp_path):
    vit_jax.save(tmp_path / "x.npz", *load("google_vit_in21k_tanh"))
    (tmp_path / "x.json").write_text(about)
    with pytest.raises(UserError, match=r"x\.npz: "):
        vit_jax.load(tmp_path / "x.npz")


WRONG = [{"depth": 10**12}, {"width": 10**30}, {"resolution": [10**9, 8]}, {"stem": "resnet", "stages": [10**9]}]
WRONG += [{"name": "x"}, {"num_classes": 10**18}, {"mlp_dim": 1.5}]


@pytest.mark.parametrize("fields", WRONG)
def test_refuses_descriptions_of_another_model(fields, tmp_path):
    vit_jax.save(tmp_path / "x.npz", *load("google_vit_in21k_tanh"))
    about = json.loads((tmp_path / "x.json").read_text())
    about["fields"] |= fields
    (tmp_path / "x.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"x\.npz: "):
        vit_jax.load(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("name", "layout"),
    [("google_vit_in21k_tanh", "ours"), ("google_hybrid_stem_only", "ours"), ("google_vit_gap", "timm")],
)
def test_a_folder_and_back_gives_the_file_again(name, layout, tmp_path, capsys):
    source, folder, target = str(fixture(name)), f"{tmp_path}/b/", f"{tmp_path}/c.npz"
    convert.main(["convert", source, folder, *(["--layout=timm"] if layout == "timm" else [])])
    assert f"{folder}: {layout} layout" in capsys.readouterr().out
    convert.main(["convert", folder, target, "--layout=google"])
    written, original = arrays_of(target), arrays_of(source)
    assert written.keys() == original.keys()
    assert all(np.array_equal(written[key], original[key]) for key in original)


def test_convert_writes_dtypes(tmp_path):
    convert.main(["convert", str(fixture("google_vit_in21k_tanh")), f"{tmp_path}/x.npz", "--dtype=bfloat16"])
    _, params = vit_jax.load(tmp_path / "x.npz")
    np.testing.assert_array_equal(params["cls"], load("google_vit_in21k_tanh")[1]["cls"].astype(jnp.bfloat16))
    with pytest.raises(UserError, match="unknown dtype 'float8'"):
        convert.main(["convert", str(fixture("google_vit_in21k_tanh")), f"{tmp_path}/x.npz", "--dtype=float8"])
