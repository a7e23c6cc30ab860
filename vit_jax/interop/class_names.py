"""What the classes of published heads are called, in the order of their logits.

`imagenet2012.txt` holds a synset and its first two lemmas a line, told apart where two synsets had the same;
`imagenet21k.txt` a synset and its first lemma, in the order of Google's ImageNet-21k checkpoints. Synsets and lemmas
are those of ImageNet and WordNet, as timm 1.0.31 lists them in `imagenet_synsets.txt`, `imagenet21k_goog_synsets.txt`
and `imagenet_synset_to_lemma.txt`.
"""

import collections
import functools
from pathlib import Path

FILES = {1000: "imagenet2012.txt", 21843: "imagenet21k.txt"}


@functools.cache
def class_names(num_classes: int) -> tuple[str, ...] | None:
    """Returns the English names of so many classes, no two the same; None if it is not known what they are."""
    lines = _lines(num_classes)
    if lines is None:
        return None
    count = collections.Counter(words for _, words in lines)
    return tuple(words if count[words] == 1 else f"{words} ({wnid})" for wnid, words in lines)


def class_wnids(num_classes: int) -> tuple[str, ...] | None:
    """Returns the synsets of so many classes, as in the names of ImageNet's folders: `n01440764`; None if not known."""
    lines = _lines(num_classes)
    return None if lines is None else tuple(wnid for wnid, _ in lines)


@functools.cache
def _lines(num_classes: int) -> tuple[tuple[str, str], ...] | None:
    if num_classes not in FILES:
        return None
    text = Path(__file__).with_name(FILES[num_classes]).read_text(encoding="utf-8")
    pairs = (line.partition("\t") for line in text.splitlines())
    return tuple((wnid, words) for wnid, _, words in pairs)
