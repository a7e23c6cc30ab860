"""The classes of a mixture: those of its parts, joined by name.

A renaming is a JSON object, {class of the part: class of the mixture}. A class is named, or numbered where a part has
no names; then each has an entry. Other classes keep their names. Several classes may become one.
"""

import itertools
import json
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from vit_jax import UserError
from vit_jax.data.sources.source import Label, Source
from vit_jax.storage import filesystem


def read_renaming(path: str) -> Mapping[str, str]:
    """Reads a renaming, local or remote; raises UserError if it is missing or no object of names."""
    try:
        stated = json.loads(filesystem.read_bytes(path))
    except ValueError as error:
        raise UserError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    if not isinstance(stated, dict) or not all(isinstance(name, str) for name in stated.values()):
        raise UserError(f'cannot read {path}: it must be an object of names, such as {{"tabby": "cat"}}')
    return stated


def rename_classes(source: Source, renaming: Mapping[str, str], path: str) -> tuple[str, ...]:
    """Returns the names of the classes of a part in the mixture.

    Args:
        source: the part.
        renaming: of them.
        path: of the renaming, for messages.

    Raises:
        UserError: the renaming names a class that is not there, or lacks one that has no name.
    """
    numbered = source.class_names is None
    own = source.class_names or tuple(map(str, range(source.num_classes)))
    if wrong := sorted(renaming.keys() - set(own)):
        known = f"0 to {len(own) - 1}" if numbered else ", ".join(own[:3]) + (", ..." if len(own) > 3 else "")
        raise UserError(f"{path} renames the class {wrong[0]!r}, but the classes of {source.name} are {known}")
    if missing := [name for name in own if numbered and name not in renaming]:
        raise UserError(f"{path} must name the class {missing[0]} of {source.name}, which has no name")
    return tuple(renaming.get(name, name) for name in own)


def join_classes(
    names: Sequence[tuple[str, ...] | None], counts: Sequence[int], texts: Sequence[str]
) -> tuple[tuple[str, ...] | None, tuple[tuple[int, ...] | None, ...]]:
    """Returns the class names of a mixture, and the labels in it of the classes of each part.

    Classes of one name are one class. The labels of a part without names are those of the mixture, if it has as many
    classes.

    Args:
        names: of the classes of each part.
        counts: of the same.
        texts: of the parts, for messages.

    Raises:
        UserError: it has not.
    """
    joined = list(dict.fromkeys(itertools.chain(*(of_part or () for of_part in names))))
    total = len(joined) or counts[0]
    for of_part, count, text in zip(names, counts, texts, strict=True):
        if of_part is None and count != total:
            raise UserError(
                f"the classes of {text} do not join: they have no names, and there are {count}, while the mixture has "
                f"{total}; name them with {text},classes=FILE"
            )
    numbers = {name: label for label, name in enumerate(joined)}
    labels = tuple(None if of_part is None else tuple(numbers[name] for name in of_part) for of_part in names)
    return tuple(joined) or None, labels


def map_label(label: Label, labels: tuple[int, ...] | None) -> Label:
    """Returns a label of a part, or its labels, each once, in the mixture."""
    if labels is None:
        return label
    if isinstance(label, int):
        return labels[label]
    mapped = list(dict.fromkeys(labels[one] for one in label if one >= 0))
    padded: Int32[np.ndarray, " max_labels"] = np.full(len(label), -1, np.int32)
    padded[: len(mapped)] = mapped
    return padded
