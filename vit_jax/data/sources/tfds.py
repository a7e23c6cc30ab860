"""TFDS data in ArrayRecord form, read without TensorFlow; prepared first where that is possible without it."""

import contextlib
import dataclasses
import http.client
import logging
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from vit_jax import MissingData, UserError, storage, tell
from vit_jax.data.images import EncodedImage
from vit_jax.data.sources.source import Source, SourceConfig, stamp_files
from vit_jax.data.sources.splits import resolve_name, select_examples
from vit_jax.storage import filesystem

FILE_NAME = "file_name"  # the feature that names an image, as ImageNet's does
CONNECT_TIMEOUT = 10.0  # seconds for the server of a download to answer at all


@dataclasses.dataclass(frozen=True)
class TfdsSplits:
    """The examples of some splits.

    Attributes:
        name: of the data set.
        data: split -> TFDS's data source, images not decoded.
        files: split -> its files.
    """

    name: str
    data: dict[str, Any]
    files: dict[str, list[str]]

    def read_example(self, split: str, index: int) -> tuple[EncodedImage, int]:
        """Returns (image, label) number `index` of a split."""
        example = self.data[split][index]
        return EncodedImage(example["image"], f"{self.name} {split} {index}"), int(example["label"])

    def read_name(self, split: str, index: int) -> str:
        """Returns the feature `file_name` of example `index` of a split; its whole record is read."""
        return self.data[split][index][FILE_NAME].decode()

    def file_stamp(self, split: str, indices: Sequence[int]) -> str:
        """Returns a short text that changes when files of a split are replaced."""
        return stamp_files(self.files[split])


def open_tfds(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens data that TFDS has prepared as ArrayRecord in `data_dir`, without TensorFlow.

    The EXIF orientation is not applied, as in the published results.

    Raises:
        UserError: the data set is missing and cannot be prepared, in another format, or has no image and label.
    """
    builder = find_builder(name, source_config.data_dir)
    info, label = builder.info, builder.info.features["label"]
    parts = tuple(select_examples(split, {name: info.splits[name].num_examples for name in info.splits}))
    data = open_whole_splits(builder, [part for part, _ in parts])
    class_names = tuple(label.names) if label.names else None
    return Source(
        name=f"tfds:{data.name}",
        parts=parts,
        read_example=data.read_example,
        num_classes=label.num_classes,
        class_names=class_names,
        file_stamp=data.file_stamp,
        read_name=data.read_name if FILE_NAME in info.features else None,
    )


def list_tfds_splits(source_config: SourceConfig, name: str) -> list[str]:
    """Returns the names of the splits of a data set; raises as `open_tfds`."""
    return list(find_builder(name, source_config.data_dir).info.splits)


def open_whole_splits(builder: Any, names: list[str]) -> TfdsSplits:
    """Returns the examples of some whole splits."""
    import tensorflow_datasets as tfds

    # The decoder that TFDS uses without TensorFlow gives other pixels than the published ones.
    images = [name for name, feature in builder.info.features.items() if isinstance(feature, tfds.features.Image)]
    skip = {name: tfds.decode.SkipDecoding() for name in images}
    existing = {name: resolve_name(name, list(builder.info.splits)) for name in names}
    opened = {name: builder.as_data_source(split=split, decoders=skip) for name, split in existing.items()}
    files = {name: [str(path) for path in builder.info.splits[split].filepaths] for name, split in existing.items()}
    return TfdsSplits(builder.info.full_name, opened, files)


def find_builder(name: str, data_dir: str | None) -> Any:
    """Returns TFDS's builder of a data set in `data_dir`, local or remote; prepares the data set if it is missing.

    Raises:
        UserError: see `open_tfds`.
    """
    where = find_data_dir(data_dir)
    builder = find_prepared(name, where) or prepare_dataset(name, where)
    check_features(builder.info, name)
    return builder


def find_data_dir(data_dir: str | None) -> str:
    """Returns the folder of TFDS data: the one given, or else TFDS's own."""
    return data_dir or os.environ.get("TFDS_DATA_DIR") or os.path.expanduser("~/tensorflow_datasets")


def find_prepared(name: str, where: str) -> Any:
    """Returns TFDS's builder of a data set in a folder, local or remote, or None if the data set is not there.

    Raises:
        UserError: it is in another format, or a store cannot be read.
    """
    import tensorflow_datasets as tfds

    try:
        if filesystem.is_remote(where):
            builder = tfds.builder_from_directory(filesystem.local_copy_of_folder(newest_remote_version(where, name)))
        else:
            builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=where)
    except tfds.core.DatasetNotFoundError:
        return None
    if tfds.core.FileFormat.ARRAY_RECORD not in builder.info.available_file_formats():
        command = build_command(name, where)
        raise MissingData(
            f"the TFDS dataset {name!r} in {where} is not in ArrayRecord format; prepare it with {command}"
        )
    return builder


