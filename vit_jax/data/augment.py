"""Augmentation of an RGB uint8 image: RandAugment, AutoAugment, 3-Augment, random erasing and colour jitter.

Ops that follow TensorFlow or Pillow give the same pixels; the functions state the few differences. An op takes the
image, a random generator, its only source of randomness, and its arguments. It never writes into the image that it is
given, but may return it.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import cv2
import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image, ImageFilter

from vit_jax.data.images import RGB

Grey: TypeAlias = UInt8[np.ndarray, "height width"]
Generator: TypeAlias = np.random.Generator

BLUR_RADII = 0.1, 2.0  # of 3-Augment: standard deviations of a Gaussian, in pixels
FILL = 128  # of the area that a moved image leaves empty, and of cut-out boxes
LEVELS: np.ndarray = np.arange(256, dtype=np.uint8)


def randaug(image: RGB, rng: Generator, num_layers: int, magnitude: int | float) -> RGB:
    """Applies `num_layers` ops, each picked uniformly from `RANDAUGMENT` (Cubuk et al., arXiv 1909.13719).

    The ops are those of google-research/big_vision (`big_vision/pp/autoaugment.py`), which agrees with the reference
    of the paper's authors (tensorflow/tpu, `models/official/efficientnet/autoaugment.py`) in every number. Both draw a
    probability from [0.2, 0.8] and never use it: a picked op is always applied. The magnitude is not limited to 10.
    Areas that a moved image leaves empty become 128.

    A larger magnitude is not always a larger change. Posterize and Solarize change less with it, until Solarize wraps
    around: at 0, 10 and 20 it inverts the whole image. The enhancing ops change nothing at 5; 0 is their other extreme.

    Args:
        image: the image at its final resolution, since translations are in pixels.
        rng: the only source of randomness.
        num_layers: number of ops to apply one after the other, at least 0.
        magnitude: strength of the ops, at least 0; AugReg (arXiv 2106.10270) uses 0, 10, 15 and 20.
    """
    ops = list(RANDAUGMENT.values())
    for _ in range(num_layers):
        function, arguments = ops[rng.integers(len(ops))]
        image = function(image, *arguments(magnitude / 10, rng))
    return image


def random_erasing(
    image: RGB,
    rng: Generator,
    probability: int | float = 0.25,
    area_min: int | float = 2,
    area_max: int | float = 100 / 3,
) -> RGB:
    """Fills a random box with noise, every value uniform in 0..255 (Zhong et al., arXiv 1708.04896).

    The box is sampled as in timm (`timm/data/random_erasing.py`): the logarithm of its aspect ratio (height to width)
    is uniform between log 0.3 and log 1/0.3 (in the paper, the ratio itself is uniform). A box that is as high or as
    wide as the image is drawn again; nothing is erased after ten such boxes. Unlike here, timm's "pixel" mode draws the
    noise after normalisation, from a normal distribution.

    Args:
        image: an image of any size.
        rng: the only source of randomness.
        probability: the probability of erasing a box; 0.25 is DeiT's.
        area_min: smallest area of the box, in percent of the image's.
        area_max: largest area of the box, in percent of the image's.
    """
    if rng.random() >= probability:
        return image
    height, width = image.shape[:2]
    for _ in range(10):
        area = rng.uniform(area_min, area_max) / 100 * height * width
        aspect = math.exp(rng.uniform(math.log(0.3), -math.log(0.3)))
        rows, columns = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if rows < height and columns < width:
            top, left = rng.integers(height - rows + 1), rng.integers(width - columns + 1)
            image = image.copy()
            image[top : top + rows, left : left + columns] = rng.integers(0, 256, (rows, columns, 3), np.uint8)
            break
    return image


def color_jitter(
    image: RGB,
    rng: Generator,
    brightness: int | float = 0.4,
    contrast: int | float = 0.4,
    saturation: int | float = 0.4,
    hue: int | float = 0.0,
) -> RGB:
    """Changes brightness, contrast, saturation and hue in random order, as `torchvision.transforms.ColorJitter` does.

    The pixels are those of Pillow: the first three are blends with black, with the mean grey level and with the grey
    image. The hue is a shift of the H of Pillow's HSV.

    Args:
        image: an image of any size.
        rng: the only source of randomness.
        brightness: the factor is uniform in [max(0, 1 - brightness), 1 + brightness]; 0 changes nothing.
        contrast: sets the range of another factor in the same way.
        saturation: sets the range of a third factor in the same way.
        hue: the shift is uniform in [-hue, hue], in turns of the colour circle; at most 0.5.
    """
    amounts = [rng.uniform(max(0, 1 - x), 1 + x) for x in (brightness, contrast, saturation)]
    amounts.append(rng.uniform(-hue, hue))
    for index in rng.permutation(len(JITTER_OPS)):
        image = JITTER_OPS[index](image, amounts[index])
    return image


def blend(first: np.ndarray, second: np.ndarray, factor: float) -> np.ndarray:
    """Returns `first + factor * (second - first)`, computed in float32, clipped to 0..255 and truncated to uint8."""
    if factor == 1:
        return second
    mixed = np.subtract(second, first, dtype=np.float32)
    mixed *= np.float32(factor)
    mixed += first
    return np.clip(mixed, 0, 255, out=mixed).astype(np.uint8)


def blend_with_level(image: RGB, level: int, factor: float) -> RGB:
    """Blends from an image of one constant level, 0..255, to the image."""
    return cv2.LUT(image, blend(np.full(256, level, np.uint8), LEVELS, factor))


def blend_with_grey(image: RGB, grey: Grey, factor: float) -> RGB:
    """Blends from the grey image to the image."""
    return blend(cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB), image, factor)


def tensorflow_grey(image: RGB) -> Grey:
    """Returns `tf.image.rgb_to_grayscale`, bit for bit: scaled by 255.5, then truncated."""
    parts = (np.arange(256, dtype=np.float32) * np.float32(1 / 255))[:, None] * np.float32([0.2989, 0.587, 0.114])
    red, green, blue = cv2.split(cv2.LUT(image, parts[None]))
    red += green
    red += blue
    red *= np.float32(255.5)
    return red.astype(np.uint8)


def color(image: RGB, factor: float) -> RGB:
    """Blends the greyscale version of an image (factor 0) with the image (1); above 1 the colours become stronger."""
    return blend_with_grey(image, tensorflow_grey(image), factor)


def contrast(image: RGB, factor: float) -> RGB:
    """Blends from a constant level (0) to the image (1) and past it.

    The level should be the mean of the grey image. The reference takes the mean of its *histogram*, which is a 256th
    of the number of pixels, whatever the image shows: 196 for 224 x 224, 255 for 256 x 256 or more.
    """
    return blend_with_level(image, min(image.shape[0] * image.shape[1] // 256, 255), factor)


def brightness(image: RGB, factor: float) -> RGB:
    """Blends from black (0) to the image (1) and past it."""
    return blend_with_level(image, 0, factor)


def sharpness(image: RGB, factor: float) -> RGB:
    """Blends from the smoothed image (0) to the image (1) and past it.

    Smoothing replaces each value by the truncated mean of the 3 x 3 values around it, with a weight of 5 for its own;
    the border stays. TensorFlow's float32 sum falls just short of some means that are whole numbers: half a percent of
    a photograph's values become one less there, and which ones depends on the processor.
    """
    smooth = image.copy()
    if min(image.shape[:2]) > 2:
        kernel = np.float32([[1, 1, 1], [1, 5, 1], [1, 1, 1]])
        mean = cv2.filter2D(image, cv2.CV_32F, kernel)[1:-1, 1:-1]  # whole numbers, exact
        mean *= np.float32(1 / 13)  # moves no possible sum across a whole number (tested)
        smooth[1:-1, 1:-1] = mean
    return blend(smooth, image, factor)


def posterize(image: RGB, bits: int) -> RGB:
    """Keeps the upper `bits` bits, 1..8; at 0 it keeps 1, since TensorFlow shifts a uint8 by at most 7.

    From magnitude 22.5 on, `bits` is more than 8: the shift, a uint8 in the reference, wraps around, and 1 bit is kept.
    """
    return image & np.uint8(256 - 2 ** min((8 - bits) % 256, 7))


def solarize(image: RGB, threshold: int) -> RGB:
    """Inverts the values of at least `threshold`.

    The threshold is taken modulo 256, since it is a uint8 in the reference (google-research/big_vision, issue 110).
    """
    return cv2.LUT(image, np.where(threshold % 256 > LEVELS, LEVELS, 255 - LEVELS))


def solarize_add(image: RGB, addition: int) -> RGB:
    """Adds `addition` to the values below 128, up to 255."""
    added = np.minimum(LEVELS.astype(int) + addition, 255).astype(np.uint8)
    return cv2.LUT(image, np.where(LEVELS < 128, added, LEVELS))


def auto_contrast(image: RGB) -> RGB:
    """Stretches every channel to 0..255 in float32, then truncates: 255 may become 254."""
    low = cv2.reduce(image, 0, cv2.REDUCE_MIN).min((0, 1)).astype(np.float32)
    high = cv2.reduce(image, 0, cv2.REDUCE_MAX).max((0, 1)).astype(np.float32)
    scale = np.float32(255) / np.maximum(high - low, 1)
    stretched = np.clip(LEVELS[:, None].astype(np.float32) * scale + -low * scale, 0, 255).astype(np.uint8)
    return cv2.LUT(image, np.where(high > low, stretched, LEVELS[:, None])[None])


def equalize(image: RGB) -> RGB:
    """Equalizes the histogram of every channel, as `PIL.ImageOps.equalize` does."""
    tables = []
    for channel in range(3):
        counts = cv2.calcHist([image], [channel], None, [256], [0, 256]).ravel().astype(int)
        step = (counts.sum() - counts[counts.nonzero()[0][-1]]) // 255
        below = counts.cumsum() - counts
        tables.append(np.minimum((below + step // 2) // step, 255).astype(np.uint8) if step else LEVELS)
    return cv2.LUT(image, np.stack(tables, -1)[None])


def cutout(image: RGB, reach: int, down: float, across: float) -> RGB:
    """Fills the part of a square that lies within the image (DeVries and Taylor, arXiv 1708.04552).

    Args:
        image: an image of any size.
        reach: half the side of the square, in pixels.
        down: the centre's row as a fraction of the height, in [0, 1).
        across: the centre's column as a fraction of the width, in [0, 1).
    """
    row, column = int(down * image.shape[0]), int(across * image.shape[1])
    image = image.copy()
    image[max(row - reach, 0) : row + reach, max(column - reach, 0) : column + reach] = FILL
    return image


def warp(image: RGB, matrix: Float32[np.ndarray, "2 3"]) -> RGB:
    """Moves the pixel nearest to `matrix @ [x, y, 1]` to column x, row y.

    Halves are rounded away from zero, pixel centres are whole numbers, and positions are computed in float32 in the
    same order as in TensorFlow.
    """
    rows, columns = (np.arange(side, dtype=np.float32) for side in image.shape[:2])
    positions = [(a * columns + (b * rows)[:, None]) + c for a, b, c in matrix]
    # The float32 below 0.5 rounds exactly; with 0.5 itself, 0.49999997 would become 1.
    half = np.nextafter(np.float32(0.5), np.float32(0))
    x, y = (np.trunc(position + np.copysign(half, position)) for position in positions)
    return cv2.remap(image, x, y, cv2.INTER_NEAREST, None, cv2.BORDER_CONSTANT, (FILL, FILL, FILL))


def rotate(image: RGB, degrees: float) -> RGB:
    """Rotates around the centre, counterclockwise, as `tfa.image.rotate` does."""
    angle = np.float32(degrees) * np.float32(math.pi / 180)
    cosine, sine = np.cos(angle), np.sin(angle)
    down, across = (np.float32(side - 1) for side in image.shape[:2])
    offsets = (across - (cosine * across - sine * down)) / 2, (down - (sine * across + cosine * down)) / 2
    return warp(image, np.array([[cosine, -sine, offsets[0]], [sine, cosine, offsets[1]]], np.float32))


def shear_x(image: RGB, slope: float) -> RGB:
    """Moves each row to the left by `slope` times its number."""
    return warp(image, np.array([[1, slope, 0], [0, 1, 0]], np.float32))


def shear_y(image: RGB, slope: float) -> RGB:
    """Moves each column up by `slope` times its number."""
    return warp(image, np.array([[1, 0, 0], [slope, 1, 0]], np.float32))


def translate_x(image: RGB, pixels: float) -> RGB:
    """Moves the image to the left."""
    return warp(image, np.array([[1, 0, pixels], [0, 1, 0]], np.float32))


def translate_y(image: RGB, pixels: float) -> RGB:
    """Moves the image up."""
    return warp(image, np.array([[1, 0, 0], [0, 1, pixels]], np.float32))


def random_sign(amount: float, rng: Generator) -> float:
    """Negates the amount with probability 0.5."""
    return amount if rng.random() < 0.5 else -amount


# Name -> op, and its arguments as a function of magnitude / 10 and of the generator.
RANDAUGMENT: dict[str, tuple[Callable[..., RGB], Callable[[float, Generator], tuple]]] = {
    "AutoContrast": (auto_contrast, lambda part, rng: ()),
    "Equalize": (equalize, lambda part, rng: ()),
    "Invert": (cv2.bitwise_not, lambda part, rng: ()),
    "Rotate": (rotate, lambda part, rng: (random_sign(part * 30, rng),)),
    "Posterize": (posterize, lambda part, rng: (int(part * 4),)),
    "Solarize": (solarize, lambda part, rng: (int(part * 256),)),
    "Color": (color, lambda part, rng: (part * 1.8 + 0.1,)),
    "Contrast": (contrast, lambda part, rng: (part * 1.8 + 0.1,)),
    "Brightness": (brightness, lambda part, rng: (part * 1.8 + 0.1,)),
    "Sharpness": (sharpness, lambda part, rng: (part * 1.8 + 0.1,)),
    "ShearX": (shear_x, lambda part, rng: (random_sign(part * 0.3, rng),)),
    "ShearY": (shear_y, lambda part, rng: (random_sign(part * 0.3, rng),)),
    "TranslateX": (translate_x, lambda part, rng: (random_sign(part * 100, rng),)),
    "TranslateY": (translate_y, lambda part, rng: (random_sign(part * 100, rng),)),
    "Cutout": (cutout, lambda part, rng: (int(part * 40), rng.random(), rng.random())),
    "SolarizeAdd": (solarize_add, lambda part, rng: (int(part * 110),)),
}


def pillow_grey(image: RGB) -> Grey:
    """Returns the grey image as Pillow's mode "L"."""
    return np.asarray(Image.fromarray(image).convert("L"))


