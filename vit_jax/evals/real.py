"""ReaL: reassessed labels of ImageNet's validation images (Beyer et al., arXiv 2006.07159).

An image may have several labels, any of which counts as correct. An image without labels is left out.
`scores.top_k_accuracy` does both when it is given the labels of this module.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from vit_jax import UserError, printable
from vit_jax.storage import read_json

FILE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")


def read_real_labels(path: str | os.PathLike) -> Int32[np.ndarray, "images most"]:
    """Returns the labels of the validation images, in the order of the numbers in their file names, padded with -1.

    Args:
        path: `real.json`, local or remote, as its authors publish it: a list with the list of labels of each image.

    Raises:
        UserError: the file cannot be read, or has another form.
    """
    lists = read_json(str(path))
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
    """Returns the labels of the images with these file names, padded with -1.

    Args:
        labels: the labels of all images; row 0 is `ILSVRC2012_val_00000001.JPEG`.
        files: names or paths of the images.

    Raises:
        UserError: a file is not named like that, or its number is greater than the number of rows.
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
