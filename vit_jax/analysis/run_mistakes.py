"""The part of a report on what a run's model takes for what: confusion, accuracy of classes, wrong images."""

import io
import shlex
from html import escape
from typing import Any

import numpy as np
from jaxtyping import Int

from vit_jax import NPZ_ERRORS, UserError, printable, user_errors
from vit_jax.analysis import html
from vit_jax.analysis.colours import THEMES
from vit_jax.analysis.plot import confusion, encode_pixels, encode_themed
from vit_jax.monitoring import RunFolder

MAX_LISTED_CLASSES, MAX_DRAWN_CLASSES = 20, 1000  # with at most so many classes the matrix is a table, a picture
WORST = 20  # classes whose accuracy is shown, and pairs of classes that are confused
SMALL = 64  # pixels: smaller pictures are encoded without loss
# Array of a file of mistakes -> the number of its dimensions and the kind of its values, as NumPy abbreviates it.
FORMS = {
    "pairs": (2, "i"),
    "names": (1, "U"),
    "images": (1, "U"),
    "pixels": (4, "u"),
    "labels": (1, "i"),
    "predictions": (1, "i"),
    "confidences": (1, "f"),
    "step": (0, "i"),
}


def mistakes_part(run: RunFolder) -> str:
    """Returns the HTML for the mistakes of a run.

    Raises:
        UserError: a file cannot be read.
    """
    if not run.mistakes:
        if run.config.data.max_labels or all(
            each.kind not in ("classify", "predictions") for each in run.config.evals.values()
        ):
            return "<p>Mistakes are those of an evaluation of a classifier's head, with one label an image.</p>"
        location = shlex.quote(run.location)
        command = f"python -m vit_jax.evaluate {location} --save=mistakes --save-dir={location}"
        return f"<p>Not saved yet. To have them here: <code>{escape(command)}</code></p>"
    return "".join(evaluation_part(name, read_mistakes(name, content)) for name, content in run.mistakes.items())


def read_mistakes(name: str, content: bytes) -> dict[str, Any]:
    """Returns the arrays of a file of mistakes; see `evals.prediction_files.find_mistakes`.

    Args:
        name: the name of the file, for errors.
        content: the content of the file.

    Raises:
        UserError: the file cannot be read, or is another one.
    """
    with user_errors(f"cannot read {name}", *NPZ_ERRORS, advice="remove it"), np.load(io.BytesIO(content)) as file:
        arrays = dict(file)
    if not FORMS.keys() <= arrays.keys() or not is_consistent(arrays):
        raise UserError(f"{name} was not written by vit_jax.evaluate --save=mistakes; remove it.")
    return arrays


def is_consistent(arrays: dict[str, Any]) -> bool:
    """Returns whether the arrays of a file have fitting forms, and their labels and predictions are known classes."""
    if any((arrays[name].ndim, arrays[name].dtype.kind) != form for name, form in FORMS.items()):
        return False
    pairs, pixels = arrays["pairs"], arrays["pixels"]
    shown_images = [arrays[name] for name in ("images", "labels", "predictions", "confidences")]
    if pairs.shape[1] != 3 or any(len(each) != len(pixels) for each in shown_images):
        return False
    if pixels.dtype != np.uint8 or pixels.shape[3] != 3 or 0 in pixels.shape[1:]:
        return False
    classes = np.concatenate([pairs[:, :2].ravel(), arrays["labels"], arrays["predictions"]])
    return bool(classes.min(initial=0) >= 0 and classes.max(initial=-1) < len(arrays["names"]))


def evaluation_part(file: str, mistakes: dict[str, Any]) -> str:
    """Returns the HTML for the mistakes of one evaluation."""
    evaluation, split = (*file.split("."), "")[:2]
    split = printable(mistakes.get("split", split), 60)  # older files name it in their own name only
    names, step, pairs = [printable(name, 60) for name in mistakes["names"]], int(mistakes["step"]), mistakes["pairs"]
    label, prediction, count = pairs.T
    wrong = int(count[label != prediction].sum())
    when = f" after step {step:,}" if step >= 0 else ""
    head = f"{wrong:,} of {count.sum():,} images of the split {split} are wrong{when}."
    parts = [f"<h3>{escape(evaluation)}</h3><p>{escape(head)}</p>"]
    if len(names) <= MAX_DRAWN_CLASSES:
        matrix: np.ndarray = np.zeros((len(names), len(names)), np.int64)
        matrix[label, prediction] = count
        parts.append(matrix_table(matrix, names) if len(names) <= MAX_LISTED_CLASSES else matrix_picture(matrix, names))
    if len(names) > MAX_LISTED_CLASSES:
        parts.append(confused_pairs(pairs, names))
    return "".join([*parts, class_accuracies(pairs, names), wrong_images(mistakes, names)])


