"""A folder with everything that people's folders hold: it trains, or tells which file is at fault."""

import contextlib
import os
import re

import numpy as np
import pytest
from PIL import ExifTags, Image

from vit_jax import UserError, train
from vit_jax.data.images import decode, headers
from vit_jax.data.preprocess import parse_pipe
from vit_jax.data.sources import kinds

GOOD = ("cmyk.jpg", "palette.png", "sixteen bits.png", "one pixel.png", "wide.JPEG", "high.jpg", "animated.gif")
GOOD += ("photo.webp", "hündchen 小狗 🐕.jpg", "lying.jpg", "grey.jpg", "alpha.png", "two colours.png")
GOOD += ("old.BMP", "scan.tif", "cmyk.tiff", "deep.tif", "raw.ppm", "raw.pgm", "from a browser.jfif")
BAD = ("text.jpg", "empty.png", "cut.jpg", "loop.jpg", "gone.jpg", "huge.png")

pytestmark = pytest.mark.filterwarnings("ignore:Image size")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Such a folder."""
    random = np.random.default_rng(0)
    photos = tmp_path_factory.mktemp("photos") / "train"
    cat, dog = photos / "cat", photos / "dog"
    cat.mkdir(parents=True)
    dog.mkdir()

    def picture(height=30, width=40):
        return Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))

    lying = Image.Exif()
    lying[ExifTags.Base.Orientation] = 6
    picture().convert("CMYK").save(cat / "cmyk.jpg")
    picture().convert("P").save(cat / "palette.png")
    Image.fromarray(random.integers(0, 2**16, (30, 40), np.uint16)).save(cat / "sixteen bits.png")
    picture(1, 1).save(cat / "one pixel.png")
    picture(20, 5000).save(cat / "wide.JPEG")
    picture(5000, 20).save(cat / "high.jpg")
    picture().save(cat / "animated.gif", save_all=True, append_images=[picture(), picture()])
    picture().save(dog / "photo.webp", save_all=True, append_images=[picture()])
    picture().save(dog / "hündchen 小狗 🐕.jpg")
    picture().save(dog / "lying.jpg", exif=lying)
    picture().convert("L").save(dog / "grey.jpg", progressive=True)
    picture().convert("RGBA").save(dog / "alpha.png")
    picture().convert("1").save(dog / "two colours.png")
    picture().save(dog / "old.BMP")
    picture().save(dog / "scan.tif", compression="tiff_lzw", exif=lying)
    picture().convert("CMYK").save(dog / "cmyk.tiff")
    Image.fromarray(random.integers(0, 2**16, (30, 40), np.uint16)).save(dog / "deep.tif")
    picture().save(dog / "raw.ppm")
    picture().convert("L").save(dog / "raw.pgm")
    picture().save(dog / "from a browser.jfif", "JPEG")
    (dog / "notes.txt").write_text("no image, and not said to be one")
    (dog / ".hidden.jpg").write_text("hidden")
    (dog / "again").symlink_to(photos)  # a loop of folders

    (cat / "text.jpg").write_text("a text file")
    (cat / "empty.png").touch()
    (cat / "cut.jpg").write_bytes((cat / "high.jpg").read_bytes()[:2000])
    (cat / "loop.jpg").symlink_to(cat / "loop.jpg")
    (dog / "gone.jpg").symlink_to(photos / "nothing.jpg")
    (dog / "folder.jpg").mkdir()
    Image.new("1", (10_001, 10_000)).save(dog / "huge.png")

    for name in ("cat", "dog"):
        (photos.parent / "val" / name).mkdir(parents=True)
        picture().save(photos.parent / "val" / name / "one.jpg")
    return photos.parent


@pytest.fixture
def odd(tiny, folder):
    """The configuration of a run on it."""
    tiny.total_steps, tiny.model.depth = 4, 1
    tiny.model.dropout_rate = tiny.model.stochastic_depth = tiny.task.mixup = 0.0
    tiny.data.source, tiny.data.split, tiny.evals.test.split = f"folder:{folder}", "train", "val"
    tiny.data.num_classes, tiny.data.num_examples = 2, len(GOOD) + len(BAD)
    return tiny


def readable(source, index) -> bool:
    try:
        return np.asarray(source[index]["image"]).ndim == 3
    except UserError as error:
        assert any(name in str(error) for name in BAD)
        return False


def test_which_are_readable(odd):
    source = kinds.open_source(odd, "train")
    assert len(source) == len(GOOD) + len(BAD)
    assert sum(readable(source, index) for index in range(len(source))) == len(GOOD)


@pytest.mark.slow  # that an image is replaced is tried in test_train too
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_replaces_unreadable_images(odd, tmp_path, caplog, workers):
    odd.data.bad_images, odd.data.max_bad, odd.data.workers = "replace", 0.4, workers
    metrics = train.train(odd, tmp_path / "run")
    assert metrics["test/n"] == 2 and np.isfinite(metrics["test/loss"])
    told = {record.message for record in caplog.records if "is replaced by the next" in record.message}
    assert len(told) == len(BAD) and all(sum(name in line for line in told) == 1 for name in BAD)
    log = (tmp_path / "run" / "train.log").read_text()
    assert f"Unreadable images, each replaced by the next readable one: {len(BAD)}." in log


@pytest.mark.slow
def test_a_run_resumes_where_no_name_is_utf8(tiny, tmp_path):
    root = os.fsencode(tmp_path) + b"/d\xe9j\xe0"
    for folder in (b"/train/caf\xe9", b"/train/tea", b"/val/caf\xe9", b"/val/tea"):
        os.makedirs(root + folder)
        for number in range(8):
            with open(root + folder + b"/%d\xfc.png" % number, "wb") as file:
                Image.new("RGB", (20, 20), (30 * number, 0, 0)).save(file, "PNG")
    with open(root + b"/train/tea/\xfcber.jpg", "wb") as file:
        file.write(b"x")
    tiny.model.depth, tiny.data.num_classes, tiny.data.num_examples = 1, None, None
    tiny.data.source, tiny.data.split, tiny.evals.test.split = f"folder:{os.fsdecode(root)}", "train", "val"
    tiny.data.preprocess, tiny.batch, tiny.batch_eval = "resize({resolution})|value_range(-1,1)", 8, 16
    tiny.data.bad_images, tiny.data.max_bad = "replace", 0.1
    for tiny.total_steps in (6, 8):
        assert train.train(tiny, tmp_path / "run")["test/n"] == 16
    log = (tmp_path / "run" / "train.log").read_text()
    assert "0  caf\\udce9\n1  tea\n" in log and "replaced by the next readable one: 1." in log


@pytest.mark.parametrize(
    ("share", "sentence"),
    [("fail", "data.bad_images=replace"), (0.001, r"more than the 0 that --config.data.max_bad=0.001 allows")],
)
def test_an_unreadable_image_is_named(odd, tmp_path, share, sentence):
    if share != "fail":
        odd.data.bad_images, odd.data.max_bad = "replace", share
    names = "|".join(BAD)
    with pytest.raises(UserError, match=rf"cannot (read|decode) the image .*({names}): .*{sentence}"):
        train.train(odd, tmp_path / "run")


def test_an_evaluation_leaves_nothing_out_and_says_so_before_training(odd, tmp_path):
    odd.data.bad_images, odd.data.max_bad, odd.evals.test.split = "replace", 0.4, "train"
    shown = ("text.jpg", "empty.png", "loop.jpg", "gone.jpg", "huge.png")  # in its data alone: cut.jpg
    names = "|".join(shown)
    fault = rf"cannot (read|decode) the image \S*/({names}): [^;]+; "
    sentence = (
        rf"^5 of {len(GOOD) + len(BAD)} images of evals.test cannot be evaluated: ({fault}){{3}}"
        r"and 2 more\. Repair or remove them: an evaluation skips no image\.$"
    )
    with pytest.raises(UserError, match=sentence):
        train.train(odd, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def readable_headers(source) -> dict[int, headers.ImageHeader]:
    found = {}
    for index in range(len(source)):
        with contextlib.suppress(UserError):
            found[index] = source.image_header(index)
    return found


def test_a_header_tells_the_size_of_the_image(odd, tmp_path):
    found = readable_headers(kinds.open_source(odd, "train")).values()
    good = [header for header in found if header.name.endswith(GOOD)]
    assert len(good) == len(GOOD)
    for header in good:
        pixels = decode.decode_image(decode.read_image(header.name).data, header.name)
        assert (header.height, header.width) == pixels.shape[:2]
    long = Image.Exif()
    long[ExifTags.Base.ImageDescription] = "x" * 2 * headers.HEADER_BYTES
    Image.new("RGB", (30, 50)).save(tmp_path / "long.jpg", exif=long)
    assert headers.ImageHeader.read(str(tmp_path / "long.jpg")) == headers.ImageHeader(
        str(tmp_path / "long.jpg"), 50, 30
    )


def test_an_image_smaller_than_a_crop_is_told_before_training(odd):
    source = kinds.open_source(odd, "train")
    names = ("grey.jpg", "lying.jpg", "wide.JPEG", "pixel.png")
    rows = [index for index, header in readable_headers(source).items() if header.name.endswith(names)]
    for pipe, small in (
        ("central_crop((30, 40))|value_range(0,1)", ("one pixel.png", "wide.JPEG")),
        ("central_crop((40, 30))|value_range(0,1)", ("one pixel.png", "wide.JPEG")),  # EXIF data may turn them so
        ("resize_small(30)|random_crop((30, 45))|value_range(0,1)", ("grey.jpg", "lying.jpg", "one pixel.png")),
    ):
        with pytest.raises(UserError) as told:
            headers.check_headers(source.image_header, parse_pipe(pipe, 40).why_too_small, rows, "test")
        assert f"{len(small)} of 4 images of evals.test cannot be evaluated" in str(told.value)
        assert all(re.search(rf"the image \S*/[^/]*{name} is too small: a crop of", str(told.value)) for name in small)
    whole = parse_pipe("inception_crop(9)|value_range(0,1)", 9)
    headers.check_headers(source.image_header, whole.why_too_small, rows, "test")
