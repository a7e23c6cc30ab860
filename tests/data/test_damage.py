"""Damaged files: whatever is wrong with one, a sentence names it."""

import json
import os
import random
import shutil
import struct
import tarfile
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.test_array_record import picture, write_set
from tests.data.test_formats import FIXTURES
from tests.data.test_sources import open_source
from tests.data.test_webdataset import sample, write_tar
from vit_jax import UserError
from vit_jax.data.images import DecodeError
from vit_jax.data.order import StreamOrder
from vit_jax.data.shards.tar_file import TarFile
from vit_jax.data.shards.tfrecord_file import HEAD, TFRecordFile, masked_checksum
from vit_jax.data.sources import SourceConfig, list_splits, open_split, tfds
from vit_jax.storage import filesystem

SOURCES = {
    "array_record": "array_record:{}",
    "folder": "folder:{}",
    "label_file": "folder:{}",
    "npz": "npz:{}/images.npz",
    "parquet": "parquet:{}",
    "tfds": "tfds:tiny",
    "webdataset": "webdataset:{}",
}


def write_sound(kind, folder):
    """A small set of a kind; the images of all kinds are PNG files or, in the .npz file, arrays."""
    if (FIXTURES / kind).exists():
        shutil.copytree(FIXTURES / kind, folder)
    elif kind == "array_record":
        write_set(folder, [[number % 3] for number in range(6)])
    elif kind == "npz":
        folder.mkdir()
        images = np.zeros((4, 4, 4, 3), np.uint8)
        np.savez(folder / "images.npz", train_images=images, train_labels=np.arange(4) % 2)
    else:
        for number in range(4):
            path = folder / "train" / ("ab"[number % 2] if kind == "folder" else "") / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(number))
        if kind == "label_file":
            rows = [f"{number}.png,{'ab'[number % 2]}" for number in range(4)]
            (folder / "train.csv").write_text("\n".join(["file_name,label", *rows]))


def damage(content, chance):
    """Flips bits of some bytes, cuts the content, puts zeros into it, or repeats a part of it."""
    kind, start = chance.choice(("flip", "cut", "zero", "repeat")), chance.randrange(len(content) + 1)
    end = min(len(content), start + chance.choice((1, 8, 64, 4096)))
    changed = {
        "flip": bytes(byte ^ 1 << chance.randrange(8) for byte in content[start:end]),
        "cut": b"",
        "zero": bytes(end - start),
        "repeat": 2 * content[start:end],
    }[kind]
    return content[:start] + changed + (b"" if kind == "cut" else content[end:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOURCES)
def test_whatever_is_damaged_is_named(tmp_path, kind):
    """Only UserError and DecodeError leave a source one of whose files is damaged; a third are noticed."""
    write_sound(kind, tmp_path / "sound")
    noticed, trials = 0, 200
    for seed in range(trials):
        chance, folder = random.Random(seed), tmp_path / f"{seed}"
        shutil.copytree(tmp_path / "sound", folder)
        path = chance.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        path.write_bytes(damage(path.read_bytes(), chance))
        config, errors = SourceConfig(SOURCES[kind].format(folder), data_dir=str(folder), num_classes=3), []
        try:
            for source in (open_split(config, split) for split in list_splits(config)):
                for index in range(len(source)):
                    try:
                        np.asarray(source[index]["image"])
                    except (DecodeError, UserError) as error:
                        errors.append(error)
        except UserError as error:
            errors.append(error)
        noticed += bool(errors)
        shutil.rmtree(folder)
    assert noticed > trials / 3


@pytest.mark.slow
def test_a_tar_may_have_any_number_of_extensions(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(33_000):
            tar.addfile(tarfile.TarInfo(f"{number}.{number}"))
    assert TarFile("a.tar", str(tmp_path / "a.tar")).read(32_999) == ("32999", {"32999": b""})


def test_a_record_of_any_stated_length_is_cut(tmp_path):
    for length in (100, 2**63, 2**64 - 1):
        head = struct.pack("<Q", length)
        (tmp_path / f"{length}").write_bytes(HEAD.pack(length, masked_checksum(head)))
        with pytest.raises(UserError, match=r"a is truncated: the record at byte 0 does not end within the 12 bytes"):
            TFRecordFile("a", str(tmp_path / f"{length}"))


def test_an_image_without_bytes_is_unreadable(tmp_path):
    pq.write_table(pa.table({"image": [{"path": "a.png"}], "label": [0]}), tmp_path / "a.parquet")
    with pytest.raises(DecodeError, match="its column image contains no bytes of an image"):
        open_source(f"parquet:{tmp_path}/a.parquet", "train", num_classes=1)[0]


def test_labels_nested_without_end_are_no_labels(tmp_path):
    source = write_tar(tmp_path / "a.tar", sample(0, json=b"[" * 100_000))
    with pytest.raises(UserError, match=r"has no label label: .* it has no json object"):
        open_source(source, "train", num_classes=1)[0]


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def state_several_labels(path):
    import tensorflow_datasets

    kinds = tensorflow_datasets.features
    features = kinds.FeaturesDict({"image": kinds.Image(), "label": kinds.Sequence(kinds.ClassLabel(num_classes=3))})
    features.save_metadata(path.parent)
    path.with_name("features.json").write_text(json.dumps(features.to_json()))


def drop_splits(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "splits": []}))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (cut_in_half, "cannot read the TFDS dataset 'tiny' in .*; copy or prepare it again"),
        (
            state_several_labels,
            r"must have the features `image` and `label` \(one class\), but has image \(Image\), label \(Seq",
        ),
        (drop_splits, "the TFDS dataset 'tiny' in .* has no splits"),
    ],
)
def test_descriptions_of_tfds_that_are_wrong(tfds_folder, change, sentence):
    change(tfds_folder / "tiny" / "1.2.3" / "dataset_info.json")
    with pytest.raises(UserError, match=sentence):
        open_source("tfds:tiny", "train", data_dir=str(tfds_folder))


