"""Packing: the same pixels, labels and order as in the source; what was killed goes on; mistakes are named."""

import contextlib
import io
import itertools
import json
import os
import shutil
from pathlib import Path

import chex
import numpy as np
import pytest
from PIL import ExifTags, Image

from tests.conftest import ROOT
from tests.data.test_array_record import SEVERAL, write_set
from tests.data.test_loader import read_batches
from tests.data.test_sources import TFDS, open_source
from vit_jax import UserError, pack
from vit_jax.data.images import decode, encode, jpeg
from vit_jax.data.packing import shard_writer
from vit_jax.data.preprocess import parse_pipe
from vit_jax.data.shards import array_record_file
from vit_jax.data.sources import array_record

PHOTOS = ROOT.parent / "shared" / "data" / "imagenet_sample"


def packed(source, out, *words):
    pack.main(["vit_jax.pack", str(source), str(out), *words])
    return f"array_record:{out}"


def everything(source, split, **fields):
    examples = [(np.asarray(e["image"]), e["label"]) for e in open_source(source, split, **fields)]
    return [(image.tobytes(), image.shape, np.array(label).tolist()) for image, label in examples]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def photos(tmp_path):
    """Noise as JPEG, PNG and WebP in `train` and `val`, some of them lying on their side."""
    random, where = np.random.default_rng(0), tmp_path / "photos"
    for number in range(23):
        pixels = random.integers(0, 256, (6, 4), np.uint8).repeat(8, 0).repeat(8, 1)[..., None].repeat(3, 2)
        split, name = ("val" if number % 5 == 4 else "train"), "ab"[number % 2]
        form = ("jpeg", "png", "webp")[number % 3]
        exif = Image.Exif()
        if number < 6:
            exif[ExifTags.Base.Orientation] = (6, 6, 1, 3, 1, 8)[number]
        (where / split / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(where / split / name / f"{number}.{form}", exif=exif, lossless=True, quality=90)
    return where


@pytest.mark.parametrize("total", [1, 3])
def test_digits(tmp_path, total):
    where = packed("digits", tmp_path / "out", f"--shards={total}")
    for split in ("train", "test"):
        assert everything(where, split) == everything("digits", split)
    names = [
        array_record_file.file_name(split, number, total) for split in ("train", "test") for number in range(total)
    ]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"info.json", *names}
    assert open_source(where, "train").class_names == tuple("0123456789")


def test_a_shuffled_set_is_the_source_in_another_order(tmp_path):
    plain, shuffled, other = (
        packed("digits", tmp_path / str(number), "--shards=3", *words)
        for number, words in enumerate(([], ["--shuffle=0"], ["--shuffle=1"]))
    )
    images = [everything(where, "train") for where in (plain, shuffled, other)]
    assert sorted(images[0]) == sorted(images[1]) == sorted(images[2])
    assert images[0] != images[1] != images[2] and images[0] != images[2]
    sources = [open_source(where, "train") for where in (plain, shuffled, other)]
    assert [source.shards.shuffled for source in sources] == [False, True, True]
    assert len({source.fingerprint for source in sources}) == 3
    with pytest.raises(UserError, match=r"made_from\.shuffle: 0 -> 1"):
        packed("digits", tmp_path / "1", "--shards=3", "--shuffle=1")
    with pytest.raises(UserError, match="--shuffle=-1 must be at least 0"):
        packed("digits", tmp_path / "1", "--shuffle=-1")


def test_batches_are_those_of_the_source(tmp_path):
    where = packed("digits", tmp_path / "out", "--shards=3")
    preprocess = parse_pipe("random_crop(7)|flip_lr|value_range(-1,1)", 7)
    options = {"batch": 16, "rows": np.arange(16), "seed": 5}
    ours, theirs = (read_batches(open_source(s, "train[9:]"), preprocess, **options) for s in (where, "digits"))
    for _ in range(3):
        chex.assert_trees_all_equal(next(ours), next(theirs))
    ours.close()
    theirs.close()


