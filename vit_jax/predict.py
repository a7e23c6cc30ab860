"""Prints the most probable classes of images.

Example:
  python -m vit_jax.predict workdirs/digits photo.png --top=3
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from vit_jax import UserError, cli, data, interop, shown


def predict(
    checkpoint: str | Path, images: Sequence[str | Path | np.ndarray], top: int = 5, batch: int = 8
) -> list[dict]:
    """Returns, for each image, `{"image": path, "classes": [{"class": name, "probability": p}, ...]}`, best first.

    Probabilities are softmax or sigmoid of the logits, as the model was trained. Images are turned upright as their
    EXIF data says, and preprocessed as in the evaluation of the run that made the checkpoint. An image may be RGB uint8
    [height, width, 3] as well; its path is then its number. `batch` images are in memory and predicted at once.

    Raises:
        UserError: the checkpoint or an image cannot be read, or a number is too small.
    """
    model, params = interop.load(checkpoint)
    if model.preprocess is None:
        raise UserError(f"{checkpoint} does not say how its images are preprocessed.")
    if not model.spec.head.num_classes:
        raise UserError(f"{checkpoint} has no head: it names no classes.")
    for name, number in (("top", top), ("batch", batch)):
        if number < 1:
            raise UserError(f"{name} must be at least 1, not {number}.")
    activation = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[model.loss]
    apply = jax.jit(lambda params, images: activation(model.apply(params, images)[0]))
    params = jax.device_put(params)  # once, not with every batch
    names = model.class_names or [str(i) for i in range(model.spec.head.num_classes)]
    size = max(1, min(batch, len(images)))
    results = []
    for start in range(0, len(images), size):
        given = [data.read(image, model.preprocess) for image in images[start : start + size]]
        full = np.stack(given + given[-1:] * (size - len(given)))  # of one shape, so that there is one compilation
        for number, row in enumerate(np.asarray(apply(params, full))[: len(given)], start):
            order = np.argsort(-row, kind="stable")[:top]
            classes = [{"class": names[i], "probability": float(row[i])} for i in order]
            path = number if isinstance(images[number], np.ndarray) else images[number]
            results.append({"image": str(path), "classes": classes})
    return results


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="workdir, checkpoint folder or model.npz, local or remote")
    parser.add_argument("images", nargs="+", metavar="image", help="JPEG, PNG or WebP file")
    parser.add_argument("--top", type=int, default=5, help="how many classes to print [5]")
    parser.add_argument("--batch", type=int, default=8, help="images to predict at once [8]")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    args = parser.parse_args(argv[1:])
    for result in predict(args.checkpoint, args.images, args.top, args.batch):
        if args.json:
            print(json.dumps(result))
            continue
        print(result["image"])
        for entry in result["classes"]:
            print(f"  {entry['probability']:7.2%}  {shown(entry['class'])}")


if __name__ == "__main__":
    cli.run(main)
