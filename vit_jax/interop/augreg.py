"""The checkpoints of "How to train your ViT?" (arXiv 2106.10270), as the authors' index lists them.

The index, https://storage.googleapis.com/vit_models/augreg/index.csv, has 21 columns. A row is a checkpoint that was
pre-trained (`filename`) and then adapted to another data set (`adapt_filename`). Names: google-research/
vision_transformer, vit_jax_augreg.ipynb and vit_jax/configs/augreg.py.
"""

import csv
import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from vit_jax import UserError, user_errors
from vit_jax.interop import download
from vit_jax.interop.printed_table import Table

FOLDER = "https://storage.googleapis.com/vit_models/augreg"
LICENCE = "apache-2.0"  # google-research/vision_transformer, LICENSE
# Model in the names of files -> its name as `vit_jax.create` takes it.
MODELS = {f"{size}_{patch}": f"ViT-{size}/{patch}" for size in ("Ti", "S", "B", "L") for patch in (8, 16, 32)}
MODELS |= {"R_Ti_16": "R+ViT-Ti/16", "R26_S_32": "R26+ViT-S/32", "R50_L_32": "R50+ViT-L/32"}
NAME = re.compile(rf"({'|'.join(MODELS)})-(i1k|i21k|i21k_30)-\d+ep-[\w.-]+")


@dataclasses.dataclass(frozen=True)
class AugRegCheckpoint:
    """A checkpoint of the index.

    Attributes:
        name: the name of its file without .npz, which `vit_jax.load` takes.
        model: the model's name, as `vit_jax.create` takes it.
        data: the data of the pre-training: i1k (ImageNet), i21k (ImageNet-21k) or i21k_30 (30 epochs of it).
        final_val: the accuracy of the pre-trained model on its validation images, as the index has it; 0: not known.
        adapted_to: the data set that the model was then trained on; empty: it was not adapted.
        resolution: the resolution of the adapted model's images; None: it was not adapted.
        adapted_val: the accuracy of the adapted model on its validation images; None: not known or not adapted.
        adapted_test: the accuracy of the adapted model on its test images; None: not known or not adapted.
        params: the number of parameters of the model; None: not known.
        images_per_sec: how many images the model classifies in a second, as the index has it; None: not known.
    """

    COLUMNS: ClassVar = (
        "name",
        "final_val",
        "adapted_to",
        "resolution",
        "adapted_val",
        "adapted_test",
        "params",
        "images_per_sec",
    )

    name: str
    model: str
    data: str
    final_val: float
    adapted_to: str
    resolution: int | None
    adapted_val: float | None
    adapted_test: float | None
    params: int | None
    images_per_sec: float | None


def list_checkpoints(
    pattern: str = "*",
    model: str | None = None,
    data: str = "i21k",
    adapted_to: str = "",
    resolution: int | None = None,
    max_params: float | None = None,
    min_images_per_sec: float | None = None,
    best: bool = False,
) -> Table:
    """Returns checkpoints of the index, the best first.

    They are sorted by the accuracy of the pre-trained model on its validation images, by which the authors recommend to
    choose (section 4.5), and then by the accuracy of the adapted model. Arguments that are None are ignored.

    Args:
        pattern: the shell pattern of the name.
        model: the model's name, as `vit_jax.create` takes it, such as ViT-B/16.
        data: the data of the pre-training: i21k, i1k or i21k_30.
        adapted_to: cifar100, imagenet2012, kitti, oxford_iiit_pet or resisc45; empty: the pre-trained checkpoints.
        resolution: the resolution of the adapted model's images.
        max_params: the largest number of parameters of the model.
        min_images_per_sec: the lowest speed of the model, on the authors' hardware.
        best: whether to return only the best checkpoint of each model.

    Raises:
        UserError: the index cannot be downloaded, or has another form.
    """
    checkpoints = [
        one
        for one in _read_index(download.download_file(f"{FOLDER}/index.csv"))
        if one.adapted_to == adapted_to
        and fnmatch.fnmatchcase(one.name, pattern)
        and model in (None, one.model)
        and one.data == data
        and resolution in (None, one.resolution)
        and (max_params is None or (one.params is not None and one.params <= max_params))
        and (min_images_per_sec is None or (one.images_per_sec or 0) >= min_images_per_sec)
    ]
    checkpoints.sort(key=lambda one: (one.final_val, one.adapted_val or 0), reverse=True)
    if best:
        best_of = dict[str, AugRegCheckpoint]()
        for one in checkpoints:
            best_of.setdefault(one.model, one)
        checkpoints = list(best_of.values())
    return Table(checkpoints)


def is_name(name: str) -> bool:
    """Returns whether this is the name of a file of the index."""
    return NAME.fullmatch(name) is not None


def training_loss(name: str) -> str:
    """Returns the loss that a checkpoint was last trained with.

    That is softmax if it was adapted to another data set (vision_transformer, vit_jax/train.py), and sigmoid if it was
    only pre-trained (big_vision, configs/vit_i1k.py and vit_i21k.py).
    """
    return "softmax" if "--" in name else "sigmoid"


def address(name: str) -> str:
    """Returns the address of a file of the index."""
    return f"{FOLDER}/{name}.npz"


@functools.lru_cache(1)
def _read_index(path: Path) -> tuple[AugRegCheckpoint, ...]:
    """Returns both checkpoints of every row, the pre-trained and the adapted one. Each checkpoint is listed once."""
    checkpoints: dict[str, AugRegCheckpoint] = {}
    with (
        user_errors(f"{path.name} has another form than expected", ValueError, KeyError, csv.Error),
        path.open(newline="", encoding="utf-8") as file,
    ):
        for row in csv.DictReader(file):
            for adapted in (False, True):
                if one := _parse_row(row, adapted):
                    checkpoints.setdefault(one.name, one)
    if not checkpoints:
        raise UserError(f"{path.name} lists no checkpoint")
    return tuple(checkpoints.values())


def _parse_row(row: dict[str, str], adapted: bool) -> AugRegCheckpoint | None:
    name = row["adapt_filename" if adapted else "filename"].rpartition("/")[2].removesuffix(".npz")
    match = NAME.fullmatch(name)
    if match is None:
        return None

    def number(column: str, kind: Callable = float):
        text = row[column]
        return kind(float(text)) if text else None

    return AugRegCheckpoint(
        name=name,
        model=MODELS[match[1]],
        data=match[2],
        final_val=float(row["final_val"] or 0),
        adapted_to=row["adapt_ds"] if adapted else "",
        resolution=number("adapt_resolution", int) if adapted else None,
        adapted_val=number("adapt_final_val") if adapted else None,
        adapted_test=number("adapt_final_test") if adapted else None,
        params=number("params", int),
        images_per_sec=number("infer_samples_per_sec"),
    )
