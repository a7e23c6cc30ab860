"""Image files to pixels: every mode, odd and damaged files, and crops that decode no more than they need."""

import contextlib
import io
import os
import warnings

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from tests.conftest import ROOT
from vit_jax import UserError
from vit_jax.data.images import decode, jpeg
from vit_jax.data.preprocess import inception_box

SAMPLES = ROOT.parent / "shared" / "data" / "imagenet_sample"


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def picture(height: int = 40, width: int = 60) -> Image.Image:
    """A smooth image without symmetry."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([3 * y, 2 * x, (x + y) // 2 * (x > y)], -1).astype(np.uint8))


def encoded(image: Image.Image, suffix: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, suffix, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("suffix", "mode"),
    [("JPEG", mode) for mode in ("1", "L", "CMYK")]
    + [("PNG", mode) for mode in ("1", "L", "LA", "P", "RGBA")]
    + [("WEBP", mode) for mode in ("L", "P", "RGBA")],
)
def test_every_mode_becomes_rgb(mode, suffix):
    image = picture().convert(mode)
    decoded = decode.decode_image(encoded(image, suffix, quality=95, lossless=True), "x")
    assert decoded.dtype == np.uint8 and decoded.shape == (40, 60, 3)
    if mode != "1":
        assert np.abs(decoded.astype(int) - np.asarray(image.convert("RGB"))).mean() < 3


def test_sixteen_bits_keep_the_upper_eight():
    values = np.arange(40 * 60, dtype=np.uint16).reshape(40, 60) * 27
    decoded = decode.decode_image(encoded(Image.fromarray(values), "PNG"), "x")
    np.testing.assert_array_equal(decoded, np.repeat(values[..., None] >> 8, 3, axis=2))


@pytest.mark.parametrize("suffix", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_on_request(suffix, orientation, tmp_path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encoded(picture(), suffix, exif=exif, quality=95)
    path = tmp_path / "x"
    path.write_bytes(data)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.abs(decode.read_image(path).decode().astype(int) - upright).max() < 8
    assert decode.decode_image(data, "x").shape == (40, 60, 3)


def test_warnings_of_pillow_are_one_line_of_ours(caplog, recwarn, monkeypatch):
    monkeypatch.setattr(decode.PillowWarnings, "logged", False)
    warnings.simplefilter("always")
    palette = picture().convert("P")
    for transparent in (bytes([0, 100]), bytes([0, 100, 200])):
        decode.decode_image(encoded(palette, "PNG", transparency=transparent), "x")
    tiff = encoded(picture(), "TIFF")
    decode.decode_image(
        tiff.replace(b"\x1c\x01\x03\x00\x01", b"\x1c\x01\x03\x00\x02"), "x"
    )  # two planar configurations
    assert [record.message.partition(" (")[0] for record in caplog.records] == ["an image file is malformed"]
    assert not list(recwarn)
    with pytest.warns(UserWarning, match="of others"):
        warnings.warn("of others", stacklevel=1)


def turned_jpeg(*segments: tuple[int, bytes]) -> bytes:
    """A JPEG with some segments, and behind them EXIF data that turns it."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    data = encoded(picture(), "JPEG", exif=exif, quality=95)
    stated = b"".join(bytes((0xFF, marker)) + (len(body) + 2).to_bytes(2) + body for marker, body in segments)
    return data[:2] + stated + data[2:]


@pytest.mark.parametrize("short", [(0xE0, b"JFIF\0"), (0xE2, b"ICC_PROFILE\0"), (0xEE, b"Adobe"), (0xE2, b"MPF\0")])
def test_short_segments_do_not_hide_pixels_or_exif(short):
    upright = decode.decode_image(turned_jpeg(), "x", exif=True)
    assert upright.shape == (60, 40, 3)
    data = turned_jpeg(short)
    np.testing.assert_array_equal(decode.decode_image(data, "x", exif=True), upright)
    np.testing.assert_array_equal(decode.EncodedImage(data, "x", exif=True).crop(5, 5, 20, 20), upright[5:25, 5:25])


def test_exif_is_applied_though_stray_bytes_stand_between_segments():
    data = turned_jpeg()
    tables = data.index(b"\xff\xdb")
    stray = data[:tables] + b"\0\0" + data[tables:]
    np.testing.assert_array_equal(decode.decode_image(stray, "x", exif=True), decode.decode_image(data, "x", exif=True))


def test_exif_behind_other_long_segments_is_applied():
    data = turned_jpeg((0xE2, bytes(65_000)), (0xE2, bytes(65_000)))
    assert data.index(b"Exif") > 2**16 and decode.exif_orientation(data) == 6
    assert decode.EncodedImage(data, "x", exif=True).shape == (60, 40)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("suffix", ["JPEG", "PNG", "WEBP"])
def test_exif_that_cannot_be_read_is_ignored(suffix):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    data, random, stated = encoded(picture(), suffix, exif=exif, quality=95), rng(), exif.tobytes()
    start, turned = data.index(stated.removeprefix(b"Exif\0\0")), set()
    for _ in range(100):
        damaged = bytearray(data)
        damaged[start + random.integers(len(stated) - 6)] = random.integers(256)
        turned.add(decode.exif_orientation(bytes(damaged)))
        if suffix == "JPEG":  # the other formats have checksums
            assert decode.decode_image(bytes(damaged), "x", exif=True).size == 7200
    assert 1 in turned


