import inspect
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from PIL import Image

from configs.base import get_config
from tests.conftest import ROOT
from tests.data.test_images import picture
from vit_jax import UserError
from vit_jax.data.images import DecodeError, EncodedImage, decode
from vit_jax.data.images.resize import bilinear
from vit_jax.data.preprocess import (
    OPS,
    central_crop,
    fill_resolution,
    flip_lr,
    inception_box,
    parse_op,
    parse_pipe,
    random_crop,
    reflect_pad,
    torch_box,
)

SAMPLES = ROOT.parent / "shared" / "data" / "imagenet_sample"
PARITY = ROOT.parent / "shared" / "parity" / "pixels.npz"
FIXTURE = ROOT / "tests" / "fixtures" / "pixels.npz"
PIPE = "inception_crop({resolution})|flip_lr|value_range(-1,1)"


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def check_pixels(stored, files: dict[str, bytes]):
    """Compares every stored pipe with ours."""
    for key in stored:
        number, _, pipe = key.partition("/")
        if number not in files or not pipe.startswith("decode|") or "bicubic" in pipe:
            continue
        image = decode.decode_image(files[number], key)
        if pipe.endswith("value_range(-1,1)"):
            assert np.abs(parse_pipe(pipe, 64)(image, rng()) - stored[key]).max() <= 1e-6, key
            continue
        for part in pipe.split("|")[1:]:
            name, arguments = parse_op(part, pipe)
            image = OPS[name].function(image, rng(), **arguments)
        exact = "antialias" not in pipe and ("resize_small" not in pipe or "bilinear" in pipe)
        difference = np.abs(image.astype(int) - stored[key])
        assert image.dtype == np.uint8 and difference.max() <= (0 if exact else 1), key
        assert difference.mean() < 0.01, key


def test_pixels_are_those_of_tensorflow():
    stored = np.load(FIXTURE)
    check_pixels(stored, {number: stored[f"{number}/jpeg"].tobytes() for number in ("0", "3")})


@pytest.mark.skipif(not (PARITY.exists() and SAMPLES.exists()), reason="needs the shared ImageNet photographs")
def test_pixels_of_all_photographs():
    stored = np.load(PARITY)
    files = {str(number): (SAMPLES / str(name)).read_bytes() for number, name in enumerate(stored["files"])}
    check_pixels(stored, files)
    for number, data in files.items():
        image = decode.decode_image(data, number)
        assert image.shape == tuple(stored[f"{number}/decoded_shape"])
        top, left, height, width = stored[f"{number}/box"]
        crop = image[top : top + height, left : left + width]
        for key, region in (("vit_jax_eval", image), ("vit_jax_crop", crop)):
            resized = bilinear(region, 64, 64, np.float32)
            assert np.abs(resized / 127.5 - 1 - stored[f"{number}/{key}"]).max() <= 1e-6


