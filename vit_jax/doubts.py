"""Lists images whose labels the models of a sweep over folds doubt, each judged by one that has not seen it.

Examples:
  python -m vit_jax.sweep --config=configs/digits.py --sweep.fold=5 --workdir=workdirs/digits_folds
  python -m vit_jax.doubts workdirs/digits_folds
  python -m vit_jax.main --config=configs/digits.py --config.data.exclude=workdirs/digits_folds/doubts.csv

Writes into the folder of the sweep:
  out_of_fold.npz   names, labels, probabilities and folds of all images, each once, from the run not trained on it
  doubts.csv        the images that these runs are confident are of another class than their label, worst first, by
                    confident learning (arXiv 1911.00068); config.data.exclude takes this list
  doubts.html       a page of them to look at, in one file

Of a sweep that varied other fields too, the best combination is taken; of several seeds, the mean of the probabilities.
"""

import argparse
import csv
import io

import jax
import numpy as np

from vit_jax import cli, evals, tell
from vit_jax.analysis import Doubt, make_doubts_page
from vit_jax.evals import confident_learning
from vit_jax.experiments import OutOfFold, find_fold_runs, predict_out_of_fold
from vit_jax.json_text import to_json
from vit_jax.storage import filesystem

PREDICTIONS, TABLE, PAGE = "out_of_fold.npz", "doubts.csv", "doubts.html"  # the files
SHOWN = 120  # images on the page
COLUMNS = ("image", "given", "suggested", "score", "suggested_probability")


def list_doubts(found: OutOfFold) -> tuple[list[int], list[Doubt]]:
    """Returns the indices of the images whose label is doubted, the most doubtful first, and what is known of each."""
    labelled = np.flatnonzero(found.labels >= 0)
    labels, probabilities = found.labels[labelled], found.probabilities[labelled]
    names = found.class_names or tuple(map(str, range(probabilities.shape[1])))
    indices, doubts = list[int](), list[Doubt]()
    for place in confident_learning.rank_doubted(labels, probabilities).tolist():
        indices.append(int(labelled[place]))
        given, suggested = int(labels[place]), int(probabilities[place].argmax())
        both = float(probabilities[place, given]), float(probabilities[place, suggested])
        doubts.append(Doubt(found.source.example_key(indices[-1]), names[given], names[suggested], *both))
    return indices, doubts


def write_csv(doubts: list[Doubt]) -> bytes:
    """Returns the list of doubted images, as `config.data.exclude` takes it."""
    text = io.StringIO()
    rows = [(*doubt[:3], f"{doubt.score:.6g}", f"{doubt.suggested_probability:.6g}") for doubt in doubts]
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *rows])
    return text.getvalue().encode("utf-8", "surrogateescape")


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.doubts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workdir", help="folder of a sweep over folds that has ended")
    parser.add_argument("--of", metavar="NAME", help="a combination of the sweep, such as base_lr=0.001 [the best]")
    parser.add_argument("--source", help="new place of the data, if they have moved, for example folder:PATH")
    parser.add_argument("--fsdp", type=int, default=1, help="devices to split the weights over [1]")
    parser.add_argument("--out", metavar="DIR", help="folder to write to [the folder of the sweep]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: see `find_fold_runs` and `predict_out_of_fold`; or a file cannot be written.
    """
    args = make_parser().parse_args(argv[1:])
    cli.join_hosts()
    runs = find_fold_runs(args.workdir, args.of)
    found = predict_out_of_fold(runs, args.source, args.fsdp)
    if jax.process_index() > 0:
        return
    paths = {name: filesystem.join_path(args.out or args.workdir, name) for name in (PREDICTIONS, TABLE, PAGE)}
    arrays = io.BytesIO()
    np.savez(arrays, allow_pickle=False, **found.arrays())
    filesystem.write_bytes(paths[PREDICTIONS], arrays.getvalue())
    tell(f"Wrote {paths[PREDICTIONS]}")
    if found.labels.ndim > 1:
        tell("An image may have several labels here, so there is no list of doubted ones.")
        return
    known = found.labels >= 0
    accuracy = float((found.probabilities.argmax(axis=1) == found.labels)[known].mean())
    indices, doubts = list_doubts(found)
    words = [
        f"{len(found.labels):,} images, each predicted by a model that was not trained on it, of "
        f"{runs[0].fold.folds} folds of {runs[0].split}: {accuracy:.2%} as labelled.",
        f"{len(doubts):,} labels ({len(doubts) / max(known.sum(), 1):.2%}) are doubted: the models are confident of "
        "another class (confident learning, arXiv 1911.00068).",
    ]
    shown = f"The {SHOWN} most doubtful are shown; {TABLE} lists all." if len(doubts) > SHOWN else ""
    filesystem.write_bytes(paths[TABLE], write_csv(doubts))
    with found.source.opened() as source:
        pixels = [evals.read_small(source, found.preprocess, index) for index in indices[:SHOWN]]
    page = make_doubts_page("Doubtful labels", [*words, *([shown] if shown else [])], doubts, pixels)
    filesystem.write_bytes(paths[PAGE], page.encode("utf-8", "surrogateescape"))
    if args.json:
        numbers = {"images": len(found.labels), "accuracy": accuracy, "doubted": len(doubts)}
        print(to_json(numbers | {"files": list(paths.values())}))
        return
    print("\n".join([*words, f"Look at {paths[PAGE]}; to train without them: --config.data.exclude={paths[TABLE]}"]))


if __name__ == "__main__":
    cli.run_command(main, is_report=True)
