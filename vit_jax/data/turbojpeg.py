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


def handle() -> ctypes.c_void_p:
    """Returns this thread's decompressor."""
    if not hasattr(_local, "handle"):
        _local.handle = ctypes.c_void_p(library().tj3Init(DECOMPRESS))
        library().tj3Set(_local.handle, FAST_DCT, 1)
    return _local.handle


def decode_box(data: bytes, top: int, left: int, rows: int, columns: int) -> UInt8[np.ndarray, "rows columns 3"]:
    """Decodes a box; `left` is the first column of a unit (MCU).

    Raises:
        ValueError: the data is damaged up to there.
    """
    turbo, this, size = library(), handle(), ctypes.c_size_t(len(data))
    pixels = np.empty((rows, columns, 3), np.uint8)
    whole = Region(0, 0, 0, 0)  # what an earlier image left must not be checked against this one's header
    if (
        turbo.tj3SetCroppingRegion(this, whole)
        or turbo.tj3DecompressHeader(this, data, size)
        or turbo.tj3SetCroppingRegion(this, Region(left, top, columns, rows))
        or turbo.tj3Decompress8(this, data, size, ctypes.c_void_p(pixels.ctypes.data), 0, RGB)
    ):
        raise ValueError(turbo.tj3GetErrorStr(this).decode(errors="replace"))
    return pixels
