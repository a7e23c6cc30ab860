"""Which of a model's classes are the classes of a data set that shares only some of them.

A class map is a JSON file: the data's name of each shared class -> WordNet ids of the model's classes that it covers.
Those in this folder are the lists in the authors' own evaluations:

* `imagenet_a`, `imagenet_r`: the 200 classes of ImageNet-A (arXiv 1907.07174) and ImageNet-R (arXiv 2006.16241).
* `imagenet_v2`: ImageNet-V2 (arXiv 1902.10811), whose folders are named by the number of the class.
* `objectnet`: the 113 folders of ObjectNet (NeurIPS 2019) that overlap with 125 classes of ImageNet.

ImageNet-Sketch has all classes under their WordNet ids and needs no map.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int64

from vit_jax import UserError, choose, shown, user_errors

FOLDER = Path(__file__).parent


class ClassMap(NamedTuple):
    """The classes that a model and a data set share.

    Attributes:
        names: of the shared classes, as the data set names them.
        members: the model's classes that each covers.
    """

    names: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]

    def map_logits(self, logits: Float[np.ndarray, "n classes"]) -> Float[np.ndarray, "n shared"]:
        """Returns for each shared class the greatest logit of those that it covers."""
        starts = np.cumsum([0, *map(len, self.members)])[:-1]
        return np.maximum.reduceat(logits[:, np.concatenate(self.members)], starts, axis=1)

    def map_labels(self, labels: Int[np.ndarray, " n"], class_names: Sequence[str]) -> Int64[np.ndarray, " n"]:
        """Returns the shared classes of labels, -1 for images of other classes.

        Args:
            labels: as the data has them.
            class_names: the name of each label.

        Raises:
            UserError: none of the data's classes is shared.
        """
        shared = {name: number for number, name in enumerate(self.names)}
        columns = np.array([shared.get(name, -1) for name in class_names], np.int64)
        if not (columns >= 0).any():
            raise UserError(
                f"none of the data's classes ({shown(', '.join(class_names[:3]), 100)}, ...) is in the class map "
                f"({shown(', '.join(self.names[:3]), 100)}, ...); choose another class map or data set."
            )
        return columns[labels]


def list_class_maps() -> tuple[str, ...]:
    """Returns the names of the class maps that the package has."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def read_class_map(name: str | os.PathLike, wnids: Sequence[str]) -> ClassMap:
    """Returns the class map of a name, or of a JSON file.

    Args:
        name: one of `list_class_maps`, or a path that ends in `.json`.
        wnids: the WordNet ids of the model's classes, in the order of its logits.

    Raises:
        UserError: there is no such map, the file is none, or it has a class that the model lacks.
    """
    path = Path(name)
    if path.suffix != ".json":
        path = FOLDER / f"{choose('class map', str(name), list_class_maps())}.json"
    with user_errors(f"cannot read {path}", OSError, ValueError):
        entries = json.loads(path.read_text(encoding="utf-8"))
    valid = isinstance(entries, dict) and all(
        isinstance(ids, list) and ids and all(isinstance(one, str) for one in ids) for ids in entries.values()
    )
    if not valid or not entries:
        raise UserError(f'{path} is no class map: an object of lists such as {{"banana": ["n07753592"]}} is expected.')
    columns = {wnid: column for column, wnid in enumerate(wnids)}
    missing = {wnid for ids in entries.values() for wnid in ids} - columns.keys()
    if missing:
        raise UserError(
            f"the class map {path.stem} covers {len(missing):,} classes that the model lacks, such as "
            f"{shown(min(missing), 20)}; it needs a model with the classes of ImageNet."
        )
    return ClassMap(tuple(entries), tuple(tuple(columns[wnid] for wnid in ids) for ids in entries.values()))