def test_more_shards_than_images(tmp_path):
    source = write_set(tmp_path / "few", [[1], [2], [0], [3], [1]])
    where = packed(source, tmp_path / "out", "--shards=1000")
    assert everything(where, "train") == everything(source, "train")
    assert len(list((tmp_path / "out").glob("train-*-of-00005.array_record"))) == 5


def test_tfds_keeps_every_byte(tfds_folder, tmp_path):
    where = packed("tfds:tiny", tmp_path / "out", f"--data-dir={tfds_folder}", "--shards=2")
    before, after = (open_source(s, "train", data_dir=str(tfds_folder)) for s in ("tfds:tiny", where))
    for index in range(12):
        (old, label), (new, same) = before.read_example("train", index), after.read_example("train", index)
        assert (old.data, label) == (new.data, same)
    assert everything(where, "test[1:]+train[:50%]") == everything(
        "tfds:tiny", "test[1:]+train[:50%]", data_dir=str(tfds_folder)
    )
    assert after.class_names == ("a", "b", "c") and after.name == "array_record:tfds:tiny/1.2.3"


def test_folders_are_turned_upright(photos, tmp_path):
    where = packed(f"folder:{photos}", tmp_path / "out", "--shards=2")
    turned = 0
    for split in ("train", "validation"):
        before, after = open_source(f"folder:{photos}", split), open_source(where, split)
        assert len(before) == len(after) and before.class_names == after.class_names == ("a", "b")
        for index in range(len(before)):
            (old, label), (new, same) = before.read_example(split, index), after.read_example(split, index)
            changed = decode.exif_orientation(old.data) != 1
            turned += changed
            assert label == same and (old.data == new.data) == (not changed)
            if jpeg.is_jpeg(new.data) and changed:
                assert np.abs(old.decode().astype(int) - new.decode()).mean() < 2
            else:
                np.testing.assert_array_equal(old.decode(), new.decode())
    assert turned == 4


def test_larger_images_are_made_smaller(tmp_path):
    random = np.random.default_rng(0)
    for name, shape in (("large", (90, 61)), ("small", (40, 100))):
        pixels = random.integers(0, 256, (*shape, 3), np.uint8)
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / "photos" / name / "1.jpg")
    where = packed(f"folder:{tmp_path / 'photos'}", tmp_path / "out", "--shorter-side=40", "--quality=80")
    by_label = {e["label"]: np.asarray(e["image"]) for e in open_source(where, "train")}
    assert by_label[0].shape == (59, 40, 3) and by_label[1].shape == (40, 100, 3)
    source = open_source(where, "train")
    stored = {label: image.data for image, label in (source.read_example("train", index) for index in range(2))}
    assert stored[1] == (tmp_path / "photos" / "small" / "1.jpg").read_bytes()
    assert stored[0].count(b"\xff\xdd") == 1  # restart markers: MCUs of 16 x 16, one for each row but the last
    assert sum(stored[0].count(bytes([0xFF, 0xD0 + i])) for i in range(8)) == 3
    assert Image.open(io.BytesIO(stored[0])).layer[0][1:3] == (2, 2)  # 4:2:0


def test_multi_label_data_is_packed_anew(tmp_path):
    bare = write_set(tmp_path / "bare", SEVERAL, info=False)
    where = packed(bare, tmp_path / "out", "--num-classes=4", "--max-labels=3", "--shards=2")
    assert everything(where, "train") == everything(bare, "train", num_classes=4, max_labels=3)
    assert open_source(where, "train").max_labels == 3
    again = packed(where, tmp_path / "again", "--shards=5")
    assert everything(again, "train") == everything(where, "train")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "wanted"),
    [("3,1", [3, 1]), ("0-4", [0, 1, 2, 3, 4]), ("8-9,2,0-0", [8, 9, 2, 0]), ("0-9", list(range(10)))],
)
def test_some_classes(tmp_path, words, wanted):
    where = packed("digits", tmp_path / "out", f"--classes={words}", "--shards=3")
    for split in ("train", "test"):
        chosen = [example for example in everything("digits", split) if example[2] in wanted]
        assert everything(where, split) == [(*image, wanted.index(label)) for *image, label in chosen]
    source = open_source(where, "train")
    assert source.class_names == tuple(map(str, wanted)) and source.num_classes == len(wanted)
    assert source.fingerprint != open_source(packed("digits", tmp_path / "all"), "train").fingerprint


