"""Packs a data set into shards of encoded images: a few large files with fast access to any image.

Packs all splits, in the source's order, so that training from `array_record:OUT` is bit for bit training from the
source: images keep their bytes wherever no pixel changes. Photographs in folders are turned upright (which encodes a
JPEG again); on request, large images are shrunk, all are stored as pixels, only some classes are packed, and
near-duplicates of a test set are left out. After an interruption, the same command resumes; when image files have
changed, it packs their shards again.

Example:
  python -m vit_jax.pack folder:data/photos data/packed/photos --shorter-side=512
  python -m vit_jax.main --config=configs/folder.py --config.data.source=array_record:data/packed/photos
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

from vit_jax import UserError, cli, first_names
from vit_jax.data import packing
from vit_jax.data.images import EncodeOptions, Encoding, PixelOptions
from vit_jax.data.sources import SourceConfig, describe_classes
from vit_jax.json_text import to_json
from vit_jax.storage import expand_home

SUSPICIOUS_DUPLICATE_FRACTION = 0.05  # of the images left out as near-duplicates: photographs seldom have so many


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.pack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="as config.data.source: folder:PATH, tfds:NAME, npz:PATH, ...")
    parser.add_argument("out", help="folder to write the shards and info.json into")
    parser.add_argument("--shards", type=positive, help="shards per split, at most one per image [about 256 MB each]")
    parser.add_argument(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="pack in a random order, in shards of 64 MB: to be streamed from a bucket [the source's order]",
    )
    parser.add_argument("--splits", help="splits to pack, for example train,validation [all]")
    parser.add_argument("--classes", metavar="NAME,0-4", help="pack only these classes, labelled in this order [all]")
    parser.add_argument(
        "--without",
        action="append",
        metavar="SOURCE[,split=SPLIT]",
        help="leave out near-duplicates of the images of this split [test], as of tfds:cifar10; may be repeated",
    )
    parser.add_argument(
        "--max-distance",
        type=int,
        default=packing.MAX_DISTANCE,
        metavar="BITS",
        help="of 255, by which the perceptual hashes of near-duplicates may differ [%(default)s]",
    )
    parser.add_argument(
        "--shorter-side", type=positive, metavar="PX", help="shrink larger images to this shorter side, saved as JPEG"
    )
    parser.add_argument(
        "--quality",
        type=positive,
        help=f"quality of JPEG files that are encoded again, 1 to 100 [{EncodeOptions.quality}]",
    )
    parser.add_argument(
        "--pixels",
        type=positive,
        metavar="PX",
        help="shrink as --shorter-side, but store pixels: large, and read faster",
    )
    parser.add_argument(
        "--bad-images",
        choices=("fail", "skip"),
        default="fail",
        help="stop at an unreadable image, or leave it out [fail]",
    )
    parser.add_argument(
        "--index-labels",
        action="store_true",
        help="write the labels of all images beside the shards, for fields that count classes, such as data.balance",
    )
    parser.add_argument("--no-decode", action="store_true", help="copy without decoding: faster, but notices no damage")
    parser.add_argument("--data-dir", help="folder of TFDS data")
    parser.add_argument(
        "--num-classes", type=positive, help="number of classes, for shards without an info.json that states it"
    )
    parser.add_argument("--max-labels", type=positive, help="most labels of an image, for such shards")
    parser.add_argument("--workers", type=positive, default=0, help="threads that read and encode [one per core]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str]) -> None:
    """Runs the command line."""
    args = make_parser().parse_args(argv[1:])
    if "://" in args.out:
        raise UserError(f"cannot pack into {args.out}: pack into a local folder, then copy it there")
    if (args.shuffle or 0) < 0:
        raise UserError(f"--shuffle={args.shuffle} must be at least 0")
    start = time.monotonic()
    writer = packing.make_shard_writer(
        SourceConfig(args.source, args.data_dir, args.num_classes, args.max_labels),
        choose_encoding(args),
        splits=args.splits and args.splits.split(","),
        classes=args.classes,
        without=args.without or (),
        max_distance=args.max_distance,
        shards=args.shards,
        shuffle=args.shuffle,
        skip_unreadable=args.bad_images == "skip",
        workers=args.workers,
        index_labels=args.index_labels,
    )
    for split, source in writer.sources.items():
        print(f"Split {split}: {describe_classes(source)}", file=sys.stderr)
    for note in dict.fromkeys(note for source in writer.sources.values() for note in source.notes):
        print(note, file=sys.stderr)
    total, size = sum(map(len, writer.rows.values())), sum(writer.sizes.values())
    print(f"{plural(total, 'image')} to pack, about {size:,.0f} bytes", file=sys.stderr)
    with tqdm(total=total, unit="image", unit_scale=True, disable=None) as bar:
        result = writer.run(str(expand_home(args.out)), bar.update)
    seconds = time.monotonic() - start
    share = result.duplicates / (sum(result.records.values()) + result.duplicates or 1)
    if share > SUSPICIOUS_DUPLICATE_FRACTION:
        print(f"{share:.0%} of the images were left out as near-duplicates; see --max-distance.", file=sys.stderr)
    for line in describe_emptied(writer.manifest.class_names, result):
        print(f"WARNING: {line}", file=sys.stderr)
    if args.json:
        print(to_json({**dataclasses.asdict(result), "seconds": round(seconds, 3)}))
        return
    counts = ", ".join(f"{split} {count:,}" for split, count in result.records.items())
    speed = f"{result.read:,} read in {seconds:.1f} s, {result.read / seconds:,.0f} per second"
    print(
        f"{args.out}: {plural(sum(result.records.values()), 'image')} ({counts}), {plural(result.shards, 'shard')}, "
        f"{result.size:,} bytes; {speed}; {result.left_out:,} unreadable left out"
        + (f"; {plural(result.duplicates, 'near-duplicate')} left out, listed in info.json" if args.without else "")
    )


def choose_encoding(args: argparse.Namespace) -> Encoding:
    """Returns how images are stored; raises UserError if the options for it contradict each other."""
    if not args.pixels:
        if (args.quality or 0) > 100:
            raise UserError(f"--quality={args.quality} must be at most 100")
        return EncodeOptions(args.shorter_side, args.quality or EncodeOptions.quality, not args.no_decode)
    for option in ("shorter_side", "quality", "no_decode"):
        if getattr(args, option):
            name = f"--{option.replace('_', '-')}"
            raise UserError(f"--pixels={args.pixels} states how images are stored; leave out {name}, or --pixels")
    return PixelOptions(args.pixels)


def describe_emptied(class_names: Sequence[str] | None, result: packing.WrittenShards) -> list[str]:
    """Returns a sentence for each split without records and for each in which classes lost all their images."""
    lines = []
    for split, records in result.records.items():
        if not records:
            lines.append(f"no record of split {split} is left: all its images are near-duplicates; see --max-distance.")
        elif labels := result.emptied.get(split):
            names = [class_names[label] if class_names else f"{label}" for label in labels]
            classes = f"{plural(len(names), 'class', 'es')} ({first_names(names)})"
            words = f"all images of {classes} are near-duplicates and were left out"
            lines.append(f"split {split}: {words}; see info.json, and --max-distance.")
    return lines


def plural(number: int, thing: str, ending: str = "s") -> str:
    """Returns `1 image`, `2 images`."""
    return f"{number:,} {thing}{'' if number == 1 else ending}"


def positive(text: str) -> int:
    """Returns a whole number above 0, or raises ValueError."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


if __name__ == "__main__":
    cli.run_command(main, rerun_advice="the same command packs what is missing.")
