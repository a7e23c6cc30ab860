"""The nearest neighbours of images by the cosine of their features: a table, near-duplicates, outliers, and a page."""

import csv
import io
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32

from vit_jax import data, encode_text, printable, refuse, user_errors
from vit_jax.analysis import html
from vit_jax.data import shards
from vit_jax.data.images import DecodeError
from vit_jax.data.sources import Source
from vit_jax.evals.embedding import Info, read_vectors
from vit_jax.evals.knn import find_neighbours
from vit_jax.evals.prediction_files import read_small
from vit_jax.storage import filesystem

MOST_VECTORS = 100_000  # all pairs of these take minutes; ten times as many would take a hundred times as long
SHOWN = 24  # images, pairs and outliers on the page
SHOWN_NEIGHBOURS = 8
TABLE, PAIRS, OUTLIERS, PAGE = "neighbours.parquet", "near_duplicates.csv", "outliers.csv", "neighbours.html"


class Neighbours(NamedTuple):
    """The nearest neighbours of n images, each with `count` of them, nearest first; no image is its own neighbour.

    Attributes:
        indices: the index of each image in the source, ascending.
        rows: the row, here, of each neighbour.
        cosines: the cosine of the features of the image and of the neighbour.
    """

    indices: Int32[np.ndarray, " n"]
    rows: Int32[np.ndarray, "n count"]
    cosines: Float32[np.ndarray, "n count"]

    def pairs(self, least: float) -> list[tuple[int, int, float]]:
        """Returns (row, later row, cosine) of each pair of neighbours with a cosine of at least `least`, best first.

        Pairs are found among the nearest neighbours: of more copies of an image than these, some pairs are left out.
        """
        first, place = np.nonzero(self.cosines >= least)
        cosines = {
            (min(pair), max(pair)): float(cosine)
            for *pair, cosine in zip(
                first.tolist(), self.rows[first, place].tolist(), self.cosines[first, place].tolist(), strict=True
            )
        }
        return [(*pair, cosine) for pair, cosine in sorted(cosines.items(), key=lambda item: (-item[1], item[0]))]

    def outliers(self) -> list[tuple[int, float]]:
        """Returns (row, mean cosine with its neighbours) of all images, the smallest first."""
        means = self.cosines.mean(axis=1, dtype=np.float64)
        return [(row, float(means[row])) for row in np.argsort(means, kind="stable").tolist()]


def check_count(images: int, count: int, sample: int | None) -> None:
    """Raises UserError if `count` neighbours of all images, or of a sample of them, cannot be found."""
    most = min(images, sample or images)
    refuse(
        (sample is not None and sample < 2, f"a sample has at least 2 images, not {sample}."),
        (not 1 <= count < most, f"each of {most:,} images has up to {most - 1:,} neighbours, not {count}."),
        (
            most > MOST_VECTORS,
            f"neighbours are exact, which takes too long for {most:,} images; take a sample of up to "
            f"{MOST_VECTORS:,}: --sample={MOST_VECTORS}.",
        ),
    )


def find(folder: str, info: Info, count: int, sample: int | None) -> Neighbours:
    """Returns the neighbours of the images of a folder of `vit_jax.embed`; those with an error are left out.

    Args:
        folder: the folder, which is complete.
        info: what its `info.json` states.
        count: the number of neighbours of an image.
        sample: the number of images that are compared, at equal distances in the order of the data; None: all.

    Raises:
        UserError: there are too few or too many images, or the folder cannot be read.
    """
    columns = read_vectors(folder, info, ["error", "features"])
    indices: Int32[np.ndarray, " present"] = np.flatnonzero([error is None for error in columns["error"]]).astype(
        np.int32
    )
    check_count(len(indices), count, sample)
    chosen: np.ndarray = np.arange(len(indices))
    if sample is not None and sample < len(indices):
        chosen = np.arange(sample) * len(indices) // sample
    return Neighbours(indices[chosen], *find_others(columns["features"][chosen].astype(np.float32), count))


def find_others(
    features: Float32[np.ndarray, "n width"], count: int
) -> tuple[Int32[np.ndarray, "n count"], Float32[np.ndarray, "n count"]]:
    """Returns the rows and the cosines of the `count` other features that are nearest to each, nearest first."""
    cosines, rows = find_neighbours(features, features, count + 1)
    others: Bool[np.ndarray, "n more"] = rows != np.arange(len(rows))[:, None]
    others[others.all(axis=1), -1] = False  # features may be behind more than `count` copies of themselves
    shape = len(rows), count
    return rows[others].reshape(shape), cosines[others].reshape(shape)


