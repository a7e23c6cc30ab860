"""A mixture of sources, `0.7*tfds:a+0.3*folder:b`: each gives its share of the images, in epochs of its own.

The examples of a mixture are those of its parts one after the other; only the order of training knows the weights.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from vit_jax import UserError
from vit_jax.data import images
from vit_jax.data.sources.source import Label, Mixture, Shards, Source

PLUS = re.compile(r"\+(?=[^*+:]*\*[a-z_]+(?:[:+]|$))")  # before another weight and kind of source
EXAMPLE = "mix:0.7*SOURCE+0.3*SOURCE"


class WeightedSource(NamedTuple):
    """A part of a mixture.

    Attributes:
        weight: as written.
        source: as `config.data.source`.
    """

    weight: str
    source: str


def parse_mixture(text: str) -> list[WeightedSource]:
    """Returns the parts of a mixture; raises UserError if it is not written as one."""
    parts = [WeightedSource(*part.partition("*")[::2]) for part in PLUS.split(text)]
    if len(parts) < 2 or not all(part.source for part in parts):
        raise UserError(f"cannot read the data source mix:{text}; write {EXAMPLE}")
    return parts


def change_sources(source: str, change: Callable[[str], str]) -> str:
    """Returns a source after a change of it, or, of a mixture, of its parts."""
    kind, _, text = source.partition(":")
    if kind != "mix":
        return change(source)
    return "mix:" + "+".join(f"{part.weight}*{change(part.source)}" for part in parse_mixture(text))


def read_weights(parts: Sequence[WeightedSource]) -> tuple[int, ...]:
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
        labels: of each part: its label -> label in the mixture; None: they are the same.
    """

    sources: tuple[Source, ...]
    labels: tuple[tuple[int, ...] | None, ...]

    def read_example(self, split: str, index: int) -> tuple[images.RGB | images.EncodedImage, Label]:
        """Returns (image, label) number `index` of a whole split of a part, `0 train`."""
        number, name = locate_split(split)
        image, label = self.sources[number].read_example(name, index)
        return image, map_label(label, self.labels[number])

    def streamed(self) -> "MixedExamples":
        """Returns the same examples, read from shards that are open or opened now."""
        return dataclasses.replace(self, sources=tuple(source.streamed() for source in self.sources))

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
    """Returns the number of the part that a split of a mixture belongs to, and its name there."""
    number, _, name = split.partition(" ")
    return int(number), name


def map_label(label: Label, labels: tuple[int, ...] | None) -> Label:
    """Returns a label of a part, or its labels, in the mixture."""
    if labels is None:
        return label
    if isinstance(label, int):
        return labels[label]
    mapped: Int32[np.ndarray, " max_labels"] = np.array([labels[one] if one >= 0 else one for one in label], np.int32)
    return mapped


def mix_sources(parts: Sequence[WeightedSource], sources: Sequence[Source]) -> Source:
    """Returns the mixture of opened sources.

    Raises:
        UserError: a weight is no number, or the classes do not join.
    """
    weights, (class_names, labels) = read_weights(parts), join_classes(parts, sources)
    if len({source.max_labels for source in sources}) > 1:
        raise UserError("the parts of a mixture must all have one label an image, or all the same max_labels")
    examples = MixedExamples(tuple(sources), labels)
    return Source(
        name="mix",
        parts=tuple((f"{k} {name}", rows) for k, source in enumerate(sources) for name, rows in source.parts),
        read_example=examples.read_example,
        num_classes=len(class_names) if class_names else sources[0].num_classes,
        class_names=class_names,
        digest=repr((weights, [source.fingerprint for source in sources])),
        max_labels=sources[0].max_labels,
        file_stamp=None if all(source.file_stamp is None for source in sources) else examples.file_stamp,
        read_name=examples.read_name,
        notes=tuple(itertools.chain(*(source.notes for source in sources))),
        shards=mix_shards(sources, examples),
        mixture=Mixture(tuple(map(len, sources)), weights),
    )


def mix_shards(sources: Sequence[Source], examples: MixedExamples) -> Shards | None:
    """Returns the shards of a mixture; None, where some parts are not in shards: then those of the others must fit.

    Raises:
        UserError: these do not fit into the cache.
    """
    shards = [source.shards for source in sources if source.shards]
    if len(shards) < len(sources):
        for source in sources:
            source.check_cache_room()
        return None
    runs = tuple(itertools.chain(*(one.runs for one in shards)))
    return Shards(runs, examples.streamed().read_example, shards[0].open, shards[0].close)


def join_classes(
    parts: Sequence[WeightedSource], sources: Sequence[Source]
) -> tuple[tuple[str, ...] | None, tuple[tuple[int, ...] | None, ...]]:
    """Returns the class names of a mixture, and the labels in it of the classes of each part.

    Classes of one name are one class. The labels of a part without names are those of the mixture, if it has as many
    classes.

    Raises:
        UserError: it has not.
    """
    names = list(dict.fromkeys(itertools.chain(*(source.class_names or () for source in sources))))
    count = len(names) or sources[0].num_classes
    for part, source in zip(parts, sources, strict=True):
        if not source.class_names and source.num_classes != count:
            raise UserError(
                f"the classes of {part.source} do not join: they have no names, and there are {source.num_classes}, "
                f"while the mixture has {count}"
            )
        if len(set(source.class_names or ())) < len(source.class_names or ()):
            raise UserError(f"the classes of {part.source} do not join by name, since several have the same name")
    numbers = {name: label for label, name in enumerate(names)}
    labels = [tuple(numbers[name] for name in source.class_names or ()) or None for source in sources]
    return tuple(names) or None, tuple(labels)
