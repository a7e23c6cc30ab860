"""The classes of a mixture: the classes of its parts, joined by name or by id.

A renaming is a JSON object, {class of the part: class of the mixture}. It states a class of the part by its name, and a
class that has no entry keeps its name. If the classes of a part have no names, the renaming states them by number, and
each class must have an entry. Several classes may get the same name and so become one.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from vit_jax import UserError
from vit_jax.data.sources.class_names import compose
from vit_jax.data.sources.source import Label, Source
from vit_jax.storage import read_json


def read_renaming(path: str) -> Mapping[str, str]:
    """Reads a renaming from a local or remote file; raises UserError if it is missing or not an object of names."""
    stated = read_json(path)
    if not isinstance(stated, dict) or not all(isinstance(name, str) for name in stated.values()):
        raise UserError(f'cannot read {path}: it must be an object of names, such as {{"tabby": "cat"}}')
    return stated


def rename_classes(source: Source, renaming: Mapping[str, str], path: str) -> tuple[str, ...]:
    """Returns the names that the classes of a part have in the mixture, in the order of the part's labels.

    Args:
        source: the part.
        renaming: class of the part -> class of the mixture.
        path: the file of the renaming, for messages.

    Raises:
        UserError: the renaming has a class that the part lacks, or the classes of the part have no names and the
            renaming lacks one of them.
    """
    numbered = source.class_names is None
    own = source.class_names or tuple(map(str, range(source.num_classes)))
    renaming = {compose(name): new for name, new in renaming.items()}
    if wrong := sorted(renaming.keys() - set(map(compose, own))):
        known = f"0 to {len(own) - 1}" if numbered else ", ".join(own[:3]) + (", ..." if len(own) > 3 else "")
        raise UserError(f"{path} renames the class {wrong[0]!r}, but the classes of {source.name} are {known}")
    if missing := [name for name in own if numbered and name not in renaming]:
        raise UserError(f"{path} must name the class {missing[0]} of {source.name}, which has no name")
    return tuple(renaming.get(compose(name), name) for name in own)


def join_classes(
    names: Sequence[tuple[str, ...] | None], counts: Sequence[int], texts: Sequence[str]
) -> tuple[tuple[str, ...] | None, tuple[tuple[int, ...] | None, ...]]:
    """Joins the classes of the parts of a mixture.

    Classes of the same name are one class. A part whose classes have no names must have as many classes as the mixture;
    its labels are also the labels in the mixture.

    Args:
        names: for each part, the names of its classes in the mixture, or None.
        counts: for each part, the number of its classes.
        texts: for each part, its data source, for messages.

    Returns:
        The class names of the mixture, or None if no part has class names. And for each part, the label in the mixture
        of each of its labels, or None if the labels are the same.

    Raises:
        UserError: a part without class names has another number of classes than the mixture.
    """
    joined: dict[str, str] = {}
    for name in itertools.chain(*(of_part or () for of_part in names)):
        joined.setdefault(compose(name), name)
    total = len(joined) or counts[0]
    for of_part, count, text in zip(names, counts, texts, strict=True):
        if of_part is None and count != total:
            raise UserError(
                f"{text} has {count} classes without names, but the mixture has {total} classes; give them names with "
                f"{text},classes=FILE"
            )
    numbers = {name: label for label, name in enumerate(joined)}
    labels = tuple(None if of_part is None else tuple(numbers[compose(name)] for name in of_part) for of_part in names)
    return tuple(joined.values()) or None, labels


def map_label(label: Label, labels: tuple[int, ...] | None) -> Label:
    """Returns the label in the mixture of an example of a part.

    Args:
        label: the label in the part: an int, or an array padded with -1. The result has the same form, and each label
            once.
        labels: label in the part -> label in the mixture; None: they are the same. An image without a label, -1, has
            none in the mixture.
    """
    if labels is None:
        return label
    if isinstance(label, int):
        return labels[label] if label >= 0 else label
    mapped = list(dict.fromkeys(labels[one] for one in label if one >= 0))
    padded: Int32[np.ndarray, " max_labels"] = np.full(len(label), -1, np.int32)
    padded[: len(mapped)] = mapped
    return padded