def interpolate_pixel_by_pixel(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """The formula of TensorFlow's kernel, in float32, for every value of the result."""

    def lines(old: int, new: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scale = np.float32(old) / np.float32(new)
        at = (np.arange(new, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
        return np.maximum(np.floor(at), 0).astype(int), np.minimum(np.ceil(at), old - 1).astype(int), at - np.floor(at)

    above, below, down = lines(image.shape[0], height)
    left, right, across = lines(image.shape[1], width)
    across, down = across[None, :, None], down[:, None, None]

    def mix(row: np.ndarray) -> np.ndarray:
        first, second = (image[np.ix_(row, column)].astype(np.float32) for column in (left, right))
        return first + (second - first) * across

    return mix(above) + (mix(below) - mix(above)) * down


# Smaller and larger; in one band of rows and in several; with most lines of the image needed, and few of them.
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (100, 90), (224, 224), (300, 250), (449, 37), (901, 700)])
@pytest.mark.parametrize("size", [(1, 1), (64, 48), (224, 224), (240, 7)])
def test_bilinear_is_exact_in_every_value(shape, size):
    image = rng().integers(0, 256, (*shape, 3), np.uint8)
    expected = interpolate_pixel_by_pixel(image, *size)
    np.testing.assert_array_equal(bilinear(image, *size, np.float32), expected)
    np.testing.assert_array_equal(bilinear(image, *size), expected.astype(np.uint8))
    image.flags.writeable = False
    for view in (image[:, shape[1] // 3 :], image[::-1], image[:, ::-1], image.transpose(1, 0, 2)):
        np.testing.assert_array_equal(bilinear(view, *size), bilinear(view.copy(), *size))


def test_resized_images_do_not_share_the_memory_of_their_thread():
    images = rng().integers(0, 256, (32, 150, 130, 3), np.uint8)
    expected = [interpolate_pixel_by_pixel(image, 224, 224) for image in images]
    with ThreadPoolExecutor(4) as threads:
        resized = list(threads.map(lambda image: bilinear(image, 224, 224, np.float32), images))
    np.testing.assert_array_equal(resized, expected)


def test_a_pipe_knows_its_text_and_shape_and_pickles():
    preprocess = parse_pipe("decode|" + PIPE, 32)
    assert preprocess.shape == (32, 32, 3)
    assert preprocess.text == "decode|inception_crop(32)|flip_lr|value_range(-1,1)"
    image = np.asarray(picture())
    first = preprocess(image, rng(3))
    assert first.shape == preprocess.shape and first.dtype == np.float32 and -1 <= first.min() < first.max() <= 1
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(preprocess))(image, rng(3)), first)
    assert np.abs(preprocess(image, rng(4)) - first).max() > 0


@pytest.mark.parametrize(
    ("pipe", "shape"),
    [
        ("resize(40)|randaug(2,10)|autoaugment|color_jitter(hue=0.1)|random_erasing(1)|value_range(0,1)", (40, 40, 3)),
        ("resize((48, 80))|value_range(0,1)", (48, 80, 3)),
        ('resize_small(40, "bilinear")|random_crop(size=(30, 40))|value_range(-1,1)', (30, 40, 3)),
        ("resize_small(40)|central_crop(32)|resize_small(64)|value_range(-1,1)", (64, 64, 3)),
        ("torch_resize(30)|reflect_pad(4)|random_crop((30,30))|three_augment|value_range(-1,1)", (30, 30, 3)),
        ("torch_random_resized_crop(30)|flip_lr|three_augment|value_range(-1,1)", (30, 30, 3)),
        ("resize(32)|flip_lr()|value_range(-1.0, high=1.0)", (32, 32, 3)),
        ("inception_crop({resolution}, area_min=25, area_max=50)|value_range(-1,1)", (24, 24, 3)),
    ],
)
def test_shapes(pipe, shape):
    preprocess = parse_pipe(pipe, 24)
    assert preprocess.shape == shape == preprocess(np.asarray(picture()), rng()).shape


def test_a_row_of_the_ops_checks_every_argument():
    for name, op in OPS.items():
        assert list(op.arguments) == list(inspect.signature(op.function).parameters)[2:], name


@pytest.mark.parametrize(
    ("pipe", "sentence"),
    [
        ("resize_smal(3)|value_range(0,1)", "unknown preprocessing op 'resize_smal'; did you mean 'resize_small'"),
        ("resize(3,4,5,6)|value_range(0,1)", r"too many positional arguments; the op is resize\(size: int"),
        ("resize(3, foo=2)|value_range(0,1)", "unexpected keyword argument 'foo'; the op is resize"),
        ("resize|value_range(0,1)", "missing a required argument: 'size'"),
        ("resize(-3)|value_range(0,1)", "size must be a whole number from 1 to 10,000 or"),
        ("resize_small((3,3))|value_range(0,1)", "size must be a whole number from 1 to 10,000, not"),
        ("resize(3,method='cubic')|value_range(0,1)", "method must be 'bilinear' or 'bicubic' or 'fast' or "),
        ("resize(3,'bicubic')|value_range(0,1)", "the method 'bicubic' needs antialias=True"),
        ("resize(3,antialias=1)|value_range(0,1)", "antialias must be True or False"),
        ("randaug(2)|resize(3)|value_range(0,1)", "missing a required argument: 'magnitude'"),
        ("randaug(1.5,3)|resize(3)|value_range(0,1)", "num_layers must be a whole number, not 1.5"),
        ("randaug(2,-1)|resize(3)|value_range(0,1)", "magnitude must be at least 0"),
        ("resize(3)|random_erasing(2)|value_range(0,1)", "probability must be at least 0 and at most 1"),
        ("resize(3)|random_erasing(area_min=50)|value_range(0,1)", "0 < area_min <= area_max <= 100 must hold"),
        ("resize(3)|color_jitter(hue=0.6)|value_range(0,1)", "hue must be at least 0 and at most 0.5"),
        ("inception_crop(3,area_min=0)|value_range(0,1)", "0 < area_min <= area_max <= 100 must hold"),
        ("resize(3)|reflect_pad(1.5)|value_range(0,1)", "pixels must be a whole number, not 1.5"),
        (
            "resize(3)|reflect_pad(3)|value_range(0,1)",
            r"reflect_pad\(3\) needs images of more than 3 pixels on each side",
        ),
        ("torch_random_resized_crop(3,method='area')|value_range(0,1)", "method must be 'bilinear' or 'bicubic' or"),
        ("resize(3)|value_range(1,0)", "low must be less than high"),
        ("resize(3)|value_range('a',0)", "low must be a number"),
        ("resize(size=8,size=9)|value_range(0,1)", "size is given twice"),
        (f"resize({'-' * 5000}8)|value_range(0,1)", "cannot read 'resize"),
        ("resize(3)|value_range(-1e999,1)", "low must be from -1,000,000 to 1,000,000, not -inf"),
        ("resize(3)|value_range(-1,1e39)", "high must be from -1,000,000 to 1,000,000, not 1e"),
        (f"resize(3)|value_range(0,1{'0' * 400})", "high must be from -1,000,000 to 1,000,000, not 1000"),
        ("resize(3)|randaug(50,1e18)|value_range(0,1)", "magnitude must be from -1,000,000 to 1,000,000, not 1e"),
        ("resize(3)|randaug(2,1e999-1e999)|value_range(0,1)", "must be numbers"),
        ("resize(__import__('os'))|value_range(0,1)", "must be numbers, tuples, strings or booleans"),
        ("os.remove('x')|value_range(0,1)", r"cannot read \"os.remove\('x'\)\""),
        ("resize(3|value_range(0,1)", r"cannot read 'resize\(3'"),
        ("", "cannot read ''"),
        ("decode", "must contain value_range exactly once"),
        ("resize(3)", "must contain value_range exactly once"),
        ("value_range(0,1)|resize(3)", "must contain value_range exactly once"),
        ("resize_small(3)|value_range(0,1)", "gives images of different sizes"),
        ("resize(3)|central_crop(4)|value_range(0,1)", "crop of 4 x 4 pixels does not fit into an image of 3 x 3"),
        (
            "resize_small(9)|central_crop(10)|value_range(0,1)",
            "crop of 10 x 10 .* whose shorter side is 9 pixels; put a",
        ),
        (
            "resize_small(9)|flip_lr|random_crop((10,30))|value_range(0,1)",
            "whose shorter side is 9 pixels; put a larger",
        ),
        (
            "resize_small(90)|resize_small(9)|random_crop(20)|value_range(0,1)",
            "whose shorter side is 9 pixels; put a larger",
        ),
        ("central_crop(9)|resize_small(8)|central_crop(9)|value_range(0,1)", "does not fit into an image of 8 x 8"),
        ("resize_small({resolution*0/7})|central_crop(9)|value_range(0,1)", "must be numbers"),
    ],
)
def test_wrong_pipes(pipe, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_pipe(pipe, 224)


def test_the_boxes_of_torchvision_are_uniform_in_area_and_in_the_logarithm_of_their_ratio():
    boxes = np.array([torch_box(400, 600, 0.08, 1.0, generator) for generator in [rng()] for _ in range(4000)])
    top, left, rows, columns = boxes.T
    assert (top + rows).max() <= 400 and (left + columns).max() <= 600 and boxes.min() >= 0
    small = rows * columns < 0.3 * 400 * 600  # where any ratio fits
    ratio, area = np.log(columns[small] / rows[small]), (rows * columns)[small] / (400 * 600)
    for values, low, high in ((ratio, -np.log(4 / 3), np.log(4 / 3)), (area, 0.08, 0.3)):
        counts, _ = np.histogram(values, 4, (low - 0.01, high + 0.01))
        assert abs(values.mean() - (low + high) / 2) < 0.03 * (high - low) and counts.min() > 0.2 * len(values)
    assert torch_box(10, 400, 0.9, 1.0, rng()) == (0, 193, 10, 13)  # none fits: the largest in the centre, ratio 4/3


def test_a_padded_image_is_mirrored_without_its_edge():
    image = np.asarray(picture())
    padded = reflect_pad(image, rng(), 4)
    np.testing.assert_array_equal(padded, np.pad(image, ((4, 4), (4, 4), (0, 0)), mode="reflect"))


def test_a_crop_that_some_images_hold_is_no_fault():
    for size in ("9", "(9, 30)", "(30, 9)", "(30, 4)"):
        parse_pipe(f"resize_small(9)|central_crop({size})|value_range(0,1)", 224)


def test_a_size_in_proportion_is_rounded_to_the_nearest_pixel():
    base = get_config()
    rounded = {224: 256, 384: 439, 448: 512, 512: 585, 378: 432, 32: 37, 7: 8}
    for resolution, size in rounded.items():
        preprocess = parse_pipe(base.evals.test.preprocess, resolution)
        assert preprocess.text == f"resize_small({size})|central_crop({resolution})|value_range(-1,1)"
        assert preprocess.shape == (resolution, resolution, 3)
    halves = [fill_resolution("{resolution*1/2}|{resolution}", resolution) for resolution in (3, 4, 5)]
    assert halves == ["2|3", "2|4", "3|5"]


@pytest.mark.parametrize("size", [(20, 30), (90, 70)])
def test_bicubic_is_keys_cubic_that_smooths_before_it_shrinks(size):
    image = rng().integers(90, 166, (48, 64, 3), np.uint8)  # Pillow clips after rows and after columns
    found = parse_pipe(f"resize({size},'bicubic',True)|value_range(0,255)", 224)(image, rng())
    expected = jax.image.resize(image.astype(np.float32), (*size, 3), "cubic")
    assert np.abs(found - expected).max() <= 1.5


def test_a_crop_larger_than_the_image_is_a_sentence():
    with pytest.raises(UserError, match="64 x 64 pixels does not fit into an image of 40 x 60"):
        parse_pipe("central_crop(64)|value_range(0,1)", 64)(np.asarray(picture()), rng())


def test_crops_and_flips_take_pixels_as_they_are():
    image = np.asarray(picture(41, 60))
    np.testing.assert_array_equal(central_crop(image, rng(), (20, 30)), image[10:30, 15:45])
    flips = [flip_lr(image, rng(seed)) for seed in range(200)]
    mirrored = sum(np.array_equal(flip, image[:, ::-1]) for flip in flips)
    assert mirrored + sum(np.array_equal(flip, image) for flip in flips) == 200 and 70 < mirrored < 130
    corners = {tuple(random_crop(image, rng(seed), (39, 59))[0, 0]) for seed in range(200)}
    assert corners == {tuple(image[top, left]) for top in range(3) for left in range(2)}


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (40, 41)])
def test_inception_boxes_have_the_distribution_of_tensorflow(height, width):
    random = rng()
    boxes = np.array([inception_box(height, width, 0.05, 1.0, random) for _ in range(4000)])
    top, left, rows, columns = boxes.T
    area, aspect = rows * columns / (height * width), columns / rows
    assert area.min() >= 0.05 and area.max() <= 1
    assert (top + rows <= height).all() and (left + columns <= width).all()
    whole = (rows == height) & (columns == width)
    slack = 0.5 / rows.min() + 1e-6
    assert (((aspect > 0.75 - slack) & (aspect < 1.33 + slack)) | whole).all()
    # The height, not the area, is uniform between the bounds that the aspect ratio leaves; of a large area, so is a
    # tenth of the boxes above the highest tenth of the heights.
    lowest = np.sqrt(0.05 * height * width / aspect)
    highest = np.minimum(np.minimum(height, width / aspect), np.sqrt(height * width / aspect))
    place = (rows - lowest) / (highest - lowest)
    assert np.abs(np.histogram(place, 5, (0, 1))[0] / 4000 - 0.2).max() < 0.07
    assert abs(place.mean() - 0.5) < 0.02
    assert abs(aspect.mean() - (0.75 + 1.33) / 2) < 0.03


def test_a_sliver_is_taken_whole():
    assert inception_box(1, 1000, 0.5, 1.0, rng()) == (0, 0, 1, 1000)


def test_an_image_not_decoded_yet_is_cut_to_the_same_pixels():
    file = io.BytesIO()
    picture(200, 90).save(file, "JPEG")
    image = decode.EncodedImage(file.getvalue(), "x")
    for pipe in (PIPE, "random_crop(32)|value_range(0,1)", "central_crop(32)|value_range(0,1)", "resize(32)|" + PIPE):
        preprocess = parse_pipe(pipe, 32)
        for seed in range(5):
            once, decoded = preprocess(image, rng(seed)), preprocess(image.decode(), rng(seed))
            np.testing.assert_array_equal(once, decoded)


def test_fast_resizing_is_one_grey_level_off_at_most():
    exact, fast = (parse_pipe(PIPE, 48, fast) for fast in (False, True))
    random = np.random.default_rng(0).integers(0, 256, (211, 157, 3), np.uint8)
    for seed in range(50):
        difference = fast.apply_ops(random, rng(seed)).astype(int) - exact.apply_ops(random, rng(seed))
        assert set(np.unique(difference)) <= {0, 1} and difference.any()
    untouched = "resize_small(64,'area')|resize(48,antialias=True)|value_range(-1,1)"
    np.testing.assert_array_equal(*(parse_pipe(untouched, 48, fast)(random, rng()) for fast in (False, True)))


@pytest.mark.parametrize(("height", "width"), [(300, 451), (451, 300), (257, 257), (230, 1001)])
def test_torch_ops_give_the_sizes_of_torchvision(height, width):
    """Sizes and offsets as of torchvision.transforms.Resize(248) and CenterCrop(224), with Pillow."""
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    pipe = parse_pipe("torch_resize(248)|torch_center_crop(224)|value_range(0,255)", 224)
    longer = int(248 * max(height, width) / min(height, width))
    size = (longer, 248) if width > height else (248, longer)  # of Pillow: width first
    resized = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))
    top, left = (round((side - 224) / 2) for side in resized.shape[:2])
    result = pipe(image, np.random.default_rng(0))
    np.testing.assert_array_equal(result, resized[top : top + 224, left : left + 224])


