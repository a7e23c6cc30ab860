"""The tasks of VTAB as sources: 1,000 examples to learn from, the whole test split, and the labels that VTAB makes."""

from functools import partial
from typing import Any

from vit_jax import UserError, choose
from vit_jax.data import shards
from vit_jax.data.images import RGB, EncodedImage
from vit_jax.data.sources.sharded import OpenShard
from vit_jax.data.sources.source import Source, SourceConfig
from vit_jax.data.sources.splits import select_examples
from vit_jax.data.sources.tfds import TfdsSplits, build_command, find_data_dir, find_prepared, open_whole_splits
from vit_jax.data.sources.vtab_labels import LABELS
from vit_jax.data.sources.vtab_tasks import VTAB_TASKS, VtabTask

VTAB_SPLITS = ("train800", "val200", "train800val200", "test")
Parts = tuple[tuple[str, range], ...]  # as `Source.parts`


def read_example(
    data: TfdsSplits, task: VtabTask, split: str, index: int, open_shard: OpenShard = shards.cached_reader
) -> tuple[RGB | EncodedImage, int]:
    """Returns (image, label) number `index` of a split of a task's data set; see `TfdsSplits.read_features`."""
    record = data.read_features(split, index, open_shard)
    image = EncodedImage(record["image"], f"{data.name} {split} {index}")
    return image.decode() * 255 if task.has_binary_pixels else image, LABELS[task.label](record[task.feature])


def open_vtab(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens a task whose data set TFDS has prepared in `data_dir`; `split` is made of `VTAB_SPLITS`.

    Raises:
        UserError: there is no such task or split, or its data set is missing, too small, or not the one that VTAB has.
    """
    task, where = VTAB_TASKS[choose("VTAB task", name, VTAB_TASKS)], find_data_dir(source_config.data_dir)
    prepared = find_prepared(task.dataset, where)
    if prepared is None:
        command = build_command(task.dataset, where)
        files = f"; download its files first, into {where}/downloads/manual" if task.needs_manual_download else ""
        raise UserError(f"there is no TFDS dataset {task.dataset!r} in {where}; prepare it with {command}{files}")
    info = prepared.info
    check_record(info.features, task)
    whole = find_splits(task, {name: split.num_examples for name, split in info.splits.items()})
    chosen = select_examples(split, {name: sum(len(rows) for _, rows in parts) for name, parts in whole.items()})
    parts = tuple(part for name, rows in chosen for part in cut_parts(whole[name], rows))
    data = open_whole_splits(prepared, [name for name, _ in parts])
    classes = info.features[task.feature] if task.label == "class" else None
    names = tuple(classes.names) if classes and classes.names else None
    return Source(
        name=f"vtab:{name} {info.full_name}",
        parts=parts,
        read_example=partial(read_example, data, task),
        num_classes=task.classes,
        class_names=names,
        file_stamp=data.splits.file_stamp,
        shards=data.splits.select(parts, not info.disable_shuffling),
    )


def check_record(features: Any, task: VtabTask) -> None:
    """Raises UserError if TFDS's records lack a feature that a task reads, or have another number of classes."""
    if missing := {"image", task.feature} - set(features):
        raise UserError(
            f"the TFDS dataset {task.dataset!r} has no feature {', '.join(sorted(missing))}, which VTAB reads"
        )
    if task.label == "class" and features[task.feature].num_classes != task.classes:
        raise UserError(
            f"the TFDS dataset {task.dataset!r} has {features[task.feature].num_classes:,} classes, but VTAB's has "
            f"{task.classes:,}"
        )


def find_splits(task: VtabTask, counts: dict[str, int]) -> dict[str, Parts]:
    """Returns split of `VTAB_SPLITS` -> the parts of the data set's own splits that it consists of.

    Args:
        task: the task.
        counts: number of examples of every split of the data set.

    Raises:
        UserError: a split of the data set is missing, or has too few examples.
    """
    [(name, rows)] = select_examples(task.val, counts)
    train = tuple(select_examples("train[:800]", counts))
    val = tuple(select_examples(f"{name}[{rows.start}:{rows.start + 200}]", counts))
    test = tuple(select_examples(task.test, counts))
    return dict(zip(VTAB_SPLITS, (train, val, train + val, test), strict=True))


def cut_parts(parts: Parts, rows: range) -> Parts:
    """Returns the parts of the examples `rows`, which are counted over all `parts`, one part after the other."""
    pieces, start = [], 0
    for name, part in parts:
        if piece := part[max(rows.start - start, 0) : max(rows.stop - start, 0)]:
            pieces.append((name, piece))
        start += len(part)
    return tuple(pieces)
