"""Class maps: which of a model's classes are the classes of a data set.

A class map is a JSON object: name of a shared class in the data -> list of the model's classes that it covers, given by
WordNet id or by name. The JSON files in this folder are the lists that the authors of these data sets evaluate with:

* `imagenet_a`, `imagenet_r`: the 200 classes of ImageNet-A (arXiv 1907.07174) and ImageNet-R (arXiv 2006.16241).
* `imagenet_v2`: ImageNet-V2 (arXiv 1902.10811), whose folders are named by the number of the class.
* `objectnet`: the 113 folders of ObjectNet (NeurIPS 2019) that overlap with 125 classes of ImageNet.

ImageNet-Sketch has all classes under their WordNet ids and needs no map. Two maps have no file. `names` maps the
classes that have the same name in the model and in the data. `order` is for data that has all classes of the model in
the model's order; the names of the classes are ignored.
"""

from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float, Int, Int64

from vit_jax import UserError, choose, interop, printable
from vit_jax.data.sources import Source, compose
from vit_jax.model import Model
from vit_jax.storage import read_json

FOLDER = Path(__file__).parent
WITHOUT_FILE = ("names", "order")
Names: TypeAlias = tuple[str, ...]


class ClassMap(NamedTuple):
    """The classes that a model and a data set share.

    Attributes:
        names: the names of the shared classes in the data set.
        members: for each shared class, the numbers of the model's classes that it covers.
    """

    names: Names
    members: tuple[tuple[int, ...], ...]

    def map_logits(self, logits: Float[np.ndarray, "n classes"]) -> Float[np.ndarray, "n shared"]:
        """Returns for each shared class the greatest logit of the model's classes that it covers."""
        starts = np.cumsum([0, *map(len, self.members)])[:-1]
        return np.maximum.reduceat(logits[:, np.concatenate(self.members)], starts, axis=1)

    def map_labels(
        self, labels: Int[np.ndarray, " n *most"], *class_names: Sequence[str]
    ) -> Int64[np.ndarray, " n *most"]:
        """Returns the number of the shared class of each label; -1 for other classes and for labels of -1 (padding).

        Args:
            labels: the labels in the data.
            *class_names: the names of the data's classes, once for each kind of names that the data has (words, ids).
                The kind that matches the most shared classes is used.

        Raises:
            UserError: none of the data's classes is shared.
        """
        shared = {compose(name): number for number, name in enumerate(self.names)}
        kinds = [np.array([shared.get(compose(name), -1) for name in names], np.int64) for names in class_names]
        columns = max(kinds, key=lambda kind: np.count_nonzero(kind >= 0), default=np.empty(0))
        if not (columns >= 0).any():
            names = class_names[0][:3] if class_names else ["without names"]
            raise UserError(
                f"none of the data's classes ({printable(', '.join(names), 100)}, ...) is in the class map "
                f"({printable(', '.join(self.names[:3]) or 'empty', 100)}, ...); choose another class map or data set."
            )
        return np.where(labels >= 0, columns[labels], -1)

    def list_members(self, labels: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, "n most"]:
        """Returns for each label all the model's classes that its shared class covers, padded with -1.

        Args:
            labels: what `map_labels` returns, with one label per image. The row of a label of -1 has only -1.
        """
        most = max(map(len, self.members))
        rows = [(*columns, *[-1] * (most - len(columns))) for columns in (*self.members, ())]
        return np.array(rows, np.int64)[labels]


def list_class_maps() -> tuple[str, ...]:
    """Returns the names of the class maps of the package: those with a file, then `names` and `order`."""
    return (*sorted(path.stem for path in FOLDER.glob("*.json")), *WITHOUT_FILE)


