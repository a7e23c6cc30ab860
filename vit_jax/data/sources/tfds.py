"""TFDS data in ArrayRecord or TFRecord form, read without TensorFlow.

A data set that is missing is prepared first, if TFDS can do that without TensorFlow.
"""

import contextlib
import dataclasses
import glob
import http.client
import json
import logging
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from vit_jax import BUGS, MissingData, UserError, printable, reason, storage, tell, user_errors
from vit_jax.data import shards
from vit_jax.data.images import DecodeError, EncodedImage
from vit_jax.data.sources.sharded import OpenShard, ShardedSplits
from vit_jax.data.sources.source import Source, SourceConfig
from vit_jax.data.sources.splits import resolve_name, select_examples
from vit_jax.storage import filesystem

# Classes of features that a prepared data set may name: those of TFDS 4.9, under all their names.
FEATURE_CLASSES = frozenset(
    f"tensorflow_datasets.core.features.{name}"
    for name in (
        *("audio_feature.Audio", "bounding_boxes.BBoxFeature", "class_label_feature.ClassLabel"),
        *("dataset_feature.Dataset", "feature.Tensor", "features_dict.FeaturesDict", "image_feature.Image"),
        *("labeled_image.LabeledImage", "optional_feature.Optional", "scalar.Scalar", "sequence_feature.Sequence"),
        *("tensor_feature.Tensor", "text_feature.Text", "translation_feature.Translation"),
        *("translation_feature.TranslationVariableLanguages", "video_feature.Video"),
    )
)
FILE_NAME = "file_name"  # the feature that names an image, as ImageNet's does
SHARD_X_OF_Y = re.compile(r"\d{5,}-of-\d{5,}")  # in the names of shards, as TFDS calls and writes it
FILE_FORMATS = ("array_record", "tfrecord")  # that can be read, the preferred first, as TFDS and `shards` name them
CONNECT_TIMEOUT = 10.0  # seconds for the server of a download to answer at all


class PreparedData(NamedTuple):
    """A data set that TFDS has prepared.

    Attributes:
        info: TFDS's description of the data set.
        folder: the folder of its shards, local or remote.
    """

    info: Any
    folder: str


@dataclasses.dataclass(frozen=True)
class TfdsSplits:
    """The examples of some whole splits.

    Attributes:
        name: the name of the data set, with its version.
        features: TFDS's description of the features, which parses a record.
        decoders: TFDS's decoders, which leave images encoded.
        splits: the shards of the splits.
        reads_labels: False: the label of all images is -1.
    """

    name: str
    features: Any
    decoders: dict[str, Any]
    splits: ShardedSplits
    reads_labels: bool = True

    def read_features(self, split: str, index: int, open_shard: OpenShard = shards.cached_reader) -> dict[str, Any]:
        """Returns the features of example `index` of a split; `open_shard` returns the reader of its shard.

        Raises:
            DecodeError: the record is damaged.
            UserError: the shard is damaged or missing.
        """
        record, name = self.splits.read(split, index, open_shard, lambda reader, row, name: reader.read(row))
        try:
            return self.features.deserialize_example_np(record, decoders=self.decoders)
        except Exception as error:  # as many kinds as TFDS raises
            raise DecodeError(f"cannot read {name}: {reason(error)}") from error

    def read_example(
        self, split: str, index: int, open_shard: OpenShard = shards.cached_reader
    ) -> tuple[EncodedImage, int]:
        """Returns (image, label) number `index` of a split; takes and raises what `read_features` does."""
        example = self.read_features(split, index, open_shard)
        label = int(example["label"]) if self.reads_labels else -1
        return EncodedImage(example["image"], f"{self.name} {split} {index}"), label

    def read_name(self, split: str, index: int, open_shard: OpenShard = shards.cached_reader) -> str:
        """Returns the feature `file_name` of example `index` of a split; its whole record is read."""
        return self.read_features(split, index, open_shard)[FILE_NAME].decode()


