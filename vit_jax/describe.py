"""Describes shards that another program wrote: counts their records once and writes info.json beside them.

Runs that read the shards then start without opening all of them. Of shards on a bucket only the ends are read. The last
image of each shard is checked. Before the first run, name and class_names (a list of names) in info.json may be edited.
Beside the tar files of a WebDataset, which are read from end to end, it writes _info.json.

Example:
  python -m vit_jax.describe array_record:gs://my-bucket/photos --num-classes=1000
"""

import argparse

from tqdm import tqdm

from vit_jax import UserError, cli
from vit_jax.data.sources import describe_source


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.describe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="array_record:FOLDER or webdataset:FOLDER, local or on a bucket")
    parser.add_argument("--num-classes", type=int, required=True, help="labels are 0 to this number - 1")
    parser.add_argument("--max-labels", type=int, help="most labels of an image, in multi-label data [one each]")
    return parser


def main(argv: list[str]) -> None:
    """Runs the command line."""
    args = make_parser().parse_args(argv[1:])
    for flag, value in (("num-classes", args.num_classes), ("max-labels", args.max_labels)):
        if value is not None and value < 1:
            raise UserError(f"--{flag}={value} must be at least 1")
    with tqdm(unit="shard", disable=None) as bar:
        description = describe_source(args.source, args.num_classes, args.max_labels, bar.update)
    splits = description.splits
    counts = ", ".join(f"{split} {sum(entry.records for entry in of):,}" for split, of in splits.items())
    size = sum(entry.size for of in splits.values() for entry in of)
    images = sum(entry.records for of in splits.values() for entry in of)
    verb = "written" if description.is_new else "there already, unchanged"
    print(
        f"{description.path}: {verb}; {images:,} images ({counts}), {sum(map(len, splits.values())):,} shards, "
        f"{size:,} bytes"
    )


if __name__ == "__main__":
    cli.run_command(main, rerun_advice="the same command counts the shards again.")
