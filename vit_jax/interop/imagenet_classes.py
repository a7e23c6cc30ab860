"""The class names of published heads, in the order of their logits.

`imagenet2012.txt` has one synset a line with its first two lemmas, and more lemmas where two synsets had the same ones.
`imagenet21k.txt` has one synset a line with its first lemma, in the order of Google's ImageNet-21k checkpoints. The
synsets and lemmas are those of ImageNet and WordNet, as timm 1.0.31 lists them in `imagenet_synsets.txt`,
`imagenet21k_goog_synsets.txt` and `imagenet_synset_to_lemma.txt`.
"""

import collections
import functools
from collections.abc import Sequence
from pathlib import Path

SYNSET_FILES = {1000: "imagenet2012.txt", 21843: "imagenet21k.txt"}  # by the number of classes


@functools.cache
def class_names(num_classes: int) -> tuple[str, ...] | None:
    """Returns the English names of ImageNet's or ImageNet-21k's classes, all different; None for another number."""
    synsets = _read_synsets(num_classes)
    if synsets is None:
        return None
    count = collections.Counter(words for _, words in synsets)
    return tuple(words if count[words] == 1 else f"{words} ({wnid})" for wnid, words in synsets)


def class_wnids(num_classes: int, names: Sequence[str] | None = None) -> tuple[str, ...] | None:
    """Returns the synsets of ImageNet's or ImageNet-21k's classes, such as `n01440764`; None for another number.

    Args:
        num_classes: the number of classes.
        names: the names of the classes that a model or data set states. None is returned if they are of other classes:
            they must be as many as the classes, and they must be the synsets or, for more than half of the classes,
            begin with the same lemma as our names.
    """
    synsets = _read_synsets(num_classes)
    if synsets is None or (names is not None and len(names) != num_classes):
        return None
    wnids = tuple(wnid for wnid, _ in synsets)
    if names is None or tuple(names) == wnids:
        return wnids
    lemmas = [[words.partition(",")[0].lower() for words in column] for column in (names, [one for _, one in synsets])]
    same = sum(one == other for one, other in zip(*lemmas, strict=True))
    return wnids if 2 * same > num_classes else None


@functools.cache
def _read_synsets(num_classes: int) -> tuple[tuple[str, str], ...] | None:
    if num_classes not in SYNSET_FILES:
        return None
    text = Path(__file__).with_name(SYNSET_FILES[num_classes]).read_text(encoding="utf-8")
    pairs = (line.partition("\t") for line in text.splitlines())
    return tuple((wnid, words) for wnid, _, words in pairs)
