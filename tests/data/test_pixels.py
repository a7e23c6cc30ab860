"""Records of pixels: those of the decoded images, read without a copy; runs from them equal runs from other files."""

import io
import json
import shutil

import chex
import numpy as np
import pytest
from PIL import ExifTags, Image

from configs import smoke
from tests.data.test_loader import read_batches
from tests.data.test_shard_writer import contents, everything, packed
from tests.data.test_sources import open_source
from tests.test_train import rows
from vit_jax import UserError, train
from vit_jax.data.images import decode, encode
from vit_jax.data.packing import shard_writer
from vit_jax.data.preprocess import inception_box, parse_pipe, resize_small


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@pytest.fixture
def odd(tmp_path):
    """Grey, transparent, rotated and plain images of different sizes."""
    folder = tmp_path / "photos" / "train" / "a"
    folder.mkdir(parents=True)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(noise(40, 61)).save(folder / "turned.jpg", exif=exif)
    Image.fromarray(noise(90, 61)).save(folder / "large.png")
    Image.fromarray(noise(33, 47)).convert("L").save(folder / "grey.jpg")
    Image.fromarray(noise(52, 44)).convert("RGBA").save(folder / "alpha.png")
    Image.fromarray(noise(20, 30)).save(folder / "small.ppm")
    return f"folder:{tmp_path / 'photos'}"


@pytest.fixture
def arrays(tmp_path):
    """Images of one size, of three classes."""
    labels = np.arange(24) % 3
    images = {split: np.stack([noise(12, 16, seed) for seed in range(24)]) for split in ("train", "test")}
    held = {f"{split}_images": images[split] for split in images} | {f"{split}_labels": labels for split in images}
    np.savez(tmp_path / "arrays.npz", **held)
    return f"npz:{tmp_path / 'arrays.npz'}"


def test_plain_pixels_are_a_view_of_the_file():
    pixels = noise(5, 7)
    data = encode.encode_ppm(pixels)
    view = decode.decode_image(data, "x")
    np.testing.assert_array_equal(view, pixels)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels)
    assert np.shares_memory(view, np.frombuffer(data, np.uint8)) and not view.flags.writeable
    crop = decode.EncodedImage(data, "x").crop(1, 2, 3, 4)
    assert np.shares_memory(crop, np.frombuffer(data, np.uint8))
    np.testing.assert_array_equal(crop, pixels[1:4, 2:6])


