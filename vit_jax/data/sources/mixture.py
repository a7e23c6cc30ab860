"""A mixture of sources, `0.7*tfds:a+0.3*folder:b`: each gives its share of the images, in epochs of its own.

`,classes=FILE` after a source names a file that renames its classes to classes of the mixture; see `class_renaming`.
The mixture contains all examples of its parts, one part after the other. The weights only affect the order of training.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from vit_jax import UserError
from vit_jax.data import images
from vit_jax.data.sources.class_names import Names, choose_names, compose, kinds_of_names
from vit_jax.data.sources.class_renaming import join_classes, map_label, rename_classes
from vit_jax.data.sources.source import Label, Mixture, Shards, Source

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

    def read_example(
        self, split: str, index: int, **opening: Callable[..., Any]
    ) -> tuple[images.RGB | images.EncodedImage, Label]:
        """Returns (image, label) number `index` of a whole split of a part; see `Source.read_example`.

        The split `0 train` is the split `train` of the first part.
        """
        number, name = locate_split(split)
        image, label = self.sources[number].read(name, index, **opening)
        return image, map_label(label, self.labels[number])

    def read_name(self, split: str, index: int) -> str:
        """Returns the name of an example in its part."""
        number, name = locate_split(split)
        source = self.sources[number]
        return source.read_name(name, index) if source.read_name else f"{split}/{index}"

    def file_stamp(self, split: str, indices: Sequence[int]) -> str:
        """Returns a short text that changes when files of a part change; empty, where its digest covers them."""
        number, name = locate_split(split)
        stamp = self.sources[number].file_stamp
        return stamp(name, indices) if stamp else ""


def locate_split(split: str) -> tuple[int, str]:
    """Returns the number of the part that a split of a mixture belongs to, and the name of the split in that part."""
    number, _, name = split.partition(" ")
    return int(number), name


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
    kinds = [name_classes(*part) for part in zip(parts, sources, renamings, strict=True)]
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


def name_classes(part: WeightedSource, source: Source, renaming: Mapping[str, str] | None) -> list[Names]:
    """Returns the names that the classes of a part may have in the mixture, see `kinds_of_names`.

    Raises:
        UserError: the renaming does not fit the classes.
    """
    return kinds_of_names(source) if renaming is None else [rename_classes(source, renaming, part.classes)]


def check_distinct(parts: Sequence[WeightedSource], names: Sequence[Names | None]) -> None:
    """Raises UserError if several classes of a part have the same name, and it has no renaming."""
    for part, of_part in zip(parts, names, strict=True):
        if of_part and not part.classes and len(set(map(compose, of_part))) < len(of_part):
            raise UserError(f"the classes of {part.source} do not join by name, since several have the same name")


def show_names(
    joined: Names | None, labels: Sequence[tuple[int, ...] | None], shown: Sequence[Names | None]
) -> Names | None:
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
    names: Sequence[Names | None],
    shown: Sequence[Names | None],
    labels: Sequence[tuple[int, ...] | None],
) -> str:
    """Returns a line on how the classes of the parts `texts` were joined; see `show_names`."""
    ways = [
        "number" if own is None else "name" if own == words else "id" for own, words in zip(names, shown, strict=True)
    ]
    total = len(set(itertools.chain(*filter(None, labels))))
    parts = ", ".join(f"{text} by {way}" for text, way in zip(texts, ways, strict=True))
    return f"The classes of the mixture are joined: {parts}{f'; {total:,} in all' if total else ''}."
