"""Writes the features, or the most probable classes, of all images of a source as Parquet files.

Examples:
  python -m vit_jax.embed data/photos workdirs/photos --of=workdirs/digits
  python -m vit_jax.embed folder:data/photos workdirs/train --of=ViT-B_16 --split=train --outputs=features,logits
  python -m vit_jax.embed data/photos workdirs/photos --of=workdirs/digits --top=5 --neighbours=8

SOURCE is a data source, as config.data.source, or a folder of images without classes, or one image. OUT, a folder,
local or remote, gets info.json and files with the columns name, label (where there is one), error (null, or why an
image is unreadable), and one for each output. All devices compute; each of several hosts writes its own files.
After an interruption, the same command writes the files that are missing. vit_jax.evaluate --features=OUT reads them.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from vit_jax import UserError, checkpoint, cli, data, refuse, tell, user_errors
from vit_jax.data import sources
from vit_jax.evals import EmbeddingWriter, Outputs, choose_batch, embedding, is_run, neighbours, open_weights
from vit_jax.json_text import to_json
from vit_jax.machine import count_cores
from vit_jax.storage import filesystem

MIN_COSINE = 0.95  # of near-duplicates


class Embedded(NamedTuple):
    """What a command has written.

    Attributes:
        folder: the folder.
        images: the number of images of the source.
        computed: the number of images that this command has read.
        errors: the number of unreadable images in the files of this host.
        files: the number of files of all hosts.
        missing: how many of them other hosts have not written yet.
        seconds: the time from the first image to the last file.
        pages: the paths of the files with neighbours.
    """

    folder: str
    images: int
    computed: int
    errors: int
    files: int
    missing: int
    seconds: float
    pages: list[str]


def embed(
    source: str,
    out: str,
    of: str | Path,
    *,
    split: str | None = None,
    outputs: Sequence[str] = ("features",),
    dtype: str = "float32",
    top: int = 0,
    labels: bool = True,
    batch: int | None = None,
    workers: int | None = None,
    fsdp: int = 1,
    resolution: int | tuple[int, ...] | None = None,
    max_bad: float = 0.01,
    neighbours_of: int = 0,
    sample: int | None = None,
    min_cosine: float = MIN_COSINE,
    data_dir: str | None = None,
    start: Callable[[int, int], Callable[[int], Any]] = lambda total, done: lambda count: None,
) -> Embedded:
    """Writes what a model computes for all images of a source.

    Args:
        source: a data source, as `config.data.source`, or the path of an image or of a folder of images.
        out: the folder to write to, local or remote.
        of: a run, whose newest checkpoint is meant, or anything that `vit_jax.load` reads.
        split: the split of a data source; None: train.
        outputs: features, tokens, logits, block_N; see `evals.Outputs`.
        dtype: the dtype of these, float32, float16 or bfloat16.
        top: the number of most probable classes to write.
        labels: whether to write the labels of a data source.
        batch: images per step over the devices of this host, rounded up to a multiple of their number; None: chosen.
        workers: processes that read and decode, 0: threads of this one; None: chosen.
        fsdp: the number of devices to split the weights over.
        resolution: the size of the images, as for `vit_jax.load`.
        max_bad: the largest fraction of the images that may be unreadable.
        neighbours_of: the number of nearest neighbours to find for each image; 0: none.
        sample: the number of images among which neighbours are sought; None: all.
        min_cosine: the least cosine of near-duplicates.
        data_dir: the folder of TFDS data.
        start: called with the number of images of this host and how many of them are written already; returns a
            function that is called with the number of images of each step.

    Raises:
        UserError: a name, a number or a file is wrong, more images are unreadable than allowed, outputs are not finite,
            or the folder has other contents or cannot be written to.
    """
    refuse(
        *(
            (number is not None and number < least, f"{name} must be at least {least}, not {number}.")
            for name, number, least in (
                ("batch", batch, 1),
                ("workers", workers, 0),
                ("fsdp", fsdp, 1),
                ("neighbours", neighbours_of, 0),
            )
        ),
        (not 0 <= max_bad <= 1, f"max-bad must be a fraction, between 0 and 1, not {max_bad:g}."),
        (sample is not None and not neighbours_of, "a sample is one of images to seek neighbours among; ask for some."),
        (
            neighbours_of and "features" not in outputs,
            "neighbours are found by features; add features to the outputs.",
        ),
        (
            neighbours_of and jax.process_count() > 1,
            "neighbours are found on one machine; give the same command there when all hosts have written their files.",
        ),
    )
    if neighbours_of:
        with user_errors("cannot draw", ModuleNotFoundError):
            from vit_jax.analysis import plot  # noqa: F401 (before anything is computed)
    images = open_images(source, split, data_dir, labels)
    for note in images.notes:
        tell(note)
    has_labels = labels and images.num_classes > 0
    if neighbours_of:
        neighbours.check_count(len(images), neighbours_of, sample)
    path = newest_checkpoint(of)
    loaded = open_weights(path, fsdp, None, resolution, jax.local_devices())
    program, wanted, folder = loaded.program, Outputs(tuple(outputs), dtype, top), filesystem.absolute_path(out)
    wanted.check(program)
    if program.model.preprocess is None:
        advice = "give preprocess= to vit_jax.load and write the model with vit_jax.save"
        raise UserError(f"{of} does not state how images are preprocessed; {advice}.")
    step = embedding.make_step(program, wanted)
    info = embedding.make_info(program, step, loaded.digest(), images, (source, split or ""), has_labels, wanted)
    embedding.begin_folder(folder, info)
    host = jax.process_index(), jax.process_count()
    writer = EmbeddingWriter(program, step, images, wanted, info, folder, host, max_bad)
    missing, errors = writer.find_missing()
    size = program.mesh.size
    batch = -(-(batch or min(loaded.batch, choose_batch(program))) // size) * size
    chosen = data.choose_workers("auto", count_cores()) if jax.default_backend() != "cpu" else 0
    to_compute = sum(len(info.range_of(number)) for number in missing)
    tick = start(to_compute, len(writer.own) - len(missing))
    began = time.monotonic()
    params = jax.device_put(loaded.read(), program.params_shardings)
    errors = writer.run(params, missing, errors, batch, chosen if workers is None else workers, tick)
    seconds = time.monotonic() - began
    absent, pages = embedding.count_missing(folder, info), list[str]()
    if neighbours_of:
        found = neighbours.find(folder, info, neighbours_of, sample)
        pages = neighbours.write_neighbours(folder, info, images, found, min_cosine)
    return Embedded(out, len(images), to_compute, errors, info.files, absent, seconds, pages)


def newest_checkpoint(of: str | Path) -> str | Path:
    """Returns the newest checkpoint of a run, so that its features are those that evaluate means; else `of` itself."""
    found = checkpoint.find_checkpoint(checkpoint.local_workdir(of)) if is_run(of) else None
    return found or of


def open_images(source: str, split: str | None, data_dir: str | None, labels: bool) -> sources.Source:
    """Opens the images; raises UserError, also if they have no labels, and then says how to do without."""
    try:
        return sources.open_images(source, split, data_dir, labels)
    except UserError as error:
        if labels:
            try:
                sources.open_images(source, split, data_dir, False)
            except UserError:
                raise error from None
            raise UserError(f"{str(error).rstrip('.')}; or leave out labels, with --no-labels.") from error
        raise


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.embed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="a data source, a folder of images, or an image")
    parser.add_argument("out", help="folder to write to, local or remote")
    parser.add_argument(
        "--of", required=True, metavar="CHECKPOINT", help="a run, or any weights that vit_jax.load reads"
    )
    parser.add_argument("--split", help="split of the data source, for example train[:10%%] [train]")
    parser.add_argument(
        "--outputs", default="features", help="features, tokens, logits, block_N, separated by commas [features]"
    )
    parser.add_argument("--dtype", choices=embedding.DTYPES, default="float32", help="of these outputs [float32]")
    parser.add_argument("--top", type=int, default=0, help="also this number of most probable classes [0]")
    parser.add_argument("--no-labels", action="store_true", help="the images have no labels, or none are wanted")
    parser.add_argument("--batch", type=int, help="images per step on a host's devices [chosen to fit this machine]")
    parser.add_argument("--workers", type=int, help="processes that read images; 0: threads [chosen for this machine]")
    parser.add_argument("--fsdp", type=int, default=1, help="devices to split the weights over [1]")
    cli.add_resolution(parser, "that of the stated preprocessing")
    parser.add_argument(
        "--max-bad", type=float, default=0.01, help="largest fraction of images that may be unreadable [0.01]"
    )
    parser.add_argument("--neighbours", type=int, default=0, metavar="K", help="also the K nearest images of each [0]")
    parser.add_argument("--sample", type=int, help="seek neighbours among so many images [all, up to 100,000]")
    parser.add_argument(
        "--min-cosine", type=float, default=MIN_COSINE, help="least cosine of near-duplicates [%(default)s]"
    )
    parser.add_argument("--data-dir", help="folder of TFDS data")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str]) -> None:
    """Runs the command line."""
    args = make_parser().parse_args(argv[1:])
    cli.join_hosts()
    with tqdm(unit="image", unit_scale=True, disable=None if jax.process_index() == 0 else True) as bar:

        def start(total: int, files: int) -> Callable[[int], Any]:
            if files:
                tell(f"Files that are written already: {files:,}.")
            bar.reset(total)
            return bar.update

        result = embed(
            args.source,
            args.out,
            args.of,
            split=args.split,
            outputs=[name for name in args.outputs.split(",") if name],
            dtype=args.dtype,
            top=args.top,
            labels=not args.no_labels,
            batch=args.batch,
            workers=args.workers,
            fsdp=args.fsdp,
            resolution=args.resolution,
            max_bad=args.max_bad,
            neighbours_of=args.neighbours,
            sample=args.sample,
            min_cosine=args.min_cosine,
            data_dir=args.data_dir,
            start=start,
        )
    if args.json:
        print(to_json(result._asdict()))
        return
    rate = f", {result.computed / result.seconds:,.1f} images per second" if result.computed else ""
    print(
        f"{result.folder}: {result.images:,} images, files: {result.files:,}, unreadable: {result.errors:,}; "
        f"computed now: {result.computed:,} in {result.seconds:.1f} s{rate}"
    )
    if result.missing:
        print(f"Files that are missing: {result.missing:,}; other hosts write theirs, or the same command does.")
    for path in result.pages:
        print(path)


if __name__ == "__main__":
    cli.run_command(main, rerun_advice="the same command writes the files that are missing.")