@pytest.mark.parametrize("op", ["resize_small(256)", "torch_resize(256)"])
@pytest.mark.parametrize("shape", [(1, 65_500), (65_500, 1)])
def test_an_image_that_would_be_resized_to_gigabytes_is_unreadable(op, shape):
    pipe = parse_pipe(f"{op}|central_crop(224)|value_range(-1,1)", 224)
    file = io.BytesIO()
    Image.new("RGB", shape[::-1]).save(file, "PNG")
    rows, columns = (256 * side for side in shape)
    resized = f"its {shape[0]} x {shape[1]} pixels would be resized to {rows} x {columns}"
    words = f"{resized}, more than the limit of 100,000,000"
    with pytest.raises(DecodeError, match=f"^cannot preprocess the image line.png: {words}$"):
        pipe.apply_ops(EncodedImage(file.getvalue(), "line.png"), rng())
    assert pipe.why_too_small(*shape) == words  # as an evaluation says before the first step
    assert pipe.apply_ops(np.zeros((20, 3000, 3), np.uint8), rng()).shape == (224, 224, 3)


def test_torch_resize_has_every_filter_of_pillow():
    image = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    for method in ("bilinear", "lanczos", "box", "hamming", "nearest"):
        pipe = parse_pipe(f"torch_resize((20,10),{method!r})|value_range(0,255)", 20)
        expected = Image.fromarray(image).resize((10, 20), getattr(Image.Resampling, method.upper()))
        np.testing.assert_array_equal(pipe(image, np.random.default_rng(0)), np.asarray(expected))
    with pytest.raises(UserError, match="method must be 'bilinear' or 'bicubic' or 'lanczos'"):
        parse_pipe("torch_resize(20,'area')|torch_center_crop(20)|value_range(0,1)", 20)