def test_some_classes_of_prepared_data_and_folders(tfds_folder, photos, tmp_path, monkeypatch):
    where = packed("tfds:tiny", tmp_path / "out", f"--data-dir={tfds_folder}", "--classes=c,a")
    before = open_source("tfds:tiny", "test", data_dir=str(tfds_folder))
    after = open_source(where, "test")
    kept = [before.read_example("test", index)[0].data for index in (0, 2, 3)]
    assert [after.read_example("test", index)[0].data for index in range(3)] == kept
    assert [example["label"] for example in after] == [1, 0, 1] and after.class_names == ("c", "a")

    read, original = [], decode.EncodedImage.decode
    monkeypatch.setattr(decode.EncodedImage, "decode", lambda image: (read.append(image.name), original(image))[1])
    where = packed(f"folder:{photos}", tmp_path / "photos-b", "--classes=b", "--workers=1", "--shards=1")
    assert len(open_source(where, "train")) + len(open_source(where, "validation")) == 11
    assert read and all("/b/" in name for name in read)


def test_some_classes_of_multi_label_data(tmp_path):
    source = write_set(tmp_path / "set", SEVERAL, max_labels=3)
    where = packed(source, tmp_path / "out", "--classes=3,0")
    assert [labels for *_, labels in everything(where, "train")] == [[0, -1], [1, -1], [0, 1]]
    assert open_source(where, "train").max_labels == 2
    again = packed(where, tmp_path / "again", "--classes=1")
    assert [labels for *_, labels in everything(again, "train")] == [[0], [0]]


def test_a_record_without_a_label_is_named_or_left_out(tmp_path, monkeypatch):
    source = write_set(tmp_path / "set", [[0], [1], [2], [1]], total=1)
    original = array_record_file.ArrayRecordFile.read

    def read(shard, row):
        if row == 2:
            raise ValueError("damaged")
        return original(shard, row)

    monkeypatch.setattr(array_record_file.ArrayRecordFile, "read", read)
    with pytest.raises(UserError, match=r"cannot read record 2 of .*: damaged; repair it"):
        packed(source, tmp_path / "out", "--classes=1")
    packed(source, tmp_path / "out", "--classes=1", "--bad-images=skip")
    [entry] = json.loads((tmp_path / "out" / "info.json").read_text())["splits"]["train"]
    assert entry["records"] == 2 and [image["index"] for image in entry["left_out"]] == [2]