def open_tfds(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens data that TFDS has prepared as ArrayRecord or TFRecord in `data_dir`, without TensorFlow.

    The EXIF orientation is not applied, as in the published results.

    Raises:
        UserError: the data set or one of its files is missing and cannot be prepared, or the data set is in another
            format or has no features `image` and `label`.
    """
    prepared = find_data(name, source_config)
    info, label = prepared.info, prepared.info.features["label"] if source_config.reads_labels else None
    parts = tuple(select_examples(split, {name: info.splits[name].num_examples for name in info.splits}))
    data = open_whole_splits(prepared, [part for part, _ in parts], source_config.reads_labels)
    class_names = tuple(label.names) if label and label.names else None
    return Source(
        name=f"tfds:{data.name}",
        parts=parts,
        sizes=data.splits.counts,
        read_example=data.read_example,
        num_classes=label.num_classes if label else 0,
        class_names=class_names,
        file_stamp=data.splits.file_stamp,
        read_name=data.read_name if FILE_NAME in info.features else None,
        shards=data.splits.select(parts, not info.disable_shuffling),
    )


def list_tfds_splits(source_config: SourceConfig, name: str) -> list[str]:
    """Returns the names of the splits of a data set; raises as `open_tfds`."""
    return list(find_data(name, source_config).info.splits)


def open_whole_splits(prepared: PreparedData, names: list[str], reads_labels: bool = True) -> TfdsSplits:
    """Returns the examples of some whole splits; raises UserError if one of their files is missing."""
    import tensorflow_datasets as tfds

    info, folder = prepared
    # The decoder that TFDS uses without TensorFlow gives other pixels than the published ones.
    images = [name for name, feature in info.features.items() if isinstance(feature, tfds.features.Image)]
    existing = {name: info.splits[resolve_name(name, list(info.splits))] for name in names}
    data_files = list_data_files(folder)
    listed = {}
    for name, split in existing.items():
        files = [path.relative_to(info.data_dir).as_posix() for path in split.filepaths]
        if missing := [file for file in files if file not in data_files]:
            raise UserError(
                f"{folder} lacks {len(missing)} of the {len(files)} files of the split {split.name}, such as "
                f"{missing[0]}; copy or prepare the TFDS dataset again"
            )
        listed[name] = tuple(
            shards.Shard(filesystem.join_path(folder, file), length, *data_files[file], info.file_format.value)
            for file, length in zip(files, split.shard_lengths, strict=True)
        )
    skip = {name: tfds.decode.SkipDecoding() for name in images}
    return TfdsSplits(info.full_name, info.features, skip, ShardedSplits(listed), reads_labels)


def list_data_files(folder: str) -> dict[str, tuple[int | None, storage.Version | None]]:
    """Returns name -> (size in bytes, version) of all files below a folder.

    The names are relative to the folder. The version of a local file is None.
    """
    if filesystem.is_remote(folder):
        return {name: (version.size, version) for name, version in filesystem.list_versions(folder).items()}
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): (path.stat().st_size, None) for path in paths}


def find_data(name: str, source_config: SourceConfig) -> PreparedData:
    """Returns a data set in the config's `data_dir`, local or remote; prepares it if it is missing.

    Raises:
        UserError: see `open_tfds`.
    """
    where = find_data_dir(source_config.data_dir)
    prepared = find_prepared(name, where) or prepare_dataset(name, where, source_config.reads_labels)
    check_features(prepared.info, name, source_config.reads_labels)
    if not prepared.info.splits:
        raise UserError(f"the TFDS dataset {name!r} in {where} has no splits; copy or prepare it again")
    return prepared


def find_data_dir(data_dir: str | None) -> str:
    """Returns the folder of TFDS data: `data_dir` or, if that is not given, TFDS's own default."""
    return data_dir or os.environ.get("TFDS_DATA_DIR") or os.path.expanduser("~/tensorflow_datasets")


def find_prepared(name: str, where: str) -> PreparedData | None:
    """Returns a data set in the data directory `where`, local or remote, or None if it is not there.

    No shards of a remote data set are copied.

    Raises:
        UserError: the data set is in another format, or a store cannot be read.
    """
    import tensorflow_datasets as tfds

    what = f"cannot read the TFDS dataset {name!r} in {where}"
    with user_errors(what, Exception, *BUGS, advice="copy or prepare it again"):
        try:
            if filesystem.is_remote(where):
                folder = newest_remote_version(where, name)
                described = filesystem.local_copy_of_folder(folder, lambda file: not SHARD_X_OF_Y.search(file))
                check_feature_classes(described)
                info = tfds.builder_from_directory(described).info
            else:
                with user_errors(f"cannot read the name {name!r}", ValueError, advice="write NAME/CONFIG:VERSION"):
                    found = tfds.core.naming.parse_builder_name_kwargs(name)[0].name  # in snake case
                check_feature_classes(os.path.join(where, found))
                info = tfds.core.read_only_builder.builder_from_files(name, data_dir=where).info
                folder = info.data_dir
        except tfds.core.DatasetNotFoundError:
            return None
    existing = {file_format.value: file_format for file_format in info.available_file_formats()}
    readable = [existing[file_format] for file_format in FILE_FORMATS if file_format in existing]
    if not readable:
        command = build_command(name, where)
        raise MissingData(
            f"the TFDS dataset {name!r} in {where} is in the format {', '.join(existing)}, and neither in ArrayRecord "
            f"nor in TFRecord; prepare it with {command}"
        )
    if info.file_format != readable[0]:  # one of several
        info.set_file_format(readable[0], override=True, override_if_initialized=True)
    return PreparedData(info, folder)


def check_feature_classes(folder: str) -> None:
    """Checks that the descriptions of features below a folder name classes of TFDS only.

    TFDS imports the modules of the classes that `features.json` names, which may be any on `sys.path`.

    Raises:
        UserError: another class is named, or a description cannot be read.
    """
    for path in sorted(glob.glob(f"{glob.escape(folder)}/**/features.json", recursive=True, include_hidden=True)):
        for name in named_classes(storage.read_json(path)):
            if name not in FEATURE_CLASSES:
                raise UserError(
                    f"{path} names the class {printable(name)}, which is no feature of TFDS, and whose code would "
                    "be run; prepare the data with features of TFDS"
                )


def named_classes(node: object) -> Iterator[object]:
    """Yields the names of classes in the description of features, also in JSON within its strings, which TFDS reads."""
    if isinstance(node, str) and node.lstrip()[:1] == "{":
        with contextlib.suppress(ValueError):
            node = json.loads(node)
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from named_classes(value)
    if isinstance(node, dict):
        keys = ("pythonClassName", "python_class_name", *(("type",) if "content" in node else ()))
        yield from (node[key] for key in keys if key in node)


def check_features(info: Any, name: str, reads_labels: bool) -> None:
    """Raises UserError if a data set, described by `info`, has no images or, where they are read, no single labels."""
    import tensorflow_datasets as tfds

    features = dict(info.features.items()) if isinstance(info.features, tfds.features.FeaturesDict) else {}
    image, label = features.get("image"), features.get("label")
    # A sequence of labels has the attributes of a label too.
    labelled = isinstance(label, tfds.features.ClassLabel) and label.num_classes
    if not isinstance(image, tfds.features.Image) or (reads_labels and not labelled):
        existing = ", ".join(f"{one} ({type(feature).__name__})" for one, feature in sorted(features.items()))
        needed = "features `image` and `label` (one class)" if reads_labels else "feature `image`"
        raise UserError(f"the TFDS dataset {name!r} must have the {needed}, but has {existing or 'none'}")


def build_command(name: str, where: str) -> str:
    """Returns the command that prepares a data set in a separate environment."""
    return (
        f"`pip install tensorflow-datasets tensorflow; tfds build {name} --file_format=array_record --data_dir={where}`"
    )


def prepare_dataset(name: str, where: str, reads_labels: bool) -> PreparedData:
    """Downloads and prepares a public data set, after a line that tells the user. A failure leaves no empty folders.

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
    check_features(builder.info, name, reads_labels)
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
    return PreparedData(builder.info, builder.info.data_dir)


def is_reachable(url: str) -> bool:
    """Returns whether a server answers in time, be it with an HTTP error. TFDS itself would retry for minutes."""

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
    """Returns the folder of one version of a data set below a remote data directory: the named one, or else the newest.

    Args:
        where: the data directory.
        name: the data set in TFDS's notation: name, name/config, name:version or name/config:version.

    Raises:
        UserError: there are several configurations, or the store cannot be reached.
        DatasetNotFoundError: there is no such data set.
    """
    import tensorflow_datasets as tfds

    path, _, version = name.partition(":")
    top = filesystem.join_path(where, path)
    listed = [one for one in filesystem.list_files(top) if re.search(r"(^|/)\d+\.\d+\.\d+/dataset_info\.json$", one)]
    infos = [one.split("/") for one in listed]
    candidates = [parts[:-1] for parts in infos if not version or parts[-2] == version]
    if not candidates:
        raise tfds.core.DatasetNotFoundError(name)
    configs = sorted({"/".join([path, *parts[:-1]]) for parts in candidates})
    if len(configs) > 1:
        raise UserError(f"{top} contains several configurations; name one of them: {', '.join(configs)}")
    return filesystem.join_path(
        top, *max(candidates, key=lambda parts: [int(number) for number in re.findall(r"\d+", parts[-1])])
    )
