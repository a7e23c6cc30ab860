"""Image files to pixels: JPEG, PNG, WebP, GIF, BMP, TIFF and PPM bytes to RGB uint8."""

import contextlib
import dataclasses
import functools
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import simplejpeg
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from vit_jax import UserError, nearest_path
from vit_jax.data.images import jpeg
from vit_jax.storage import filesystem

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
KINDS = "it is not a JPEG, PNG, WebP, GIF, BMP, TIFF or PPM file of a kind that can be read"
MAX_PIXELS = 100_000_000  # a small file can unfold to gigabytes
HEADER = 1 << 14  # bytes of a file that mostly hold its header

RGB: TypeAlias = UInt8[np.ndarray, "height width 3"]
Crop: TypeAlias = UInt8[np.ndarray, "rows columns 3"]


class DecodeError(UserError):
    """A file that holds no readable image; the sentence names it."""


@dataclasses.dataclass(frozen=True)
class EncodedImage:
    """An image as it lies in a file, decoded when and as far as its pixels are wanted.

    Attributes:
        data: the file's bytes.
        name: what an error message calls it.
        exif: whether the image is to be turned upright as its EXIF orientation says.
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
        """Height and width.

        Raises:
            DecodeError: see `decode_image`.
        """
        if self._frame:
            return self._frame.height, self._frame.width
        return self._pixels.shape[:2]

    def cut(self, top: int, left: int, rows: int, columns: int) -> Crop:
        """Returns the pixels of a box, and decodes as few others as it can.

        Raises:
            DecodeError: see `decode_image`; damage below the box, and sometimes above it, goes unnoticed.
        """
        if self._frame:
            try:
                return jpeg.decode_box(self.data, self._frame, top, left, rows, columns)
            except ValueError:  # the whole image tells what is wrong with it
                pass
        return self._pixels[top : top + rows, left : left + columns]

    @functools.cached_property
    def _pixels(self) -> RGB:
        return decode_image(self.data, self.name, exif=self.exif)

    @functools.cached_property
    def _frame(self) -> jpeg.Frame | None:
        frame = jpeg.read_frame(self.data) if is_jpeg(self.data) else None
        if frame is None or frame.height * frame.width > MAX_PIXELS:
            return None
        turned = self.exif and has_exif(self.data[: frame.scan_at]) and orientation(self.data) != 1
        return None if turned else frame


@dataclasses.dataclass(frozen=True)
class ImageHeader:
    """What the beginning of an image file says.

    Attributes:
        name: what an error message calls it.
        height: in pixels, as stored: before it is turned upright.
        width: likewise.
    """

    name: str
    height: int
    width: int


def list_images(place: str) -> list[str]:
    """Returns a file's path itself, and of a folder the paths of all images in and below it, sorted, but hidden ones.

    Raises:
        UserError: there is no such file, or no image in the folder.
    """
    remote = filesystem.is_remote(place)
    folder = place if remote else os.path.expanduser(place)
    if (remote and place.lower().endswith(IMAGE_SUFFIXES)) or os.path.isfile(folder):
        return [place]
    if not remote and not os.path.isdir(folder):
        near = nearest_path(Path(folder))
        raise UserError(f"there is no image and no folder {place}{f'; did you mean {str(near)!r}?' if near else '.'}")
    below = (
        filesystem.list_files(place) if remote else (str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
    )
    names = sorted(name for name in below if name.lower().endswith(IMAGE_SUFFIXES) and "/." not in f"/{name}")
    if not names:
        raise UserError(f"no images ({' '.join(IMAGE_SUFFIXES)}) lie in {place}.")
    return [filesystem.join_path(folder, name) for name in names]


def decode_image(data: bytes, name: str, *, exif: bool = False) -> RGB:
    """Decodes an image of one of `FORMATS`, of an animation the first frame, of a TIFF file the first page.

    JPEG pixels are those of TensorFlow: libjpeg-turbo's fast integer DCT with fancy upsampling. Grey images are
    repeated over the channels, an alpha channel is dropped, 16 bits keep their upper 8, as TensorFlow does. TIFF
    images are turned upright by Pillow, whatever `exif` says.

    Args:
        data: the encoded file.
        name: what an error message calls it.
        exif: whether to turn the image upright as its EXIF orientation says.

    Raises:
        DecodeError: the data is truncated, damaged, of another format, or unfolds to too many pixels.
    """
    # Pillow skips damage if this is set, by whomever: a truncated picture would pass as a grey one.
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise RuntimeError("PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set: damaged images would go unnoticed")
    with decoding(name):
        image = decode_jpeg(data) if is_jpeg(data) else decode_other(data)
        return upright(image, data) if exif and has_exif(data) else image


class PillowWarnings:
    """Tells of Pillow's warnings in one line, once in a process: they name no file, and come with many."""

    said = False

    def __init__(self, usual: Callable[..., None]):
        """Takes what is to show all other warnings."""
        self.usual = usual

    def __call__(self, message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any) -> None:
        """Shows a warning, given as `warnings.showwarning` is."""
        if f"{os.sep}PIL{os.sep}" not in filename:
            self.usual(message, category, filename, *rest, **more)
        elif (
            not issubclass(category, Image.DecompressionBombWarning) and not PillowWarnings.said
        ):  # we have a limit, too
            PillowWarnings.said = True
            words = "an image file is not quite in order (%s); such files are read, and no more is said of them."
            logging.getLogger(__name__).warning(words, message)


