"""3-Augment, the augmentation of DeiT III (arXiv 2204.07118, section 3.4), as its authors' code draws it.

Source of the numbers: facebookresearch/deit, augment.py, which uses Pillow; so does this.
"""

import cv2
import numpy as np
from PIL import Image, ImageFilter

from vit_jax.data.augment import RGB, Generator, pillow_grey, solarize

THRESHOLD = 128  # of solarization
RADII = 0.1, 2.0  # of the blur: standard deviations of its Gaussian, in pixels


def three_augment(image: RGB, rng: Generator) -> RGB:
    """Makes the image grey, solarizes it or blurs it, each with a probability of a third.

    The blur's radius is uniform in [0.1, 2]. The authors' colour jitter follows: `color_jitter(0.3,0.3,0.3)`.
    """
    return OPS[rng.integers(len(OPS))](image, rng)


def _grey(image: RGB, rng: Generator) -> RGB:
    return cv2.cvtColor(pillow_grey(image), cv2.COLOR_GRAY2RGB)


def _solarize(image: RGB, rng: Generator) -> RGB:
    return solarize(image, THRESHOLD)


def _blur(image: RGB, rng: Generator) -> RGB:
    return np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(rng.uniform(*RADII))))


OPS = (_grey, _solarize, _blur)
