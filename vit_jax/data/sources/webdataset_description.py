"""Description of a WebDataset: its samples are counted once and stated in `_info.json` beside the tar files."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from vit_jax import UserError, user_errors
from vit_jax.data import shards
from vit_jax.data.images import EncodedImage
from vit_jax.data.sources.file_pattern import FoundFile, read_options
from vit_jax.data.sources.sharded import check_labels
from vit_jax.data.sources.webdataset import OPTIONS, find_tars, read_sample
from vit_jax.data.sources.webdataset_info import INFO_NAME, WebDatasetInfo, write_info
from vit_jax.storage import filesystem

COPIES = 4  # remote files that are copied at once


def describe_tars(
    name: str, num_classes: int, max_labels: int | None, advance: Callable[[int], None] = lambda count: None
) -> shards.Description:
    """Counts the samples of all tar files in a folder and writes `_info.json` beside them.

    Each file is read from end to end. A remote file is copied into the cache, and the copy is given back afterwards.
    The last sample of each file is checked, and its image is decoded.

    Args:
        name: the folder, local or remote, with options.
        num_classes: the labels are 0 to num_classes - 1.
        max_labels: the most labels of an image in multi-label data, or None.
        advance: called with 1 for each file that was counted.

    Raises:
        UserError: there are no files, one is damaged, a label is missing or out of range, or an `_info.json` exists
            already or cannot be written.
    """
    folder, options = read_options(name, OPTIONS)
    tar_set = find_tars(folder)
    path = filesystem.join_path(tar_set.folder, INFO_NAME)
    if tar_set.folder != filesystem.absolute_path(folder).rstrip("/"):
        raise UserError(f"{INFO_NAME} describes all tar files of a folder; name the folder instead of {folder}")
    if tar_set.info:
        raise UserError(f"{path} exists already; to count again, remove it and repeat the command")

    def count(file: FoundFile) -> shards.ShardEntry:
        local, give_back = filesystem.borrow_copy(file.path, file.version)
        try:
            reader = shards.open_reader(file.path, local, file.size, "tar")
            if records := reader.num_records():
                sample = f"record {records - 1} of {file.path}"
                with user_errors(f"cannot read {sample}", ValueError):
                    image, labels = read_sample(reader, records - 1, sample, options.get("label"), options.get("image"))
                check_labels(labels, sample, num_classes, max_labels)
                EncodedImage(image, sample).decode()
        finally:
            give_back()
        advance(1)
        return shards.ShardEntry(file.name, records, file.size or 0)

    with ThreadPoolExecutor(COPIES) as pool:
        counted = pool.map(count, itertools.chain(*tar_set.splits.values()))  # after an error, no further file is begun
        splits = {split: tuple(itertools.islice(counted, len(files))) for split, files in tar_set.splits.items()}
    lengths = {split: {entry.name: entry.records for entry in entries} for split, entries in splits.items()}
    fields = dict.fromkeys(lengths, options["label"]) if "label" in options else {}
    write_info(path, WebDatasetInfo(lengths, fields, num_classes, None, max_labels))
    return shards.Description(path, splits, is_new=True)
