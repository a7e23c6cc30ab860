"""The page and the files that `vit_jax.look` writes: photographs with the attention beside them, and figures."""

from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from vit_jax import encode_text, printable, tree
from vit_jax.analysis import html
from vit_jax.analysis.captioned_figures import Drawing, list_drawings
from vit_jax.analysis.figures import attended, component_colours, contrast, mosaic
from vit_jax.analysis.observe import Observations
from vit_jax.analysis.plot import colour_map, encode_figure, encode_pixels, encode_themed, theme
from vit_jax.model import Model

SMALL = 96  # pixels: smaller pictures are encoded without loss
HEAD_PIXELS = 56  # width of the map of a head on the page
LEVELS = 24  # of brightness in it: with 256 the pages of 128 photographs are twice as large
MEASURES = (
    "rollout",
    "rollout_alone",
    "registers",
    "components",
    "own_components",
    "distance",
    "entropy",
    "similarity",
)
ON_PAGE = ("rollout", "rollout_all")  # drawings of which the page has the photographs one by one, as cards


def write_look(
    folder: Path,
    checkpoint: str,
    model: Model,
    params: dict[str, Any],
    names: Sequence[str],
    seen: Observations,
    top: int,
) -> list[Path]:
    """Writes the figures, the numbers behind them and the page; returns the files, the page first.

    Args:
        folder: created if necessary.
        checkpoint: what the page calls the weights.
        model: the model.
        params: its parameters, as NumPy arrays.
        names: the names of the images that `seen` keeps.
        seen: what the model did with the images.
        top: the number of classes that are shown for each image.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "index.html"]
    parts = [write_drawing(folder, drawing, files) for drawing in list_drawings(model.vit, params, seen)]
    numbers = {name: getattr(seen, name) for name in MEASURES}
    np.savez(folder / "measures.npz", images=np.array(names), logits=seen.logits, **numbers)
    files.append(folder / "measures.npz")
    colours = component_colours(seen.components, *seen.pixels.shape[1:3])
    body = [
        page_header(checkpoint, model, params, names, seen),
        '<div class="cards">',
        *(
            image_card(model, title, number, seen, colours[number], top)
            for number, title in enumerate(distinct_names(names))
        ),
        '</div><div class="figures">',
        *parts,
        "</div>",
    ]
    files[0].write_bytes(encode_text(html.document(f"Inside {model.name}", "\n".join(body))))
    return files


def distinct_names(paths: Sequence[str]) -> list[str]:
    """Returns the names of files, each with as many of the folders above it as tell it from the others."""
    parts = [Path(str(path)).parts for path in paths]
    names = [of_one[-1:] for of_one in parts]
    while clashing := {name for name, count in Counter(names).items() if count > 1}:
        longer = [
            of_one[-len(name) - 1 :] if name in clashing else name for of_one, name in zip(parts, names, strict=True)
        ]
        if longer == names:  # the same file, twice
            break
        names = longer
    return ["/".join(name) for name in names]


def write_drawing(folder: Path, drawing: Drawing, files: list[Path]) -> str:
    """Writes a figure as PNG and SVG, appends their paths to `files`, and returns the part of the page on the figure.

    If there is no figure, the part says why. For the drawings of `ON_PAGE` it is empty.
    """
    title, words = f"<h2>{escape(drawing.title)}</h2>", f"<p>{escape(drawing.caption)}</p>"
    if drawing.draw is None:
        return f"<section>{title}{words}</section>"
    with theme("light"):
        figure = drawing.draw()
        light = encode_figure(figure, "svg")
        for suffix, content in ((".png", encode_figure(figure, "png")), (".svg", light)):
            files.append(folder / f"{drawing.name}{suffix}")
            files[-1].write_bytes(content)
    if drawing.name in ON_PAGE:
        return ""
    drawn = html.picture(light, encode_themed(drawing.draw, "dark"), drawing.text)
    return f"<section>{title}{drawn}{words}</section>"


def page_header(checkpoint: str, model: Model, params: dict[str, Any], names: Sequence[str], seen: Observations) -> str:
    """Returns the top of the page: which model this is, and what the photographs show."""
    spec = model.vit
    (height, width), (rows, columns) = spec.position.image_size, spec.grid
    facts = [
        ("model", f"{model.name}, {tree.count(params):,} parameters"),
        ("weights", checkpoint),
        ("images", f"{seen.count:,}" + (f", the first {len(names):,} shown" if len(names) < seen.count else "")),
        ("input", f"{height} x {width} pixels, {rows} x {columns} patches of {spec.stem.patch_size} pixels"),
        ("encoder", f"{spec.depth} blocks of {seen.distance.shape[1]} heads, width {spec.width}"),
    ]
    whose = "the class token" if spec.class_rows else "the average patch, since this model has no class token,"
    saliency = " Saliency: the gradient of the first class by the pixels; bright is large."
    words = (
        f"Rollout: how much of each patch reaches {whose} through all blocks, where each block's attention is averaged "
        "over its heads and half of each token passes unchanged (the residual connection), as in Figures 6 and 14. "
        "Attention alone: the same without the residual connections. Both are scaled: where the value is lowest the "
        "photograph is black, in the highest hundredth it has its own brightness, and between it gives light in "
        "proportion. "
        "Components: the first three principal components of the patches' tokens as red, green and blue, of all images "
        "together and of each by itself." + ("" if seen.saliency is None else saliency)
    )
    patches = (
        "<p>This model predicts masked patches. Corrupted: the image that it is given, as in an evaluation; masked "
        "patches are grey, some others are replaced. Predicted: what it makes of the corrupted patches.</p>"
    )
    parts = [
        f"<h1>Inside {escape(model.name)}</h1>{html.table(facts)}<h2>Photographs</h2><p>{words}</p>",
        patches if spec.head.kind == "patches" else "",
        "" if spec.head.num_classes else "<p>This model has no classifier, so no classes are shown.</p>",
    ]
    return "".join(parts)


def image_card(
    model: Model, name: str, number: int, seen: Observations, colours: UInt8[np.ndarray, "height width 3"], top: int
) -> str:
    """Returns the card of an image: its attention, its classes and, hidden until opened, the attention of each head.

    The `colours` are the principal components of its patches, those of all images together.
    """
    pixels, short = seen.pixels[number], printable(name)
    pictures = [
        ("input", pixels, f"{short} as the model reads it"),
        ("rollout", attended(pixels, seen.rollout[number]), f"{short}, bright where the rollout is high"),
        ("attention alone", attended(pixels, seen.rollout_alone[number]), f"{short}, bright where the attention is"),
        ("components", colours, f"the patches of {short}, in equal colours where they are alike"),
    ]
    if seen.count > 1:
        own = component_colours(seen.own_components[number], *pixels.shape[:2])
        pictures.append(("own components", own, f"the patches of {short}, in colours of this image alone"))
    if seen.corrupted is not None and seen.predicted is not None:
        pictures.append(("corrupted", seen.corrupted[number], f"{short}, some patches grey or replaced by others"))
        pictures.append(("predicted", seen.predicted[number], f"{short}, the corrupted patches as predicted"))
    if seen.saliency is not None:
        values = seen.saliency[number]
        bright = np.minimum(values / max(np.quantile(values, 0.99), np.finfo(np.float32).tiny), 1)
        pictures.append(("saliency", colour_map(bright), f"the saliency of {short}"))
    small = max(pixels.shape) <= SMALL
    how = 'class="pixels" loading="lazy"' if small else 'loading="lazy"'
    row = "".join(
        f"<figure>{html.image(encode_pixels(array, small), text, how)}<figcaption>{caption}</figcaption></figure>"
        for caption, array, text in pictures
    )
    parts = [f"<h3>{escape(short)}</h3>", f'<div class="row">{row}</div>', class_table(model, seen.logits[number], top)]
    return f'<article class="card">{"".join(parts)}{token_maps(model, seen, number, short)}</article>'


def class_table(model: Model, logits: np.ndarray, top: int) -> str:
    """Returns a table of the `top` most probable classes, or of all numbers; empty if the model has no head."""
    if not logits.size or not model.vit.head.num_classes:
        return ""
    [answers] = np.asarray(model.activate(logits[None])).tolist()
    named = list(zip(output_names(model), answers, strict=True))
    if model.is_regression:
        return html.table([(name, f"{number:.4g}") for name, number in named], numbers=(1,))
    best = sorted(named, key=lambda pair: -pair[1])[:top]
    return html.table([(name, f"{share:.1%}", html.meter(share)) for name, share in best], numbers=(1,))


def output_names(model: Model) -> list[str]:
    """Returns the names of the classes or numbers, or numbered ones."""
    return list(model.class_names or (f"class {index}" for index in range(model.vit.head.num_classes or 0)))


def token_maps(model: Model, seen: Observations, number: int, name: str) -> str:
    """Returns the attention of every head in every block, and of each register, hidden until the reader opens it."""
    whose, registers = "class token" if model.vit.class_rows else "average patch", seen.registers[number]
    words = (
        f"Attention of the {whose} to the patches: a row for each block, from the first; a map for each head, from "
        "dark (its lowest value) to bright (its highest hundredth)."
    )
    rows: list[tuple[int | str, str]] = [
        (block, map_strip(maps, f"block {block} of {name}: the {whose}'s attention by head 1 to {len(maps)}"))
        for block, maps in enumerate(seen.heads[number].astype(np.float32), 1)
    ]
    if len(registers):
        words += " Last row: the attention of each register in the last block, averaged over the heads."
        rows.append(("registers", map_strip(registers, f"the attention of registers 1 to {len(registers)} of {name}")))
    return (
        f'<details><summary>All heads</summary><p class="faint">{words}</p>'
        f'<div class="heads">{html.table(rows)}</div></details>'
    )


def map_strip(maps: Float[np.ndarray, "maps rows columns"], text: str) -> html.Html:
    """Returns maps side by side, dark to bright, as `contrast` scales each; `text` says what they are."""
    tiles = np.stack([np.rint(contrast(one) * LEVELS) / LEVELS for one in maps])
    strip = mosaic(tiles, len(tiles), gap=1)
    width = round(HEAD_PIXELS * strip.shape[1] / tiles.shape[2])
    pixels = np.where(np.isnan(strip)[..., None], np.uint8(128), colour_map(np.nan_to_num(strip)))
    return html.image(encode_pixels(pixels, lossless=True), text, f'class="pixels" loading="lazy" width="{width}"')
