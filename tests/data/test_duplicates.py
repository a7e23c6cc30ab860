"""Near-duplicates: found after they were encoded again, resized or mirrored; listed; other images are kept."""

import io
import json

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.data.test_shard_writer import contents, everything, packed
from tests.data.test_sources import TFDS, open_source
from vit_jax import UserError
from vit_jax.data.packing import near_duplicates


def smooth(seed):
    """A picture of a few waves, 48x40 pixels."""
    noise = np.random.default_rng(seed).normal(128, 60, (12, 10, 3)).clip(0, 255).astype(np.uint8)
    return cv2.resize(noise, (40, 48), interpolation=cv2.INTER_CUBIC)


def jpeg(pixels, quality):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return np.array(Image.open(file))


def resized(pixels, height, width):
    return np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS))


CHANGES = {
    "same": lambda pixels: pixels,
    "jpeg": lambda pixels: jpeg(pixels, 60),
    "smaller": lambda pixels: resized(pixels, pixels.shape[0] * 3 // 4, pixels.shape[1] * 3 // 4),
    "larger": lambda pixels: jpeg(resized(pixels, 224, 224), 85),
    "mirrored": lambda pixels: np.ascontiguousarray(pixels[:, ::-1]),
    "brighter": lambda pixels: np.clip(pixels * 1.2 + 10, 0, 255).astype(np.uint8),
}


def write_images(folder, images):
    folder.mkdir(parents=True)
    for name, pixels in images.items():
        Image.fromarray(pixels).save(folder / f"{name}.png")


@pytest.fixture
def planted(tmp_path):
    """A folder of 20 images and, among them, one of the six images of a test set in each of the changes."""
    write_images(tmp_path / "test" / "test" / "a", {f"t{i}": smooth(100 + i) for i in range(6)})
    own = {f"own{i:02}": smooth(i) for i in range(20)}
    copies = {f"own{i:02}_{name}": change(smooth(100 + i)) for i, (name, change) in enumerate(CHANGES.items())}
    write_images(tmp_path / "data" / "train" / "a", own | copies)
    write_images(tmp_path / "data" / "train" / "b", {"last": smooth(50)})
    return f"folder:{tmp_path / 'data'}", f"--without=folder:{tmp_path / 'test'}"


def test_what_was_planted_is_left_out_and_listed(planted, tmp_path, capsys):
    source, without = planted
    where = packed(source, tmp_path / "out", without, "--shards=2")
    assert "6 near-duplicates left out, listed in info.json" in capsys.readouterr().out
    rows = open_source(source, "train")
    names = [rows.example_name(index) for index in range(len(rows))]
    wanted = [index for index, name in enumerate(names) if "_" in name.rpartition("/")[2]]
    entries = json.loads((tmp_path / "out" / "info.json").read_text())["splits"]["train"]
    listed = [one for entry in entries for one in entry.get("duplicates", [])]
    assert [one["index"] for one in listed] == wanted
    assert {one["split"] for one in listed} == {without.partition("=")[2]}
    for one in listed:
        number = int(names[one["index"]].rpartition("own")[2][:2])
        assert one["image"].endswith(f"t{number}.png") and one["distance"] <= 60
    before = everything(source, "train")
    assert everything(where, "train") == [row for index, row in enumerate(before) if index not in wanted]
    packed(source, tmp_path / "again", without, "--shards=2", "--workers=1", "--json")
    assert json.loads(capsys.readouterr().out)["duplicates"] == 6
    assert contents(tmp_path / "again") == contents(tmp_path / "out")
    spelt = packed(source, tmp_path / "spelt", f"{without},split=test", "--shards=2")
    assert open_source(spelt, "train").digest == open_source(where, "train").digest
    with pytest.raises(UserError, match=r"other settings \(made_from\.without\.max_distance: 60 -> 5\)"):
        packed(source, tmp_path / "out", without, "--shards=2", "--max-distance=5")


def test_a_split_is_not_emptied(planted, tmp_path):
    source, without = planted
    with pytest.raises(UserError, match=r"split train contains the images of --without=\S+,split=train; list only"):
        packed(source, tmp_path / "out", f"--without={source},split=train")
    with pytest.raises(UserError, match=r"unknown split of the folder \S+ 'val'"):
        packed(source, tmp_path / "out", f"{without},split=val")


def test_the_hash_of_a_mirror_image_is_that_of_the_mirrored_image():
    image = smooth(3)
    _, mirrored = near_duplicates.perceptual_hash(image)
    again = near_duplicates.perceptual_hash(np.ascontiguousarray(image[:, ::-1]))
    one, other = near_duplicates.hash_distances(mirrored, again.T)
    assert one < 20 < 100 < other


@pytest.mark.parametrize(("count", "differ", "distance"), [(255, 60, 60), (255, 0, 0), (64, 0, 63.6), (0, 0, 127.5)])
def test_the_distance_is_as_improbable_as_in_all_bits(count, differ, distance):
    def hashed(signs):
        significant = np.arange(1, 257) <= count
        return np.packbits(np.concatenate([signs, significant])).view(np.uint64)

    one, other = np.zeros(256, bool), np.arange(256) < differ
    [found] = near_duplicates.hash_distances(hashed(one), hashed(other)[:, None])
    assert found == pytest.approx(distance, abs=0.1)


def test_symmetric_images_are_found_and_flat_ones_are_like_no_other(tmp_path):
    halves = [smooth(seed)[:, :20] for seed in range(8)]
    symmetric = {f"{i}": np.concatenate([half, half[:, ::-1]], axis=1) for i, half in enumerate(halves)}
    flat = {f"flat{level}": np.full((32, 32, 3), level, np.uint8) for level in range(0, 250, 50)}
    write_images(tmp_path / "test" / "test" / "a", symmetric | {"black": np.zeros((40, 40, 3), np.uint8)})
    write_images(tmp_path / "data" / "train" / "a", {name: jpeg(one, 90) for name, one in symmetric.items()})
    write_images(tmp_path / "data" / "train" / "flat", flat)
    source = f"folder:{tmp_path / 'data'}"
    where = packed(source, tmp_path / "out", f"--without=folder:{tmp_path / 'test'}")
    assert [label for *_, label in everything(where, "train")] == [1] * len(flat)


def test_a_class_and_a_split_that_lose_all_images_are_told(tmp_path, capsys):
    images = {f"{i}": smooth(i) for i in range(4)}
    write_images(tmp_path / "test" / "test" / "a", images)
    write_images(tmp_path / "data" / "train" / "cats", images)
    write_images(tmp_path / "data" / "train" / "dogs", {f"{i}": smooth(50 + i) for i in range(4)})
    write_images(tmp_path / "data" / "val" / "cats", images)
    without = f"--without=folder:{tmp_path / 'test'}"
    for _ in range(2):  # also where nothing is left to do
        packed(f"folder:{tmp_path / 'data'}", tmp_path / "out", without, "--json")
        output = capsys.readouterr()
        assert json.loads(output.out)["emptied"] == {"train": [0], "validation": [0]}
        assert "WARNING: split train: all images of 1 class (cats) are near-duplicates and were left out" in output.err
        assert "WARNING: no record of split validation is left" in output.err


@pytest.mark.slow
@pytest.mark.skipif(not TFDS.exists(), reason="needs the shared CIFAR-10")
def test_test_images_of_cifar10_among_training_images():
    known = near_duplicates.hash_splits(["tfds:cifar10"], open_config("tfds:cifar10"), {}, 60, 2)
    test, train = (open_source("tfds:cifar10", split, data_dir=str(TFDS)) for split in ("test", "train"))
    for name, change in CHANGES.items():
        found = [known.find(i, change(np.asarray(test[i]["image"]))) for i in range(0, 10_000, 50)]
        assert None not in found, name
    kept = [known.find(i, train[i]["image"]) is None for i in range(0, 50_000, 50)]
    assert np.mean(kept) > 0.985


def open_config(source):
    return near_duplicates.SourceConfig(source, str(TFDS))
