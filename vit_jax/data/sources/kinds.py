"""The table of the kinds of sources, and a source opened by its name, `KIND` or `KIND:NAME`."""

import dataclasses
import glob
import os
import re
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from vit_jax import UserError, choose
from vit_jax.data import shards
from vit_jax.data.sources import folds, image_lists, splits
from vit_jax.data.sources.array_record import describe_records, list_record_splits, open_records
from vit_jax.data.sources.builtin import open_digits, open_synthetic
from vit_jax.data.sources.image_files import open_image_files
from vit_jax.data.sources.labelled_folder import FIRST, list_any_folder_splits, open_any_folder
from vit_jax.data.sources.mixture import change_sources, mix_sources, parse_mixture, read_renaming
from vit_jax.data.sources.npz_file import list_npz_splits, open_npz
from vit_jax.data.sources.parquet import list_hub_splits, list_parquet_splits, open_hub, open_parquet
from vit_jax.data.sources.sharded import Description
from vit_jax.data.sources.source import Source, SourceConfig
from vit_jax.data.sources.tfds import list_tfds_splits, open_tfds
from vit_jax.data.sources.vtab import VTAB_SPLITS, open_vtab
from vit_jax.data.sources.webdataset import describe_tars, list_webdataset_splits, open_webdataset
from vit_jax.storage import filesystem

ANY_CLASSES = 2**31 - 1  # more than any data have
# Options of a source that lies in files, and those among them that name a file.
OPTIONS = re.compile(r"(,(label|image|classes|table|separator|targets)=[^,]*)+$")
OPTION_FILES = re.compile(r"(,(?:classes|table)=)([^,]+)")


@dataclasses.dataclass(frozen=True)
class SourceKind:
    """A kind of source.

    Attributes:
        open: function of (source config, name, split) that returns the examples of the split.
        list_splits: function of (source config, name) that returns the names of the whole splits; None: any split
            exists.
        example: an example of the name that follows the kind and a colon; empty: the kind takes no name.
        asks: what the name says, in words, for the message if it is missing.
        is_path: whether the name is the path of a file or a folder.
        in_shards: whether the examples lie in shards, which can be streamed.
        describe: function of (name, num_classes, max_labels, advance) that counts the records of shards and writes the
            numbers into a file beside them, see `array_record.describe_records`; None: there is no such file.
    """

    open: Callable[[SourceConfig, str, str], Source]
    list_splits: Callable[[SourceConfig, str], list[str]] | None
    example: str = ""
    asks: str = ""
    is_path: bool = False
    in_shards: bool = False
    describe: Callable[[str, int, int | None, Callable[[int], None]], Description] | None = None


