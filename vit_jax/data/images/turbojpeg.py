"""libjpeg-turbo 3, where it is installed: the only decoder that decodes a box of a JPEG without the rest.

It comes with the system (`libturbojpeg`, version 3 or newer) or with the package of the extra `[fast]`.
"""

import ctypes
import ctypes.util
import functools
import importlib.util
import threading
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

# turbojpeg.h: enums TJINIT, TJPF and TJPARAM
DECOMPRESS, RGB_FORMAT, FAST_DCT = 1, 0, 10

_local = threading.local()


class Region(ctypes.Structure):
    """`tjregion`, in pixels."""

    _fields_ = [(name, ctypes.c_int) for name in ("x", "y", "w", "h")]


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Returns the library, or None if it is not installed or is older than version 3."""
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
    """A handle of the library, for one thread."""

    def __init__(self, library: ctypes.CDLL):
        self.library, self.handle = library, ctypes.c_void_p(library.tj3Init(DECOMPRESS))
        library.tj3Set(self.handle, FAST_DCT, 1)

    def __del__(self) -> None:
        self.library.tj3Destroy(self.handle)


def decompress_region(
    library: ctypes.CDLL, data: bytes, top: int, left: int, rows: int, columns: int
) -> UInt8[np.ndarray, "rows columns 3"]:
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
