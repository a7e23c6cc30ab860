"""The figures of the paper that show the inside of a model, from the arrays of `measure` and `observe`.

Also the pixels that they consist of: photographs seen through attention, and many small pictures as one.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt8

from vit_jax.analysis.plot import NotebookFigure
from vit_jax.data.images import resize_pixels

GAP = 2  # pixels between small pictures
GAMMA = 2.2  # of screens: the light that a pixel gives is its value to this power
MAX_COLUMNS = 8  # images side by side
PAIRS = 6  # of photograph and attention, in Figure 6
TILE = 64  # largest side of a photograph in Figure 14, in pixels
TICKS = 14  # most numbers along an axis


def spread(values: Float[np.ndarray, "rows columns"], height: int, width: int) -> Float[np.ndarray, "height width"]:
    """Returns values of patches as a smooth picture with values from 0 to 1.

    Each pixel is the average of the patches, after `contrast`, weighted by a Gaussian of their distance whose standard
    deviation is a patch. The smallest value becomes 0 and the largest 1; equal values become 1.
    """
    weights = []
    for new, old in ((height, values.shape[0]), (width, values.shape[1])):
        places = (np.arange(new) + 0.5) * old / new - 0.5  # in patches
        near = np.exp(-((places[:, None] - np.arange(old)) ** 2) / 2)
        weights.append(near / near.sum(axis=1, keepdims=True))
    return stretch(weights[0] @ contrast(values.astype(np.float64)) @ weights[1].T)


def contrast(values: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Returns values scaled as by `stretch`, but the largest hundredth becomes 1.

    Large models without registers attend most to a few patches (arXiv 2309.16588), beside which all else would be dark.
    """
    return stretch(np.minimum(values, np.quantile(values, 0.99)))


def stretch(values: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Returns values scaled so that the smallest is 0 and the largest 1; equal values become 1."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.ones_like(values)


def attended(
    pixels: UInt8[np.ndarray, "height width 3"], rollout: Float[np.ndarray, "rows columns"]
) -> UInt8[np.ndarray, "height width 3"]:
    """Returns a photograph that is darkened where the attention is low (Figures 6 and 14).

    The light of each pixel is multiplied by a factor that is linear in the attention to its place: 0 where the
    attention is lowest, and 1 where it is highest.
    """
    light = spread(rollout, *pixels.shape[:2])[..., None]
    return (pixels * light ** (1 / GAMMA)).round().astype(np.uint8)


def component_colours(
    components: Float[np.ndarray, "*images rows columns 3"], height: int, width: int
) -> UInt8[np.ndarray, "*images height width 3"]:
    """Returns the three principal components of patches as red, green and blue, enlarged to pictures (bicubic).

    Of each component, the lowest and the highest hundredth of all patches given have the values 0 and 255.
    """
    low, high = np.quantile(components.reshape(-1, 3), (0.01, 0.99), axis=0)
    shares = ((components - low) / np.maximum(high - low, np.finfo(np.float32).tiny)).clip(0, 1)
    small = np.rint(255 * shares).astype(np.uint8).reshape(-1, *components.shape[-3:])
    large = [resize_pixels(picture, height, width, "bicubic", antialias=True) for picture in small]
    return np.stack(large).reshape(*components.shape[:-3], height, width, 3)


def mosaic(tiles: np.ndarray, columns: int, gap: int = GAP) -> np.ndarray:
    """Returns tiles [number, height, width, *channels] as one picture, row by row; gaps and missing tiles are NaN."""
    number, height, width, *channels = tiles.shape
    rows = -(-number // columns)
    picture = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, *channels), np.nan)
    for index, tile in enumerate(tiles):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        picture[top : top + height, left : left + width] = tile
    return picture