def matrix_table(matrix: Int[np.ndarray, "label prediction"], names: list[str]) -> str:
    """Returns a confusion matrix as a table, each cell as dark as its share of the row."""
    shares = 100 * matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    head = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in names)
    rows = []
    for name, numbers, parts in zip(names, matrix.tolist(), shares.tolist(), strict=True):
        cells = "".join(
            f'<td style="--share: {part:.0f}%">{number or "·"}</td>'
            for number, part in zip(numbers, parts, strict=True)
        )
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    words = "Confusion: images of each class (row) by what they are taken for (column). Colour is the share of the row."
    return (
        f'<p class="faint">{words}</p><div class="wide"><table class="matrix">'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def matrix_picture(matrix: Int[np.ndarray, "label prediction"], names: list[str]) -> str:
    """Returns a confusion matrix as a picture."""
    text = f"A confusion matrix of {len(names)} classes; below are the pairs that are confused most."
    light, dark = (encode_themed(lambda: confusion(matrix, names), theme) for theme in THEMES)
    drawn = html.picture(light, dark, text)
    return f"<figure>{drawn}<figcaption>Confusion, in per cent of each class.</figcaption></figure>"


def confused_pairs(pairs: Int[np.ndarray, "pairs 3"], names: list[str]) -> str:
    """Returns the pairs of classes that are confused most."""
    wrong = pairs[pairs[:, 0] != pairs[:, 1]]
    rows = wrong[np.argsort(-wrong[:, 2], kind="stable")][:WORST].tolist()
    lines = [(names[label], names[guess], f"{count:,}") for label, guess, count in rows]
    return f"<h4>Confused most</h4>{html.table(lines, ('class', 'taken for', 'images'), numbers=(2,))}"


def class_accuracies(pairs: Int[np.ndarray, "pairs 3"], names: list[str]) -> str:
    """Returns a table of the accuracy of each class, the lowest first; at most `WORST` classes."""
    label, prediction, count = pairs.T
    total = np.bincount(label, weights=count, minlength=len(names))
    right = np.bincount(label, weights=count * (label == prediction), minlength=len(names))
    present, shares = np.flatnonzero(total), right / np.maximum(total, 1)
    order = present[np.argsort(shares[present], kind="stable")][:WORST]
    lines = [
        (names[index], f"{shares[index]:.1%}", html.meter(shares[index]), f"{total[index]:,.0f}") for index in order
    ]
    title = "Accuracy of each class" if len(present) <= WORST else f"The {WORST} classes with the lowest accuracy"
    return f"<h4>{title}</h4>{html.table(lines, ('', 'accuracy', '', 'images'), numbers=(1, 3))}"


def wrong_images(mistakes: dict[str, Any], names: list[str]) -> str:
    """Returns the wrongly classified images with the highest confidence; empty if there are none."""
    figures = []
    for index, pixels in enumerate(mistakes["pixels"]):
        label, guess = names[mistakes["labels"][index]], names[mistakes["predictions"][index]]
        name, confidence = printable(mistakes["images"][index], 200), float(mistakes["confidences"][index])
        text = f"{name}: {label}, taken for {guess}"
        small = max(pixels.shape) <= SMALL
        drawn = html.image(encode_pixels(pixels, small), text, 'class="pixels"' if small else "")
        words = f"<b>{escape(guess)}</b> {confidence:.1%}<br>is {escape(label)}<br>{escape(name)}"
        figures.append(f"<figure>{drawn}<figcaption>{words}</figcaption></figure>")
    if not figures:
        return ""
    return f'<h4>Wrong with most confidence</h4><div class="row">{"".join(figures)}</div>'
