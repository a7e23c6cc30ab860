"""The sizes of images, read from the headers of their files.

They are checked before an evaluation begins, so that unreadable and too small images are reported in time.
"""

import dataclasses
import functools
import io
from collections.abc import Callable, Sequence

from PIL import Image

from vit_jax import UserError
from vit_jax.data.images import jpeg
from vit_jax.data.images.decode import FORMATS, DecodeError, check_pixel_count, decode_errors
from vit_jax.data.thread_pool import open_thread_pool

HEADER_BYTES = 1 << 14  # of a file that are read first: they usually contain its header
THREADS = 16  # more than the cores, since shared disks are slow to answer
CHUNK = 256  # files that a thread reads at a time
SHOWN = 3  # faults in the message


@dataclasses.dataclass(frozen=True)
class ImageHeader:
    """The size that the header of an image file states.

    Attributes:
        name: what error messages call the image.
        height: in pixels, as stored, before the EXIF orientation is applied.
        width: in pixels, as stored.
    """

    name: str
    height: int
    width: int

    @classmethod
    def read(cls, path: str) -> "ImageHeader":
        """Reads the header of a local image file: its first 16 KiB, or all of it if these do not suffice.

        Raises:
            DecodeError: the file is missing, unreadable or of another format, its header is damaged, or it decodes to
                too many pixels. Other damage is not noticed.
        """
        try:
            with open(path, "rb") as file:
                data = file.read(HEADER_BYTES)
                try:
                    height, width = stated_size(data, path)
                except DecodeError:  # a long header, or a format that must be read whole
                    height, width = stated_size(data + file.read(), path)
        except OSError as error:
            raise DecodeError(f"cannot read the image {path}: {error.strerror or error}") from error
        return cls(path, height, width)


def stated_size(data: bytes, name: str) -> tuple[int, int]:
    """Returns the height and width in pixels that the header of an image states, before any EXIF orientation.

    Raises:
        DecodeError: the header is cut off or damaged, of another format, or states too many pixels.
    """
    with decode_errors(name):
        if jpeg.is_jpeg(data):
            height, width, _ = jpeg.read_size(data)
        else:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                height, width = image.height, image.width
        check_pixel_count(height, width)
        return height, width


def check_headers(
    read_header: Callable[[int], ImageHeader],
    why_too_small: Callable[[int, int], str | None],
    indices: Sequence[int],
    name: str,
) -> None:
    """Checks the headers of some images. For 50,000 local files this takes 2 to 3 seconds on two cores.

    Args:
        read_header: index of an image -> its `ImageHeader`.
        why_too_small: (height, width) -> why an image of this size is too small, or None if it is not.
        indices: the indices of the images to check.
        name: the name of the evaluation, for the message.

    Raises:
        UserError: some images are unreadable or too small; the message counts them and names the first.
    """
    why_too_small = functools.cache(why_too_small)

    def find_fault(index: int) -> str:
        try:
            header = read_header(index)
        except UserError as error:
            return str(error)
        reason = why_too_small(header.height, header.width)
        # EXIF data may turn the image, so one that fits in either orientation passes.
        small = reason and why_too_small(header.width, header.height)
        return f"the image {header.name} is too small: {reason}" if small else ""

    with open_thread_pool(THREADS) as pool:
        faults = list(filter(None, pool.imap(find_fault, indices, CHUNK)))
    if faults:
        more = f"; and {len(faults) - SHOWN:,} more" if len(faults) > SHOWN else ""
        raise UserError(
            f"{len(faults):,} of {len(indices):,} images of evals.{name} cannot be evaluated: "
            f"{'; '.join(faults[:SHOWN])}{more}. Repair or remove them: an evaluation skips no image."
        )
