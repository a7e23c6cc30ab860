"""ReaL: the labels of ImageNet's validation images assessed anew (Beyer et al., arXiv 2006.07159).

Any of an image's labels counts as correct, and images without a label are left out: `scores.top_k_accuracy` does both,
given the labels as they are here.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from vit_jax import UserError, printable, user_errors

FILE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")


def read_real_labels(path: str | os.PathLike) -> Int32[np.ndarray, "images most"]:
    """Returns the labels of the validation images in the order of their numbers, padded by -1.

    Args:
        path: `real.json`, as its authors publish it: one list of classes for each image.

    Raises:
        UserError: the file cannot be read, or is not such a list.
    """
    with user_errors(f"cannot read {path}", OSError, ValueError):
        lists = json.loads(Path(path).read_text(encoding="utf-8"))
    valid = isinstance(lists, list) and all(
        isinstance(labels, list) and all(type(label) is int and 0 <= label < 1000 for label in labels)
        for labels in lists
    )
    if not valid or not any(lists):
        raise UserError(f"{path} holds no ReaL labels: a list of lists of classes from 0 to 999 is expected.")
    padded: np.ndarray = np.full((len(lists), max(map(len, lists))), -1, np.int32)
    for row, labels in zip(padded, lists, strict=True):
        row[: len(labels)] = labels
    return padded


def select_labels(
    labels: Int32[np.ndarray, "images most"], files: Sequence[str | os.PathLike]
) -> Int32[np.ndarray, "n most"]:
    """Returns the labels of images by the numbers in their file names: `ILSVRC2012_val_00000001.JPEG` is the first.

    Raises:
        UserError: a file is not named so, or has no labels.
    """
    rows = []
    for file in files:
        match = FILE_NAME.fullmatch(Path(file).name)
        if not match or not 1 <= int(match[1]) <= len(labels):
            raise UserError(
                f"{printable(Path(file).name, 100)} is not one of the {len(labels):,} images with ReaL labels; they "
                "are named ILSVRC2012_val_00000001.JPEG and so on."
            )
        rows.append(int(match[1]) - 1)
    return labels[rows]