@pytest.mark.parametrize(
    ("header", "rest"),
    [
        (b"P6\n# a comment\n7 5\n255\n", b""),  # Pillow reads these
        (b"P6\n7 5\n255\n", b"P6"),
        (b"P6\n7 5\n255\r\n", b""),
    ],
)
def test_other_ppm_files_are_decoded_by_pillow(header, rest):
    pixels = noise(5, 7)
    data = header + pixels.tobytes() + rest
    assert decode.view_ppm(data) is None
    np.testing.assert_array_equal(decode.decode_image(data, "x"), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("data", [b"P6\n7 5\n255\n", b"P6\n0 5\n255\n", encode.encode_ppm(noise(5, 7))[:-1]])
def test_cut_off_pixels_are_named(data):
    with pytest.raises(decode.DecodeError, match="cannot decode the image x"):
        decode.decode_image(data, "x")


@pytest.mark.parametrize("side", [100, 30])
def test_pixels_are_those_of_the_images(odd, tmp_path, side):
    whole, plain = packed(odd, tmp_path / "pixels", f"--pixels={side}"), packed(odd, tmp_path / "plain")
    assert open_source(whole, "train").fingerprint != open_source(plain, "train").fingerprint
    sizes = set()
    for stored, image in zip(open_source(whole, "train"), open_source(odd, "train"), strict=True):
        data, pixels = stored["image"].data, np.asarray(image["image"])
        expected = resize_small(pixels, np.random.default_rng(), side) if min(pixels.shape[:2]) > side else pixels
        np.testing.assert_array_equal(decode.view_ppm(data), expected)
        sizes.add(expected.shape[:2])
    if side == 30:
        assert sizes == {(46, 30), (44, 30), (30, 43), (35, 30), (20, 30)}


@pytest.mark.parametrize(
    ("pipe", "fast"),
    [
        ("inception_crop(10)|flip_lr", True),
        ("inception_crop(10)|flip_lr", False),
        ("random_crop(9)|randaug(2,15)", False),
        ("resize_small(10)|central_crop(8)|autoaugment", False),
        ("random_crop(9)|color_jitter(hue=0.1)|random_erasing(1.0)", False),
        ("torch_resize(14)|torch_center_crop(10)|flip_lr", False),
    ],
)
def test_every_pipe_gives_the_same_batches_as_of_png(arrays, tmp_path, pipe, fast):
    preprocess = parse_pipe(f"{pipe}|value_range(-1,1)", 10, fast)
    options = {"batch": 16, "rows": np.arange(16), "seed": 5}
    places = (packed(arrays, tmp_path / "png"), packed(arrays, tmp_path / "pixels", "--pixels=12"))
    assert [open_source(where, "train").read_example("train", 0)[0].data[1:3] for where in places] == [b"PN", b"6\n"]
    png, pixels = (read_batches(open_source(where, "train"), preprocess, **options) for where in places)
    for _ in range(3):
        chex.assert_trees_all_equal(next(pixels), next(png))
    png.close()
    pixels.close()


def test_crops_are_those_of_the_decoded_image(odd, tmp_path):
    random = np.random.default_rng(0)
    for example in open_source(packed(odd, tmp_path / "out", "--pixels=40"), "train"):
        image = example["image"]
        for _ in range(20):
            top, left, height, width = inception_box(*image.shape, 0.05, 1.0, random)
            np.testing.assert_array_equal(
                image.crop(top, left, height, width), image.decode()[top : top + height, left : left + width]
            )


@pytest.mark.slow
def test_a_run_has_the_losses_of_one_from_png(arrays, tmp_path):
    config = smoke.get_config()
    config.batch, config.batch_eval, config.total_steps, config.resolution = 8, 8, 6, 8
    config.log_every, config.checkpoint_every, config.eval_every = 1, 2, 6
    config.data.preprocess = "inception_crop({resolution})|flip_lr|value_range(-1,1)"
    config.evals.test.preprocess = "resize({resolution})|value_range(-1,1)"
    config.data.num_classes, config.data.split, config.evals.test.split = 3, "train", "test"
    for name, words in (("png", []), ("pixels", ["--pixels=12"])):
        config.data.source = packed(arrays, tmp_path / f"{name}_packed", "--shards=2", *words)
        train.train(config, tmp_path / name)
    assert rows(tmp_path / "pixels") == rows(tmp_path / "png")
    first, second = (np.load(tmp_path / name / "model.npz") for name in ("pixels", "png"))
    assert all((first[name] == second[name]).all() for name in first)


def test_other_programs_and_another_packing_read_them(odd, tmp_path):
    where = packed(odd, tmp_path / "pixels", "--pixels=30")
    for example in open_source(where, "train"):
        with Image.open(io.BytesIO(example["image"].data)) as image:
            np.testing.assert_array_equal(np.asarray(image), example["image"].decode())
    again = packed(where, tmp_path / "again", "--shards=2")  # keeps the bytes
    assert everything(again, "train") == everything(where, "train")
    assert [example["image"].data for example in open_source(again, "train")] == [
        example["image"].data for example in open_source(where, "train")
    ]


def test_packing_goes_on_where_it_was_stopped(odd, tmp_path, monkeypatch):
    packed(odd, tmp_path / "whole", "--pixels=30", "--shards=3")
    record, seen = shard_writer.record_finished, []

    def stop(out, entry):
        record(out, entry)
        seen.append(entry.name)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shard_writer, "record_finished", stop)
        packed(odd, tmp_path / "out", "--pixels=30", "--shards=3")
    for words, sentence in (
        (["--pixels=31"], r"\(made_from.pixels: 30 -> 31\)"),
        (["--shorter-side=30"], "made_from.pixels: 30 -> None; made_from.shorter_side: None -> 30"),
    ):
        with pytest.raises(UserError, match=f"was packed with other settings .*{sentence}"):
            packed(odd, tmp_path / "out", "--shards=3", *words)
    packed(odd, tmp_path / "out", "--pixels=30", "--shards=3")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    made_from = json.loads((tmp_path / "out" / "info.json").read_text())["made_from"]
    assert set(made_from) == {"source", "fingerprints", "pixels"} and made_from["pixels"] == 30


def test_the_size_is_stated_before_and_refused_without_room(arrays, tmp_path, monkeypatch, capsys):
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=28_000))
    with pytest.raises(UserError, match=r"the shards need about 2\.\d+e-05 GB, but .*out has room for 2\.8e-05; make"):
        packed(arrays, tmp_path / "out", "--pixels=16")
    assert not list((tmp_path / "out").iterdir())
    size = 48 * len(encode.encode_ppm(noise(12, 16)))
    assert f"48 images to pack, about {size:,} bytes\n" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    packed(arrays, tmp_path / "out", "--pixels=16")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=0))
    packed(arrays, tmp_path / "out", "--pixels=16")  # what is there needs no room


@pytest.mark.parametrize("option", ["--shorter-side=256", "--quality=90", "--no-decode"])
def test_what_contradicts_pixels_is_refused(tmp_path, option):
    sentence = f"^--pixels=256 states how images are stored; leave out {option.partition('=')[0]}, or --pixels$"
    with pytest.raises(UserError, match=sentence):
        packed("digits", tmp_path / "out", "--pixels=256", option)
    with pytest.raises(SystemExit):
        packed("digits", tmp_path / "out", "--pixels=0")
    assert not (tmp_path / "out").exists()
