"""libjpeg-turbo 3, where it is installed: it alone decodes a box of a JPEG without the rest.

It comes with the system (`libturbojpeg`, from version 3 on) or with the package of the extra `[fast]`.
"""

import ctypes
import ctypes.util
import functools
import importlib.util
import threading
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

# turbojpeg.h, enum TJPARAM and others
DECOMPRESS, RGB, FAST_DCT = 1, 0, 10

_local = threading.local()


class Region(ctypes.Structure):
    """`tjregion`, in pixels."""

    _fields_ = [(name, ctypes.c_int) for name in ("x", "y", "w", "h")]


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the library, or None if there is none or only an older one."""
    spec = importlib.util.find_spec("turbojpeg")
    beside = Path(spec.origin).parent / "turbojpeg.libs" if spec and spec.origin else Path("/nowhere")
    for name in [*map(str, beside.glob("libturbojpeg*")), ctypes.util.find_library("turbojpeg")]:
        try:
            found = ctypes.CDLL(name) if name else None
        except OSError:
            continue
        if found and hasattr(found, "tj3SetCroppingRegion"):
            found.tj3Init.restype = ctypes.c_void_p
            found.tj3GetErrorStr.restype = ctypes.c_char_p
            return found
    return None


class Decompressor:
    """A handle of the library, for one thread."""

    def __init__(self, turbo: ctypes.CDLL):
        self.turbo, self.handle = turbo, ctypes.c_void_p(turbo.tj3Init(DECOMPRESS))
        turbo.tj3Set(self.handle, FAST_DCT, 1)

    def __del__(self) -> None:
        self.turbo.tj3Destroy(self.handle)


def decode_box(
    turbo: ctypes.CDLL, data: bytes, top: int, left: int, rows: int, columns: int
) -> UInt8[np.ndarray, "rows columns 3"]:
    """Decodes a box; `left` is the first column of a unit (MCU).

    Raises:
        ValueError: the data is damaged up to there.
    """
    if not hasattr(_local, "decompressor"):
        _local.decompressor = Decompressor(turbo)
    handle, size = _local.decompressor.handle, ctypes.c_size_t(len(data))
    pixels: np.ndarray = np.empty((rows, columns, 3), np.uint8)
    if (
        turbo.tj3SetCroppingRegion(handle, Region(0, 0, 0, 0))  # else the last image's would be checked here
        or turbo.tj3DecompressHeader(handle, data, size)
        or turbo.tj3SetCroppingRegion(handle, Region(left, top, columns, rows))
        or turbo.tj3Decompress8(handle, data, size, ctypes.c_void_p(pixels.ctypes.data), 0, RGB)
    ):
        raise ValueError(turbo.tj3GetErrorStr(handle).decode(errors="replace"))
    return pixels
