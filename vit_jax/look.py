"""Shows what a model does inside, in pictures.

These are attention maps of photographs, and the paper's figures of heads, filters and positions.

Examples:
  python -m vit_jax.look workdirs/digits data/photo.png --out=workdirs/look
  python -m vit_jax.look ViT-B/16-imagenet2012-224 data/photos --out=workdirs/look --saliency

Writes index.html, a page that needs no network and no other file; every figure as PNG and SVG; and measures.npz, the
numbers behind them.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit_jax import UserError, analysis, cli, data, user_errors, without_queries
from vit_jax.data.images import list_images
from vit_jax.evals import count_nonfinite, open_weights, refuse_nonfinite, rounded
from vit_jax.model import Model


def look(
    checkpoint: str | Path,
    images: Sequence[str | Path],
    folder: str | Path,
    *,
    top: int = 5,
    batch: int | None = None,
    saliency: bool = False,
    resolution: int | tuple[int, ...] | None = None,
) -> list[Path]:
    """Writes the figures and the page of a model and some images, and returns the files, the page first.

    Args:
        checkpoint: anything that `vit_jax.load` reads.
        images: files, local or remote, 1 or more.
        folder: the folder to write to.
        top: the number of classes to show for each image, from the most probable.
        batch: images at a time over all devices, rounded up to a multiple of their number; None: chosen.
        saliency: whether to show also the gradient of each image's first class, which takes twice the time of all else.
        resolution: the size of the images, as for `vit_jax.load`.

    Raises:
        UserError: the checkpoint or an image cannot be read, a number is too small, the folder cannot be written to, or
            matplotlib is missing.
    """
    if top < 1:
        raise UserError(f"top must be at least 1, not {top}.")
    with user_errors("cannot draw", ModuleNotFoundError):
        from vit_jax.analysis import look_page  # which needs matplotlib
    model, params, seen = examine(checkpoint, images, batch=batch, saliency=saliency, resolution=resolution)
    names = [str(image) for image in images[: len(seen.pixels)]]
    with user_errors(f"cannot write to {folder}"):
        return look_page.write_look(Path(folder), without_queries(str(checkpoint)), model, params, names, seen, top)


def examine(
    checkpoint: str | Path,
    images: Sequence[str | Path | np.ndarray],
    *,
    batch: int | None = None,
    saliency: bool = False,
    resolution: int | tuple[int, ...] | None = None,
) -> tuple[Model, dict[str, Any], analysis.observe.Observations]:
    """Returns a model, its parameters as NumPy arrays, and what it does with images.

    Args:
        checkpoint: see `look`.
        images: see `look`; or RGB uint8 arrays [height, width, 3].
        batch: see `look`.
        saliency: see `look`.
        resolution: see `look`.

    Raises:
        UserError: the checkpoint or an image cannot be read, or a number is too small.
    """
    for name, number in (("batch", batch), ("the number of images", len(images))):
        if number is not None and number < 1:
            raise UserError(f"{name} must be at least 1, not {number}.")
    loaded = open_weights(checkpoint, 1, None, resolution)
    program, params = loaded.program, loaded.read()
    preprocess = program.model.preprocess
    if preprocess is None:
        advice = "give preprocess= to vit_jax.load and write the model with vit_jax.save"
        raise UserError(f"{checkpoint} does not state how images are preprocessed; {advice}.")
    if saliency and program.model.field("head") == "patches":
        raise UserError(f"{checkpoint} predicts masked patches, not classes; leave out --saliency.")
    batch = analysis.observe.choose_batch(program, len(images)) if batch is None else rounded(batch)
    on_devices = jax.device_put(params, program.params_shardings)
    arrays = read_images(images, preprocess)
    values = data.value_range_of(preprocess)
    seen = analysis.observe.observe(program, on_devices, arrays, batch, len(images), saliency, values)
    refuse_nonfinite(f"{checkpoint}: the logits", count_nonfinite(seen.logits), len(seen.logits))
    return program.model, params, seen


def read_images(images: Sequence[str | Path | np.ndarray], preprocess: str) -> Iterator[np.ndarray]:
    """Yields preprocessed images. If stderr is a terminal, prints how many have been read."""
    for number, image in enumerate(images, 1):
        yield data.load_image(image, preprocess)
        if sys.stderr.isatty():
            print(f"\r{number} of {len(images)} images", end="\n" if number == len(images) else "", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.look", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a workdir, or any weights that vit_jax.load reads")
    parser.add_argument(
        "images", nargs="+", metavar="image", help="an image file, or a folder: all images in and below it"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--top", type=int, default=5, help="number of classes of each image [5]")
    parser.add_argument("--batch", type=int, help="images at a time over all devices [chosen to fit this machine]")
    parser.add_argument("--saliency", action="store_true", help="also on which pixels the first class depends")
    cli.add_resolution(parser, "that of the stated preprocessing")
    return parser


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: see `look`.
    """
    args = make_parser().parse_args(argv[1:])
    images = [path for path_or_folder in args.images for path in list_images(path_or_folder)]
    cli.use_compilation_cache()
    chosen = {name: getattr(args, name) for name in ("top", "batch", "saliency", "resolution")}
    for path in look(args.checkpoint, images, args.out, **chosen):
        print(path)


if __name__ == "__main__":
    cli.run_command(main, is_report=True)
