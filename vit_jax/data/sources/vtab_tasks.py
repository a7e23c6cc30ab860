"""The 19 tasks of VTAB (arXiv 1910.04867): data sets, splits and labels, as in its authors' code (task_adaptation).

The version of a data set decides which images a split holds. TFDS can still prepare the versions that the authors' code
reads, except for Pets, of which it prepares version 4 instead of 3.
"""

import dataclasses
from collections.abc import Mapping

VTAB_GROUPS = ("natural", "specialized", "structured")


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
        label: how the label is made, a key of `vtab_labels.LABELS`.
        has_binary_pixels: whether the pixels in the data set are 0 and 1.
        needs_manual_download: whether the files must be downloaded by hand before TFDS can prepare the data set.
    """

    group: str
    dataset: str
    classes: int
    val: str = "validation"
    test: str = "test"
    feature: str = "label"
    label: str = "class"
    has_binary_pixels: bool = False
    needs_manual_download: bool = False


NATURAL, SPECIALIZED, STRUCTURED = VTAB_GROUPS
CLEVR = VtabTask(STRUCTURED, "clevr", 8, val="train[90%:]", test="validation", feature="objects", label="count_objects")
DSPRITES = VtabTask(
    STRUCTURED,
    "dsprites",
    16,
    val="train[80%:]",
    test="train[90%:]",
    feature="label_x_position",
    label="bin_position",
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
    "clevr_distance": dataclasses.replace(CLEVR, classes=6, label="bin_object_distance"),
    "dmlab": VtabTask(STRUCTURED, "dmlab", 6),
    "dsprites_location": DSPRITES,
    "dsprites_orientation": dataclasses.replace(DSPRITES, feature="label_orientation", label="bin_orientation"),
    "kitti_distance": VtabTask(STRUCTURED, "kitti:3.1.0", 4, feature="objects", label="bin_vehicle_distance"),
    "smallnorb_azimuth": SMALLNORB,
    "smallnorb_elevation": dataclasses.replace(SMALLNORB, classes=9, feature="label_elevation"),
    # In VTAB's code, but not one of its 19: small, public, and prepared without TensorFlow.
    "cifar10": VtabTask("", "cifar10", 10, val="train[90%:]"),
}
