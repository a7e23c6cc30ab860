"""The 19 tasks of VTAB (arXiv 1910.04867): data sets, splits and labels, as in its authors' code (task_adaptation).

A task has 1,000 examples to learn from, the whole test split, and labels that may be made from what TFDS's records
state. The version of a data set decides which images a split holds. TFDS can still prepare the versions that the
authors' code reads, except for Pets, of which it prepares version 4 instead of 3.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from vit_jax import UserError, choose
from vit_jax.data import shards
from vit_jax.data.images import RGB, EncodedImage
from vit_jax.data.sources.sharded import OpenShard
from vit_jax.data.sources.source import Source, SourceConfig
from vit_jax.data.sources.splits import select_examples
from vit_jax.data.sources.tfds import TfdsSplits, build_command, find_data_dir, find_prepared, open_whole_splits

VTAB_GROUPS = ("natural", "specialized", "structured")
VTAB_SPLITS = ("train800", "val200", "train800val200", "test")
MIN_OBJECTS = 3  # in an image of CLEVR
CLEVR_DISTANCES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
KITTI_DISTANCES = (-100.0, 8.0, 20.0, 999.0)  # meters; the last class has no vehicle
NO_VEHICLE = 1000.0
VEHICLES = 3  # the first types of objects of KITTI: car, van, truck
BINS = 16  # of the positions and orientations of dSprites

SplitParts: TypeAlias = tuple[tuple[str, range], ...]  # as `Source.parts`
Objects: TypeAlias = Mapping[str, Any]  # of a TFDS record: arrays with a row for each object


def count_objects(objects: Objects) -> int:
    """Returns the number of objects in an image of CLEVR, less the fewest that an image has: 0 to 7."""
    return len(objects["size"]) - MIN_OBJECTS


def bin_object_distance(objects: Objects) -> int:
    """Returns the bin, 0 to 5, of the distance from the camera to the nearest object in an image of CLEVR."""
    return find_bin(float(np.asarray(objects["pixel_coords"])[:, 2].min()), CLEVR_DISTANCES)


def bin_vehicle_distance(objects: Objects) -> int:
    """Returns the bin, 0 to 3, of the distance along the view to the nearest vehicle of KITTI; 3 if there is none."""
    types = np.asarray(objects["type"])
    depths = np.asarray(objects["location"], np.float32).reshape(len(types), 3)[types < VEHICLES, 2]
    return find_bin(float(depths.min(initial=NO_VEHICLE)), KITTI_DISTANCES)


def bin_position(label: Any) -> int:
    """Returns the bin, 0 to 15, of one of the 32 horizontal positions of dSprites; a bin has two positions."""
    return int(label // (32 / BINS))


def bin_orientation(label: Any) -> int:
    """Returns the bin, 0 to 15, of one of the 40 orientations of dSprites; bins have three and two in turn."""
    return int(label // (40 / BINS))


def find_bin(value: float, bounds: Sequence[float]) -> int:
    """Returns the number of the last bound that is less than a value; a value on a bound is in the bin below it."""
    return int(np.searchsorted(bounds, value, side="left")) - 1


@dataclasses.dataclass(frozen=True)
class VtabTask:
    """A classification task on 1,000 examples.

    Attributes:
        group: one of `VTAB_GROUPS`; empty: the task is not one of the 19.
        dataset: the name of its data set in TFDS.
        classes: number of classes.
        val: the split whose first 200 examples are val200; train800 are the first 800 examples of `train`.
        test: the split to test on.
        feature: the feature of a record from which the label is made.
        label: makes the label from this feature; `int`: the feature is the number of a class.
        has_binary_pixels: whether the pixels in the data set are 0 and 1.
        needs_manual_download: whether the files must be downloaded by hand before TFDS can prepare the data set.
    """

    group: str
    dataset: str
    classes: int
    val: str = "validation"
    test: str = "test"
    feature: str = "label"
    label: Callable[[Any], int] = int
    has_binary_pixels: bool = False
    needs_manual_download: bool = False


NATURAL, SPECIALIZED, STRUCTURED = VTAB_GROUPS
CLEVR = VtabTask(STRUCTURED, "clevr", 8, val="train[90%:]", test="validation", feature="objects", label=count_objects)
DSPRITES = VtabTask(
    STRUCTURED,
    "dsprites",
    16,
    val="train[80%:]",
    test="train[90%:]",
    feature="label_x_position",
    label=bin_position,
    has_binary_pixels=True,
)
SMALLNORB = VtabTask(STRUCTURED, "smallnorb", 18, val="test[:50%]", test="test[50%:]", feature="label_azimuth")

VTAB_TASKS: Mapping[str, VtabTask] = {
    "caltech101": VtabTask(NATURAL, "caltech101", 102, val="train[90%:]"),
    "cifar100": VtabTask(NATURAL, "cifar100", 100, val="train[90%:]"),
    "dtd": VtabTask(NATURAL, "dtd", 47),
    "flowers102": VtabTask(NATURAL, "oxford_flowers102", 102),
    "pets": VtabTask(NATURAL, "oxford_iiit_pet", 37, val="train[80%:]"),
    "sun397": VtabTask(NATURAL, "sun397/tfds", 397),
    "svhn": VtabTask(NATURAL, "svhn_cropped", 10, val="train[90%:]"),
    "camelyon": VtabTask(SPECIALIZED, "patch_camelyon", 2),
    "eurosat": VtabTask(SPECIALIZED, "eurosat/rgb", 10, val="train[60%:]", test="train[80%:]"),
    "resisc45": VtabTask(
        SPECIALIZED, "resisc45", 45, val="train[60%:]", test="train[80%:]", needs_manual_download=True
    ),
    "retinopathy": VtabTask(SPECIALIZED, "diabetic_retinopathy_detection/btgraham-300", 5, needs_manual_download=True),
    "clevr_count": CLEVR,
    "clevr_distance": dataclasses.replace(CLEVR, classes=6, label=bin_object_distance),
    "dmlab": VtabTask(STRUCTURED, "dmlab", 6),
    "dsprites_location": DSPRITES,
    "dsprites_orientation": dataclasses.replace(DSPRITES, feature="label_orientation", label=bin_orientation),
    "kitti_distance": VtabTask(STRUCTURED, "kitti:3.1.0", 4, feature="objects", label=bin_vehicle_distance),
    "smallnorb_azimuth": SMALLNORB,
    "smallnorb_elevation": dataclasses.replace(SMALLNORB, classes=9, feature="label_elevation"),
    # In VTAB's code, but not one of its 19: small, public, and prepared without TensorFlow.
    "cifar10": VtabTask("", "cifar10", 10, val="train[90%:]"),
}


def read_example(
    data: TfdsSplits, task: VtabTask, split: str, index: int, open_shard: OpenShard = shards.cached_reader
) -> tuple[RGB | EncodedImage, int]:
    """Returns (image, label) number `index` of a split of a task's data set; see `TfdsSplits.read_features`."""
    record = data.read_features(split, index, open_shard)
    image = EncodedImage(record["image"], f"{data.name} {split} {index}")
    return image.decode() * 255 if task.has_binary_pixels else image, task.label(record[task.feature])


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
    classes = info.features[task.feature] if task.label is int else None
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
    if task.label is int and features[task.feature].num_classes != task.classes:
        raise UserError(
            f"the TFDS dataset {task.dataset!r} has {features[task.feature].num_classes:,} classes, but VTAB's has "
            f"{task.classes:,}"
        )


def find_splits(task: VtabTask, counts: dict[str, int]) -> dict[str, SplitParts]:
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


def cut_parts(parts: SplitParts, rows: range) -> SplitParts:
    """Returns the parts of the examples `rows`, which are counted over all `parts`, one part after the other."""
    pieces, start = [], 0
    for name, part in parts:
        if piece := part[max(rows.start - start, 0) : max(rows.stop - start, 0)]:
            pieces.append((name, piece))
        start += len(part)
    return tuple(pieces)