def write_neighbours(folder: str, info: Info, source: Source, found: Neighbours, least: float) -> list[str]:
    """Writes the table, the near-duplicates, the outliers and the page into a folder; returns their paths.

    Args:
        folder: the folder of `vit_jax.embed`.
        info: what its `info.json` states.
        source: its images.
        found: their neighbours.
        least: the least cosine of near-duplicates.

    Raises:
        UserError: a file cannot be written, or matplotlib, which encodes the pictures, is missing.
    """
    names = [source.example_name(index) for index in found.indices.tolist()]
    pairs, outliers = found.pairs(least), found.outliers()
    table = {
        "name": names,
        "neighbours": [[names[row] for row in rows] for rows in found.rows.tolist()],
        "cosines": found.cosines,
    }
    pair_rows = [(names[one], names[other], f"{cosine:.6f}") for one, other, cosine in pairs]
    outlier_rows = [(names[row], f"{mean:.6f}") for row, mean in outliers]
    contents = {
        TABLE: shards.encode_columns(table, np.ones(len(names), bool), {}),
        PAIRS: format_csv(("image", "near_duplicate", "cosine"), pair_rows),
        OUTLIERS: format_csv(("image", "mean_cosine"), outlier_rows),
        PAGE: encode_text(draw_page(folder, info, source, names, found, pairs, outliers, least)),
    }
    for name, content in contents.items():
        filesystem.write_bytes(filesystem.join_path(folder, name), content)
    return [filesystem.join_path(folder, name) for name in (PAGE, TABLE, PAIRS, OUTLIERS)]


def format_csv(head: Sequence[str], rows: Sequence[Sequence[str]]) -> bytes:
    """Returns a CSV file."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([head, *rows])
    return encode_text(file.getvalue())


def draw_page(
    folder: str,
    info: Info,
    source: Source,
    names: Sequence[str],
    found: Neighbours,
    pairs: Sequence[tuple[int, int, float]],
    outliers: Sequence[tuple[int, float]],
    least: float,
) -> str:
    """Returns the page: images with their neighbours, near-duplicates, outliers.

    Takes what `write_neighbours` takes, the `names` of the images, and the results of `Neighbours`.

    Raises:
        UserError: matplotlib is missing.
    """
    with user_errors("cannot draw", ModuleNotFoundError):
        from vit_jax.analysis import plot
    preprocess = data.parse_pipe(info.preprocess, 0)
    drawn: dict[int, html.Html] = {}

    def show(row: int, words: str) -> str:
        index = int(found.indices[row])
        if row not in drawn:
            try:
                file = plot.encode_pixels(read_small(source, preprocess, index), lossless=False)
                drawn[row] = html.image(file, names[row])
            except DecodeError as error:  # since its features were computed
                drawn[row] = html.Html(f"<p>{escape(printable(error))}</p>")
        label = source.label(index) if info.labels else None
        of_class = ""
        if isinstance(label, int) and label >= 0:
            of_class = f"{info.class_names[label] if info.class_names else label}, "
        caption = escape(printable(f"{of_class}{words}"))
        return (
            f'<figure>{drawn[row]}<figcaption><span title="{escape(printable(names[row]))}">{caption}</span>'
            "</figcaption></figure>"
        )

    def short(row: int) -> str:
        return printable(names[row].rpartition("/")[2], 24)

    rows = []
    for row in np.unique(np.linspace(0, len(names) - 1, SHOWN, dtype=int)).tolist():
        near = zip(found.rows[row, :SHOWN_NEIGHBOURS].tolist(), found.cosines[row].tolist(), strict=False)
        figures = "".join(show(other, f"{cosine:.3f}") for other, cosine in near)
        rows.append(f'<div class="row">{show(row, short(row))}{figures}</div>')
    doubles = "".join(
        f'<div class="card"><h3>{cosine:.4f}</h3><div class="row">{show(one, short(one))}{show(other, short(other))}'
        "</div></div>"
        for one, other, cosine in pairs[:SHOWN]
    )
    strange = "".join(show(row, f"{mean:.3f}, {short(row)}") for row, mean in outliers[:SHOWN])
    shown = f", of which {SHOWN} are shown" if len(pairs) > SHOWN else ""
    data_words = f"{info.source} {info.split}".strip()
    facts = f"{len(names):,} of {info.images:,} images of {data_words}, features of {info.model}."
    parts = {
        "Images and their neighbours": (
            f"The first of each row is spread evenly over the data; its nearest others follow. All: {TABLE}.",
            "".join(rows),
        ),
        "Near-duplicates": (
            f"Pairs with a cosine of at least {least:g}: {len(pairs):,}{shown}. Where near-duplicates begin depends on "
            f"the model; --min-cosine moves it. All: {PAIRS}.",
            f'<div class="cards pairs">{doubles}</div>',
        ),
        "Outliers": (
            f"The images with the smallest mean cosine with their neighbours. All: {OUTLIERS}.",
            f'<div class="row">{strange}</div>',
        ),
    }
    head = "The number under a picture is the cosine of the features: 1 for the same direction."
    body = f"<h1>Nearest neighbours</h1><p>{escape(printable(facts))} {head}</p>" + "".join(
        f'<h2>{name}</h2><p class="faint">{escape(words)}</p>{content}' for name, (words, content) in parts.items()
    )
    return html.document(f"Nearest neighbours of {printable(info.source)}", body)