@pytest.mark.parametrize("suffix", ["JPEG", "PNG", "WEBP"])
def test_damaged_files_are_errors_that_name_the_file(suffix):
    data = encoded(picture(), suffix)
    for end in (0, 1, 2, 20, len(data) // 2, len(data) * 9 // 10):
        with pytest.raises(decode.DecodeError, match=r"cannot decode the image some/file\.x: \w"):
            decode.decode_image(data[:end], "some/file.x")
    with pytest.raises(decode.DecodeError, match="not a JPEG, PNG, WebP, GIF, BMP, TIFF or PPM file"):
        decode.decode_image(encoded(picture(), "TGA"), "x")


@pytest.mark.parametrize("suffix", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM"])
def test_random_damage_never_raises_anything_else(suffix):
    data, random = np.frombuffer(encoded(picture(), suffix), np.uint8), rng()
    for _ in range(100):
        damaged = data.copy()
        damaged[random.integers(0, len(data), 4)] = random.integers(0, 256, 4)
        with contextlib.suppress(decode.DecodeError):
            decode.decode_image(damaged.tobytes(), "x", exif=True)


@pytest.mark.parametrize("stray", [bytes(5), b"\x01\x02", bytes(300)])
def test_stray_bytes_that_lose_nothing(stray):
    data = encoded(picture(), "JPEG")
    table, end = data.index(b"\xff\xc4"), len(data) - 2
    for at in (table, end):
        image = decode.EncodedImage(data[:at] + stray + data[at:], "x")
        np.testing.assert_array_equal(image.decode(), decode.decode_image(data, "x"))
        followed = decode.EncodedImage(image.data + data, "x")  # phones put a second picture behind the first
        np.testing.assert_array_equal(followed.decode(), decode.decode_image(data, "x"))
        np.testing.assert_array_equal(image.crop(3, 4, 20, 30), decode.decode_image(data, "x")[3:23, 4:34])


def test_a_scan_that_lost_its_way_is_damage():
    data = noisy(200, 150)
    start, refused = jpeg.read_frame(data).scan_at, 0
    for seed in range(60):
        random = rng(seed)
        damaged = np.frombuffer(data, np.uint8).copy()
        at = start + random.integers(0, len(data) - start - 100)
        damaged[at : at + 64] = random.integers(0, 255, 64)  # no marker
        try:
            pixels = decode.decode_image(damaged.tobytes(), "x")
        except decode.DecodeError:
            refused += 1
            continue
        assert pixels.shape == (200, 150, 3)
    assert refused > 45  # to the others, an eighth, no decoder objects


def test_image_bomb(monkeypatch):
    monkeypatch.setattr(decode, "MAX_PIXELS", 1000)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    for suffix in ("JPEG", "PNG"):
        with pytest.raises(decode.DecodeError, match=r"limit|bomb"):
            decode.decode_image(encoded(picture(), suffix), "x")


def test_read_image_of_nothing():
    with pytest.raises(UserError, match="/nowhere: No such file"):
        decode.read_image("/nowhere")


def noisy(height: int, width: int, **options) -> bytes:
    """A JPEG that has something in every block."""
    pixels = rng().integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    return encoded(image.convert(options.pop("mode", "RGB")), "JPEG", **options)


def boxes(height: int, width: int, count: int) -> list[tuple[int, int, int, int]]:
    edges = [(0, 0, 1, 1), (height - 1, width - 1, 1, 1), (0, 0, height, width), (height // 2, 0, height // 3 + 1, 1)]
    random = rng()
    return edges + [inception_box(height, width, 0.01, 1.0, random) for _ in range(count)]


@pytest.fixture(params=["libjpeg-turbo 3", "simplejpeg"])
def decoder(request, monkeypatch):
    """Both ways to decode a part of an image."""
    assert jpeg.load_turbojpeg(), "the tests want the extra [fast]"
    if request.param == "simplejpeg":
        monkeypatch.setattr(jpeg, "load_turbojpeg", lambda: None)
    return request.param


def check_cuts(data: bytes, count: int):
    """Every crop has the pixels of the whole image; returns how many rows were decoded, as a part of all."""
    whole, parts = decode.decode_image(data, "x"), []
    for top, left, rows, columns in boxes(*whole.shape[:2], count):
        image = decode.EncodedImage(data, "x")
        assert image.shape == whole.shape[:2]
        cut = image.crop(top, left, rows, columns)
        np.testing.assert_array_equal(cut, whole[top : top + rows, left : left + columns])
        parts.append((cut.base if cut.base is not None else cut).shape[0] / whole.shape[0])
    return np.mean(parts)


@pytest.mark.parametrize("restart", [0, 1])
@pytest.mark.parametrize("options", [{"subsampling": kind} for kind in (0, 1, 2)] + [{"mode": "L"}, {"mode": "CMYK"}])
@pytest.mark.parametrize("size", [(1, 1), (16, 16), (203, 97), (64, 320)])
def test_a_crop_has_the_pixels_of_the_whole_image(size, options, restart, decoder):
    part = check_cuts(noisy(*size, restart_marker_rows=restart, **options), 20)
    if size == (203, 97) and options.get("mode") != "CMYK":
        assert part < (0.75 if restart else 0.9)


def test_other_kinds_of_jpeg_are_cut_too(decoder):
    for options in ({"progressive": True}, {"restart_marker_blocks": 3}, {"optimize": True}):
        check_cuts(noisy(90, 120, **options), 10)
    for options in ({"restart_marker_blocks": 1}, {"restart_marker_blocks": 7}, {"restart_marker_rows": 2}):
        assert check_cuts(noisy(160, 120, subsampling=0, **options), 20) < 0.9
    check_cuts(noisy(90, 120) + bytes(10), 5)
    data = noisy(90, 120)
    scan = data.index(b"\xff\xda")
    assert jpeg.read_frame(data[:scan] + b"\xff\xff" + data[scan:]).height == 90  # fill bytes before a marker
    assert jpeg.read_frame(data[:2] + data[2:scan] + data[2:]) is None  # two frames


def test_photographs_that_say_they_are_upright_are_cut_too():
    for orientation in (1, 6):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        image = decode.EncodedImage(noisy(200, 100, exif=exif), "x", exif=True)
        cut = image.crop(0, 0, 40, 50)
        np.testing.assert_array_equal(cut, decode.decode_image(image.data, "x", exif=True)[:40, :50])
        assert ("_pixels" in vars(image)) == (orientation == 6)  # decoded whole


@pytest.mark.skipif(not SAMPLES.exists(), reason="needs the shared ImageNet photographs")
def test_crops_of_photographs(decoder):
    for path in sorted(SAMPLES.glob("*/*.JPEG"))[::20]:
        check_cuts(path.read_bytes(), 3)


@pytest.mark.parametrize("restart", [0, 1])
def test_a_crop_of_damaged_data_is_an_error_or_the_undamaged_pixels(restart, decoder):
    data = noisy(200, 100, restart_marker_rows=restart)
    whole, noticed = decode.decode_image(data, "x"), 0
    with pytest.raises(decode.DecodeError, match="cannot decode the image x"):
        decode.EncodedImage(data[: len(data) // 2], "x").crop(0, 0, 8, 8)  # truncated: noticed wherever one looks
    start = jpeg.read_frame(data).scan_at
    for seed in range(100):
        random = rng(seed)
        damaged = np.frombuffer(data, np.uint8).copy()
        damaged[start + random.integers(0, (len(data) - start) // 8)] = 0xFF  # among the rows of the crop
        try:
            cut = decode.EncodedImage(damaged.tobytes(), "x").crop(0, 0, 40, 100)
        except decode.DecodeError:
            noticed += 1
            continue
        assert cut.shape == whole[:40].shape
    assert noticed > 50
    for seed in range(200):
        random = rng(seed)
        damaged = np.frombuffer(data, np.uint8).copy()
        damaged[random.integers(0, len(data), 4)] = random.integers(0, 256, 4)
        with contextlib.suppress(decode.DecodeError):
            image = decode.EncodedImage(damaged.tobytes(), "x")
            height, width = image.shape
            image.crop(height // 2, 0, 1, width)


@pytest.mark.filterwarnings("ignore:Image size")
def test_too_large_images_are_refused_before_they_are_decoded():
    for suffix in ("JPEG", "PNG", "GIF"):
        data = encoded(Image.new("L", (10_001, 10_000)), suffix)
        with pytest.raises(decode.DecodeError, match="10000 x 10001 pixels are more than the limit of 100,000,000"):
            decode.EncodedImage(data, "x").decode()
        with pytest.raises(decode.DecodeError, match="more than the limit"):
            decode.EncodedImage(data, "x").crop(0, 0, 8, 8)


def test_the_first_frame_of_an_animation_is_read():
    frames = [Image.new("RGB", (7, 5), colour) for colour in ("red", "blue")]
    for suffix in ("GIF", "WEBP", "PNG"):
        data = encoded(frames[0], suffix, save_all=True, append_images=frames[1:], lossless=True)
        np.testing.assert_array_equal(decode.decode_image(data, "x"), np.full((5, 7, 3), (255, 0, 0)))


def test_files_that_cannot_be_opened_are_named(tmp_path):
    (tmp_path / "loop.jpg").symlink_to(tmp_path / "loop.jpg")
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder.jpg").mkdir()
    for name in ("loop.jpg", "gone.jpg", "folder.jpg"):
        with pytest.raises(decode.DecodeError, match=f"cannot read the image .*{name}: "):
            decode.read_image(tmp_path / name)
    if os.geteuid() != 0:  # root reads everything
        (tmp_path / "secret.jpg").touch(mode=0o000)
        with pytest.raises(decode.DecodeError, match="Permission denied"):
            decode.read_image(tmp_path / "secret.jpg")
