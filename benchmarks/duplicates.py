"""Measures how many near-duplicates a perceptual hash misses, and how many unrelated images it takes for duplicates.

python -m benchmarks.duplicates --photos=data/photos --data-dir=data/tensorflow_datasets --write=docs/data.md

It measures the hash of `pack --without` and hashes of imagehash (`pip install ImageHash`, not a dependency): 8x8 and
16x16 bits of the cosine transform (phash), differences of neighbours (dhash), and wavelets (whash). Distances are
scaled to bits of 255. A changed image counts as missed if its distance from its own original is greater than the
threshold. An image counts as false if another image of its set is within the threshold.
"""

import argparse
import io
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageDraw

from docs.pages import replace_section
from vit_jax.data.packing.near_duplicates import hash_distances, perceptual_hash
from vit_jax.data.sources import SourceConfig, open_split

THRESHOLDS = (40, 60, 70)
SHORTER_SIDE = 256  # pixels of the shorter side of photographs
CHANGED = 200  # images of each set that are changed

Pixels = np.ndarray  # uint8 [height, width, 3]


class Ours:
    """The hash of `pack --without`."""

    def hash(self, pixels: Pixels) -> np.ndarray:
        """Returns the hash of an image in row 0, and the hash of its mirror image in row 1."""
        return perceptual_hash(pixels)

    def distances(self, one: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Returns the distances between one hash and each row of `others`, in bits of 255."""
        return hash_distances(one, np.ascontiguousarray(others.T))


class Library:
    """A hash of imagehash, with the methods of `Ours`."""

    def __init__(self, name: str, side: int):
        import imagehash

        self._hash, self._side = getattr(imagehash, name), side

    def hash(self, pixels: Pixels) -> np.ndarray:
        pair = (pixels, np.ascontiguousarray(pixels[:, ::-1]))
        return np.stack([self._hash(Image.fromarray(one), self._side).hash.ravel() for one in pair])

    def distances(self, one: np.ndarray, others: np.ndarray) -> np.ndarray:
        return (others ^ one).mean(axis=1) * 255


def jpeg(pixels: Pixels, quality: int) -> Pixels:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return np.array(Image.open(file))


def resized(pixels: Pixels, height: int, width: int) -> Pixels:
    return np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS))


def symmetric(pixels: Pixels) -> Pixels:
    half = pixels[:, : pixels.shape[1] // 2]
    return np.ascontiguousarray(np.concatenate([half, half[:, ::-1]], axis=1))


def drawing(seed: int) -> Pixels:
    """Returns an image with some black lines, ellipses and rectangles on white."""
    random, image = np.random.default_rng(seed), Image.new("RGB", (224, 224), "white")
    pen = ImageDraw.Draw(image)
    for _ in range(random.integers(2, 7)):
        left, right = sorted(random.choice(np.arange(10, 214), 2, replace=False).tolist())
        top, bottom = sorted(random.choice(np.arange(10, 214), 2, replace=False).tolist())
        shape = ("line", "ellipse", "rectangle")[random.integers(3)]
        style = {"fill": "black"} if shape == "line" else {"outline": "black"}
        getattr(pen, shape)([left, top, right, bottom], width=3, **style)
    return np.array(image)


def gradient(seed: int) -> Pixels:
    """Returns an image that interpolates between four random colours in its corners."""
    corners = np.random.default_rng(seed).uniform(0, 255, (2, 2, 3)).astype(np.float32)
    return cv2.resize(corners, (96, 96), interpolation=cv2.INTER_LINEAR).astype(np.uint8)


CHANGES: dict[str, Callable[[Pixels], Pixels]] = {
    "JPEG of quality 90": lambda pixels: jpeg(pixels, 90),
    "JPEG of quality 50": lambda pixels: jpeg(pixels, 50),
    "half the size": lambda pixels: resized(pixels, pixels.shape[0] // 2, pixels.shape[1] // 2),
    "64x64 pixels": lambda pixels: resized(pixels, 64, 64),
    "mirrored": lambda pixels: np.ascontiguousarray(pixels[:, ::-1]),
    "brighter": lambda pixels: np.clip(pixels * 1.2 + 10, 0, 255).astype(np.uint8),
    "shifted by 1 pixel": lambda pixels: np.ascontiguousarray(pixels[1:, 1:]),
    "shifted by 8 pixels": lambda pixels: np.ascontiguousarray(pixels[8:, 8:]),
}


def read_sets(photos: Path, data_dir: str) -> dict[str, list[Pixels]]:
    """Returns name -> images: photographs, CIFAR-10 (test), symmetric images of both, drawings, and gradients."""
    taken = []
    for path in sorted(path for path in photos.rglob("*") if path.is_file()):
        pixels = np.array(Image.open(path).convert("RGB"))
        height, width = (SHORTER_SIDE * side // min(pixels.shape[:2]) for side in pixels.shape[:2])
        taken.append(resized(pixels, height, width))
    source = open_split(SourceConfig("tfds:cifar10", data_dir), "test")
    small = [np.asarray(source[index]["image"]) for index in range(0, len(source), 5)]
    return {
        "photographs": taken,
        "CIFAR-10": small,
        "symmetric": [symmetric(pixels) for pixels in (*taken[:100], *small[:100])],
        "drawings": [drawing(seed) for seed in range(400)],
        "gradients": [gradient(seed) for seed in range(200)],
    }


def measure(kind: Ours | Library, images: list[Pixels]) -> tuple[list[float], dict[str, list[float]]]:
    """Returns the percentage of false images at each threshold, and change -> percentage missed at each threshold."""
    hashes = np.concatenate([kind.hash(pixels) for pixels in images])
    nearest = []
    for index in range(len(images)):
        distances = kind.distances(hashes[2 * index], hashes)
        distances[2 * index : 2 * index + 2] = np.inf
        nearest.append(distances.min())
    missed = {}
    for name, change in CHANGES.items():
        own = [
            kind.distances(kind.hash(change(pixels))[0], hashes[2 * index : 2 * index + 2]).min()
            for index, pixels in enumerate(images[:CHANGED])
        ]
        missed[name] = [float(np.mean(np.array(own) > threshold)) * 100 for threshold in THRESHOLDS]
    return [float(np.mean(np.array(nearest) <= threshold)) * 100 for threshold in THRESHOLDS], missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="folder of photographs")
    parser.add_argument("--data-dir", required=True, help="folder of TFDS data, with CIFAR-10")
    parser.add_argument("--write", type=Path, help="page whose table this replaces")
    args = parser.parse_args()
    kinds: dict[str, Ours | Library] = {"ours": Ours()}
    kinds |= {"phash 16": Library("phash", 16), "phash 8": Library("phash", 8), "dhash 16": Library("dhash", 16)}
    kinds |= {"whash 8": Library("whash", 8)}
    lines = [f"| images | % | {' | '.join(kinds)} |", "|---|---|" + "---|" * len(kinds)]
    for name, images in read_sets(args.photos, args.data_dir).items():
        found = {kind: measure(one, images) for kind, one in kinds.items()}
        cells = {f"{len(images):,} {name}": {"false": [of[0] for of in found.values()]}}
        cells[name] = {f"missed: {change}": [of[1][change] for of in found.values()] for change in CHANGES}
        for title, rows in cells.items():
            for what, values in rows.items():
                shown = " | ".join(", ".join(f"{value:.3g}" for value in one) for one in values)
                if what == "false" or any(map(any, values)):
                    lines.append(f"| {title} | {what} | {shown} |")
    print("\n".join(lines))
    if args.write:
        replace_section(args.write, "duplicates", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
