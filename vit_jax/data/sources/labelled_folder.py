"""Images of a folder with several answers each, which a CSV file gives: `folder:PATH,table=FILE`.

`label_table` documents the file and its options. Folders called train, val, validation and test are splits, else all
images are the split train. All images of a split that is trained on or evaluated are in the file, and the file names
no others.
"""

import collections

from vit_jax import UserError, first_names, tell
from vit_jax.data.sources.file_pattern import read_options
from vit_jax.data.sources.folder import (
    FolderFiles,
    FolderTree,
    describe_splits,
    find_splits,
    list_folder_splits,
    mix_files,
    open_folder,
)
from vit_jax.data.sources.label_table import OPTIONS, read_label_table
from vit_jax.data.sources.source import Source, SourceConfig
from vit_jax.data.sources.splits import canonical_name, resolve_name, select_examples, split_names
from vit_jax.storage import filesystem

FIRST = ",table="  # in the name of a folder whose labels a file gives


def open_any_folder(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens image files in folders: those that a file gives labels, or else those of `open_folder`."""
    return (open_labelled_folder if FIRST in name else open_folder)(source_config, name, split)


def list_any_folder_splits(source_config: SourceConfig, name: str) -> list[str]:
    """Returns the names of the splits of a folder that have labels, and prints which splits have none."""
    if FIRST not in name:
        return list_folder_splits(source_config, name)
    path, options = read_options(name, OPTIONS)
    tree = FolderTree(path)
    folders = find_splits(tree, needs_labels=False)
    images = tree.images_below("", collections.Counter())
    listed = read_label_table(options).find(images, options["table"], tree.root)
    labelled = [split for split, folder in folders.items() if any(is_below(image, folder) for image in listed)]
    for split in (one for one in folders if one not in labelled):
        tell(f"{tree.full_path(folders[split])} is skipped: {options['table']} has none of its images.")
    return labelled


def open_labelled_folder(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens the images of a folder with the labels that a file gives them. The EXIF orientation is applied.

    Raises:
        UserError: the folder or the split is missing, the file is wrong, or it lacks an image whose label is needed.
    """
    path, options = read_options(name, OPTIONS)
    tree, table = FolderTree(path), read_label_table(options)
    file, skipped = options["table"], collections.Counter[str]()
    folders = find_splits(tree, needs_labels=False)
    images = tree.images_below("", skipped)
    known, listed = table.find(images, file, tree.root), {}
    for stated in split_names(split):
        resolve_name(stated, folders, f"split of the folder {tree.root}")
        whole = canonical_name(stated)
        own = [image for image in images if is_below(image, folders[whole])]
        missing = [image for image in own if image not in known]
        if not own:
            raise UserError(f"{tree.full_path(folders[whole])} contains no images")
        if missing and source_config.reads_labels and source_config.needs_labels:
            count = f"{len(missing):,} of the {len(own):,} images of {tree.full_path(folders[whole])}"
            raise UserError(
                f"{file} has no line for {count}: {first_names(missing)}; add the lines, or move these images elsewhere"
            )
        listed[whole] = mix_files(own, table.rows([known.get(image) for image in own]))
    files = FolderFiles(tree, listed)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
    left_out = f"; skipped: {reasons}" if reasons else ""
    return Source(
        name=f"folder {describe_splits(folders)}".strip(),
        parts=tuple(select_examples(split, files.counts)),
        sizes=files.counts,
        read_example=files.read_example,
        num_classes=len(table.names),
        class_names=table.names,
        split_names=tuple(folder or split for split, folder in folders.items() if folder),
        notes=(f"{tree.root}: {len(images):,} images, labels from {filesystem.absolute_path(file)}{left_out}",),
        digest=files.digest,
        max_labels=table.max_labels,
        has_numbers=table.has_numbers,
        file_stamp=files.file_stamp,
        read_label=files.read_label,
        split_labels=files.split_labels,
        read_name=files.read_name,
        read_header=None if filesystem.is_remote(files.root) else files.read_header,
    )


def is_below(image: str, folder: str) -> bool:
    """Returns whether the path of an image is in a folder or below it; the root is ''."""
    return not folder or image.startswith(f"{folder}/")