def check_features(info: Any, name: str) -> None:
    """Raises UserError if a data set, described by TFDS's `info`, has no images with one class each."""
    if not {"image", "label"} <= set(info.features) or not hasattr(info.features["label"], "num_classes"):
        raise UserError(
            f"the TFDS dataset {name!r} must have the features `image` and `label` (one class), but has "
            f"{', '.join(info.features)}"
        )


def build_command(name: str, where: str) -> str:
    """Returns the command that prepares a data set in a separate environment."""
    return (
        f"`pip install tensorflow-datasets tensorflow; tfds build {name} --file_format=array_record --data_dir={where}`"
    )


def prepare_dataset(name: str, where: str) -> Any:
    """Downloads and prepares a public data set, and says so first; a failure leaves no empty folder.

    Raises:
        MissingData: TFDS needs TensorFlow, the network or files that are missing.
        UserError: there is no such data set.
    """
    import tensorflow_datasets as tfds

    exists = filesystem.is_remote(where) or os.path.isdir(where)
    missing = f"there is no TFDS dataset {name!r} in {where}" + ("" if exists else ", which does not exist")
    elsewhere = f"prepare it in a separate environment with {build_command(name, where)}"
    if filesystem.is_remote(where) or jax.process_count() > 1:
        raise MissingData(f"{missing}; {elsewhere}")
    try:
        builder = tfds.builder(name, data_dir=where, file_format="array_record")
    except tfds.core.DatasetNotFoundError:
        raise UserError(
            f"{missing}, and TFDS has no dataset of this name; to use your own data, store it there as ArrayRecord "
            "files whose examples have an `image` (encoded) and a `label` (one class); to run without data, use "
            "--config.data.source=synthetic"
        ) from None
    except Exception as error:  # a data set's own code may raise anything
        raise MissingData(
            f"{missing}, and TFDS cannot create the builder of this dataset here ({short_reason(error)}); {elsewhere}"
        ) from error
    check_features(builder.info, name)
    urls = {} if builder.MANUAL_DOWNLOAD_INSTRUCTIONS else dict(builder.url_infos or {})
    size = sum(info.size for info in urls.values()) or builder.info.download_size
    download = f", {size / 1e6:,.0f} MB to download" if size else ""
    tell(f"{missing}: TFDS prepares it there now{download}.")
    for url in [url for url in urls if url.startswith("http")][:1]:
        if not is_reachable(url):
            raise MissingData(f"{missing}, and the network, or {url}, cannot be reached from here; {elsewhere}")
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it would log every attempt
    with remove_empty_folders_on_error(where):
        try:
            builder.download_and_prepare()
        except Exception as error:
            raise MissingData(
                f"{missing}, and TFDS cannot prepare this dataset here ({short_reason(error)}); {elsewhere}"
            ) from error
    return builder


def is_reachable(url: str) -> bool:
    """Returns whether a server answers, with success or not; TFDS itself would retry for minutes."""

    def request_head(_: storage.Progress) -> None:
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=CONNECT_TIMEOUT).close()

    try:
        storage.call_with_timeout(url, request_head, CONNECT_TIMEOUT)
    except (OSError, ValueError, http.client.HTTPException, UserError):
        return False
    return True


@contextlib.contextmanager
def remove_empty_folders_on_error(where: str) -> Iterator[None]:
    """Removes the empty folders that an error leaves at a path, if the path did not exist before."""
    missing = [path for path in (Path(where), *Path(where).parents) if not path.exists()]
    try:
        yield
    except BaseException:
        inside = [folder for folder, _, _ in os.walk(where, topdown=False)] if missing else []
        for folder in [*inside, *map(str, missing[1:])]:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        raise


def short_reason(error: Exception) -> str:
    """Returns the reason of an error in a few words."""
    if isinstance(error, ImportError):
        return "its code needs TensorFlow"
    if isinstance(error, OSError) and "Max retries" in str(error):
        return "the network cannot be reached"
    lines = [line for line in str(error).strip().splitlines() if line]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def newest_remote_version(where: str, name: str) -> str:
    """Returns the folder of a data set below a remote data directory, of its newest version unless one is named.

    Args:
        where: the data directory.
        name: of the data set in TFDS's notation: name, name/config, name:version or name/config:version.

    Raises:
        UserError: there are several configurations, or the store cannot be reached.
        DatasetNotFoundError: there is no such data set.
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
        raise UserError(f"{top} contains several configurations; name one of them: {', '.join(configs)}")
    return filesystem.join_path(
        top, *max(found, key=lambda parts: [int(number) for number in re.findall(r"\d+", parts[-1])])
    )
