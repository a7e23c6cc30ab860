"""Files of .safetensors: dtypes, shards, and randomly changed ones, each loaded cleanly or refused in a sentence."""

import dataclasses
import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path

import chex
import fsspec
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import vit_jax
from tests.interop.test_hostile_files import CUTS, JSON, PROFILE, outcome
from vit_jax import UserError, convert, interop
from vit_jax.evals import loaded_model
from vit_jax.interop import archives, locate
from vit_jax.model import create, parameter_shapes

SMALL = {"width": 24, "depth": 2, "mlp_dim": 48, "num_heads": 3, "resolution": 16, "num_classes": 5}


@functools.cache
def small(seed=0):
    """A small model and parameters that are whole numbers, which every dtype holds."""
    model = create("ViT/8", activation="gelu", **SMALL)
    shapes = parameter_shapes(model)
    rng = np.random.default_rng(seed)
    return model, jax.tree.map(lambda leaf: rng.integers(-8, 9, leaf.shape).astype(np.float32), shapes)


@functools.cache
def folder_files(layout):
    """The files of a folder with the small model."""
    with tempfile.TemporaryDirectory() as folder:
        vit_jax.save(Path(folder) / "x", *small(), layout=layout)
        return {path.name: path.read_bytes() for path in (Path(folder) / "x").iterdir()}


def save_without_notes(path, model, params, **how):
    """Saves a file as PyTorch's libraries do: with nothing in its header that describes the model."""
    vit_jax.save(path, model, params, **how)
    safetensors.numpy.save_file(safetensors.numpy.load_file(path), path, metadata={"format": "pt"})


