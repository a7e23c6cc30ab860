"""Binary PPM files: a header of a few bytes, then the pixels, which are read without a copy.

The format is that of Netpbm (https://netpbm.sourceforge.net/doc/ppm.html), 8 bits a channel.
"""

import re

import numpy as np
from jaxtyping import UInt8

HEADER = re.compile(rb"P6\s+(\d{1,9})\s+(\d{1,9})\s+255\s")


def encode_ppm(pixels: UInt8[np.ndarray, "height width 3"]) -> bytes:
    """Returns the bytes of a PPM file."""
    return b"P6\n%d %d\n255\n" % (pixels.shape[1], pixels.shape[0]) + pixels.tobytes()


def view_pixels(data: bytes) -> UInt8[np.ndarray, "height width 3"] | None:
    """Returns the pixels of a PPM file as a read-only view of the data.

    The result is None if the data is of another format, has comments in its header, is damaged, or does not end with
    the pixels.
    """
    header = HEADER.match(data)
    if not header:
        return None
    width, height = int(header[1]), int(header[2])
    if not height * width or len(data) != header.end() + height * width * 3:
        return None
    return np.frombuffer(data, np.uint8, offset=header.end()).reshape(height, width, 3)