def jitter_contrast(image: RGB, factor: float) -> RGB:
    """Blends from the rounded mean grey level, as `PIL.ImageEnhance.Contrast` does."""
    return blend_with_level(image, int(pillow_grey(image).mean() + 0.5), factor)


def jitter_saturation(image: RGB, factor: float) -> RGB:
    """Blends from grey, as `PIL.ImageEnhance.Color` does."""
    return blend_with_grey(image, pillow_grey(image), factor)


def jitter_hue(image: RGB, turns: float) -> RGB:
    """Shifts the H of Pillow's HSV by whole 255ths of a turn, truncated, although a turn has 256 levels."""
    if not turns:
        return image
    hue, *others = Image.fromarray(image).convert("HSV").split()
    shifted = hue.point([(level + int(turns * 255)) % 256 for level in range(256)])
    return np.asarray(Image.merge("HSV", (shifted, *others)).convert("RGB"))


# In the order of color_jitter's arguments.
JITTER_OPS: tuple[Callable[[RGB, float], RGB], ...] = (brightness, jitter_contrast, jitter_saturation, jitter_hue)


# AutoAugment's sub-policies of (operation, probability, magnitude) for ImageNet, from the authors' code
# (tensorflow/tpu, models/official/efficientnet/autoaugment.py, policy_v0). big_vision and DALI have the same.
# Operations with probability 0 are left out; Equalize, AutoContrast and Invert have no magnitude.
AUTOAUGMENT_POLICY: tuple[tuple[tuple[str, float, int], ...], ...] = (
    (("Equalize", 0.8, 0), ("ShearY", 0.8, 4)),
    (("Color", 0.4, 9), ("Equalize", 0.6, 0)),
    (("Color", 0.4, 1), ("Rotate", 0.6, 8)),
    (("Solarize", 0.8, 3), ("Equalize", 0.4, 0)),
    (("Solarize", 0.4, 2), ("Solarize", 0.6, 2)),
    (("Color", 0.2, 0), ("Equalize", 0.8, 0)),
    (("Equalize", 0.4, 0), ("SolarizeAdd", 0.8, 3)),
    (("ShearX", 0.2, 9), ("Rotate", 0.6, 8)),
    (("Color", 0.6, 1), ("Equalize", 1.0, 0)),
    (("Invert", 0.4, 0), ("Rotate", 0.6, 0)),
    (("Equalize", 1.0, 0), ("ShearY", 0.6, 3)),
    (("Color", 0.4, 7), ("Equalize", 0.6, 0)),
    (("Posterize", 0.4, 6), ("AutoContrast", 0.4, 0)),
    (("Solarize", 0.6, 8), ("Color", 0.6, 9)),
    (("Solarize", 0.2, 4), ("Rotate", 0.8, 9)),
    (("Rotate", 1.0, 7), ("TranslateY", 0.8, 9)),
    (("Solarize", 0.8, 4),),
    (("ShearY", 0.8, 0), ("Color", 0.6, 4)),
    (("Color", 1.0, 0), ("Rotate", 0.6, 2)),
    (("Equalize", 0.8, 0),),
    (("Equalize", 1.0, 0), ("AutoContrast", 0.6, 0)),
    (("ShearY", 0.4, 7), ("SolarizeAdd", 0.6, 7)),
    (("Posterize", 0.8, 2), ("Solarize", 0.6, 10)),
    (("Solarize", 0.6, 8), ("Equalize", 0.6, 0)),
    (("Color", 0.8, 6), ("Rotate", 0.4, 5)),
)
# As RANDAUGMENT, but translations reach farther.
AUTOAUGMENT = RANDAUGMENT | {"TranslateY": (translate_y, lambda part, rng: (random_sign(part * 250, rng),))}


