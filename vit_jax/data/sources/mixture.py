"""A mixture of sources, `0.7*tfds:a+0.3*folder:b`: each gives its share of the images, in epochs of its own.

The mixture contains all examples of its parts, one part after the other. The weights only affect the order of training.

The classes of the parts are joined by name or by id. `,classes=FILE` after a source names a renaming of its classes, a
JSON object, {class of the part: class of the mixture}. It states a class of the part by its name, and a class that has
no entry keeps its name. If the classes of a part have no names, the renaming states them by number, and each class must
have an entry. Several classes may get the same name and so become one.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64

from vit_jax import UserError
from vit_jax.data.sources.source import ClassNames, Example, Label, Mixture, Shards, Source, compose, kinds_of_names
from vit_jax.data.sources.splits import Rows
from vit_jax.storage import read_json

PLUS = re.compile(r"\+(?=[^*+:]*\*[a-z_]+(?:[:+,]|$))")  # before another weight and kind of source
CLASSES = ",classes="
EXAMPLE = "mix:0.7*SOURCE+0.3*SOURCE"


class WeightedSource(NamedTuple):
    """A part of a mixture.

    Attributes:
        weight: the weight as written.
        source: the data source, in the form of `config.data.source`.
        classes: path of the renaming of its classes; empty: they keep their names.
    """

    weight: str
    source: str
    classes: str = ""

    def __str__(self) -> str:
        """Returns the part as written."""
        return f"{self.weight}*{self.source}" + (f"{CLASSES}{self.classes}" if self.classes else "")


def parse_mixture(text: str) -> list[WeightedSource]:
    """Returns the parts of a mixture `0.7*SOURCE+0.3*SOURCE`; raises UserError if the text is not of this form."""
    parts = []
    for part in PLUS.split(text):
        weight, _, source = part.partition("*")
        parts.append(WeightedSource(weight, *source.partition(CLASSES)[::2]))
    if len(parts) < 2 or not all(part.source for part in parts):
        raise UserError(f"cannot read the data source mix:{text}; write {EXAMPLE}")
    return parts


def change_sources(source: str, change: Callable[[str], str], change_path: Callable[[str], str] = str) -> str:
    """Returns the result of `change` for a data source.

    If the source is a mixture, `change` is applied to the source of each part, and `change_path` to the path of its
    renaming, if it has one.
    """
    kind, _, text = source.partition(":")
    if kind != "mix":
        return change(source)
    parts = parse_mixture(text)
    return "mix:" + "+".join(
        str(part._replace(source=change(part.source), classes=part.classes and change_path(part.classes)))
        for part in parts
    )


def parse_proportions(parts: Sequence[WeightedSource]) -> tuple[int, ...]:
    """Returns the weights as whole numbers in the same proportions; raises UserError if one is no number above 0."""
    weights = []
    for part in parts:
        try:
            weights.append(Fraction(part.weight.strip()))
        except (ValueError, ZeroDivisionError):
            weights.append(Fraction(0))
        if weights[-1] <= 0:
            raise UserError(f"the weight {part.weight!r} of {part.source} must be a number above 0, as in {EXAMPLE}")
    scale = math.lcm(*(weight.denominator for weight in weights))
    numbers = [int(weight * scale) for weight in weights]
    return tuple(number // math.gcd(*numbers) for number in numbers)


@dataclasses.dataclass(frozen=True)
class MixedExamples:
    """The examples of several sources.

    Attributes:
        sources: the parts.
        labels: for each part, label in the part -> label in the mixture, or None if they are the same.
    """

    sources: tuple[Source, ...]
    labels: tuple[tuple[int, ...] | None, ...]

    def read_example(self, split: str, index: int, **opening: Callable[..., Any]) -> Example:
        """Returns (image, label) number `index` of a whole split of a part; see `Source.read_example`.

        The split `0 train` is the split `train` of the first part.
        """
        number, name = locate_split(split)
        image, label = self.sources[number].read(name, index, **opening)
        return image, map_label(label, self.labels[number])

    def read_name(self, split: str, index: int, **opening: Callable[..., Any]) -> str:
        """Returns the name of an example in its part; takes what `read_example` takes."""
        number, name = locate_split(split)
        source = self.sources[number]
        if not source.read_name:
            return f"{split}/{index}"
        return source.read_name(name, index, **opening if source.shards else {})

    def split_labels(self, split: str) -> Int[np.ndarray, " n *max_labels"]:
        """Returns the labels in the mixture of all examples of a whole split of a part, whose source must know them."""
        number, name = locate_split(split)
        of_split, mapping = self.sources[number].split_labels, self.labels[number]
        assert of_split
        labels = of_split(name)
        if mapping is None:
            return labels
        if labels.ndim == 1:
            return np.array([*mapping, -1], np.int32)[labels]
        return np.array([map_label(row, mapping) for row in labels], np.int32)

    def split_counts(self, split: str, rows: Rows) -> Int64[np.ndarray, " classes"]:
        """Returns the number of images of each class of the mixture in some rows of a whole split of a part."""
        number, name = locate_split(split)
        counts, mapping = self.sources[number].count_rows(name, rows), self.labels[number]
        if mapping is None:
            return counts
        total = 1 + max(max(of_part) for of_part in self.labels if of_part)
        return np.bincount(mapping, weights=counts, minlength=total).astype(np.int64)

    def file_stamp(self, split: str, indices: Sequence[int]) -> str:
        """Returns a short text that changes when files of a part change; empty, where its digest covers them."""
        number, name = locate_split(split)
        stamp = self.sources[number].file_stamp
        return stamp(name, indices) if stamp else ""


def locate_split(split: str) -> tuple[int, str]:
    """Returns the number of the part that a split of a mixture belongs to, and the name of the split in that part."""
    number, _, name = split.partition(" ")
    return int(number), name


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


def mix_sources(
    parts: Sequence[WeightedSource], sources: Sequence[Source], renamings: Sequence[Mapping[str, str] | None]
) -> Source:
    """Returns the mixture of opened sources.

    Args:
        parts: the parts as written.
        sources: the opened split of each part.
        renamings: the renaming of the classes of each part, or None.

    Raises:
        UserError: a weight is not a number above 0, the classes do not join, the parts differ in `max_labels`, or not
            all parts are in shards and the shards of a part do not fit into the cache.
    """
    weights = parse_proportions(parts)
    kinds = [
        kinds_of_names(source) if renaming is None else [rename_classes(source, renaming, part.classes)]
        for part, source, renaming in zip(parts, sources, renamings, strict=True)
    ]
    names = choose_names(kinds)
    check_distinct(parts, names)
    counts, texts = [source.num_classes for source in sources], [part.source for part in parts]
    class_ids, labels = join_classes(names, counts, texts)
    shown = [of_part[0] if of_part else None for of_part in kinds]
    class_names = show_names(class_ids, labels, shown)
    # Older versions joined classes by these names alone, and told the forms of Unicode apart.
    as_before = names == shown and len(class_ids or ()) == len(dict.fromkeys(itertools.chain(*filter(None, names))))
    if len({source.max_labels for source in sources}) > 1:
        raise UserError("the parts of a mixture must all have one label an image, or all the same max_labels")
    if any(source.has_numbers for source in sources):
        raise UserError("a mixture joins classes, but a part has numbers to learn; train on one source")
    examples = MixedExamples(tuple(sources), labels)
    return Source(
        name="mix" if as_before else "mix with its classes joined by id or in one Unicode form",
        parts=tuple((f"{k} {name}", rows) for k, source in enumerate(sources) for name, rows in source.parts),
        read_example=examples.read_example,
        num_classes=len(class_names) if class_names else sources[0].num_classes,
        class_names=class_names,
        class_ids=None if class_ids == class_names else class_ids,
        digest=repr((weights, [source.fingerprint for source in sources], names)),
        max_labels=sources[0].max_labels,
        file_stamp=None if all(source.file_stamp is None for source in sources) else examples.file_stamp,
        read_name=examples.read_name,
        split_labels=examples.split_labels if all(source.split_labels for source in sources) else None,
        split_counts=None if any(source.class_counts() is None for source in sources) else examples.split_counts,
        notes=(*itertools.chain(*(source.notes for source in sources)), describe_join(texts, names, shown, labels)),
        shards=mix_shards(sources),
        origins=tuple(itertools.chain(*(source.origins for source in sources))),
        mixture=Mixture(tuple(map(len, sources)), weights),
    )


def mix_shards(sources: Sequence[Source]) -> Shards | None:
    """Returns the shards of a mixture, or None if some parts are not in shards.

    A mixture without shards cannot be streamed, so the shards of its other parts must fit into the cache.

    Raises:
        UserError: the shards of a part do not fit into the cache, but must.
    """
    shards = [source.shards for source in sources if source.shards]
    if len(shards) < len(sources):
        for source in sources:
            source.check_cache_room()
        return None
    runs = tuple(itertools.chain(*(one.runs for one in shards)))
    examples = tuple(itertools.chain(*(one.examples for one in shards)))
    return Shards(runs, examples, all(one.shuffled for one in shards))


def read_renaming(path: str) -> Mapping[str, str]:
    """Reads a renaming from a local or remote file; raises UserError if it is missing or not an object of names."""
    stated = read_json(path)
    if not isinstance(stated, dict) or not all(isinstance(name, str) for name in stated.values()):
        raise UserError(f'cannot read {path}: it must be an object of names, such as {{"tabby": "cat"}}')
    return stated


def rename_classes(source: Source, renaming: Mapping[str, str], path: str) -> ClassNames:
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


def choose_names(kinds: Sequence[Sequence[ClassNames]]) -> list[ClassNames | None]:
    """Returns, for each of several sources, those of its kinds of names of which most are also names in other sources.

    Of several such kinds it is the first. A kind in which several classes have the same name is chosen only if there is
    no other. The result for a source without names is None.
    """
    composed = [{compose(name) for names in of_source for name in names} for of_source in kinds]
    chosen: list[ClassNames | None] = []
    for number, of_source in enumerate(kinds):
        others = {name for other, names in enumerate(composed) if other != number for name in names}
        shared = {names: (len({*names}) == len(names), len(others & {*map(compose, names)})) for names in of_source}
        chosen.append(max(shared, key=lambda names: shared[names], default=None))
    return chosen


def check_distinct(parts: Sequence[WeightedSource], names: Sequence[ClassNames | None]) -> None:
    """Raises UserError if several classes of a part have the same name, and it has no renaming."""
    for part, of_part in zip(parts, names, strict=True):
        if of_part and not part.classes and len(set(map(compose, of_part))) < len(of_part):
            raise UserError(f"the classes of {part.source} do not join by name, since several have the same name")


def join_classes(
    names: Sequence[ClassNames | None], counts: Sequence[int], texts: Sequence[str]
) -> tuple[ClassNames | None, tuple[tuple[int, ...] | None, ...]]:
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


def show_names(
    joined: ClassNames | None, labels: Sequence[tuple[int, ...] | None], shown: Sequence[ClassNames | None]
) -> ClassNames | None:
    """Returns the names to print of the joined classes: those that the first part with the class prints, or None.

    Args:
        joined: the names by which the classes were joined.
        labels: for each part, label in the part -> label in the mixture.
        shown: for each part, the names that it prints.
    """
    names: dict[int, str] = {}
    for of_part, words in zip(labels, shown, strict=True):
        for label, word in zip(of_part or (), words or (), strict=True):
            names.setdefault(label, word)
    return joined and tuple(names[label] for label in range(len(joined)))


def describe_join(
    texts: Sequence[str],
    names: Sequence[ClassNames | None],
    shown: Sequence[ClassNames | None],
    labels: Sequence[tuple[int, ...] | None],
) -> str:
    """Returns a line on how the classes of the parts `texts` were joined; see `show_names`."""
    ways = [
        "number" if own is None else "name" if own == words else "id" for own, words in zip(names, shown, strict=True)
    ]
    total = len(set(itertools.chain(*filter(None, labels))))
    parts = ", ".join(f"{text} by {way}" for text, way in zip(texts, ways, strict=True))
    return f"The classes of the mixture are joined: {parts}{f'; {total:,} in all' if total else ''}."
