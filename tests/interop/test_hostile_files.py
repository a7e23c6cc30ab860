"""Randomly changed files: each is loaded cleanly or refused with one sentence."""

import functools
import io
import json
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vit_jax
from tests.conftest import ROOT
from vit_jax import UserError, tree

NAMES = ("google_vit_in21k_tanh", "google_hybrid_stem_only", "big_vision_gap_scan", "big_vision_map")
PARITY = ROOT / "tests" / "fixtures" / "parity"
FILES = {name: (PARITY / f"{name}.npz").read_bytes() for name in NAMES}
# One unit of a BiT, as released.
UNIT = {"a": (1, 1, 32, 32), "b": (3, 3, 32, 32), "c": (1, 1, 32, 128), "a/proj": (1, 1, 32, 128)}
SHAPES_OF_BIT = {"root_block/standardized_conv2d/kernel": (7, 7, 3, 32), "head/conv2d/kernel": (1, 1, 128, 3)}
SHAPES_OF_BIT |= {f"block1/unit01/{part}/standardized_conv2d/kernel": shape for part, shape in UNIT.items()}
SHAPES_OF_BIT |= {f"block1/unit01/{part}/group_norm/{kind}": (32,) for part in "abc" for kind in ("gamma", "beta")}
SHAPES_OF_BIT |= {"group_norm/gamma": (128,), "group_norm/beta": (128,), "head/conv2d/bias": (3,)}


def bit_file():
    stream = io.BytesIO()
    np.savez(stream, **{f"resnet/{name}": np.ones(shape, np.float32) for name, shape in SHAPES_OF_BIT.items()})
    return stream.getvalue()


FILES["bit"] = bit_file()


def npz_of_torch(name):
    """The arrays of a folder of timm or transformers."""
    stream = io.BytesIO()
    np.savez(stream, **safetensors.numpy.load_file(PARITY / name / "model.safetensors"))
    return stream.getvalue()


# Folders, whose configuration stays beside the changed arrays.
FOLDERS = ("timm_beit", "timm_clip", "timm_naflex", "hf_clip", "hf_dinov3", "hf_siglip", "hf_siglip2_naflex")
CONFIGS = {name: (PARITY / name / "config.json").read_text() for name in FOLDERS}
FILES |= {name: npz_of_torch(name) for name in FOLDERS}
ARRAYS = {name: dict(np.load(io.BytesIO(content))) for name, content in FILES.items()}

