"""Shards without info.json: counted once by a command that writes it, locally and on a bucket, reading little."""

import json
import os

import fsspec
import pytest

from tests.data.test_array_record import SEVERAL, SINGLE, cut, numbers, picture, write_set
from tests.data.test_sources import open_source
from vit_jax import UserError, describe
from vit_jax.data.shards import array_record_file, readers, tf_example
from vit_jax.data.sources import SourceConfig, array_record, open_split
from vit_jax.storage import filesystem


def empty_memory():
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    return store


@pytest.fixture(params=["here", "bucket"])
def place(request, tmp_path, monkeypatch):
    """Where `put` copies a folder of this name to."""
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    empty_memory()
    return tmp_path / "moved" if request.param == "here" else "memory://b/moved"


def put(folder, place):
    filesystem_of = fsspec.filesystem("memory" if "://" in str(place) else "file")
    filesystem_of.put(str(folder), str(place), recursive=True)


def run(place, *words):
    describe.main(["vit_jax.describe", f"array_record:{place}", *(words or ["--num-classes=4"])])


def info_of(place):
    return filesystem.read_bytes(f"{place}/info.json")


def test_what_is_described_is_what_was_packed(place, tmp_path, capsys):
    write_set(tmp_path / "set", SINGLE)
    packed = json.loads((tmp_path / "set" / "info.json").read_text())
    (tmp_path / "set" / "info.json").unlink()
    put(tmp_path / "set", place)
    bare = open_source(f"array_record:{place}", "train", num_classes=4)
    run(place)
    assert "info.json: written; 11 images (train 11), 3 shards, " in capsys.readouterr().out
    written = info_of(place)
    assert json.loads(written) == packed | {"name": "moved", "made_from": {}}
    source = open_source(f"array_record:{place}", "train")
    assert numbers(source) == numbers(bare) == list(range(11)) and not source.shards.shuffled
    assert source.shards.runs == tuple(
        one._replace(size=other.size) for one, other in zip(bare.shards.runs, source.shards.runs, strict=True)
    )
    run(place)
    assert "info.json: there already, unchanged; 11 images" in capsys.readouterr().out and info_of(place) == written
    for words in (["--num-classes=5"], ["--num-classes=4", "--max-labels=2"]):
        with pytest.raises(
            UserError, match=r"info.json does not agree with the shards, --num-classes or --max-labels; to count"
        ):
            run(place, *words)
    filesystem.write_bytes(f"{place}/val-00000-of-00001.array_record", b"more")
    with pytest.raises(UserError, match=r"info.json does not agree with the shards"):
        run(place)
    assert info_of(place) == written


def test_labels_of_multi_label_data(place, tmp_path):
    write_set(tmp_path / "set", SEVERAL, info=False)
    put(tmp_path / "set", place)
    with pytest.raises(UserError, match=r"record 0 of .*00000-of-00003.* has 0 labels, but one is expected"):
        run(place)
    run(place, "--num-classes=4", "--max-labels=3")
    assert open_source(f"array_record:{place}", "train").max_labels == 3


def test_what_is_wrong_is_named_and_nothing_is_written(place, tmp_path):
    write_set(tmp_path / "set", SINGLE, info=False)
    names = [array_record_file.file_name("train", number, 3) for number in range(3)]
    content = (tmp_path / "set" / names[1]).read_bytes()
    for damage, words, sentence in [
        (lambda path: None, "--num-classes=2", "record 2 of .*00000-of-00003.* has the label 2, but there are 2"),
        (lambda path: None, "--num-classes=0", "--num-classes=0 must be at least 1"),
        (cut, "--num-classes=4", "00001-of-00003.array_record: it is truncated or not an ArrayRecord file"),
        (lambda path: path.write_bytes(b""), "--num-classes=4", "00001-of-00003.array_record: it is truncated"),
        (lambda path: path.unlink(), "--num-classes=4", "must have 3 shards; 1 missing: train-00001-of-00003"),
    ]:
        (tmp_path / "set" / names[1]).write_bytes(content)
        damage(tmp_path / "set" / names[1])
        empty_memory()
        here = str(place) if "://" in str(place) else str(tmp_path / "set")
        put(tmp_path / "set", place) if "://" in here else None
        with pytest.raises(UserError, match=sentence):
            run(here, words)
        assert not filesystem.exists(f"{here}/info.json")


