"""The part of a report on what a run's model takes for what: confusion, accuracy of classes, wrong images."""

import io
import shlex
import zipfile
from html import escape
from typing import Any

import numpy as np
from jaxtyping import Int

from vit_jax import UserError, shown, user_errors
from vit_jax.analysis import html
from vit_jax.analysis.plot import confusion, encode_figure, encode_pixels, theme
from vit_jax.monitoring import RunFolder

DAMAGE = OSError, ValueError, EOFError, zipfile.BadZipFile
FEW, MANY = 20, 1000  # classes: up to FEW the matrix is a table, up to MANY a picture
WORST = 20  # classes whose accuracy is shown, and pairs of classes that are confused
SMALL = 64  # pixels: smaller pictures are encoded without loss


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
        place = shlex.quote(run.place)
        command = f"python -m vit_jax.evaluate {place} --save=mistakes --save-dir={place}"
        return f"<p>Not saved yet. To have them here: <code>{escape(command)}</code></p>"
    return "".join(evaluation_part(name, read_mistakes(name, content)) for name, content in run.mistakes.items())


def read_mistakes(name: str, content: bytes) -> dict[str, Any]:
    """Returns the arrays of a file; see `evals.mistakes.find_mistakes`.

    Raises:
        UserError: it cannot be read.
    """
    with user_errors(f"cannot read {name}", *DAMAGE, advice="remove it"), np.load(io.BytesIO(content)) as file:
        arrays = dict(file)
    wanted = {"pairs", "names", "images", "pixels", "labels", "predictions", "confidences", "step"}
    if not wanted <= arrays.keys() or not is_consistent(arrays):
        raise UserError(f"{name} is not a file of vit_jax.evaluate --save=mistakes; remove it.")
    return arrays


def is_consistent(arrays: dict[str, Any]) -> bool:
    """Returns whether the arrays fit each other and name classes that exist."""
    pairs, shown_images = arrays["pairs"], [arrays[name] for name in ("images", "labels", "predictions", "confidences")]
    if pairs.ndim != 2 or pairs.shape[1] != 3 or any(len(each) != len(arrays["pixels"]) for each in shown_images):
        return False
    classes = np.concatenate([pairs[:, :2].ravel(), arrays["labels"], arrays["predictions"]])
    return bool(classes.min(initial=0) >= 0 and classes.max(initial=-1) < len(arrays["names"]))


def evaluation_part(file: str, found: dict[str, Any]) -> str:
    """Returns the HTML for the mistakes of one evaluation."""
    evaluation, split = (*file.split("."), "")[:2]
    split = shown(found.get("split", split), 60)  # older files name it in their own name only
    names, step, pairs = [shown(name, 60) for name in found["names"]], int(found["step"]), found["pairs"]
    label, prediction, count = pairs.T
    wrong = int(count[label != prediction].sum())
    when = f" after step {step:,}" if step >= 0 else ""
    head = f"{wrong:,} of {count.sum():,} images of the split {split} are wrong{when}."
    parts = [f"<h3>{escape(evaluation)}</h3><p>{escape(head)}</p>"]
    if len(names) <= MANY:
        matrix: np.ndarray = np.zeros((len(names), len(names)), np.int64)
        matrix[label, prediction] = count
        parts.append(matrix_table(matrix, names) if len(names) <= FEW else matrix_picture(matrix, names))
    if len(names) > FEW:
        parts.append(confused_pairs(pairs, names))
    return "".join([*parts, class_accuracies(pairs, names), wrong_images(found, names)])


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
    with theme("light"):
        light = encode_figure(confusion(matrix, names), "svg")
    with theme("dark"):
        dark = encode_figure(confusion(matrix, names), "svg")
    text = f"A confusion matrix of {len(names)} classes; below are the pairs that are confused most."
    drawn = html.picture(light, dark, text)
    return f"<figure>{drawn}<figcaption>Confusion, in per cent of each class.</figcaption></figure>"


def confused_pairs(pairs: Int[np.ndarray, "pairs 3"], names: list[str]) -> str:
    """Returns the pairs of classes that are confused most."""
    wrong = pairs[pairs[:, 0] != pairs[:, 1]]
    rows = wrong[np.argsort(-wrong[:, 2], kind="stable")][:WORST].tolist()
    lines = "".join(
        f'<tr><td>{escape(names[label])}</td><td>{escape(names[guess])}</td><td class="number">{count:,}</td></tr>'
        for label, guess, count in rows
    )
    head = '<tr><th scope="col">class</th><th scope="col">taken for</th><th scope="col">images</th></tr>'
    return f"<h4>Confused most</h4><table><thead>{head}</thead><tbody>{lines}</tbody></table>"


def class_accuracies(pairs: Int[np.ndarray, "pairs 3"], names: list[str]) -> str:
    """Returns the accuracy of each class, the worst first; of many classes only the worst."""
    label, prediction, count = pairs.T
    total = np.bincount(label, weights=count, minlength=len(names))
    right = np.bincount(label, weights=count * (label == prediction), minlength=len(names))
    present = np.flatnonzero(total)
    order = present[np.argsort((right[present] / total[present]), kind="stable")][:WORST]
    lines = []
    for index in order.tolist():
        share = right[index] / total[index]
        meter = f'<meter min="0" max="1" value="{share:.4f}">{share:.1%}</meter>'
        cells = f'<td class="number">{share:.1%}</td><td>{meter}</td><td class="number">{int(total[index]):,}</td>'
        lines.append(f'<tr><th scope="row">{escape(names[index])}</th>{cells}</tr>')
    head = '<tr><td></td><th scope="col" colspan="2">accuracy</th><th scope="col">images</th></tr>'
    title = "Accuracy of each class" if len(present) <= WORST else f"The {WORST} classes with the lowest accuracy"
    return f"<h4>{title}</h4><table><thead>{head}</thead><tbody>{''.join(lines)}</tbody></table>"


def wrong_images(found: dict[str, Any], names: list[str]) -> str:
    """Returns the images that are wrong with most confidence."""
    figures = []
    for index, pixels in enumerate(found["pixels"]):
        label, guess = names[found["labels"][index]], names[found["predictions"][index]]
        name, confidence = shown(found["images"][index], 200), float(found["confidences"][index])
        text = f"{name}: {label}, taken for {guess}"
        small = max(pixels.shape) <= SMALL
        drawn = html.image(encode_pixels(pixels, small), text, 'class="pixels"' if small else "")
        words = f"<b>{escape(guess)}</b> {confidence:.1%}<br>is {escape(label)}<br>{escape(name)}"
        figures.append(f"<figure>{drawn}<figcaption>{words}</figcaption></figure>")
    if not figures:
        return ""
    return f'<h4>Wrong with most confidence</h4><div class="row">{"".join(figures)}</div>'