def embedding_filters(components: Float[np.ndarray, "components rows columns 3"]) -> NotebookFigure:
    """Returns the principal components of RGB filters as small pictures, each with its own scale (Figure 7 left)."""
    columns = min(7, len(components))
    tiles = np.stack([stretch(component) for component in components])
    picture = mosaic(np.kron(tiles, np.ones((1, 4, 4, 1))), columns)
    return _show(picture, 4.8 * columns / 7)


def position_similarity(similarity: Float[np.ndarray, "rows columns rows columns"]) -> NotebookFigure:
    """Returns a small map at the place of each patch: how similar all positions are to its own (Figures 7 and 10)."""
    rows, columns = similarity.shape[:2]
    tiles = similarity.reshape(-1, rows, columns)
    figure = NotebookFigure(figsize=(5.6, 4.6 * rows / columns), layout="compressed")
    axes = figure.subplots()
    artist = axes.imshow(mosaic(tiles, columns, gap=1), vmin=-1, vmax=1, interpolation="nearest")
    for name, number in (("x", columns), ("y", rows)):
        chosen = _ticks(number)
        inside = (columns if name == "x" else rows) + 1
        places = [i * inside + (inside - 2) / 2 for i in chosen]  # a tile is as many pixels wide as there are columns
        axes.set(**{f"{name}ticks": places, f"{name}ticklabels": [i + 1 for i in chosen]})
    axes.set(xlabel="column of the patch", ylabel="row of the patch")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(artist, ax=axes, label="cosine similarity", aspect=25)
    return figure


def head_dots(values: Float[np.ndarray, "depth heads"], label: str, uniform: float) -> NotebookFigure:
    """Returns a plot of a quantity of each head's attention over the blocks (Figures 7 right and 11).

    Args:
        values: the values of the quantity.
        label: the name of the quantity, with the unit.
        uniform: the value of the quantity for equal attention to all.
    """
    depth = len(values)
    figure = NotebookFigure(figsize=(4.8, 3.6), layout="constrained")
    axes = figure.subplots()
    blocks = np.arange(1, depth + 1)
    axes.plot(blocks, values, linestyle="", marker="o", markersize=4, color="C0", alpha=0.6)
    [mean] = axes.plot(blocks, values.mean(axis=1), color="C1", linewidth=1.5)
    limit = axes.axhline(uniform, color="C2", linestyle="--", linewidth=1.5)
    dots, names = axes.lines[0], ("one head", "mean of the heads", "equal attention to all")
    figure.legend([dots, mean, limit], names, loc="outside upper center", ncols=3, fontsize="small", frameon=False)
    axes.set(xlabel="block", ylabel=label, ylim=(0, 1.08 * max(uniform, values.max())))
    axes.set(xticks=[i + 1 for i in _ticks(depth)], xlim=(0.5, depth + 0.5))
    axes.grid(alpha=0.4, axis="y")
    return figure


def layer_similarity(similarity: Float[np.ndarray, "depth depth"]) -> NotebookFigure:
    """Returns a square of colours: how similar the representations after each pair of blocks are."""
    figure = NotebookFigure(figsize=(4.4, 3.6), layout="compressed")
    axes = figure.subplots()
    artist = axes.imshow(similarity, vmin=0, vmax=1, origin="lower", interpolation="nearest")
    chosen = _ticks(len(similarity))
    axes.set(xticks=chosen, yticks=chosen, xlabel="block", ylabel="block")
    axes.set(xticklabels=[i + 1 for i in chosen], yticklabels=[i + 1 for i in chosen])
    figure.colorbar(artist, ax=axes, label="linear CKA")
    return figure


