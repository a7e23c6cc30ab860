"""Decoding of JPEG, PNG, WebP, GIF, BMP, TIFF and PPM files to RGB uint8."""

import contextlib
import dataclasses
import functools
import io
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from vit_jax import UserError, nearest_path
from vit_jax.data.images import jpeg
from vit_jax.storage import filesystem

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
UNKNOWN_FORMAT = "it is not a JPEG, PNG, WebP, GIF, BMP, TIFF or PPM file that can be read"
MAX_PIXELS = 100_000_000  # a small file can decode to gigabytes
PPM_HEADER = re.compile(rb"P6\s+(\d{1,9})\s+(\d{1,9})\s+255\s")  # https://netpbm.sourceforge.net/doc/ppm.html

RGB: TypeAlias = UInt8[np.ndarray, "height width 3"]
Crop: TypeAlias = UInt8[np.ndarray, "rows columns 3"]


class DecodeError(UserError):
    """A file without a readable image; the message names the file."""


@dataclasses.dataclass(frozen=True)
class EncodedImage:
    """The encoded bytes of an image, which are decoded when its pixels are needed.

    A crop decodes little more than its own rows. The pixels of the whole image are kept once they are decoded.

    Attributes:
        data: the file's bytes.
        name: what error messages call the image.
        exif: whether to apply the EXIF orientation.
    """

    data: bytes
    name: str
    exif: bool = False

    def decode(self) -> RGB:
        """Returns the pixels; see `decode_image`."""
        return self._pixels

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> RGB:
        """Returns the pixels, for `np.asarray`."""
        return self._pixels

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the image that `decode` returns, in pixels.

        Raises:
            DecodeError: the header does not suffice, and the image cannot be decoded; see `decode_image`.
        """
        if self._frame:
            return self._frame.height, self._frame.width
        return self._pixels.shape[:2]

    def crop(self, top: int, left: int, rows: int, columns: int) -> Crop:
        """Returns the pixels of the box whose upper left corner is at (`top`, `left`).

        As few pixels outside the box as possible are decoded.

        Raises:
            DecodeError: see `decode_image`. Damage below the box, and sometimes above it, is not noticed.
        """
        if self._frame:
            try:
                return jpeg.decode_box(self.data, self._frame, top, left, rows, columns)
            except ValueError:  # decoding the whole image gives the reason
                pass
        return self._pixels[top : top + rows, left : left + columns]

    @functools.cached_property
    def _pixels(self) -> RGB:
        return decode_image(self.data, self.name, exif=self.exif)

    @functools.cached_property
    def _frame(self) -> jpeg.Frame | None:
        frame = jpeg.read_frame(self.data) if jpeg.is_jpeg(self.data) else None
        if frame is None or frame.height * frame.width > MAX_PIXELS:
            return None
        turned = self.exif and exif_orientation(self.data) != 1
        return None if turned else frame


def list_images(path: str) -> list[str]:
    """Returns `[path]` if the path is that of an image file, else the sorted paths of the images in and below a folder.

    Images in a folder are found by their suffixes. Hidden files and folders are skipped. A remote path with the suffix
    of an image is returned without a check that the file exists.

    Raises:
        UserError: there is neither a file nor a folder of this path, or the folder contains no images.
    """
    remote = filesystem.is_remote(path)
    folder = path if remote else os.path.expanduser(path)
    if (remote and path.lower().endswith(IMAGE_SUFFIXES)) or os.path.isfile(folder):
        return [path]
    if not remote and not os.path.isdir(folder):
        near = nearest_path(Path(folder))
        raise UserError(
            f"there is no image file and no folder {path}{f'; did you mean {str(near)!r}?' if near else '.'}"
        )
    below = (
        filesystem.list_files(path) if remote else (str(file.relative_to(folder)) for file in Path(folder).rglob("*"))
    )
    names = sorted(name for name in below if name.lower().endswith(IMAGE_SUFFIXES) and "/." not in f"/{name}")
    if not names:
        raise UserError(f"{path} contains no images ({' '.join(IMAGE_SUFFIXES)}).")
    return [filesystem.join_path(folder, name) for name in names]


def decode_image(data: bytes, name: str, *, exif: bool = False) -> RGB:
    """Decodes an image of one of `FORMATS`: the first frame of an animation, the first page of a TIFF file.

    JPEG pixels are those of TensorFlow: libjpeg-turbo's fast integer DCT with fancy upsampling. As in TensorFlow, grey
    images are repeated over the channels, an alpha channel is dropped, and 16-bit values keep their upper 8 bits.
    Pillow always applies the orientation of TIFF images, whatever `exif` says. The pixels of a PPM file may be a
    read-only view of the data.

    Args:
        data: the encoded file.
        name: what error messages call the image.
        exif: whether to apply the EXIF orientation.

    Raises:
        DecodeError: the data is truncated, damaged, of another format, or decodes to too many pixels.
    """
    # If any library sets this, Pillow ignores damage: a truncated image would pass as a partly grey one.
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise RuntimeError("PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set: damaged images would go unnoticed")
    with decode_errors(name):
        image = decode_jpeg(data) if jpeg.is_jpeg(data) else decode_other(data)
        return apply_orientation(image, data) if exif else image


class PillowWarnings:
    """A replacement of `warnings.showwarning` that logs only the first warning of Pillow in a process, in one line.

    Pillow gives many warnings, and they do not name the file.
    """

    logged = False

    def __init__(self, showwarning: Callable[..., None]):
        """Takes the function that shows the warnings of all other libraries."""
        self.showwarning = showwarning

    def __call__(self, message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any) -> None:
        """Shows a warning; takes the arguments of `warnings.showwarning`."""
        if f"{os.sep}PIL{os.sep}" not in filename:
            self.showwarning(message, category, filename, *rest, **more)
        # `check_pixel_count` has a limit of its own.
        elif not issubclass(category, Image.DecompressionBombWarning) and not PillowWarnings.logged:
            PillowWarnings.logged = True
            words = "an image file is malformed (%s); such files are read, and this warning is not repeated."
            logging.getLogger(__name__).warning(words, message)


@contextlib.contextmanager
def decode_errors(name: str) -> Iterator[None]:
    """Turns the exceptions of image decoders into a DecodeError that names the image `name`."""
    current = warnings.showwarning
    if not isinstance(current, PillowWarnings):  # installed again where another library has restored the default
        warnings.showwarning = PillowWarnings(current)
    try:
        yield
    except UnidentifiedImageError as error:
        raise DecodeError(f"cannot decode the image {name}: {UNKNOWN_FORMAT}") from error
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DecodeError(f"cannot decode the image {name}: {error or type(error).__name__}") from error


def decode_jpeg(data: bytes) -> RGB:
    """Decodes JPEG data: CMYK images with Pillow, all others with libjpeg-turbo."""
    height, width, colorspace = jpeg.read_size(data)
    check_pixel_count(height, width)
    if colorspace in ("CMYK", "YCCK"):
        return decode_with_pillow(data)
    return jpeg.decode_whole(data)


def check_pixel_count(height: int, width: int) -> None:
    """Raises ValueError if an image has more than `MAX_PIXELS` pixels."""
    if height * width > MAX_PIXELS:
        raise ValueError(f"its {height} x {width} pixels are more than the limit of {MAX_PIXELS:,}")


def decode_other(data: bytes) -> RGB:
    """Decodes an image that is not a JPEG.

    The pixels of a PPM file that `view_ppm` accepts are a read-only view of `data`. All other images are decoded
    with Pillow.
    """
    pixels = view_ppm(data)
    if pixels is None:
        return decode_with_pillow(data)
    check_pixel_count(pixels.shape[0], pixels.shape[1])
    return pixels


def view_ppm(data: bytes) -> RGB | None:
    """Returns the pixels of a binary PPM file, 8 bits a channel, as a read-only view of the data.

    The result is None if the data is of another format, has comments in its header, is damaged, or does not end with
    the pixels.
    """
    header = PPM_HEADER.match(data)
    if not header:
        return None
    width, height = int(header[1]), int(header[2])
    if not height * width or len(data) != header.end() + height * width * 3:
        return None
    return np.frombuffer(data, np.uint8, offset=header.end()).reshape(height, width, 3)


def decode_with_pillow(data: bytes) -> RGB:
    """Decodes an image of any of `FORMATS` with Pillow."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        check_pixel_count(image.height, image.width)
        if image.mode == "F":
            raise ValueError("its pixels are floating-point numbers, whose range is unknown")
        if image.mode.startswith("I"):
            grey = (np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8)
            return np.repeat(grey[..., None], 3, axis=2)
        return np.array(image.convert("RGB"))


