"""Which figures a model has, and the words that go with each."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from vit_jax.analysis import figures, measure
from vit_jax.analysis.observe import Observations
from vit_jax.analysis.plot import NotebookFigure
from vit_jax.models import ModelSpec

UNLEARNED_CAPTIONS = {
    "none": "This model has no position embeddings.",
    "relative": "The position embeddings of this model belong to pairs of tokens; there is none of a single patch.",
    "relative_bias": "The position biases of this model belong to pairs of tokens; there is none of a single patch.",
    "sincos2d": "The position embeddings of this model are fixed sines and cosines; it has learned none.",
    "sincos2d_moco": "The position embeddings of this model are fixed sines and cosines; it has learned none.",
}


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure with its words, or the reason why the model has no such figure.

    Attributes:
        name: the name of its files, without suffix.
        title: a heading.
        text: what is to be seen, for readers who do not see it.
        caption: what the figure means, or why there is none.
        draw: makes the figure, in the colours of the `plot.theme` in which it is called; None: there is no figure.
    """

    name: str
    title: str
    text: str
    caption: str
    draw: Callable[[], NotebookFigure] | None = None


def list_drawings(spec: ModelSpec, params: dict[str, Any], observations: Observations) -> list[Drawing]:
    """Returns the figures of a model.

    Args:
        spec: the specification of the model.
        params: the parameters of the model, as NumPy arrays.
        observations: the images, and the attention weights and outputs of the model for them.
    """
    return [
        filters(spec, params),
        positions(spec, params),
        *attention(spec, observations),
        similarity(observations),
        *rollouts(observations),
        components(observations),
        *predictions(observations),
    ]


def filters(spec: ModelSpec, params: dict[str, Any]) -> Drawing:
    """Returns the filters of the patches; of a hybrid, those of the first convolution, which reads the pixels."""
    title, is_hybrid = "Embedding filters", spec.stem.kind == "resnet"
    kernel, where = measure.pixel_filters(params, is_hybrid), "the projection of the patches (Figure 7 left)"
    if is_hybrid:
        where = "the first convolution of the ResNet, since the patches of a hybrid are not of pixels"
    components, shares = measure.embedding_filters(kernel)
    size, number = "x".join(map(str, kernel.shape[:2])), kernel.shape[-1]
    return Drawing(
        "embedding_filters",
        title,
        f"{len(components)} small colour pictures of {size} pixels.",
        f"The first {len(components)} principal components of the {number} filters of {where}. Together they explain "
        f"{shares.sum():.0%} of the variance. Each component has its own scale of brightness, and its sign means "
        "nothing.",
        lambda: figures.embedding_filters(components),
    )


def position_table(spec: ModelSpec, params: dict[str, Any]) -> np.ndarray:
    """Returns the table of learned position embeddings, whose last rows belong to the patches in raster order.

    If each block has position embeddings of its own, they are those of the first block.
    """
    owners: dict[str, Callable[[], Any]] = {
        "model": lambda: params,
        "encoder": lambda: params["encoder"],
        "block": lambda: {name: leaf[0] for name, leaf in params["encoder"]["blocks"].items() if "position" in name},
    }
    tables = {
        name: np.asarray(leaf, np.float32) for name, leaf in owners[spec.position.owner]().items() if "position" in name
    }
    if spec.position.kind == "learned":
        return tables["position"]
    halves = np.meshgrid(*(range(side) for side in spec.grid), indexing="ij")
    rows, columns = (half.ravel() for half in halves)
    return np.concatenate([tables["position_x"][columns], tables["position_y"][rows]], axis=1)


def positions(spec: ModelSpec, params: dict[str, Any]) -> Drawing:
    """Returns the similarity of the position embeddings."""
    title, (rows, columns) = "Similarity of position embeddings", spec.grid
    if spec.position.kind in UNLEARNED_CAPTIONS:
        return Drawing("position_similarity", title, "", UNLEARNED_CAPTIONS[spec.position.kind])
    similarities = measure.position_similarity(position_table(spec, params), spec.grid)
    flat = similarities.reshape(rows * columns, -1)
    others = flat[~np.eye(len(flat), dtype=bool)]
    between = f"{others.min():.2f} to {others.max():.2f}" if others.size else "1"
    return Drawing(
        "position_similarity",
        title,
        f"{rows} x {columns} small maps of {rows} x {columns} patches; similarities of two patches are {between}.",
        "Each small map belongs to the patch at its place in the image, and shows how similar the position embeddings "
        "of all patches are to that patch's own (Figures 7 centre and 10).",
        lambda: figures.position_similarity(similarities),
    )