def test_records_that_are_no_images_are_refused(tmp_path):
    for image, sentence in (
        (b"no image", "image record 1 of .*00000-of-00001.array_record: it is not a JPEG"),
        (picture(1)[:40], "record 1 of"),
    ):
        name = array_record_file.file_name("train", 0, 1)
        array_record_file.write_shard(str(tmp_path / name), [(picture(0), [0]), (image, [0])])
        with pytest.raises(UserError, match=sentence):
            run(tmp_path)
    with pytest.raises(UserError, match=r"name the folder instead of .*train-\*"):
        run(tmp_path / "train-*")
    with pytest.raises(UserError, match=r"cannot describe digits: only array_record:FOLDER and webdataset:FOL"):
        describe.main(["vit_jax.describe", "digits", "--num-classes=4"])
    assert not (tmp_path / "info.json").exists()


def test_an_interrupted_count_leaves_nothing_and_the_same_command_counts_again(tmp_path, monkeypatch):
    write_set(tmp_path / "set", SINGLE, info=False)

    def interrupt(count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        array_record.describe_records(str(tmp_path / "set"), 4, None, interrupt)
    assert not (tmp_path / "set" / "info.json").exists()
    run(tmp_path / "set")
    first = info_of(tmp_path / "set")
    (tmp_path / "set" / "info.json").unlink()
    run(tmp_path / "set")
    assert info_of(tmp_path / "set") == first


@pytest.mark.parametrize(
    ("records", "size", "most"), [(9, 400_000, 2), (3000, 100, 1), (40, 50_000, 1), (0, 1, 1), (2, 4_000_000, 6)]
)
def test_of_a_remote_shard_only_the_end_is_read(tmp_path, monkeypatch, records, size, most):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    path = tmp_path / array_record_file.file_name("train", 0, 1)
    contents = [os.urandom(size) for _ in range(records)]
    array_record_file.write_shard(str(path), ((content, [1]) for content in contents))
    fsspec.filesystem("memory").pipe_file(f"/b/{path.name}", path.read_bytes())
    asked, plain = [], filesystem.read_range
    monkeypatch.setattr(
        filesystem, "read_range", lambda path, start, end: asked.append(end - start) or plain(path, start, end)
    )
    found, end = array_record.read_shard_end(f"memory://b/{path.name}", path.stat().st_size)
    assert found == records and len(asked) <= most
    whole = readers.open_reader(str(path), str(path))
    assert end == (whole.read(records - 1) if records else None)
    assert not records or tf_example.parse_example(end) == (contents[-1], [1])
    assert sum(asked) <= max(2**18, 3 * size + 2**18)
    assert not any((tmp_path / "cache").glob("tmp*"))  # the file with the hole


def test_remote_shards_that_are_not_counted_and_exceed_the_cache_name_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    write_set(tmp_path / "set", SINGLE, info=False)
    store = empty_memory()
    store.put(str(tmp_path / "set"), "/b/set", recursive=True)
    size = sum(path.stat().st_size for path in (tmp_path / "set").iterdir())
    copied, plain = [], filesystem.download
    monkeypatch.setattr(filesystem, "download", lambda *args: copied.append(args) or plain(*args))
    monkeypatch.setenv("VIT_JAX_CACHE_GB", str((size - 1) / 1e9))
    wanted = SourceConfig("array_record:memory://b/set", num_classes=4)
    command = r"python -m vit_jax.describe array_record:memory://b/set --num-classes=N$"
    with pytest.raises(UserError, match=rf"split train of memory://b/set is not known, since .*; count .* {command}"):
        open_split(wanted, "train", streams=True)
    assert not copied
    run("memory://b/set")
    assert not copied and len(open_split(wanted, "train", streams=True)) == 11
    store.rm("/b/set/info.json")
    monkeypatch.setenv("VIT_JAX_CACHE_GB", str((size + 1) / 1e9))
    source = open_split(wanted, "train")
    assert numbers(source) == list(range(11)) and source.shards.remote_bytes == size and len(copied) == 3
