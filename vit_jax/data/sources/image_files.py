"""Images without labels: one file, or all images in and below a folder, in the order of their names."""

import dataclasses
import hashlib
from collections.abc import Sequence

from vit_jax import encode_text
from vit_jax.data.images import EncodedImage, list_images, read_image
from vit_jax.data.sources.source import Source, stamp_files
from vit_jax.storage import filesystem

SPLIT = "images"


@dataclasses.dataclass(frozen=True)
class ImageFiles:
    """Files below a folder; the methods are those of a `Source`.

    Attributes:
        folder: the folder.
        names: the names of the files, relative to the folder.
    """

    folder: str
    names: tuple[str, ...]

    def path(self, index: int) -> str:
        """Returns the path of a file."""
        return filesystem.join_path(self.folder, self.names[index])

    def read_example(self, split: str, index: int) -> tuple[EncodedImage, int]:
        """Returns an image, whose EXIF orientation is applied, and the label -1."""
        return read_image(self.path(index)), -1

    def read_name(self, split: str, index: int) -> str:
        """Returns the name of a file."""
        return self.names[index]

    def file_stamp(self, split: str, indices: Sequence[int]) -> str:
        """Returns a short text that changes when the files do."""
        return stamp_files(map(self.path, indices))


def open_image_files(path: str) -> Source:
    """Returns the images at a path, without labels.

    Raises:
        UserError: there is neither a file nor a folder of this path, or the folder contains no images.
    """
    place = filesystem.absolute_path(path).rstrip("/")
    paths = list_images(place)
    folder = place.rpartition("/")[0] if paths == [place] else place
    names = tuple(one.removeprefix(f"{folder}/") for one in paths)
    files = ImageFiles(folder, names)
    return Source(
        name="images",
        parts=((SPLIT, range(len(names))),),
        read_example=files.read_example,
        num_classes=0,
        digest=hashlib.sha256(encode_text("\n".join(names))).hexdigest()[:16],
        file_stamp=files.file_stamp,
        read_name=files.read_name,
    )