def open_mixture(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens the same split of all parts of a mixture and returns their mixture.

    Raises:
        UserError: as `mix_sources`, or a part cannot be opened.
    """
    parts = parse_mixture(name)
    renamings = [read_renaming(part.classes) if part.classes else None for part in parts]
    opened = []
    for part, renaming in zip(parts, renamings, strict=True):
        num_classes = len(renaming) if renaming else source_config.num_classes  # where the data do not state it
        of_part = dataclasses.replace(source_config, source=part.source, num_classes=num_classes)
        opened.append(open_split(of_part, split, streams=True))
    return mix_sources(parts, opened, renamings)


def list_mixture_splits(source_config: SourceConfig, name: str) -> list[str]:
    """Returns the names of the splits that all parts of a mixture have."""
    listed = [list_splits(dataclasses.replace(source_config, source=part.source)) for part in parse_mixture(name)]
    return [split for split in listed[0] if all(split in others for others in listed)]


KINDS = {
    "array_record": SourceKind(
        open_records,
        list_record_splits,
        "FOLDER",
        "where the shards lie",
        is_path=True,
        in_shards=True,
        describe=describe_records,
    ),
    "digits": SourceKind(open_digits, lambda source_config, name: ["train", "test"]),
    "folder": SourceKind(open_any_folder, list_any_folder_splits, "PATH", "where the images lie", is_path=True),
    "hf": SourceKind(
        open_hub, list_hub_splits, "//datasets/OWNER/NAME", "which dataset of the Hugging Face hub", in_shards=True
    ),
    "mix": SourceKind(open_mixture, list_mixture_splits, "0.7*SOURCE+0.3*SOURCE", "which sources"),
    "npz": SourceKind(open_npz, list_npz_splits, "PATH", "where the file lies", is_path=True),
    "parquet": SourceKind(
        open_parquet, list_parquet_splits, "FOLDER", "where the Parquet files lie", is_path=True, in_shards=True
    ),
    "synthetic": SourceKind(open_synthetic, None),
    "tfds": SourceKind(open_tfds, list_tfds_splits, "NAME", "which dataset", in_shards=True),
    "vtab": SourceKind(open_vtab, lambda source_config, name: [*VTAB_SPLITS], "TASK", "which task"),
    "webdataset": SourceKind(
        open_webdataset,
        list_webdataset_splits,
        "FOLDER",
        "where the tar files lie",
        is_path=True,
        in_shards=True,
        describe=describe_tars,
    ),
}


def open_source(
    config: ConfigDict, split: str, source: str | None = None, streams: bool = False, needs_labels: bool = True
) -> Source:
    """Opens a split of `config.data.source`, or of another `source`; see `open_split` and `SourceConfig.needs_labels`.

    The config's `num_classes`, `max_labels` and lists of images do not apply to another source (but to `synthetic`).
    """
    other = source is not None and source not in (config.data.source, "synthetic")
    source_config = SourceConfig(
        source=source or config.data.source,
        data_dir=config.data.data_dir,
        num_classes=None if other else config.data.num_classes,
        max_labels=None if other else config.data.max_labels,
        num_examples=config.data.num_examples,
        train_split=config.data.split,
        resolution=config.resolution,
        exclude=None if other else config.data.exclude,
        groups=None if other else config.data.groups,
        group_column=config.data.group_column,
        needs_labels=needs_labels,
    )
    return open_split(source_config, split, streams)


def open_split(source_config: SourceConfig, split: str, streams: bool = False) -> Source:
    """Opens a split such as `train[:98%]+test`; see `splits`.

    Args:
        source_config: the source of the split.
        split: the split as written.
        streams: whether the caller reads shards a few at a time; False: copies of all remote shards must fit into the
            cache.

    Raises:
        UserError: the source is unknown or missing, has no such split, or does not fit into the cache.
    """
    kind, name = parse_source(source_config.source)
    if kind == "mix":  # each part of which has folds of its own
        if source_config.exclude or source_config.groups:
            raise UserError("data.exclude and data.groups list images of one source, not of a mixture; leave them out")
        source = open_mixture(source_config, name, split)
    else:
        plain, divided = splits.divide_folds(split)
        if any(divided) and not KINDS[kind].list_splits:
            raise UserError(f"cannot divide {split} into folds: any split of {kind} exists, of any size")
        source = KINDS[kind].open(source_config, name, plain)
        source = select_listed(source, source_config, split)
    if source.shards:
        shards.forget_readers()  # other files may have these names since this process has opened some
    if not streams:
        source.check_cache_room()
    # Files of a place are the same data, whatever columns are read of them; other data are told by their names.
    in_files = kind == "hf" or KINDS[kind].is_path
    place = f"{kind}:{filesystem.absolute_path(OPTIONS.sub('', name))}" if in_files else source.name
    own = tuple((place, splits.canonical_name(whole), rows) for whole, rows in source.parts)
    return dataclasses.replace(source, origins=source.origins or own)


def select_listed(source: Source, source_config: SourceConfig, split: str) -> Source:
    """Returns the images of a source that are in the folds of `split` and not in the list of those to leave out.

    Raises:
        UserError: there is no such fold, or a list is wrong; see `folds` and `image_lists`.
    """
    stated = None
    if source_config.groups:
        stated = image_lists.read_groups(source, source_config.groups, source_config.group_column)
    notes = (*source.notes, *folds.describe_folds(source, split))
    # Leaving out an image moves no other to another fold.
    source = folds.select_folds(source, split, None if stated is None else image_lists.groups_of(source, stated))
    if source_config.exclude:
        source = image_lists.leave_out(source, source_config.exclude, lambda: list_splits(source_config))
    groups = () if stated is None else filter(None, image_lists.groups_of(source, stated))
    return dataclasses.replace(source, notes=notes, groups=frozenset(groups))


def open_images(source: str, split: str | None, data_dir: str | None, reads_labels: bool) -> Source:
    """Opens a split to read its images, whatever their classes, with their labels if `reads_labels` is True.

    Args:
        source: a data source; or the path of an image or a folder, which has no labels and no splits.
        split: the split of a data source; None: train.
        data_dir: the folder of TFDS data; None: TFDS's own.
        reads_labels: whether labels are read.

    Raises:
        UserError: the source or its split is missing or has no images, or the labels cannot be read.
    """
    if source.partition(":")[0] in KINDS:
        classes = None if reads_labels else ANY_CLASSES
        source_config = SourceConfig(source, data_dir, num_classes=classes, reads_labels=reads_labels)
        opened = open_split(source_config, split or "train", streams=True)
        if not len(opened):
            raise UserError(f"the split {split} of {source} has no images; choose another.")
        return opened
    opened = open_image_files(source)
    if split is not None:
        raise UserError(f"{source} is a place of images without splits; write folder:{source}, or leave out the split.")
    return opened


def list_splits(source_config: SourceConfig, wanted: Sequence[str] = ()) -> list[str]:
    """Returns the names of the whole splits of a source: of the `wanted` ones, or of all if none is named.

    Raises:
        UserError: the source is unknown or missing, has no list of splits, or lacks a wanted split.
    """
    kind, name = parse_source(source_config.source)
    listers = {kind: entry.list_splits for kind, entry in KINDS.items() if entry.list_splits}
    if kind not in listers:
        raise UserError(f"the data source {kind} has no list of splits; choose from {', '.join(sorted(listers))}")
    existing = listers[kind](source_config, name)
    return [splits.resolve_name(split, existing) for split in wanted] or existing


def describe_source(
    source: str, num_classes: int, max_labels: int | None, advance: Callable[[int], None]
) -> Description:
    """Counts the records of shards and writes the numbers into a file beside them; see `SourceKind.describe`.

    Raises:
        UserError: the source is unknown, of a kind without such a file, or cannot be read, or the file not be written.
    """
    kind, name = parse_source(source)
    if not (describe := KINDS[kind].describe):
        names = " and ".join(f"{one}:FOLDER" for one, entry in KINDS.items() if entry.describe)
        raise UserError(f"cannot describe {source}: only {names} can be described")
    return describe(name, num_classes, max_labels, advance)


def change_paths(source: str, change: Callable[[str], str], change_file: Callable[[str], str]) -> str:
    """Returns a data source with other paths.

    Args:
        source: the data source. One whose name is no path is returned as it is.
        change: returns the new path of a folder or file with examples; in a mixture, of each part.
        change_file: returns the new path of a file of class names or labels, or in a mixture of a renaming of classes.
    """

    def change_part(part: str) -> str:
        kind, colon, name = part.partition(":")
        path = OPTIONS.sub("", name)
        options = OPTION_FILES.sub(lambda match: match[1] + change_file(match[2]), name[len(path) :])
        return f"{kind}{colon}{change(path) if kind in KINDS and KINDS[kind].is_path else path}{options}"

    return change_sources(source, change_part, change_file)


def source_label(source: str) -> str:
    """Returns a short name of a data source, with word characters only.

    Examples are `tfds:cifar100` -> cifar100 and `folder:data/pets` -> pets.
    """
    kind, colon, rest = source.partition(FIRST)[0].partition(":")
    rest = rest.rstrip("/").rpartition("/")[2] if kind in KINDS and KINDS[kind].is_path else rest
    return re.sub(r"\W+", "_", rest if kind.isidentifier() and colon else source.partition(FIRST)[0]).strip("_")


def is_in_shards(source: str) -> bool:
    """Returns whether the examples of a source lie in shards, without opening it."""
    return KINDS[parse_source(source)[0]].in_shards


def parse_source(source: str) -> tuple[str, str]:
    """Returns the kind and the name of a data source.

    Raises:
        UserError: there is no such kind, the name is missing, or the kind takes no name.
    """
    kind, _, name = source.partition(":")
    if kind not in KINDS and ("/" in kind or name.startswith("//") or os.path.isdir(source)):
        packed = glob.glob(os.path.join(glob.escape(source), "*.array_record"))
        near = f"{'array_record' if packed else 'folder'}:{source}"
        raise UserError(f"unknown data source {source!r}; did you mean {near!r}?")
    entry = KINDS[choose("data source", kind, KINDS)]
    if entry.example and not name:
        raise UserError(f"say {entry.asks}: --config.data.source={kind}:{entry.example}")
    if name and not entry.example:
        raise UserError(f"the data source {kind} takes no name; write --config.data.source={kind}")
    return kind, name