@contextlib.contextmanager
def decoding(name: str) -> Iterator[None]:
    """Turns what decoders raise into a DecodeError."""
    usual = warnings.showwarning
    if not isinstance(usual, PillowWarnings):  # again where somebody has put the usual one back
        warnings.showwarning = PillowWarnings(usual)
    try:
        yield
    except UnidentifiedImageError as error:
        raise DecodeError(f"cannot decode the image {name}: {KINDS}") from error
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DecodeError(f"cannot decode the image {name}: {error or type(error).__name__}") from error


def is_jpeg(data: bytes) -> bool:
    """Returns whether the data begins as JPEG does."""
    return data[:2] == b"\xff\xd8"


def has_exif(data: bytes) -> bool:
    """Returns whether there may be EXIF data to apply: a JPEG begins with it, PNG and WebP have it anywhere."""
    if data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):  # TIFF, which Pillow turns itself
        return False
    return data.find(b"Exif", 0, 1 << 16) >= 0 if is_jpeg(data) else b"eXIf" in data or b"EXIF" in data


def decode_jpeg(data: bytes) -> RGB:
    """Decodes JPEG data; one in CMYK goes through Pillow."""
    height, width, colorspace = jpeg_header(data)
    check_size(height, width)
    if colorspace in ("CMYK", "YCCK"):
        return decode_other(data)
    return jpeg.decode(data)


def jpeg_header(data: bytes) -> tuple[int, int, str]:
    """Returns height, width and colour space of JPEG data."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except KeyError:
        raise ValueError("damaged JPEG header") from None
    return height, width, colorspace


def check_size(height: int, width: int) -> None:
    """Raises ValueError if an image is too large to be decoded."""
    if height * width > MAX_PIXELS:
        raise ValueError(f"its {height} x {width} pixels are more than the limit of {MAX_PIXELS:,}")


def decode_other(data: bytes) -> RGB:
    """Decodes what Pillow reads."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        check_size(image.height, image.width)
        if image.mode == "F":
            raise ValueError("its pixels are floating-point numbers, of which it is not known what is white")
        if image.mode.startswith("I"):
            grey = (np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8)
            return np.repeat(grey[..., None], 3, axis=2)
        return np.array(image.convert("RGB"))


def upright(image: RGB, data: bytes) -> UInt8[np.ndarray, "rows columns 3"]:
    """Applies the EXIF orientation that `data` states."""
    stated = orientation(data)
    if stated in (5, 6, 7, 8):
        image = image.transpose(1, 0, 2)
    if stated in (2, 3, 6, 7):
        image = image[:, ::-1]
    if stated in (3, 4, 7, 8):
        image = image[::-1]
    return np.ascontiguousarray(image)


def orientation(data: bytes) -> int:
    """Returns the EXIF orientation of an image (EXIF 2.3, tag 274: 1 to 8), 1 if it states none that is known."""
    if not has_exif(data):
        return 1
    with Image.open(io.BytesIO(data), formats=FORMATS) as header:
        stated = header.getexif().get(ExifTags.Base.Orientation, 1)
    return stated if stated in range(1, 9) else 1


def read_image(path: str | os.PathLike) -> EncodedImage:
    """Reads an image file, local or remote, to be turned upright as its EXIF orientation says.

    Raises:
        DecodeError: a local file is missing or unreadable.
        UserError: a remote one is, or its store does not answer: no reason to take another image for it.
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


def read_image_header(path: str) -> ImageHeader:
    """Reads as much of a local image file as its header takes.

    Raises:
        DecodeError: it is missing or unreadable, of another format, its header is damaged, or it would unfold to too
            many pixels. Other damage goes unnoticed.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(HEADER)
            try:
                height, width = stated_size(data, path)
            except DecodeError:  # a long header, or a format that is read whole
                height, width = stated_size(data + file.read(), path)
    except OSError as error:
        raise DecodeError(f"cannot read the image {path}: {error.strerror or error}") from error
    return ImageHeader(path, height, width)


def stated_size(data: bytes, name: str) -> tuple[int, int]:
    """Returns the height and width that the header of an image states; see `read_image_header`."""
    with decoding(name):
        if is_jpeg(data):
            height, width, _ = jpeg_header(data)
        else:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                height, width = image.height, image.width
        check_size(height, width)
        return height, width
