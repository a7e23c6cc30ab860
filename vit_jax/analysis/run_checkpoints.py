"""The part of a report on how filters and positions change from one kept checkpoint to the next."""

import functools
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from vit_jax import UserError, interop
from vit_jax.analysis import html, measure
from vit_jax.analysis.captioned_figures import UNLEARNED_CAPTIONS, position_table
from vit_jax.analysis.figures import mosaic, stretch
from vit_jax.analysis.plot import colour_map, encode_pixels
from vit_jax.monitoring import RunFolder

PIXELATED_ATTRIBUTE = 'class="pixels"'
MAX_CHECKPOINTS = 6  # checkpoints that are shown, spread over all
COLUMNS = 7  # filters beside each other
GREY = 128  # between small pictures
PICTURES = (
    (
        "Embedding filters",
        "The principal components of the filters that read the pixels (Figure 7 left), each with its own scale.",
    ),
    (
        "Similarity of position embeddings",
        "For each patch a small map, at its place: the cosine similarity of its position embedding to those of all "
        "patches (Figures 7 centre and 10), from dark (-1) to bright (1).",
    ),
)


def checkpoints_part(run: RunFolder) -> str:
    """Returns the HTML for the checkpoints of a run."""
    steps = sorted(int(path.name) for path in Path(run.location, "checkpoints").glob("*") if path.name.isdigit())
    if not steps:
        return "<p>No checkpoint lies here. Those in buckets are not read.</p>"
    chosen = [steps[index] for index in np.unique(np.linspace(0, len(steps) - 1, MAX_CHECKPOINTS).round().astype(int))]
    drawn = {}
    for step in chosen:
        try:
            path = Path(run.location, "checkpoints", str(step))
            drawn[step] = draw_checkpoint(str(path), path.stat().st_mtime_ns)
        except (
            UserError,
            OSError,
        ):  # it is still being written, was removed meanwhile, or is damaged, as a resumed run will say
            continue
    words = f"{len(drawn):,} of the {len(steps):,} checkpoints that were kept (<code>checkpoint.keep_last</code>)."
    parts = [f"<p>{words}</p>"]
    for index, (title, caption) in enumerate(PICTURES):
        figures = [
            f"<figure>{html.image(pictures[index], f'{title} after step {step:,}', PIXELATED_ATTRIBUTE)}"
            f"<figcaption>step {step:,}</figcaption></figure>"
            for step, pictures in drawn.items()
            if pictures[index]
        ]
        told = caption if figures else "This model has none for each patch."
        parts.append(f'<h3>{title}</h3><p>{escape(told)}</p><div class="row large">{"".join(figures)}</div>')
    return "".join(parts)


@functools.lru_cache(maxsize=64)
def draw_checkpoint(path: str, modified: int) -> tuple[bytes, bytes]:
    """Returns the pictures of a checkpoint in the order of `PICTURES`; empty where its model has no such thing.

    Args:
        path: the path of the checkpoint.
        modified: when the checkpoint was modified, in nanoseconds. Pictures that are kept in memory are not returned
            for another checkpoint that has taken its place.

    Raises:
        UserError: the checkpoint cannot be read.
    """
    del modified
    model, params = interop.load(path, dtype="float32")
    try:
        spec = model.vit
    except UserError:  # a BiT
        return b"", b""
    has_table = spec.position.kind not in UNLEARNED_CAPTIONS
    positions = positions_picture(position_table(spec, params), spec.grid) if has_table else b""
    return filters_picture(params, spec.stem.kind == "resnet"), positions


def filters_picture(params: dict[str, Any], is_hybrid: bool) -> bytes:
    """Returns a WebP file with the principal components of the filters that read pixels, each with its own scale."""
    components, _ = measure.embedding_filters(measure.pixel_filters(params, is_hybrid))
    picture = mosaic(np.stack([stretch(component) for component in components]), COLUMNS, gap=1)
    return _encode(np.where(np.isnan(picture), GREY, np.nan_to_num(picture) * 255))


def positions_picture(table: Float[np.ndarray, "rows width"], grid: tuple[int, int]) -> bytes:
    """Returns a WebP file with a map of similarities for each patch, from dark (-1) to bright (1)."""
    similarity = measure.position_similarity(table, grid)
    picture = mosaic(similarity.reshape(-1, *grid), grid[1], gap=1)
    colours = colour_map((np.nan_to_num(picture) + 1) / 2)
    return _encode(np.where(np.isnan(picture)[..., None], GREY, colours))


def _encode(pixels: np.ndarray) -> bytes:
    return encode_pixels(pixels.round().astype(np.uint8), lossless=True)
