"""Decoding of JPEG data, and of no more of it than a crop needs.

Most of the time that an image takes is spent decoding it. Where there are restart markers between the rows of blocks
(`vit_jax.pack` writes them), the rows above and below the crop are cut from the data. Then libjpeg-turbo 3, where it is
installed, skips what lies around the crop: it comes with the system (`libturbojpeg`, version 3 or newer) or with the
package of the extra `[fast]`. Without it, a header that states fewer rows makes any decoder stop below the
crop. The pixels of the crop are the same, bit for bit, as if the whole image were decoded.
"""

import ctypes
import ctypes.util
import dataclasses
import functools
import importlib.util
import re
import threading
from pathlib import Path
from typing import TypeAlias

import numpy as np
import simplejpeg
from jaxtyping import UInt8

# ITU-T T.81, table B.1: the second byte of a marker, after 0xff.
BASELINE, EXTENDED, RESTART, END, SCAN, INTERVAL, EXIF = 0xC0, 0xC1, 0xD0, 0xD9, 0xDA, 0xDD, 0xE1
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # without tables and extensions
WITHOUT_LENGTH = frozenset(range(RESTART, END + 1)) | {0x00, 0x01}  # the last two are not markers
# turbojpeg.h: enums TJINIT, TJPF and TJPARAM
DECOMPRESS, RGB_FORMAT, FAST_DCT = 1, 0, 10

Pixels: TypeAlias = UInt8[np.ndarray, "rows columns 3"]

_local = threading.local()


@dataclasses.dataclass(frozen=True)
class Frame:
    """The frame header of a JPEG image that is coded in one sequential scan.

    Attributes:
        height: in pixels.
        width: in pixels.
        height_at: the offset in the data of the height, which takes two bytes.
        scan_at: the offset of the entropy-coded data.
        unit: (rows, columns) in pixels of a minimum coded unit (MCU), the blocks that are coded together.
        has_restart_markers: whether a restart marker follows every row of units.
    """

    height: int
    width: int
    height_at: int
    scan_at: int
    unit: tuple[int, int]
    has_restart_markers: bool


def is_jpeg(data: bytes) -> bool:
    """Returns whether the data begins as a JPEG file does."""
    return data[:2] == b"\xff\xd8"