def rollout_pairs(
    pixels: Sequence[UInt8[np.ndarray, "height width 3"]], rollouts: Sequence[Float[np.ndarray, "rows columns"]]
) -> NotebookFigure:
    """Returns photographs, each beside what it looks like through the attention (Figure 6)."""
    shown = list(zip(pixels, rollouts, strict=True))[:PAIRS]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    height = pixels[0].shape[0] / pixels[0].shape[1]
    figure = NotebookFigure(figsize=(3.0 * columns, 1.5 * rows * height + 0.3), layout="constrained")
    grid = figure.subplots(rows, 2 * columns, squeeze=False).reshape(-1, 2)
    for pair in grid:
        for axes in pair:
            axes.set_axis_off()
    for number, (pair, (photograph, rollout)) in enumerate(zip(grid, shown, strict=False)):
        for axes, picture, title in zip(
            pair, (photograph, attended(photograph, rollout)), ("input", "attention"), strict=True
        ):
            axes.imshow(picture)
            if number < columns:
                axes.set_title(title, fontsize="medium")
    return figure


def rollout_mosaic(
    pixels: Sequence[UInt8[np.ndarray, "height width 3"]], rollouts: Sequence[Float[np.ndarray, "rows columns"]]
) -> NotebookFigure:
    """Returns all photographs, small, each beside what it looks like through the attention (Figure 14)."""
    height, width = (max(1, round(side * min(1, TILE / max(pixels[0].shape[:2])))) for side in pixels[0].shape[:2])
    pairs = []
    for photograph, rollout in zip(pixels, rollouts, strict=True):
        both = (photograph, attended(photograph, rollout))
        small = [resize_pixels(picture, height, width, "area", antialias=False) for picture in both]
        pairs.append(np.concatenate(small, axis=1) / 255)
    picture = mosaic(np.stack(pairs), columns=max(1, round(np.sqrt(len(pairs) / 2))))
    return _show(picture, min(8.0, picture.shape[1] / TILE))


def predicted_patches(
    pixels: UInt8[np.ndarray, "images height width 3"],
    corrupted: UInt8[np.ndarray, "images height width 3"],
    predicted: UInt8[np.ndarray, "images height width 3"],
) -> NotebookFigure:
    """Returns three rows of pictures: the first images, what a model of masked patches is given of each, and what it
    predicts.
    """
    return _show_rows(pixels, corrupted, predicted)


def patch_components(
    pixels: UInt8[np.ndarray, "images height width 3"],
    components: Float[np.ndarray, "images rows columns 3"],
    own_components: Float[np.ndarray, "images rows columns 3"],
) -> NotebookFigure:
    """Returns three rows of pictures: the first images, the principal components of all images together, and those of
    each image by itself. A single image has two rows.
    """
    size = pixels.shape[1:3]
    own = np.stack([component_colours(of_image, *size) for of_image in own_components[:MAX_COLUMNS]])
    return _show_rows(pixels, *([component_colours(components, *size)] if len(pixels) > 1 else []), own)


def _show_rows(*rows: UInt8[np.ndarray, "images height width 3"]) -> NotebookFigure:
    """Returns a figure of rows of pictures, of which the first `MAX_COLUMNS` are shown."""
    columns = min(MAX_COLUMNS, len(rows[0]))
    scale = max(1, -(-TILE // max(rows[0].shape[1:3])))  # small images as larger squares
    tiles = np.concatenate([row[:columns] for row in rows])
    picture = mosaic(tiles.repeat(scale, axis=1).repeat(scale, axis=2) / 255, columns, gap=2 * scale)
    return _show(picture, columns)


def _show(picture: np.ndarray, width: float) -> NotebookFigure:
    """Returns a figure, `width` inches wide, of an RGB picture with values from 0 to 1; NaN becomes transparent."""
    figure = NotebookFigure(figsize=(width, width * picture.shape[0] / picture.shape[1]), layout="constrained")
    axes = figure.subplots()
    alpha = ~np.isnan(picture).any(axis=-1, keepdims=True)
    axes.imshow(np.concatenate([np.nan_to_num(picture), alpha], axis=-1), interpolation="nearest")
    axes.set_axis_off()
    return figure


def _ticks(number: int) -> list[int]:
    """Returns at most `TICKS` of the places 0 to number - 1, evenly spaced from the first."""
    return list(range(0, number, -(-number // TICKS)))