def split(content):
    """Header and values of a file."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header, values):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["x", "x.safetensors", "x.npz"])
def test_dtypes_are_read_and_written(name, dtype, tmp_path):
    model, params = small()
    vit_jax.save(tmp_path / name, model, params, dtype=dtype)
    file = next(path for path in tmp_path.rglob("*") if path.suffix in (".npz", ".safetensors"))
    with archives.open_archive(file) as archive:
        assert {str(header.dtype) for header in archive.values()} == {dtype}
    again, back = vit_jax.load(tmp_path / name, num_heads=3, **({"activation": "gelu"} if "safe" in name else {}))
    assert again.spec == model.spec
    chex.assert_trees_all_equal(back, params)


def test_values_beyond_a_dtype_are_refused_and_leave_nothing(tmp_path):
    model, params = small()
    params = params | {"cls": np.full_like(params["cls"], 1e6)}
    for name in ("x.safetensors", "x.npz"):
        with pytest.raises(UserError, match=r"the weights cannot be written as float16: overflow .*; use another"):
            vit_jax.save(tmp_path / name, model, params, dtype="float16")
    assert not list(tmp_path.iterdir())
    vit_jax.save(tmp_path / "x.safetensors", model, params, dtype="bfloat16")


def write_shards(folder, index=None, layout="huggingface"):
    """Writes the small model in two shards with an index."""
    files = folder_files(layout)
    for name in files.keys() - {"model.safetensors"}:
        (folder / name).write_bytes(files[name])
    (folder / "whole.safetensors").write_bytes(files["model.safetensors"])
    shard_of = {}
    with archives.open_archive(folder / "whole.safetensors") as archive:
        for number in range(2):
            shard = f"model-0000{number + 1}-of-00002.safetensors"
            names = sorted(archive)[number::2]
            arrays = {name: np.empty(archive[name].shape, np.float32) for name in names}
            for name, array in arrays.items():
                archive.read_array(name, array)
            archives.write_archive(folder / shard, folder / shard, arrays, "float32")
            shard_of |= dict.fromkeys(names, shard)
    (folder / "whole.safetensors").unlink()
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": (index or (lambda same: same))(shard_of)})
    (folder / "model.safetensors.index.json").write_text(text)


def test_shards_are_read_by_their_index(tmp_path):
    write_shards(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        model, params = vit_jax.load(path)
        assert model.spec == small()[0].spec
        chex.assert_trees_all_equal(params, small()[1])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors must be in the same folder"):
        vit_jax.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda same: dict.fromkeys(same, "../x.safetensors"), "which is not the name of a"),
        (lambda same: dict.fromkeys(same, "/etc/passwd"), "which is not the name of a .safetensors file beside"),
        (lambda same: dict.fromkeys(same, 3), "it names 3, which is not"),
        (lambda same: {}, "it has no weight_map"),
        (lambda same: same | {"more": "model-00001-of-00002.safetensors"}, "index and files differ in the array more"),
        (lambda same: dict(sorted(same.items())[1:]), "index and files differ in the array"),
        (
            lambda same: same | {str(i): "model-00001-of-00002.safetensors" for i in range(10_001)},
            "more than any model",
        ),
    ],
)
def test_indices_that_are_not_what_they_say(change, words, tmp_path):
    write_shards(tmp_path, change)
    with pytest.raises(UserError, match=words):
        vit_jax.load(tmp_path)


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE = {
    "long header": (2**40).to_bytes(8, "little") + b"{",
    "larger than any": (2**23).to_bytes(8, "little") + b"{" + bytes(2**23),
    "beyond the file": joined({"a": ONE | {"data_offsets": [0, 2**40], "shape": [2**38]}}, bytes(8)),
    "overlap": joined({"a": ONE, "b": ONE}, bytes(8)),
    "hole": joined({"a": ONE}, bytes(16)),
    "overflow": joined({"a": ONE | {"shape": [2**62, 2**62]}}, bytes(8)),
    "size": joined({"a": ONE | {"shape": [3]}}, bytes(8)),
    "no such dtype": joined({"a": ONE | {"dtype": "F99"}}, bytes(8)),
    "quantised": joined({"a": ONE | {"dtype": "F8_E4M3", "shape": [8]}}, bytes(8)),
    "dimensions": joined({"a": ONE | {"shape": [1] * 20 + [2]}}, bytes(8)),
    "many": joined({str(i): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(10_001)}, b""),
    "up": joined({"../../up": ONE}, bytes(8)),
    "not an object": joined([1], bytes(8)),
    "nested": (20_000).to_bytes(8, "little") + b'{"a":' * 4_000,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_refuses_files_that_are_not_what_they_say(kind, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(HOSTILE[kind])
    with pytest.raises(UserError) as caught:
        vit_jax.load(tmp_path / "x.safetensors")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


LAYOUTS = st.sampled_from(["timm", "huggingface"])
KEYS = st.sampled_from(["dtype", "shape", "data_offsets", "other"])


def bytes_changed(folder, layout, cuts):
    files = dict(folder_files(layout))
    content = files["model.safetensors"]
    for share, length, new in cuts:
        start = int(share**4 * len(content))  # mostly in the header
        content = content[:start] + new + content[start + length :]
    outcome_of(folder, files | {"model.safetensors": content})


def header_changed(folder, layout, number, key, value):
    files = dict(folder_files(layout))
    header, values = split(files["model.safetensors"])
    entry = header[sorted(header)[number % len(header)]]
    entry[key] = value
    outcome_of(folder, files | {"model.safetensors": joined(header, values)})


def config_changed(folder, layout, inner, key, value):
    files = dict(folder_files(layout))
    names = sorted(name for name in files if name.endswith(".json"))
    name = names[inner % len(names)]
    config = json.loads(files[name])
    place = config["pretrained_cfg"] if inner > 5 and "pretrained_cfg" in config else config
    place[sorted(place)[key % len(place)]] = value
    outcome_of(folder, files | {name: json.dumps(config).encode()})


def outcome_of(folder, files):
    for name, content in files.items():
        (folder / name).write_bytes(content)
    outcome(folder / "model.safetensors")


KINDS = {
    "bytes": (bytes_changed, (LAYOUTS, st.lists(CUTS, min_size=1, max_size=3))),
    "header": (header_changed, (LAYOUTS, st.integers(0, 100), KEYS, JSON | st.lists(st.integers(-1, 2**62)))),
    "config": (config_changed, (LAYOUTS, st.integers(0, 10), st.integers(0, 40), JSON)),
}


def fuzz(kind, count, folder):
    function, strategies = KINDS[kind]

    @settings(PROFILE, max_examples=count)
    @given(st.tuples(*strategies))
    def run(values):
        function(folder, *values)

    run()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_loaded_cleanly_or_refused(kind, tmp_path):
    fuzz(kind, 15, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_changed_files_are_loaded_cleanly_or_refused(kind, tmp_path):
    fuzz(kind, 150, tmp_path)


def test_bfloat16_is_read_exactly(tmp_path):
    values = np.array([1.5, -2.25, 3e38], ml_dtypes.bfloat16)
    archives.write_archive(tmp_path / "x.safetensors", tmp_path / "x.safetensors", {"a": values}, "bfloat16")
    with archives.open_archive(tmp_path / "x.safetensors") as archive:
        read = np.empty(3, np.float32)
        archive.read_array("a", read)
    np.testing.assert_array_equal(read, values.astype(np.float32))


def test_remote_folders_and_files_are_copied_with_their_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    store = fsspec.filesystem("memory")
    for name, content in folder_files("huggingface").items():
        store.pipe_file(f"/weights/{name}", content)
    for path in ("memory://weights", "memory://weights/model.safetensors"):
        chex.assert_trees_all_equal(vit_jax.load(path)[1], small()[1])


def test_a_folder_of_weights_is_not_taken_for_a_run(tmp_path):
    for layout in ("timm", "huggingface", "ours"):
        vit_jax.save(tmp_path / layout, *small(), layout=layout)
        assert not loaded_model.is_run(tmp_path / layout)
    assert not loaded_model.is_run("https://host/model.npz?sig=1")
    assert not loaded_model.is_run("hf-hub:owner/name") and not loaded_model.is_run("ViT-B/16-imagenet21k")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for layout in ("timm", "huggingface", "ours"):
        with pytest.raises(UserError, match="it is the workdir of a run; choose another folder"):
            vit_jax.save(tmp_path / "run", *small(), layout=layout)
    (tmp_path / "run" / "config.json").write_text("{}")
    vit_jax.save(tmp_path / "run" / "exported.safetensors", *small())
    assert loaded_model.is_run(tmp_path / "run")


def test_what_is_written_last_into_a_folder_is_loaded_or_nothing_is_written(tmp_path):
    layouts = ("timm", "ours", "huggingface", "ours")
    for seed, layout in enumerate(layouts):
        model, params = small(seed)
        try:
            vit_jax.save(tmp_path / "folder", model, params, layout=layout)
        except UserError as error:
            assert layout == "huggingface" and "model.npz, which is there already, would be loaded" in str(error)
            continue
        chex.assert_trees_all_equal(vit_jax.load(tmp_path / "folder")[1], params)
        assert layout != "huggingface"


@pytest.mark.parametrize("content", ['{"version": 2, "model": {}}', "a line\nof text", "[1]"])
def test_a_description_replaces_no_other_file(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json: the file that is there does not describe a model; choose an"):
        vit_jax.save(tmp_path / "config.npz", *small())
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == content
    for _ in range(2):
        vit_jax.save(tmp_path / "other.npz", *small())


def test_two_files_of_one_name_have_a_description_each(tmp_path):
    model, params = small()
    first, second = (dataclasses.replace(model, class_names=tuple(names)) for names in ("abcde", "vwxyz"))
    vit_jax.save(tmp_path / "m.npz", first, params)
    vit_jax.save(tmp_path / "m.safetensors", second, params, layout="ours")
    assert vit_jax.load(tmp_path / "m.npz")[0].class_names == first.class_names
    again, back = vit_jax.load(tmp_path / "m.safetensors")
    assert again == second
    chex.assert_trees_all_equal(back, params)
    (tmp_path / "m.safetensors").rename(tmp_path / "alone.safetensors")
    assert vit_jax.load(tmp_path / "alone.safetensors")[0] == second


def test_a_pickled_model_is_refused_with_advice(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"only PyTorch can read; save the model from PyTorch as model\.safetensors"):
        vit_jax.load(tmp_path)


def test_what_a_file_does_not_state_is_asked_for(tmp_path):
    save_without_notes(tmp_path / "x.safetensors", *small())
    with pytest.raises(UserError, match=r"the number of attention heads is not known: .*; give num_heads="):
        vit_jax.load(tmp_path / "x.safetensors")
    heads = small()[0].field("num_heads")
    convert.main(["convert", f"{tmp_path}/x.safetensors", f"{tmp_path}/stated.npz", f"--num-heads={heads}"])
    assert vit_jax.load(tmp_path / "stated.npz")[0].field("num_heads") == heads
    save_without_notes(tmp_path / "y.safetensors", *small(), layout="huggingface")
    with pytest.raises(UserError, match="without it, give num_heads= norm_epsilon= activation="):
        vit_jax.load(tmp_path / "y.safetensors")
    found, back = vit_jax.load(tmp_path / "y.safetensors", num_heads=heads, norm_epsilon=1e-6, activation="gelu")
    assert found.spec == small()[0].spec
    chex.assert_trees_all_equal(back, small()[1])
    with pytest.raises(UserError, match=r"the google layout is written into \.npz files"):
        vit_jax.save(tmp_path / "z.safetensors", *small(), layout="google")
    with pytest.raises(UserError, match=r"that ends in \.npz, \.safetensors, \.onnx or \.stablehlo, or a folder"):
        vit_jax.save(tmp_path / "z.pth", *small())


def test_the_digest_of_a_large_file_is_remembered(tmp_path, monkeypatch):
    """The next process knows it, too, until the file is another. Without a cache it is computed."""
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(locate, "REMEMBERED_BYTES", 0)
    read, path = [], tmp_path / "weights.npz"
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: read.append(path) or digest(*args))

    def found():
        locate._digest_file.cache_clear()  # as a new process does
        return interop.digest_weights(path)

    path.write_bytes(b"some weights")
    first = found()
    assert found() == first and len(read) == 1
    status = path.stat()
    path.write_bytes(b"other weight")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a copy that keeps times
    second = found()
    assert second != first and found() == second and len(read) == 2
    for kept in (tmp_path / "cache" / "digests").iterdir():
        kept.write_text("damaged")
    assert found() == second and len(read) == 3
    monkeypatch.setenv("VIT_JAX_CACHE", str(path))  # no folder can be made there
    assert found() == second and len(read) == 4