def read_size(data: bytes) -> tuple[int, int, str]:
    """Returns the height, the width and the colour space that a JPEG states; raises ValueError if it is damaged."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except KeyError:
        raise ValueError("damaged JPEG header") from None
    return height, width, colorspace


def header_segments(data: bytes) -> list[tuple[int, int, int]] | None:
    """Returns the segments of a JPEG before its entropy-coded data; the last one is the scan header.

    A segment is (second byte of its marker, offset of its length, offset of its end). The result is None if the
    segments are not contiguous, or if there is no scan header.
    """
    segments, at = [], 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4])
        if marker == 0xFF:  # may stand before any marker
            at += 1
            continue
        if marker in WITHOUT_LENGTH:
            return None
        segments.append((marker, at + 2, at + 2 + length))
        if marker == SCAN:
            return segments
        at += 2 + length
    return None


def exif_only(data: bytes) -> bytes:
    """Returns the header of a JPEG without all segments but those of the frame, the scan, EXIF data and XMP data.

    Other segments may have faults that libjpeg ignores, but for which readers of EXIF data refuse the file. The result
    is empty if there is no EXIF data, and the whole file if there is some but the segments are not contiguous.
    """
    listed = header_segments(data)
    if listed is None:
        return data if data.find(b"Exif", 0, 1 << 16) >= 0 else b""
    if not any(marker == EXIF and data.find(b"Exif", begin, end) >= 0 for marker, begin, end in listed):
        return b""
    kept = [data[begin - 2 : end] for marker, begin, end in listed if marker in FRAMES | {EXIF, SCAN}]
    return data[:2] + b"".join(kept)


def read_frame(data: bytes) -> Frame | None:
    """Returns the frame header of a grey or three-channel JPEG in one sequential scan.

    The result is None for any other JPEG, and for truncated or damaged data. Only decoding tells these cases apart.
    """
    listed = header_segments(data) or []
    frames = [(marker, begin, end) for marker, begin, end in listed if marker in FRAMES]
    if len(frames) != 1 or data.rfind(bytes((0xFF, END)), len(data) - 64) < 0:
        return None
    [(marker, begin, end)] = frames
    _, scan_begin, scan_end = listed[-1]
    bits, channels = data[begin + 2], data[begin + 7]
    sampling = data[begin + 9 : end : 3]  # across and down, four bits each
    if marker not in (BASELINE, EXTENDED) or bits != 8 or channels not in (1, 3) or len(sampling) != channels:
        return None
    if data[scan_begin + 2 : scan_begin + 3] != bytes([channels]):  # other channels have scans of their own
        return None
    height, width = (int.from_bytes(data[begin + at : begin + at + 2]) for at in (3, 5))
    across, down = max(size >> 4 for size in sampling), max(size & 15 for size in sampling)
    if channels == 1:  # a single channel is coded block by block, whatever its sampling factors
        across = down = 1
    if 0 in (height, width, across, down):
        return None
    intervals = [int.from_bytes(data[begin + 2 : end]) for marker, begin, end in listed if marker == INTERVAL]
    has_restart_markers = intervals[-1:] == [-(-width // (8 * across))]
    return Frame(height, width, begin + 3, scan_end, (8 * down, 8 * across), has_restart_markers)


def decode_whole(data: bytes) -> Pixels:
    """Decodes as TensorFlow does: the fast integer cosine transform, fancy upsampling, grey repeated to RGB.

    Raises:
        ValueError: the data is damaged.
    """
    try:
        return simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=False, strict=True)
    except ValueError as error:
        if (cleaned := remove_stray_bytes(data, str(error))) is None:
            raise
    return simplejpeg.decode_jpeg(cleaned, "RGB", fastdct=True, fastupsample=False, strict=True)


def remove_stray_bytes(data: bytes, message: str) -> bytes | None:
    """Returns the data without extraneous bytes, which a few published files contain; None if the data is damaged.

    Extraneous bytes before a header segment are removed. Those before the end-of-image marker are removed if they are
    padding (all equal) or at most two. Other bytes there mean that the decoder has lost its position in damaged data.

    Args:
        data: the file.
        message: the decoder's error message.
    """
    reported = re.search(r"(\d+) extraneous bytes before marker 0x(..)", message)
    if not reported:
        return None
    if int(reported[2], 16) == END:
        listed = header_segments(data)  # thumbnails, and second images behind the first, have end markers too
        end = data.find(bytes((0xFF, END)), listed[-1][2] if listed else 0)
        strays = data[max(end - int(reported[1]), 0) : end]
        return data[: end - len(strays)] + data[end:] if len(strays) <= 2 or len(set(strays)) == 1 else None
    kept, at = data[:2], 2
    while at + 4 <= len(data):
        at = data.find(0xFF, at, len(data) - 3)
        if at < 0 or data[at + 1] in WITHOUT_LENGTH:
            return None
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        if data[at + 1] == SCAN:
            return kept + data[at:]
        kept, at = kept + data[at:end], end
    return None


def decode_box(data: bytes, frame: Frame, top: int, left: int, rows: int, columns: int) -> Pixels:
    """Decodes the box of an image whose upper left corner is at (`top`, `left`).

    Args:
        data: the file.
        frame: its header, see `read_frame`.
        top: the first row of the box.
        left: the first column of the box.
        rows: the height of the box.
        columns: the width of the box.

    Raises:
        ValueError: the data is damaged within the box, or above it where the rows above it must be decoded.
    """
    unit, across = frame.unit
    # Upsampling reads one pixel beyond each side.
    first, last = max(top - 1, 0) // unit, min((top + rows) // unit + 1, -(-frame.height // unit))
    if frame.has_restart_markers and (part := extract_unit_rows(data, frame, first, last)):
        height = min(last * unit, frame.height) - first * unit
        data, frame, top = part, dataclasses.replace(frame, height=height), top - first * unit
        last -= first
    if library := load_turbojpeg():
        start = max(left // across - 1, 0) * across
        stop = min(left + columns + across, frame.width)
        pixels = decompress_region(library, data, top, start, rows, stop - start)
        return pixels[:, left - start : left - start + columns]
    return decode_upper_rows(data, frame, last * unit)[top : top + rows, left : left + columns]


def decode_upper_rows(data: bytes, frame: Frame, height: int) -> Pixels:
    """Decodes the first `height` rows, a multiple of the unit's rows, or all rows if there are no more than these."""
    if height >= frame.height:
        return decode_whole(data)
    pixels: np.ndarray = np.empty((height, frame.width, 3), np.uint8)
    part = header_with_height(data, frame, height) + data[frame.scan_at :]
    try:
        simplejpeg.decode_jpeg(part, "RGB", fastdct=True, fastupsample=False, strict=True, buffer=pixels)
    except ValueError as error:
        # The decoder reports the first fault; if that is the data after the last row, these rows are undamaged.
        if not re.search("extraneous bytes before marker 0xd[0-79]", str(error)):
            raise
    return pixels


