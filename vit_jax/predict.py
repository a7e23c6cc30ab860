"""Prints the most probable classes of images.

Examples:
  python -m vit_jax.predict workdirs/digits data/photo.png --top=3
  python -m vit_jax.predict workdirs/digits data/photos --top=1 --csv > workdirs/photos.csv
  python -m vit_jax.predict workdirs/digits folder:data/photos --split=train --json
  python -m vit_jax.predict hf-hub:openai/clip-vit-base-patch32 data/photos --texts=data/words.npz
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import UserError, cli, data, interop, printable, refuse, tell
from vit_jax.data.images import DecodeError, list_images
from vit_jax.evals import Texts, read_texts, refuse_nonfinite
from vit_jax.json_text import to_json
from vit_jax.kernel_trials import check_kernels
from vit_jax.tree import ArrayTree

Images: TypeAlias = Sequence[str | Path | np.ndarray | data.SourceImage]


def predict(
    checkpoint: str | Path,
    images: Images,
    top: int = 5,
    batch: int = 8,
    *,
    skip_unreadable: bool = False,
    resolution: int | tuple[int, ...] | None = None,
    texts: str | Path | Texts | None = None,
) -> list[dict]:
    """Returns, for each image, `{"image": path, "classes": [{"class": name, "probability": p}, ...]}`, best first.

    Probabilities are the softmax or the sigmoid of the logits, depending on the loss that the model was trained with.
    Images are turned upright according to their EXIF data, and preprocessed as in the evaluation of the run that wrote
    the checkpoint. An image may also be an RGB uint8 array [height, width, 3], whose path is then its index, or
    an image of a source. `batch` images are read into memory and predicted at a time. With `skip_unreadable`, images
    that cannot be decoded are left out, after a line for each on stderr. `resolution` is as for `vit_jax.load`.
    With `texts`, those of `make_texts` or their .npz file, the classes are the texts, and a head is not used.

    Raises:
        UserError: the checkpoint, the texts or an image cannot be read, the texts are for other features, logits are
            not finite, or a number is too small.
    """
    return list(iterate_predictions(checkpoint, images, top, batch, skip_unreadable, resolution, texts))


def iterate_predictions(
    checkpoint: str | Path,
    images: Images,
    top: int = 5,
    batch: int = 8,
    skip_unreadable: bool = False,
    resolution: int | tuple[int, ...] | None = None,
    texts: str | Path | Texts | None = None,
) -> Iterator[dict]:
    """Yields the results of `predict` as they are computed, so that those before an unreadable image are not lost."""
    if isinstance(texts, str | Path):
        texts = read_texts(texts)  # before the weights, which may be large
    model, params = interop.load(checkpoint, resolution=resolution)
    preprocess = model.preprocess
    if preprocess is None:
        advice = "give preprocess= to vit_jax.load and write the model with vit_jax.save"
        raise UserError(f"{checkpoint} does not state how images are preprocessed; {advice}.")
    refuse(
        (
            not texts and not model.field("num_classes"),
            f"{checkpoint} has no head, so it predicts no classes; fine-tune it with --config.init_from first, or give "
            "vectors of texts, --texts=FILE.npz.",
        ),
        (
            not texts and model.field("head") == "patches",
            f"{checkpoint} predicts masked patches, not classes; fine-tune it with --config.init_from first.",
        ),
        (top < 1, f"top must be at least 1, not {top}."),
        (batch < 1, f"batch must be at least 1, not {batch}."),
    )
    if texts:
        texts.check_width(model)
    device = jax.local_devices()[0]
    model = check_kernels(model.for_device(device.device_kind, batch), device)
    activation = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[texts.loss if texts else model.loss]

    @jax.jit
    def apply(params: ArrayTree, texts: Texts | None, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, out = model.apply(params, images)
        logits = texts.logits(out["pre_logits"]) if texts else logits
        return activation(logits), jnp.isfinite(logits).all(axis=1)

    arrays = jax.device_put((params, texts))  # once, not for every batch
    names = texts.names if texts else model.class_names or [str(i) for i in range(model.field("num_classes"))]
    size = max(1, min(batch, len(images)))
    for start in range(0, len(images), size):
        given = {}
        for number in range(start, min(start + size, len(images))):
            try:
                given[number] = data.load_image(images[number], preprocess)
            except DecodeError as error:
                if not skip_unreadable:
                    raise
                tell(f"left out: {error}")
        if not given:
            continue
        pixels = list(given.values())
        full = np.stack(pixels + pixels[-1:] * (size - len(pixels)))  # all batches have one shape: one compilation
        rows, finite = map(np.asarray, apply(*arrays, full))
        refuse_nonfinite(f"{checkpoint}: the logits", int(np.count_nonzero(~finite[: len(given)])), len(given))
        for number, row in zip(given, rows, strict=False):
            order = np.argsort(-row, kind="stable")[:top]
            classes = [{"class": names[i], "probability": float(row[i])} for i in order]
            path = number if isinstance(images[number], np.ndarray) else images[number]
            yield {"image": str(path), "classes": classes}


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a workdir, or any weights that vit_jax.load reads")
    parser.add_argument(
        "images", nargs="+", metavar="image", help="an image file, or a folder: all images in and below it"
    )
    parser.add_argument("--split", help="the images are data sources, as config.data.source; their split to predict")
    parser.add_argument("--data-dir", help="of TFDS data")
    parser.add_argument("--texts", metavar="FILE.npz", help="the classes are these texts, see docs/evaluation.md")
    parser.add_argument("--top", type=int, default=5, help="number of classes to print [5]")
    parser.add_argument("--batch", type=int, default=8, help="images to predict at a time [8]")
    parser.add_argument(
        "--bad-images",
        choices=("fail", "skip"),
        default="fail",
        help="stop at an unreadable image, or leave it out and list it on stderr [fail]",
    )
    cli.add_resolution(parser, "that of the stated preprocessing")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object a line")
    output.add_argument("--csv", action="store_true", help="print CSV: one line for each image and class, best first")
    return parser


def main(argv: list[str]) -> None:
    """Runs the command line."""
    args = make_parser().parse_args(argv[1:])
    images: list[str | data.SourceImage] = []
    for place in args.images:
        images += data.list_source_images(place, args.split, args.data_dir) if args.split else list_images(place)
    table = csv.writer(sys.stdout, lineterminator="\n")
    if args.csv:
        table.writerow(["image", "rank", "class", "probability"])
    skips = args.bad_images == "skip"
    for result in iterate_predictions(
        args.checkpoint, images, args.top, args.batch, skips, args.resolution, args.texts
    ):
        if args.json:
            print(to_json(result))
            continue
        if not args.csv:
            print(printable(result["image"]))
        for rank, entry in enumerate(result["classes"], 1):
            name, probability = printable(entry["class"]), entry["probability"]
            if args.csv:
                table.writerow([printable(result["image"]), rank, name, f"{probability:.6g}"])
            else:
                print(f"  {probability:7.2%}  {name}")


if __name__ == "__main__":
    cli.run_command(main, is_report=True)