def read_class_map(name: str, model: Model, source: Source) -> ClassMap:
    """Returns the class map with a name, or the one in a JSON file.

    Args:
        name: one of `list_class_maps()` except `order`, or a path, local or remote, that ends in `.json`.
        model: the model whose classes the map covers.
        source: the data whose classes are mapped; read only for the map `names`.

    Raises:
        UserError: there is no such map, the file is not a class map, the map has a class that the model lacks, or
            several classes share a name that the map needs.
    """
    if name == "names":
        own, other = same_names(model, source) or ((), ())
        _check_unique(set(own) & set(other), model=own, data=other)
        return ClassMap(
            tuple(one for one in own if one in other), tuple((i,) for i, one in enumerate(own) if one in other)
        )
    is_file = name.endswith(".json")
    path = name if is_file else str(FOLDER / f"{choose('class map', name, list_class_maps())}.json")
    entries = read_json(path)
    valid = isinstance(entries, dict) and all(
        isinstance(ids, list) and ids and all(isinstance(one, str) for one in ids) for ids in entries.values()
    )
    if not valid or not entries:
        raise UserError(f'{path} is no class map: an object of lists such as {{"banana": ["n07753592"]}} is expected.')
    known = [names for names in (model.class_names, model_wnids(model)) if names]
    columns = {one: column for names in known for column, one in enumerate(names)}
    wanted = {one for ids in entries.values() for one in ids}
    missing = wanted - columns.keys()
    if missing:
        raise UserError(
            f"the class map {Path(path).stem} covers {len(missing):,} classes that the model lacks, such as "
            f"{printable(min(missing), 20)}; the model's classes must be ImageNet's, or have the names that the "
            "map states."
        )
    for names in known:
        _check_unique(wanted & set(names), model=names)
    return ClassMap(tuple(entries), tuple(tuple(columns[one] for one in ids) for ids in entries.values()))


def _check_unique(needed: Set[str], **named: Names) -> None:
    """Raises UserError if one of the needed names is the name of several classes.

    Args:
        needed: the names that must be unique.
        **named: `model` or `data` -> the names of its classes.
    """
    for whose, names in named.items():
        if repeated := sorted(one for one, times in Counter(names).items() if times > 1 and one in needed):
            classes = [str(number) for number, one in enumerate(names) if one == repeated[0]]
            raise UserError(
                f"{printable(repeated[0], 50)!r} is the name of several classes of the {whose} "
                f"({', '.join(classes)}), so names do not tell these apart; use a class map of WordNet ids or, if the "
                "model and the data have the same classes in the same order, class_map=order."
            )


def model_wnids(model: Model) -> Names | None:
    """Returns the WordNet ids of a model's classes; None if they are not the classes of ImageNet or ImageNet-21k."""
    return interop.class_wnids(model.field("num_classes"), model.class_names)


def same_names(model: Model, source: Source) -> tuple[Names, Names] | None:
    """Returns the names of a model's classes and of a data set's classes, both in the order of the classes.

    Either may have two kinds of names: words, and ids such as WordNet's. Returns the pair of kinds with the most names
    in common; a pair of equal names in equal order comes first. Returns None if the model or the data has no names.
    Class names that only count ("0", "1", ...) are not names. Names are composed, see `compose`.
    """
    of_model = without_numbers(model_wnids(model), model.class_names)
    of_data = without_numbers(source.class_ids, source.class_names)
    pairs = [(own, other) for own in of_model for other in of_data]
    return max(pairs, key=lambda pair: (pair[0] == pair[1], len(set(pair[0]) & set(pair[1]))), default=None)


def check_names(model: Model, source: Source, evaluation: str, where: str) -> None:
    """Compares the class names of a model's head with the class names of the data that it is evaluated on.

    Args:
        model: the model.
        source: the data, with as many classes as the model.
        evaluation: the name of the evaluation in the error message.
        where: the name of the data in the error message.

    Raises:
        UserError: both have names, and the names differ or are in another order.
    """
    own, other = same_names(model, source) or ((), ())
    if own == other:
        return
    first = next(index for index, pair in enumerate(zip(own, other, strict=True)) if pair[0] != pair[1])
    common = len(set(own) & set(other))
    by_name = "--evals=predictions:class_map=names evaluates only these classes; " if common else ""
    raise UserError(
        f"{evaluation} evaluates the model's head, whose class {first} is {printable(own[first], 50)!r}, but class "
        f"{first} of {where} is {printable(other[first], 50)!r}; {common:,} of {len(own):,} names are shared. {by_name}"
        "--evals=predictions:class_map=order ignores the names and compares the classes by number."
    )


def without_numbers(*named: Names | None) -> list[Names]:
    """Returns those of several kinds of names that do not only count the classes, composed."""
    return [tuple(map(compose, names)) for names in named if names and [*names] != [*map(str, range(len(names)))]]
