"""Small pictures of what a model has learned: its filters and its positions, without axes, to lie beside others."""

from typing import Any

import numpy as np
from jaxtyping import Float

from vit_jax.analysis import measure
from vit_jax.analysis.overlays import mosaic, stretch
from vit_jax.analysis.plot import colour_map, encode_pixels

COLUMNS = 7  # filters beside each other
GREY = 128  # between small pictures


def filters_picture(params: dict[str, Any], is_hybrid: bool) -> bytes:
    """Returns the principal components of the filters that read pixels, WebP, each with its own scale."""
    components, _ = measure.embedding_filters(measure.pixel_filters(params, is_hybrid))
    picture = mosaic(np.stack([stretch(component) for component in components]), COLUMNS, gap=1)
    return _encode(np.where(np.isnan(picture), GREY, np.nan_to_num(picture) * 255))


def positions_picture(table: Float[np.ndarray, "rows width"], grid: tuple[int, int]) -> bytes:
    """Returns a map of similarities for each patch, WebP, from dark (-1) to bright (1)."""
    similarity = measure.position_similarity(table, grid)
    picture = mosaic(similarity.reshape(-1, *grid), grid[1], gap=1)
    colours = colour_map((np.nan_to_num(picture) + 1) / 2)
    return _encode(np.where(np.isnan(picture)[..., None], GREY, colours))


def _encode(pixels: np.ndarray) -> bytes:
    return encode_pixels(pixels.round().astype(np.uint8), lossless=True)
