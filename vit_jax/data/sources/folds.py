"""The folds of a split, for cross-validation: which image is in which fold.

A fold is a function of the data alone: not of seed, hosts or earlier runs. The images of each class are shuffled by a
permutation that depends on the label and the number of its images, and dealt to the folds in turn, the next class from
where the last one ended. So each class, and the whole, has numbers of images in the folds that differ by one at most.
Fold k of 5 is folds k and k + 5 of 10.

Where images belong to groups, such as patients, a group is never divided. The largest groups are dealt first, each to
the fold that has least of the group's classes, and of those to the smallest.
"""

import hashlib
import zlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Int64

from vit_jax import UserError, printable
from vit_jax.data.sources.source import Source
from vit_jax.data.sources.splits import Fold, divide_folds

SHARE = 2**20  # a class counts as much in all its images; whole numbers, so that all hosts agree


def select_folds(source: Source, split: str, groups: Sequence[str | None] | None = None) -> Source:
    """Returns the images of the folds that a split names.

    Args:
        source: the images of the split without its folds, see `divide_folds`.
        split: the split as written.
        groups: the group of each image, or None where it has none; None: images have no groups.

    Raises:
        UserError: an image has no group, groups would cross folds, or there are more folds than groups or images of a
            class.
    """
    plain, folds = divide_folds(split)
    if not any(folds):
        return source
    bases = [base for base, fold in zip(plain.split("+"), folds, strict=True) if fold]
    if groups is not None and len(set(bases)) > 1:
        raise UserError(
            f"the split {split} has folds of several parts, which data.groups could not keep apart; take the folds of "
            "one split or slice"
        )
    if len(folds) > 1 and len(folds) != len(source.parts):
        raise UserError(f"cannot read the split {split} of {source.name}; take the folds of one split or slice")
    if groups is not None and (missing := [place for place, group in enumerate(groups) if group is None]):
        raise UserError(
            f"data.groups states no group for {len(missing):,} of {len(groups):,} images of {split}, such as "
            f"{source.example_key(missing[0])}; add them"
        )
    lengths = [len(rows) for _, rows in source.parts] if len(folds) > 1 else [len(source)]
    labels = known_labels(source)
    chosen, start = list[np.ndarray](), 0
    for text, fold, length in zip(split.split("+"), folds, lengths, strict=True):
        own = slice(start, start + length)
        if fold is None:
            chosen.append(np.arange(own.start, own.stop))
        else:
            assigned = assign_folds(
                np.zeros(length, int) if labels is None else labels[own],
                None if groups is None else groups[own],
                fold,
                text.strip(),
                source.class_names,
            )
            chosen.append(start + np.flatnonzero((assigned == fold.number - 1) != fold.negated))
        start += length
    return source.pick(np.concatenate(chosen).astype(np.int64))


def known_labels(source: Source) -> Int[np.ndarray, " n"] | None:
    """Returns the labels of a source by which its folds are stratified; None: they are not known, or are several."""
    if source.split_labels is None or source.max_labels or not len(source):
        return None
    labels = source.labels()
    return labels if labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu" else None


def describe_folds(source: Source, split: str) -> list[str]:
    """Returns a line for the user if the folds that a split names are not stratified by class."""
    if not any(divide_folds(split)[1]) or known_labels(source) is not None:
        return []
    if source.max_labels or source.has_numbers:
        why = "an image may have several labels" if source.max_labels else "images have numbers"
    else:
        why = "labels are not known without reading images"
    return [f"The folds of {split} are drawn without regard to classes: {why}."]


def assign_folds(
    labels: Int[np.ndarray, " n"],
    groups: Sequence[str | None] | None,
    fold: Fold,
    text: str,
    class_names: Sequence[str] | None,
) -> Int64[np.ndarray, " n"]:
    """Returns the fold of each image, from 0.

    Args:
        labels: the labels; -1 for images without one.
        groups: the group of each image; None: each image is dealt by itself.
        fold: says how many folds there are.
        text: the split as written, for messages.
        class_names: the names of the classes, for messages.

    Raises:
        UserError: there are more folds than groups or images of a class.
    """
    if groups is None:
        classes, counts = np.unique(labels, return_counts=True)
        few = counts.argmin()
        if counts[few] < fold.folds:
            name = class_names[classes[few]] if class_names and classes[few] >= 0 else f"label {classes[few]}"
            of_class = f" of {printable(name, 40)}" if len(classes) > 1 else ""
            raise UserError(
                f"there is no {text}: there {'are' if counts[few] > 1 else 'is'} only {counts[few]} image"
                f"{'s' if counts[few] > 1 else ''}{of_class}, and each of the {fold.folds} folds needs one; take fewer "
                "folds, or leave such images out with data.exclude"
            )
        return stratified_folds(labels, fold.folds)
    if len(set(groups)) < fold.folds:
        raise UserError(f"there is no {text}: data.groups states only {len(set(groups))} groups; take fewer folds")
    return grouped_folds(labels, [str(group) for group in groups], fold.folds)


def stratified_folds(labels: Int[np.ndarray, " n"], folds: int) -> Int64[np.ndarray, " n"]:
    """Returns the fold of each image, from 0; see the module."""
    order = np.argsort(labels, kind="stable")
    classes, starts = np.unique(labels[order], return_index=True)
    assigned: np.ndarray = np.empty(len(labels), np.int64)
    for label, start, rows in zip(classes.tolist(), starts.tolist(), np.split(order, starts[1:]), strict=True):
        random = np.random.RandomState(zlib.crc32(f"{label} {len(rows)}".encode()))  # its stream never changes
        assigned[random.permutation(rows)] = (start + np.arange(len(rows))) % folds
    return assigned


def grouped_folds(labels: Int[np.ndarray, " n"], groups: Sequence[str], folds: int) -> Int64[np.ndarray, " n"]:
    """Returns the fold of each image, from 0, the same for all images of a group; see the module."""
    names, of_image, sizes = np.unique(np.array(groups, str), return_inverse=True, return_counts=True)
    classes = np.unique(labels, return_inverse=True)[1]
    weights = np.maximum(SHARE // np.bincount(classes), 1)
    mixed = [hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest() for name in names.tolist()]
    rows_of = np.split(np.argsort(of_image, kind="stable"), np.cumsum(sizes)[:-1])
    loads: np.ndarray = np.zeros((folds, len(weights)), np.int64)
    of_group: np.ndarray = np.empty(len(names), np.int64)
    for group in sorted(range(len(names)), key=lambda group: (-sizes[group], mixed[group])):
        present, counts = np.unique(classes[rows_of[group]], return_counts=True)
        costs = loads[:, present] @ (counts * weights[present])
        of_group[group] = chosen = np.lexsort((loads.sum(axis=1), costs))[0]
        loads[chosen, present] += counts
    return of_group[of_image]
