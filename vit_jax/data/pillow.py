"""Resizing as PyTorch's libraries do it: by Pillow, on uint8."""

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vit_jax.data.images import check_resized

# They smooth before they shrink, except "nearest".
FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
    "nearest": Image.Resampling.NEAREST,
}


def pillow_resize(
    image: UInt8[np.ndarray, "height width 3"], height: int, width: int, method: str
) -> UInt8[np.ndarray, "rows columns 3"]:
    """Resizes by one of `FILTERS`; the result is rounded."""
    return np.asarray(Image.fromarray(image).resize((width, height), FILTERS[method]))


def torch_size(height: int, width: int, size: int) -> tuple[int, int]:
    """Returns the (height, width) of an image whose shorter side becomes `size`; the longer one is rounded down.

    Raises:
        TooNarrow: the image would have too many pixels.
    """
    longer = int(size * max(height, width) / min(height, width))
    rows, columns = (size, longer) if height <= width else (longer, size)
    check_resized(height, width, rows, columns)
    return rows, columns