def header_with_height(data: bytes, frame: Frame, height: int) -> bytes:
    """Returns the bytes before the entropy-coded data, in which `height` replaces the height of the image."""
    return data[: frame.height_at] + height.to_bytes(2) + data[frame.height_at + 2 : frame.scan_at]


def extract_unit_rows(data: bytes, frame: Frame, first: int, last: int) -> bytes | None:
    """Returns a JPEG file of only the rows of units `first` to `last - 1`; None if a restart marker is missing."""
    coded = np.frombuffer(data, np.uint8, offset=frame.scan_at)
    marks = np.flatnonzero((coded[:-1] == 0xFF) & (coded[1:] - np.uint8(RESTART) < 8))
    total = -(-frame.height // frame.unit[0])
    if len(marks) != total - 1 or ((coded[marks + 1] - RESTART) != np.arange(total - 1) % 8).any():
        return None
    start = int(marks[first - 1]) + 2 if first else 0
    stop = int(marks[last - 1]) if last < total else len(coded)
    part = coded[start:stop].copy()
    inner = marks[first : last - 1]
    part[inner - start + 1] = RESTART + np.arange(len(inner)) % 8  # numbered from the beginning of the scan
    height = min(last * frame.unit[0], frame.height) - first * frame.unit[0]
    return header_with_height(data, frame, height) + part.tobytes() + (bytes((0xFF, END)) if last < total else b"")


class Region(ctypes.Structure):
    """`tjregion`, in pixels."""

    _fields_ = [(name, ctypes.c_int) for name in ("x", "y", "w", "h")]


@functools.cache
def load_turbojpeg() -> ctypes.CDLL | None:
    """Returns libjpeg-turbo, or None if it is not installed or is older than version 3."""
    spec = importlib.util.find_spec("turbojpeg")
    beside = Path(spec.origin).parent / "turbojpeg.libs" if spec and spec.origin else Path("/nowhere")
    for name in [*map(str, beside.glob("libturbojpeg*")), ctypes.util.find_library("turbojpeg")]:
        try:
            library = ctypes.CDLL(name) if name else None
        except OSError:
            continue
        if library and hasattr(library, "tj3SetCroppingRegion"):
            library.tj3Init.restype = ctypes.c_void_p
            library.tj3GetErrorStr.restype = ctypes.c_char_p
            return library
    return None


class Decompressor:
    """A handle of libjpeg-turbo, for one thread."""

    def __init__(self, library: ctypes.CDLL):
        self.library, self.handle = library, ctypes.c_void_p(library.tj3Init(DECOMPRESS))
        library.tj3Set(self.handle, FAST_DCT, 1)

    def __del__(self) -> None:
        self.library.tj3Destroy(self.handle)


def decompress_region(library: ctypes.CDLL, data: bytes, top: int, left: int, rows: int, columns: int) -> Pixels:
    """Decodes the box of an image whose upper left corner is at (`top`, `left`).

    `left` must be the first column of a minimum coded unit (MCU).

    Raises:
        ValueError: the data is damaged within or above the box.
    """
    if not hasattr(_local, "decompressor"):
        _local.decompressor = Decompressor(library)
    handle, size = _local.decompressor.handle, ctypes.c_size_t(len(data))
    pixels: np.ndarray = np.empty((rows, columns, 3), np.uint8)
    if (
        library.tj3SetCroppingRegion(handle, Region(0, 0, 0, 0))  # else the previous image's is checked here
        or library.tj3DecompressHeader(handle, data, size)
        or library.tj3SetCroppingRegion(handle, Region(left, top, columns, rows))
        or library.tj3Decompress8(handle, data, size, ctypes.c_void_p(pixels.ctypes.data), 0, RGB_FORMAT)
    ):
        raise ValueError(library.tj3GetErrorStr(handle).decode(errors="replace"))
    return pixels