def test_some_classes_go_on_where_they_were_killed(tmp_path, monkeypatch):
    words, original, written = ["--classes=8,0-3", "--shards=4"], array_record_file.write_shard, []
    packed("digits", tmp_path / "whole", *words)

    def killed(path, examples):
        written.append(path)
        if len(written) == 6:
            raise KeyboardInterrupt
        return original(path, examples)

    monkeypatch.setattr(shard_writer, "write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        packed("digits", tmp_path / "out", *words)
    for other, change in (
        (["--classes=0-3,8"], r"class_names: .* -> .*; made_from.classes: \[8, 0, 1, 2, 3\] -> \[0, 1, 2, 3, 8\]"),
        ([], r"num_classes: 5 -> 10; .*made_from.classes: \[8, 0, 1, 2, 3\] -> None"),
    ):
        with pytest.raises(UserError, match=rf"out was packed with other settings \(.*{change}.*restore them"):
            packed("digits", tmp_path / "out", "--shards=4", *other)
    packed("digits", tmp_path / "out", *words)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole") and len(written) == 6 + 3


def test_what_is_killed_goes_on(photos, tmp_path, monkeypatch, capsys):
    source = f"folder:{photos}"
    packed(source, tmp_path / "whole", "--shards=4")
    written = []
    original = array_record_file.write_shard

    def first(examples, count):
        yield from itertools.islice(examples, count)
        raise KeyboardInterrupt

    def killed(path, examples):
        written.append(Path(path).name)
        return original(path, first(examples, 2) if len(written) == 3 else examples)

    monkeypatch.setattr(shard_writer, "write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        packed(source, tmp_path / "out", "--shards=4")
    assert not (tmp_path / "out" / "info.json").exists() and (tmp_path / "out" / "progress.jsonl").exists()
    assert not list((tmp_path / "out").glob("*.partial"))
    (tmp_path / "out" / f"{written[2]}.partial").write_bytes(b"left by a power cut")
    with open(tmp_path / "out" / "progress.jsonl", "a") as file:
        file.write('{"name": "tra')  # torn by a power cut
    (tmp_path / "out" / written[0]).write_bytes(b"damaged meanwhile")
    packed(source, tmp_path / "out", "--shards=4", "--json")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert written[3:5] == [written[0], written[2]] and len(set(written)) == 8 and len(written) == 10
    reported = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert reported["records"] == {"train": 19, "validation": 4} and reported["read"] < 23

    written.clear()  # a set that is whole is left as it is; a shard that is lost is made anew
    packed(source, tmp_path / "out", "--shards=4")
    assert not written and contents(tmp_path / "out") == contents(tmp_path / "whole")
    next((tmp_path / "out").glob("train-00002*")).unlink()
    packed(source, tmp_path / "out", "--shards=4")
    assert len(written) == 1 and contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_are_refused(photos, tmp_path, finished, monkeypatch):
    source, out = f"folder:{photos}", tmp_path / "out"
    if finished:
        packed(source, out, "--shards=2")
    else:
        with monkeypatch.context() as patch, pytest.raises(TypeError):
            patch.setattr(shard_writer, "write_manifest", None)
            packed(source, out, "--shards=2")
    before = contents(out)
    for words, sentence in [
        (["--shards=3"], "shards.train: 2 -> 3; shards.validation: 2 -> 3"),
        (["--shards=2", "--quality=90"], r"made_from.quality: 95 -> 90\)"),
        (["--shards=2", "--shorter-side=8"], "made_from.shorter_side: None -> 8"),
        (["--shards=2", "--splits=train"], "made_from.fingerprints.validation: .* -> None"),
    ]:
        with pytest.raises(
            UserError, match=f"out was packed with other settings .*{sentence}.*restore them, choose another folder or"
        ):
            packed(source, out, *words)
    with pytest.raises(UserError, match=r"name: folder -> digits; num_classes: 2 -> 10"):
        packed("digits", out, "--shards=2")
    (photos / "train" / "a" / "new.png").write_bytes(encode.encode_image(np.zeros((8, 8, 3), np.uint8)))
    with pytest.raises(UserError, match=r"\(made_from.fingerprints.train: \w+ -> \w+\)"):
        packed(source, out, "--shards=2")
    (photos / "train" / "a" / "new.png").unlink()
    assert contents(out) == before
    shutil.move(photos, tmp_path / "moved")
    packed(f"folder:{tmp_path / 'moved'}", out, "--shards=2")


def test_unreadable_images(photos, tmp_path):
    source, out = f"folder:{photos}", tmp_path / "out"
    bad = photos / "train" / "a" / "12.jpeg"
    whole = everything(source, "train")
    index = [row["image"].name for row in open_source(source, "train")].index(str(bad))
    bad.write_bytes(bad.read_bytes()[:-40])
    with pytest.raises(UserError, match=rf"cannot decode the image {bad}.*repair it, or .*--bad-images=skip"):
        packed(source, out, "--shards=3")
    packed(source, out, "--shards=3", "--bad-images=skip")
    assert len(open_source(f"array_record:{out}", "train")) == 18
    entries = json.loads((out / "info.json").read_text())["splits"]["train"]
    [left_out] = [image for entry in entries for image in entry.get("left_out", [])]
    assert left_out["index"] == index and str(bad) in left_out["error"]
    fresh = tmp_path / "fresh"
    packed(source, fresh, "--shards=3", "--bad-images=skip", "--workers=1")
    assert contents(fresh) == contents(out)
    with pytest.raises(UserError, match=str(bad)):  # what was left out is not passed over in silence
        packed(source, out, "--shards=3")
    packed(source, tmp_path / "unseen", "--no-decode")
    with pytest.raises(decode.DecodeError, match=r"record \d+ of .*train-00000-of-00001"):
        everything(f"array_record:{tmp_path / 'unseen'}", "train")
    kept = everything(f"array_record:{out}", "train")
    assert [example[1:] for example in kept] == [example[1:] for example in whole[:index] + whole[index + 1 :]]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["digits", "gs://bucket/x"], "cannot pack into gs://bucket/x: pack into a local folder"),
        (["digits", "/proc/x"], "cannot write /proc/x"),
        (["synthetic", "x"], "the data source synthetic has no list of splits; choose from array_record"),
        (["digits", "x", "--splits=train,val"], "unknown split 'val'"),
        (["digits", "x", "--splits=train[:50%]"], r"cannot pack train\[:50%\]: only whole splits can be packed"),
        (["digits", "x", "--splits=test,train+test"], r"cannot pack train\+test: only whole splits can be packed"),
        (["digits", "x", "--classes=0,sevn"], "unknown class 'sevn'; choose from 0, 1, 2"),
        (["digits", "x", "--classes="], "unknown class ''; choose from 0, 1"),
        (
            ["digits", "x", "--classes=5-10"],
            r"digits has no classes 5-10; its labels are 0 to 9 \(write 0-1 for the first two\)",
        ),
        (["digits", "x", "--classes=4-0"], "digits has no classes 4-0; its labels are 0 to 9"),
        (["digits", "x", "--classes=0-4,3"], "class 3 is listed twice in 0-4,3"),
        (["digits", "x", "--quality=101"], "--quality=101 must be at most 100"),
        (["folder:/nowhere", "x"], "there is no folder /nowhere"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        packed(*words)
    assert not list(tmp_path.iterdir())


def test_mistaken_classes(tfds_folder, photos, tmp_path):
    (photos / "val").rename(tmp_path / "val")
    (photos / "train" / "b").rename(photos / "train" / "cat")
    with pytest.raises(UserError, match=r"^unknown class 'cats'; did you mean 'cat'\?$"):
        packed(f"folder:{photos}", tmp_path / "out", "--classes=a,cats")
    source = write_set(tmp_path / "set", [[0], [1], [1]], total=1)
    with pytest.raises(UserError, match=r"classes of array_record:.*set have no names: write numbers .* 'cat', as"):
        packed(source, tmp_path / "out", "--classes=cat")
    with pytest.raises(
        UserError, match=r"^no image of split train has one of the classes in --classes; to skip this split"
    ):
        packed(source, tmp_path / "out", "--classes=3")
    assert not (tmp_path / "out").exists()


def test_an_empty_split(tmp_path):
    source = write_set(tmp_path / "set", [[0], [1]], total=1)
    info = json.loads((tmp_path / "set" / "info.json").read_text())
    info["splits"]["test"] = []
    (tmp_path / "set" / "info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=r"^the split test has no examples$"):
        packed(source, tmp_path / "out")
    assert len(open_source(packed(source, tmp_path / "out", "--splits=train"), "train")) == 2


@pytest.mark.parametrize("finished", [True, False])
def test_changed_files_are_packed_anew(photos, tmp_path, finished, monkeypatch, capsys):
    source, out, words = f"folder:{photos}", tmp_path / "out", ["--shards=4", "--bad-images=skip"]
    bad, other = photos / "train" / "a" / "12.jpeg", photos / "val" / "a" / "4.png"
    good = bad.read_bytes()
    bad.write_bytes(good[:-40])
    with monkeypatch.context() as patch, contextlib.suppress(TypeError):
        if not finished:
            patch.setattr(shard_writer, "write_manifest", None)
        packed(source, out, *words)
    bad.write_bytes(good)
    Image.fromarray(np.full((8, 8, 3), 7, np.uint8)).save(other)
    packed(source, out, *words, "--json")
    reported = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert reported["left_out"] == 0 and 2 <= reported["read"] <= 6  # a shard of `train`, one of `val`
    packed(source, tmp_path / "fresh", *words)
    assert contents(out) == contents(tmp_path / "fresh")

    print_before = open_source(f"array_record:{out}", "train").fingerprint
    os.utime(other, (1, 1))
    for path in photos.glob("train/*/*"):
        os.utime(path, (1, 1))
    packed(source, out, *words, "--json")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["read"] >= 20
    assert open_source(f"array_record:{out}", "train").fingerprint == print_before  # the same images


def test_the_output_is_blamed_for_its_own_faults_alone(tmp_path, monkeypatch):
    def broken(self, image):
        raise OSError(5, "Input/output error")

    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match=r"^cannot read image 0 of split train: .*I"),
    ):
        patch.setattr(encode.EncodeOptions, "__call__", broken)
        packed("digits", tmp_path / "out", "--shards=1")

    def examples():
        yield b"image", [0]
        raise OSError("of the source")

    with pytest.raises(OSError, match=r"^of the source$"):
        array_record_file.write_shard(str(tmp_path / "train-00000-of-00001.array_record"), examples())
    with pytest.raises(UserError, match=r"^cannot write /proc/x: "):
        array_record_file.write_shard("/proc/x", [])
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"^cannot write .*out: .*No space"):
        patch.setattr(shard_writer, "write_manifest", lambda *args: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
        packed("digits", tmp_path / "out", "--shards=1")


def test_a_wrong_label_is_named(tmp_path, monkeypatch):
    source = write_set(tmp_path / "set", [[0], [1, 3], [2]], max_labels=2)
    labels = np.array([1, 9], np.int32)
    monkeypatch.setattr(
        array_record,
        "read_labelled",
        lambda *args: (decode.EncodedImage(encode.encode_image(np.zeros((4, 4, 3), np.uint8)), "x"), labels),
    )
    with pytest.raises(UserError, match="x of the split train has the label 9, but there are 4 classes"):
        packed(source, tmp_path / "out", "--shards=1")


def test_one_shard_is_no_shards(tmp_path, capsys):
    packed(write_set(tmp_path / "set", [[0]], total=1), tmp_path / "out")
    assert ": 1 image (train 1), 1 shard, " in capsys.readouterr().out


def test_folders_that_are_in_use(tmp_path):
    write_set(tmp_path / "set", [[0]], info=False)
    with pytest.raises(UserError, match="contains shards that this command did not write"):
        packed("digits", tmp_path / "set")
    with (
        shard_writer.writing_lock(str(tmp_path / "out")),
        pytest.raises(UserError, match="another process is packing into"),
    ):
        packed("digits", tmp_path / "out")


def test_shards_have_about_the_size_wanted(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "SHARD_BYTES", 50_000)
    source = open_source(packed("digits", tmp_path / "out"), "train")
    size = sum(len(source.read_example("train", index)[0].data) for index in range(len(source)))
    assert abs(len(list((tmp_path / "out").glob("train-*"))) - size / 50_000) < 1


@pytest.mark.skipif(not PHOTOS.exists(), reason="needs the shared photographs")
def test_photographs_keep_their_bytes(tmp_path):
    for path in sorted(PHOTOS.glob("*/*"))[:20]:
        (tmp_path / "photos" / path.parent.name).mkdir(parents=True)
        shutil.copy(path, tmp_path / "photos" / path.parent.name)
    source = f"folder:{tmp_path / 'photos'}"
    assert everything(packed(source, tmp_path / "out"), "train") == everything(source, "train")


@pytest.mark.skipif(not TFDS.exists(), reason="needs the shared CIFAR-10")
def test_cifar10(tmp_path):
    where = packed("tfds:cifar10", tmp_path / "out", f"--data-dir={TFDS}", "--splits=test", "--no-decode")
    before, after = (open_source(source, "test", data_dir=str(TFDS)) for source in ("tfds:cifar10", where))
    assert len(after) == 10_000 and after.class_names == before.class_names
    for index in range(0, 10_000, 97):
        assert before.read_example("test", index)[0].data == after.read_example("test", index)[0].data