def attention(spec: ModelSpec, observations: Observations) -> Iterator[Drawing]:
    """Yields the attention distance and the attention entropy of the heads."""
    distance, entropy, size = observations.distance, observations.entropy, spec.stem.patch_size
    heads = f"{distance.shape[1]} heads in each of {spec.depth} blocks"
    images = "1 image" if observations.count == 1 else f"{observations.count:,} images"
    tokens = spec.prefix_rows + math.prod(spec.grid)
    yield Drawing(
        "attention_distance",
        "Attention distance",
        f"Dots for {heads}, from {distance.min():.0f} to {distance.max():.0f} pixels; the mean goes from "
        f"{distance[0].mean():.0f} in the first block to {distance[-1].mean():.0f} in the last.",
        f"How far, in pixels, each head looks from a patch, averaged over {images} (Figures 7 right and 11). Patches "
        f"are {size} pixels apart."
        + (
            " Class token and registers are left out; attention to them counts as 0 pixels." if spec.prefix_rows else ""
        ),
        lambda: figures.head_dots(
            distance, "mean attention distance (pixels)", measure.uniform_distance(spec.grid, size)
        ),
    )
    yield Drawing(
        "attention_entropy",
        "Attention entropy",
        f"Dots for {heads}, from {entropy.min():.1f} to {entropy.max():.1f} nats; the mean goes from "
        f"{entropy[0].mean():.1f} in the first block to {entropy[-1].mean():.1f} in the last.",
        f"How widely each head spreads its attention, averaged over the tokens of {images}: 0 is attention to a single "
        f"token, {math.log(tokens):.2f} nats is equal attention to all {tokens}.",
        lambda: figures.head_dots(entropy, "attention entropy (nats)", math.log(tokens)),
    )


def similarity(observations: Observations) -> Drawing:
    """Returns the similarity of the representations of the blocks."""
    cka = observations.similarity
    return Drawing(
        "layer_similarity",
        "Similarity of representations",
        f"A square of {len(cka)} x {len(cka)} blocks, from {cka.min():.2f} to 1; the first and the last block "
        f"have {cka[0, -1]:.2f}.",
        "How similar the patches' representations after one block (row) and after another (column) are, by linear CKA "
        "(arXiv 1905.00414): 1 where they are equal up to a rotation and a scale. With fewer patches than channels "
        "all values are too large.",
        lambda: figures.layer_similarity(cka),
    )


def rollouts(observations: Observations) -> Iterator[Drawing]:
    """Yields the photographs seen through the attention."""
    pixels, rollout_maps = list(observations.pixels), list(observations.rollout)
    text = "Each photograph, and beside it the same, dark where the attention is low."
    caption = "Photographs, and what they look like through the attention of all blocks"
    for name, figure, draw in (("rollout", 6, figures.rollout_pairs), ("rollout_all", 14, figures.rollout_mosaic)):
        drawn = functools.partial(draw, pixels, rollout_maps)
        yield Drawing(name, "Attention of photographs", text, f"{caption} (Figure {figure}).", drawn)


def components(observations: Observations) -> Drawing:
    """Returns the principal components of the tokens of patches as colours."""
    seen = observations
    return Drawing(
        "patch_components",
        "Principal components of the patches",
        "Rows of pictures: images, and the same in colours that are equal where the model sees the same kind of thing.",
        "The first three principal components of the patches' tokens after the last block as red, green and blue, as "
        "in Figure 1 of arXiv 2304.07193: "
        + ("of all images together, and below of each by itself" if seen.count > 1 else "of this image")
        + f". They explain {seen.component_shares.sum():.0%} of the variance. The sign of a component means nothing.",
        lambda: figures.patch_components(seen.pixels, seen.components, seen.own_components),
    )


def predictions(observations: Observations) -> Iterator[Drawing]:
    """Yields what a model of masked patches predicts; nothing for other models."""
    corrupted, predicted = observations.corrupted, observations.predicted
    if corrupted is None or predicted is None:
        return
    yield Drawing(
        "predicted_patches",
        "Predicted patches",
        "Three rows of pictures: images, the same with grey and displaced patches, the same with predicted patches.",
        "Images; what the model is given of them: of the corrupted patches most are masked, here grey, and some are "
        "replaced by another patch; and its predictions in the place of all corrupted patches (section 4.6).",
        lambda: figures.predicted_patches(observations.pixels, corrupted, predicted),
    )