def autoaugment(image: RGB, rng: Generator) -> RGB:
    """Applies one of `AUTOAUGMENT_POLICY`'s 25 sub-policies, picked uniformly (Cubuk et al., arXiv 1805.09501).

    Its operations are applied with their probabilities. The policy was found for ImageNet.

    Args:
        image: the image at its final resolution, since translations are in pixels.
        rng: the only source of randomness.
    """
    for name, probability, magnitude in AUTOAUGMENT_POLICY[rng.integers(len(AUTOAUGMENT_POLICY))]:
        if rng.random() < probability:
            function, arguments = AUTOAUGMENT[name]
            image = function(image, *arguments(magnitude / 10, rng))
    return image


def three_augment(image: RGB, rng: Generator) -> RGB:
    """Makes the image grey, solarizes it or blurs it, each with a probability of a third: DeiT III's 3-Augment.

    It is that of arXiv 2204.07118, section 3.4, as the authors' code draws it (facebookresearch/deit, augment.py),
    which uses Pillow; so does this. The blur's radius is uniform in [0.1, 2]. The authors' colour jitter follows:
    `color_jitter(0.3,0.3,0.3)`.
    """
    return THREE_AUGMENT[rng.integers(len(THREE_AUGMENT))](image, rng)


def _grey(image: RGB, rng: Generator) -> RGB:
    return cv2.cvtColor(pillow_grey(image), cv2.COLOR_GRAY2RGB)


def _solarize(image: RGB, rng: Generator) -> RGB:
    return solarize(image, 128)


def _blur(image: RGB, rng: Generator) -> RGB:
    return np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(rng.uniform(*BLUR_RADII))))


THREE_AUGMENT = (_grey, _solarize, _blur)