def apply_orientation(image: RGB, data: bytes) -> UInt8[np.ndarray, "rows columns 3"]:
    """Turns an image upright by the EXIF orientation that `data` states."""
    stated = exif_orientation(data)
    if stated in (5, 6, 7, 8):
        image = image.transpose(1, 0, 2)
    if stated in (2, 3, 6, 7):
        image = image[:, ::-1]
    if stated in (3, 4, 7, 8):
        image = image[::-1]
    return np.ascontiguousarray(image)


def exif_orientation(data: bytes) -> int:
    """Returns the EXIF orientation of an image that is still to be applied (EXIF 2.3, tag 274: 1 to 8).

    It is 1 for a TIFF file, since Pillow applies its orientation, and for an image that states none, an unknown one, or
    one that cannot be read.
    """
    if data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return 1
    stating = jpeg.exif_only(data) if jpeg.is_jpeg(data) else data if b"eXIf" in data or b"EXIF" in data else b""
    if not stating:
        return 1
    try:
        with Image.open(io.BytesIO(stating), formats=FORMATS) as header:
            stated = header.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # the pixels can be read all the same; damaged EXIF data raise errors of many kinds
        return 1
    return stated if stated in range(1, 9) else 1


def read_image(path: str | os.PathLike) -> EncodedImage:
    """Reads the bytes of an image file, local or remote. Its EXIF orientation is applied when it is decoded.

    Raises:
        DecodeError: a local file is missing or unreadable.
        UserError: a remote file is missing or unreadable, or its store does not answer. This is no DecodeError, so that
            the loader does not replace the image by another.
    """
    path = os.fspath(path)
    if filesystem.is_remote(path):
        return EncodedImage(filesystem.read_bytes(path), path, exif=True)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise DecodeError(f"cannot read the image {path}: {error.strerror or error}") from error
    return EncodedImage(data, path, exif=True)
