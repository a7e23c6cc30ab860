"""JPEG data: what its header says, and decoding no more of it than a crop needs.

Decoding is most of what an image costs. Restart markers between the rows of blocks, where there are any
(`vit_jax.pack` writes them), let the data begin late and end early; then libjpeg-turbo 3, where it is installed,
skips what lies around the crop, or else a header that states fewer rows makes any decoder stop early. The pixels are
those of the whole image, bit for bit.
"""

import dataclasses
import re
from typing import TypeAlias

import numpy as np
import simplejpeg
from jaxtyping import UInt8

from vit_jax.data.images import turbojpeg

# ITU-T T.81, table B.1: the second byte of a marker, after 0xff.
BASELINE, EXTENDED, RESTART, END, SCAN, INTERVAL = 0xC0, 0xC1, 0xD0, 0xD9, 0xDA, 0xDD
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # tables and extensions are no frames
ALONE = frozenset(range(RESTART, END + 1)) | {0x00, 0x01}  # what has no length, or is no marker

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


def segments(data: bytes) -> list[tuple[int, int, int]] | None:
    """Returns the segments before the coded data, the scan's last, as (marker, where its length stands, its end); None
    if they do not lie one after the other up to there.
    """
    found, at = [], 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4])
        if marker == 0xFF:  # may stand before any marker
            at += 1
            continue
        if marker in ALONE:
            return None
        found.append((marker, at + 2, at + 2 + length))
        if marker == SCAN:
            return found
        at += 2 + length
    return None


def read_frame(data: bytes) -> Frame | None:
    """Returns what the header of a grey or three-channel JPEG says; None: it is cut short, damaged or not sequential,
    and only decoding tells.
    """
    listed = segments(data) or []
    frames = [(marker, begin, end) for marker, begin, end in listed if marker in FRAMES]
    if len(frames) != 1 or data.rfind(bytes((0xFF, END)), len(data) - 64) < 0:
        return None
    [(marker, begin, end)] = frames
    _, scan_begin, scan_end = listed[-1]
    bits, channels = data[begin + 2], data[begin + 7]
    sampling = data[begin + 9 : end : 3]  # across and down, four bits each
    if marker not in (BASELINE, EXTENDED) or bits != 8 or channels not in (1, 3) or len(sampling) != channels:
        return None
    if data[scan_begin + 2 : scan_begin + 3] != bytes([channels]):  # the other channels follow in scans of their own
        return None
    height, width = (int.from_bytes(data[begin + at : begin + at + 2]) for at in (3, 5))
    across, down = max(size >> 4 for size in sampling), max(size & 15 for size in sampling)
    if channels == 1:  # whatever its sampling says, a lone channel is coded block by block
        across = down = 1
    if 0 in (height, width, across, down):
        return None
    intervals = [int.from_bytes(data[begin + 2 : end]) for marker, begin, end in listed if marker == INTERVAL]
    restarts = intervals[-1:] == [-(-width // (8 * across))]
    return Frame(height, width, begin + 3, scan_end, (8 * down, 8 * across), restarts)


def decode(data: bytes) -> Pixels:
    """Decodes as TensorFlow does: the fast integer cosine transform, fancy upsampling, grey repeated to RGB.

    Raises:
        ValueError: the data is damaged.
    """
    try:
        return simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=False, strict=True)
    except ValueError as error:
        tidy = without_strays(data, str(error))
        if tidy is None:
            raise
    return simplejpeg.decode_jpeg(tidy, "RGB", fastdct=True, fastupsample=False, strict=True)


def without_strays(data: bytes, fault: str) -> bytes | None:
    """Returns the data without bytes that belong to nothing, as a few published files have them; None: it is damaged.

    They may stand before a segment of the header, or before the end: there, if they are padding or one or two. More of
    them are what a decoder leaves over that lost its way.
    """
    told = re.search(r"(\d+) extraneous bytes before marker 0x(..)", fault)
    if not told:
        return None
    if int(told[2], 16) == END:
        listed = segments(data)  # a thumbnail has an end too, and so has a second picture behind the first
        end = data.find(bytes((0xFF, END)), listed[-1][2] if listed else 0)
        strays = data[max(end - int(told[1]), 0) : end]
        return data[: end - len(strays)] + data[end:] if len(strays) <= 2 or len(set(strays)) == 1 else None
    kept, at = data[:2], 2
    while at + 4 <= len(data):
        at = data.find(0xFF, at, len(data) - 3)
        if at < 0 or data[at + 1] in ALONE:
            return None
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        if data[at + 1] == SCAN:
            return kept + data[at:]
        kept, at = kept + data[at:end], end
    return None


def decode_box(data: bytes, frame: Frame, top: int, left: int, rows: int, columns: int) -> Pixels:
    """Decodes a box of the image.

    Raises:
        ValueError: the data is damaged there.
    """
    unit, across = frame.unit
    # Upsampling looks one pixel beyond each side.
    first, last = max(top - 1, 0) // unit, min((top + rows) // unit + 1, -(-frame.height // unit))
    if frame.restarts and (part := restarted(data, frame, first, last)):
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
    part = bytearray(data)
    part[frame.height_at : frame.height_at + 2] = height.to_bytes(2)
    try:
        simplejpeg.decode_jpeg(part, "RGB", fastdct=True, fastupsample=False, strict=True, buffer=pixels)
    except ValueError as error:
        # The first thing wrong is told: that there are data after the last row, if nothing was before.
        if not re.search("extraneous bytes before marker 0xd[0-79]", str(error)):
            raise
    return pixels


def header(data: bytes, frame: Frame, height: int) -> bytes:
    """Returns what stands before the coded data, with another height."""
    return data[: frame.height_at] + height.to_bytes(2) + data[frame.height_at + 2 : frame.scan_at]


def restarted(data: bytes, frame: Frame, first: int, last: int) -> bytes | None:
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
