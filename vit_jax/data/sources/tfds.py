"""TFDS data in ArrayRecord form, read without TensorFlow: found, or prepared where that goes."""

import contextlib
import dataclasses
import http.client
import logging
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from vit_jax import UserError, storage
from vit_jax.data.images import EncodedImage
from vit_jax.data.sources.splits import resolve
from vit_jax.storage import filesystem

REACHING = 10.0  # seconds for the server of a download to answer at all


@dataclasses.dataclass(frozen=True)
class Tfds:
    """The data sources of some splits.

    Attributes:
        name: of the data set.
        data: split -> what TFDS gives, images left encoded.
    """

    name: str
    data: dict[str, Any]

    def read(self, split: str, index: int) -> tuple[EncodedImage, int]:
        """Returns (image, label) number `index` of a split."""
        example = self.data[split][index]
        return EncodedImage(example["image"], f"{self.name} {split} {index}"), int(example["label"])


def open_splits(builder: Any, names: list[str]) -> Tfds:
    """Returns the examples of some splits."""
    import tensorflow_datasets as tfds

    # The decoder that TFDS uses without TensorFlow gives other pixels than the published ones.
    skip = {"image": tfds.decode.SkipDecoding()}
    there = {name: resolve(name, list(builder.info.splits)) for name in names}
    opened = {name: builder.as_data_source(split=split, decoders=skip) for name, split in there.items()}
    return Tfds(builder.info.full_name, opened)


def find(name: str, data_dir: str | None) -> Any:
    """Returns TFDS's builder of a data set that lies in `data_dir`, local or remote, or else is prepared there.

    Raises:
        UserError: there is none and it cannot be prepared, it is in another format, or has no image and label.
    """
    import tensorflow_datasets as tfds

    where = data_dir or os.environ.get("TFDS_DATA_DIR") or os.path.expanduser("~/tensorflow_datasets")
    try:
        if filesystem.is_remote(where):
            builder = tfds.builder_from_directory(filesystem.local_copy_of_folder(remote_folder(where, name)))
        else:
            builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=where)
    except tfds.core.DatasetNotFoundError:
        builder = prepare(name, where)
    info = builder.info
    check_features(info, name)
    if tfds.core.FileFormat.ARRAY_RECORD not in info.available_file_formats():
        build = command(name, where)
        raise UserError(f"the TFDS dataset {name!r} in {where} is not in ArrayRecord; prepare it with {build}")
    return builder


def check_features(info: Any, name: str) -> None:
    """Raises UserError if a data set, given what TFDS says of it, is not one of images with a class each."""
    if not {"image", "label"} <= set(info.features) or not hasattr(info.features["label"], "num_classes"):
        raise UserError(f"the TFDS dataset {name!r} has no image and class label, but {', '.join(info.features)}")


def command(name: str, where: str) -> str:
    """Returns what prepares a data set in an environment of its own."""
    return (
        f"`pip install tensorflow-datasets tensorflow; tfds build {name} --file_format=array_record --data_dir={where}`"
    )


def prepare(name: str, where: str) -> Any:
    """Downloads and prepares a public data set, having said so; where that fails at once, no folder is left.

    Raises:
        UserError: there is no such one, or TFDS needs TensorFlow, the network or files that are not here.
    """
    import tensorflow_datasets as tfds

    there = filesystem.is_remote(where) or os.path.isdir(where)
    absent = f"there is no TFDS dataset {name!r} in {where}" + ("" if there else ", which does not exist")
    elsewhere = f"prepare it in an environment of its own with {command(name, where)}"
    if filesystem.is_remote(where) or jax.process_count() > 1:
        raise UserError(f"{absent}; {elsewhere}")
    try:
        builder = tfds.builder(name, data_dir=where, file_format="array_record")
    except tfds.core.DatasetNotFoundError:
        raise UserError(
            f"{absent}, and TFDS knows none of that name; data of your own must lie there as ArrayRecord files whose "
            "examples have an `image` (encoded) and a `label` (one class); "
            "--config.data.source=synthetic runs without data"
        ) from None
    except Exception as error:  # of whatever a data set's own code does
        raise UserError(f"{absent}, and TFDS cannot load its code here ({first_line(error)}); {elsewhere}") from error
    check_features(builder.info, name)
    urls = {} if builder.MANUAL_DOWNLOAD_INSTRUCTIONS else dict(builder.url_infos or {})
    size = sum(info.size for info in urls.values()) or builder.info.download_size
    told = f", {size / 1e6:,.0f} MB to download" if size else ""
    print(f"{absent}: TFDS prepares it there now{told}.", file=sys.stderr, flush=True)
    for url in [url for url in urls if url.startswith("http")][:1]:
        if not is_reachable(url):
            raise UserError(f"{absent}, and the network, or {url}, cannot be reached from here; {elsewhere}")
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it would tell of each of its attempts
    with without_empty_folders(where):
        try:
            builder.download_and_prepare()
        except Exception as error:
            raise UserError(f"{absent}, and TFDS cannot prepare it here ({first_line(error)}); {elsewhere}") from error
    return builder


def is_reachable(url: str) -> bool:
    """Returns whether a server answers, whatever it answers; TFDS itself would ask for minutes."""

    def ask(_: storage.Progress) -> None:
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=REACHING).close()

    try:
        storage.call_with_timeout(url, ask, REACHING)
    except (OSError, ValueError, http.client.HTTPException, UserError):
        return False
    return True


@contextlib.contextmanager
def without_empty_folders(where: str) -> Iterator[None]:
    """Removes the empty folders that are left at a path after an error inside, if there was no folder before."""
    missing = [path for path in (Path(where), *Path(where).parents) if not path.exists()]
    try:
        yield
    except BaseException:
        inside = [folder for folder, _, _ in os.walk(where, topdown=False)] if missing else []
        for folder in [*inside, *map(str, missing[1:])]:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        raise


def first_line(error: Exception) -> str:
    """Returns what an error says, in short."""
    if isinstance(error, ImportError):
        return "its code needs TensorFlow"
    if isinstance(error, OSError) and "Max retries" in str(error):
        return "the network cannot be reached"
    lines = [line for line in str(error).strip().splitlines() if line]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def remote_folder(where: str, name: str) -> str:
    """Returns the folder of the newest version of a data set, or of the one named, below a remote data directory.

    Args:
        where: the data directory.
        name: of the data set as TFDS writes it: name, name/config, name:version or name/config:version.

    Raises:
        UserError: there are several configurations, or the store cannot be asked.
        DatasetNotFoundError: there is none.
    """
    import tensorflow_datasets as tfds

    path, _, version = name.partition(":")
    top = filesystem.join_path(where, path)
    infos = [one.split("/") for one in filesystem.list_files(top) if one.endswith("/dataset_info.json")]
    found = [parts[:-1] for parts in infos if not version or parts[-2] == version]
    if not found:
        raise tfds.core.DatasetNotFoundError(name)
    configs = sorted({"/".join([path, *parts[:-1]]) for parts in found})
    if len(configs) > 1:
        raise UserError(f"{top} holds several configurations; name one of them: {', '.join(configs)}")
    return filesystem.join_path(
        top, *max(found, key=lambda parts: [int(number) for number in re.findall(r"\d+", parts[-1])])
    )