# A range of bytes: its start as a share of the file, its length, and its replacement.
CUTS = st.tuples(st.floats(0, 1), st.integers(0, 64), st.binary(max_size=64))
SIZES = st.one_of(st.integers(0, 40), st.sampled_from([-1, 2**16, 2**31, 2**40, 2**62]))
SHAPES = st.lists(SIZES, max_size=5)
DTYPES = st.sampled_from(["<f4", "<f8", "<f2", "|V2", ">f4", "<i4", "|O", "<U3", "|b1", "<c8"])
WORDS = st.sampled_from(
    ["", "/", "..", "Transformer/", "encoderblock_7/", "encoderblock/", "cls", "params/", "block9/unit2/"]
)
# A change of the nth array: another name, another header, other content, or its removal.
CHANGES = st.one_of(
    st.tuples(st.just("name"), st.integers(0, 200), st.tuples(WORDS, WORDS)),
    st.tuples(st.just("shape"), st.integers(0, 200), SHAPES),
    st.tuples(st.just("true shape"), st.integers(0, 200), st.lists(st.integers(0, 40), max_size=5)),
    st.tuples(st.just("dtype"), st.integers(0, 200), DTYPES),
    st.tuples(st.just("drop"), st.integers(0, 200), st.none()),
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["ViT-B/16", "map"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=5,
)


def outcome(path: Path, name: str = "") -> str:
    """Loads a file, beside the configuration of the fixture NAME; it is loaded cleanly or refused in one line."""
    config = path.with_name("config.json")
    config.unlink(missing_ok=True)
    if name in CONFIGS:
        config.write_text(CONFIGS[name])
    before = sorted(path.parent.iterdir())
    try:
        model, params = vit_jax.load(path)
    except UserError as error:
        assert str(error) and "\n" not in str(error)
        return "refused"
    finally:
        assert sorted(path.parent.iterdir()) == before
    assert all(leaf.dtype == np.float32 for leaf in tree.flatten(params).values())
    assert "encoder" not in params or model.spec.depth == len(params["encoder"]["blocks"]["norm1"]["scale"])
    return "loaded"


def bytes_changed(folder, name, cuts):
    content = FILES[name]
    for share, length, new in cuts:
        start = int(share * len(content))
        content = content[:start] + new + content[start + length :]
    (folder / "x.npz").write_bytes(content)
    outcome(folder / "x.npz", name)


def arrays_changed(folder, name, changes, compressed):
    entries = [(key, array, None) for key, array in ARRAYS[name].items()]
    for kind, number, value in changes:
        index = number % len(entries) if entries else 0
        key, array, said = entries.pop(index) if entries else ("a", np.zeros(1, np.float32), None)
        if kind == "name":
            key = value[0] + key + value[1]
        elif kind == "true shape":
            array = np.ones(value, np.float32)
        elif kind in ("shape", "dtype"):
            said = (said or {}) | {kind: tuple(value) if kind == "shape" else value}
        if kind != "drop":
            entries.insert(index, (key, array, said))
    with zipfile.ZipFile(folder / "x.npz", "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as file:
        for key, array, said in {entry[0]: entry for entry in entries}.values():
            said = {"shape": array.shape, "dtype": "<f4"} | (said or {})
            stream = io.BytesIO()
            header = {"descr": said["dtype"], "fortran_order": False, "shape": said["shape"]}
            np.lib.format.write_array_header_1_0(stream, header)
            file.writestr(f"{key}.npy", stream.getvalue() + array.tobytes())
    outcome(folder / "x.npz", name)


@functools.cache
def saved():
    """A file in our own layout and its description."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npz"
        vit_jax.save(path, *vit_jax.load(PARITY / "google_hybrid_stem_only.npz"))
        return path.read_bytes(), path.with_suffix(".json").read_text()


def description_changed(folder, key, inner, value):
    path = folder / "x.npz"
    content, text = saved()
    path.write_bytes(content)
    about = json.loads(text)
    if inner is None:
        about[key] = value
    else:
        about["fields"][inner] = value
    path.with_suffix(".json").write_text(json.dumps(about))
    outcome(path)


KEYS = st.sampled_from(["model", "fields", "preprocess", "class_names", "loss", "other"])
FIELDS = st.none() | st.sampled_from(
    ["width", "depth", "stages", "stem", "resolution", "patch_size", "pooling", "x", ""]
)
ANY = st.sampled_from(list(FILES))
KINDS = {
    "bytes": (bytes_changed, (ANY, st.lists(CUTS, min_size=1, max_size=3))),
    "arrays": (
        arrays_changed,
        (ANY, st.lists(CHANGES, min_size=1, max_size=4), st.booleans()),
    ),
    "description": (description_changed, (KEYS, FIELDS, JSON)),
}


PROFILE = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


def fuzz(kind, count, folder):
    function, strategies = KINDS[kind]

    @settings(PROFILE, max_examples=count)
    @given(st.tuples(*strategies))
    def run(values):
        function(folder, *values)

    run()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "count"), [("bytes", 8), ("arrays", 8), ("description", 4)])
def test_a_changed_file_is_loaded_cleanly_or_refused(kind, count, tmp_path):
    fuzz(kind, count, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "count"), [("bytes", 250), ("arrays", 250), ("description", 100)])
def test_hundreds_of_changed_files_are_loaded_cleanly_or_refused(kind, count, tmp_path):
    fuzz(kind, count, tmp_path)
