"""The page of the images whose labels are doubted: each with its label, what the model takes it for, and its name."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from vit_jax import printable
from vit_jax.analysis import html
from vit_jax.data.images import encode_image

SMALL = 64  # pixels: smaller pictures are enlarged without smoothing


class Doubt(NamedTuple):
    """An image whose label is doubted.

    Attributes:
        image: its name in the data.
        given: the name of its label.
        suggested: the name of the class that the model predicts.
        score: the probability of the label.
        suggested_probability: the probability of that class.
    """

    image: str
    given: str
    suggested: str
    score: float
    suggested_probability: float


def make_doubts_page(
    title: str, words: Sequence[str], doubts: Sequence[Doubt], pixels: Sequence[UInt8[np.ndarray, "height width 3"]]
) -> str:
    """Returns the page, which needs no other file.

    Args:
        title: the title of the page.
        words: paragraphs above the images.
        doubts: all doubted images, the most doubtful first.
        pixels: the pixels of the first of them.
    """
    pairs = dict[tuple[str, str], int]()
    for doubt in doubts:
        pairs[doubt.given, doubt.suggested] = pairs.get((doubt.given, doubt.suggested), 0) + 1
    most = sorted(pairs.items(), key=lambda pair: -pair[1])[:20]
    rows = [(printable(given, 60), printable(suggested, 60), f"{count:,}") for (given, suggested), count in most]
    body = [f"<h1>{escape(printable(title))}</h1>", *(f"<p>{escape(printable(text))}</p>" for text in words)]
    if doubts:
        body += [
            "<h2>Label and prediction</h2>",
            html.table(rows, ("label", "predicted", "images"), numbers=(2,)),
            "<h2>Most doubtful first</h2>",
            f'<div class="row">{"".join(map(draw_image, doubts, pixels))}</div>',
        ]
    return html.document(title, "\n".join(body))


def draw_image(doubt: Doubt, pixels: UInt8[np.ndarray, "height width 3"]) -> str:
    """Returns the HTML of an image, with what is known of its label below it."""
    name, given, suggested = (printable(text, 60) for text in (doubt.image, doubt.given, doubt.suggested))
    small = max(pixels.shape) <= SMALL
    drawn = html.image(
        encode_image(pixels), f"{name}: {given}, predicted {suggested}", 'class="pixels"' if small else ""
    )
    words = (
        f"<b>{escape(given)}</b> {doubt.score:.1%}<br>predicted <b>{escape(suggested)}</b> "
        f"{doubt.suggested_probability:.1%}<br>{escape(name)}"
    )
    return f"<figure>{drawn}<figcaption>{words}</figcaption></figure>"
