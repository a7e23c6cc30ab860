"""Prints the most probable classes of images, all probable ones where an image may have several, or numbers.

Examples:
  python -m vit_jax.predict workdirs/digits data/photo.png --top=3
  python -m vit_jax.predict workdirs/digits data/photos --top=1 --csv > workdirs/photos.csv
  python -m vit_jax.predict workdirs/digits folder:data/photos --split=train --json
  python -m vit_jax.predict hf-hub:openai/clip-vit-base-patch32 data/photos --texts=data/words.npz
"""

import argparse
import csv
import dataclasses
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

TOP = 5  # classes of an image that has one
THRESHOLD = 0.5  # above which a class is predicted where an image has any number of them
Images: TypeAlias = Sequence[str | Path | np.ndarray | data.SourceImage]


def predict(
    checkpoint: str | Path,
    images: Images,
    top: int | None = None,
    batch: int = 8,
    *,
    skip_unreadable: bool = False,
    resolution: int | tuple[int, ...] | None = None,
    texts: str | Path | Texts | None = None,
) -> list[dict]:
    """Returns, for each image, `{"image": path, "classes": [{"class": name, "probability": p}, ...]}`, best first.

    There are `top` classes; None: 5 or, if the model was trained on images with several classes or none, all with a
    probability above 0.5. Of a regression it is `{"image": path, "numbers": {name: number, ...}}`, in the units of the
    data.

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
    top: int | None = None,
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
        (
            top is not None and not texts and model.is_regression,
            f"{checkpoint} predicts numbers, not classes; leave out top.",
        ),
        (top is not None and top < 1, f"top must be at least 1, not {top}."),
        (batch < 1, f"batch must be at least 1, not {batch}."),
    )
    if texts:
        texts.check_width(model)
    device = jax.local_devices()[0]
    model = check_kernels(model.for_device(device.device_kind, batch), device)
    described = dataclasses.replace(model, loss=texts.loss, multi_label=False) if texts else model

    @jax.jit
    def apply(params: ArrayTree, texts: Texts | None, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, out = model.apply(params, images)
        logits = texts.logits(out["pre_logits"]) if texts else logits
        return described.activate(logits), jnp.isfinite(logits).all(axis=1)

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
            path = number if isinstance(images[number], np.ndarray) else images[number]
            if described.is_regression:
                yield {"image": str(path), "numbers": dict(zip(names, row.tolist(), strict=True))}
                continue
            order = np.argsort(-row, kind="stable")
            few = (
                row[order] > THRESHOLD if described.multi_label and top is None else slice(TOP if top is None else top)
            )
            classes = [{"class": names[i], "probability": float(row[i])} for i in order[few]]
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
    parser.add_argument(
        "--top", type=int, help="number of classes to print [5; all above 50 %% if an image may have several or none]"
    )
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
    output.add_argument(
        "--csv",
        action="store_true",
        help="print CSV: one line for each image and class, best first, or with all numbers",
    )
    return parser


def main(argv: list[str]) -> None:
    """Runs the command line."""
    args = make_parser().parse_args(argv[1:])
    images: list[str | data.SourceImage] = []
    for place in args.images:
        images += data.list_source_images(place, args.split, args.data_dir) if args.split else list_images(place)
    table, is_first = csv.writer(sys.stdout, lineterminator="\n"), True
    skips = args.bad_images == "skip"
    for result in iterate_predictions(
        args.checkpoint, images, args.top, args.batch, skips, args.resolution, args.texts
    ):
        if args.json:
            print(to_json(result))
        elif args.csv:
            table.writerows(csv_rows(result)[0 if is_first else 1 :])
            is_first = False
        else:
            print("\n".join(text_lines(result)))


def csv_rows(result: dict) -> list[list]:
    """Returns a line of headings, then those of an image: one with its numbers, or one for each class.

    An image without a class has a line without one.
    """
    image = printable(result["image"])
    if "numbers" in result:
        names, numbers = zip(*result["numbers"].items(), strict=True)
        return [["image", *map(printable, names)], [image, *(f"{number:.6g}" for number in numbers)]]
    classes = [
        [image, rank, printable(entry["class"]), f"{entry['probability']:.6g}"]
        for rank, entry in enumerate(result["classes"], 1)
    ]
    return [["image", "rank", "class", "probability"], *(classes or [[image, "", "", ""]])]


def text_lines(result: dict) -> list[str]:
    """Returns the name of an image, and a line for each of its classes or numbers."""
    if "numbers" in result:
        lines = [f"  {number:12.6g}  {printable(name)}" for name, number in result["numbers"].items()]
    else:
        lines = [f"  {entry['probability']:7.2%}  {printable(entry['class'])}" for entry in result["classes"]]
    return [printable(result["image"]), *(lines or [f"  no class above {THRESHOLD:.0%}"])]


if __name__ == "__main__":
    cli.run_command(main, is_report=True)
