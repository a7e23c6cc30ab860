"""JPEG data: what its header says, and decoding no more of it than a crop needs.

Decoding is most of what an image costs. Restart markers between the rows of blocks, where there are any
(`vit_jax.pack` writes them), let the data begin late and end early; then libjpeg-turbo 3, where it is installed,
skips what lies around the crop, or else a header that states fewer rows makes any decoder stop early. The pixels are
those of the whole image, bit for bit.
"""

import dataclasses
from typing import TypeAlias

import numpy as np
import simplejpeg
from jaxtyping import UInt8

from vit_jax.data import turbojpeg

# ITU-T T.81, table B.1: the second byte of a marker, after 0xff.
BASELINE, EXTENDED, RESTART, START, END, SCAN, INTERVAL = 0xC0, 0xC1, 0xD0, 0xD8, 0xD9, 0xDA, 0xDD
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # tables and extensions are no frames

Pixels: TypeAlias = UInt8[np.ndarray, "rows columns 3"]


@dataclasses.dataclass(frozen=True)
class Frame:
    """What the header says of an image in one sequential scan.

    Attributes:
        height: in pixels.
        width: in pixels.
        height_at: where the data states the height, in two bytes.
        scan_at: where the entropy-coded data begin.
        unit: (rows, columns) of a minimum coded unit (MCU), the blocks that are coded together.
        restarts: whether the data restart after every row of units.
    """

    height: int
    width: int
    height_at: int
    scan_at: int
    unit: tuple[int, int]
    restarts: bool


def read_frame(data: bytes) -> Frame | None:
    """Returns what the header of a grey or three-channel JPEG says; None: it is cut short, damaged or not sequential,
    and only decoding tells.
    """
    at, interval, frame = 2, 0, None
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4])
        if marker in FRAMES:
            frame = data[at : at + 2 + length]
            frame_at = at
        elif marker == INTERVAL:
            interval = int.from_bytes(data[at + 4 : at + 6])
        elif marker == SCAN:
            break
        at += 2 + length
    else:
        return None
    if frame is None or frame[1] not in (BASELINE, EXTENDED) or len(frame) < 10 or frame[4] != 8:
        return None
    channels = frame[9]
    if channels not in (1, 3) or data[at + 4] != channels or len(frame) != 10 + 3 * channels:
        return None
    ended = data.rfind(bytes((0xFF, END)), len(data) - 64) >= 0
    across, down = (max(size) for size in zip(*(divmod(size, 16) for size in frame[11::3]), strict=True))
    height, width = int.from_bytes(frame[5:7]), int.from_bytes(frame[7:9])
    if not ended or not height or not width or not across or not down:
        return None
    if channels == 1:  # whatever its sampling says, a lone channel is coded block by block
        across = down = 1
    per_row = -(-width // (8 * across))
    return Frame(height, width, frame_at + 5, at + 2 + length, (8 * down, 8 * across), interval == per_row)


def decode(data: bytes) -> Pixels:
    """Decodes as TensorFlow does: the fast integer cosine transform, fancy upsampling, grey repeated to RGB.

    Raises:
        ValueError: the data is damaged.
    """
    return simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=False, strict=True)


def decode_box(data: bytes, frame: Frame, top: int, left: int, rows: int, columns: int) -> Pixels:
    """Decodes a box of the image.

    Raises:
        ValueError: the data is damaged there.
    """
    unit, across = frame.unit
    # Upsampling looks one pixel beyond each side.
    first, last = max(top - 1, 0) // unit, min((top + rows) // unit + 1, -(-frame.height // unit))
    if frame.restarts and (part := segments(data, frame, first, last)):
        height = min(last * unit, frame.height) - first * unit
        data, frame, top = part, dataclasses.replace(frame, height=height), top - first * unit
        last -= first
    if turbo := turbojpeg.library():
        start = max(left // across - 1, 0) * across
        stop = min(left + columns + across, frame.width)
        pixels = turbojpeg.decode_box(turbo, data, top, start, rows, stop - start)
        return pixels[:, left - start : left - start + columns]
    return decode_above(data, frame, last * unit)[top : top + rows, left : left + columns]


def decode_above(data: bytes, frame: Frame, height: int) -> Pixels:
    """Decodes at least the rows before `height`, the first of a row of units."""
    if height >= frame.height:
        return decode(data)
    pixels: np.ndarray = np.empty((height, frame.width, 3), np.uint8)
    try:
        part = header(data, frame, height) + data[frame.scan_at :]
        simplejpeg.decode_jpeg(part, "RGB", fastdct=True, fastupsample=False, strict=True, buffer=pixels)
    except ValueError as error:
        # The first thing wrong is told: that there are data after the last row, if nothing was before.
        if "extraneous bytes before marker 0xd9" not in str(error):
            raise
    return pixels


def header(data: bytes, frame: Frame, height: int) -> bytes:
    """Returns what stands before the coded data, with another height."""
    return data[: frame.height_at] + height.to_bytes(2) + data[frame.height_at + 2 : frame.scan_at]


def segments(data: bytes, frame: Frame, first: int, last: int) -> bytes | None:
    """Returns an image of some rows of units; None if the restart markers between them are not all there."""
    coded = np.frombuffer(data, np.uint8, offset=frame.scan_at)
    marks = np.flatnonzero((coded[:-1] == 0xFF) & (coded[1:] - np.uint8(RESTART) < 8))
    total = -(-frame.height // frame.unit[0])
    if len(marks) != total - 1 or ((coded[marks + 1] - RESTART) != np.arange(total - 1) % 8).any():
        return None
    start = int(marks[first - 1]) + 2 if first else 0
    stop = int(marks[last - 1]) if last < total else len(coded)
    part = coded[start:stop].copy()
    inner = marks[first : last - 1]
    part[inner - start + 1] = RESTART + np.arange(len(inner)) % 8  # they count from the scan's begin
    height = min(last * frame.unit[0], frame.height) - first * frame.unit[0]
    return header(data, frame, height) + part.tobytes() + (bytes((0xFF, END)) if last < total else b"")