def test_a_record_that_tfds_cannot_read_is_unreadable(tfds_folder, monkeypatch):
    source = open_source("tfds:tiny", "train", data_dir=str(tfds_folder))
    features = type(source.read_example.__self__.features)
    monkeypatch.setattr(features, "deserialize_example_np", lambda *_, **__: {}["image"])
    with pytest.raises(DecodeError, match=r"cannot read record 0 of \S+: 'image'"):
        source[0]


def test_what_tfds_has_not_finished_is_no_version(monkeypatch):
    names = ("1.0.0", "2.0.0.incompleteABC", "incomplete.9Z_3.0.0")
    monkeypatch.setattr(filesystem, "list_files", lambda _: [f"{name}/dataset_info.json" for name in names])
    assert tfds.newest_remote_version("gs://b", "tiny") == "gs://b/tiny/1.0.0"


def test_an_image_alone_in_its_shard_is_replaced_by_one_of_another():
    order = StreamOrder([3, 1, 2], batch=2, readers=1, window=1, seed=0)
    assert [order.neighbour(1, distance) for distance in range(6)] == [1, 2, 0, 3, 4, 5]
    assert [order.neighbour(3, distance) for distance in range(6)] == [3, 4, 5, 0, 1, 2]
    assert [order.neighbour(5, distance) for distance in range(4)] == [5, 4, 0, 1]


def test_a_folder_that_may_not_be_entered_is_named(tmp_path, monkeypatch):
    write_sound("folder", tmp_path / "photos")
    plain = os.stat

    def stat(path, *args, **kwargs):
        if str(path).endswith("train/b"):
            raise PermissionError(13, "Permission denied", path)
        return plain(path, *args, **kwargs)

    monkeypatch.setattr("vit_jax.data.sources.folder.os", types.SimpleNamespace(**{**vars(os), "stat": stat}))
    with pytest.raises(UserError, match=r"cannot list the folder .*/train/b: Permission denied"):
        open_source(f"folder:{tmp_path}/photos", "train")
