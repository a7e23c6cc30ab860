"""Records finished runs: the configuration, results, time, hardware and commit of each, as a small file.

Examples:
  python -m vit_jax.record workdirs/digits
  python -m vit_jax.record workdirs/table5_b16 --page=results/runs.md

A folder of several runs, such as that of a sweep or of vit_jax.finetune, adds a record of each, in folders of the same
names: results/pooling/token/0.0003,seed=1.json. With --page, a page in Markdown shows all records beside each other; it
can be written without a folder of runs.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from vit_jax import UserError, cli, user_errors
from vit_jax.experiments import format_records, make_record, read_records, write_record
from vit_jax.monitoring import find_runs, write_page


def read_evaluations(path: str | None) -> list[dict[str, Any]]:
    """Returns the objects that `vit_jax.evaluate --json` has printed to a file, one a line; none if `path` is None.

    Raises:
        UserError: the file cannot be read, or a line is not such an object.
    """
    if path is None:
        return []
    try:
        with user_errors(f"cannot read {path}"):
            content = Path(path).read_bytes()
        rows = [json.loads(line) for line in content.splitlines()]
        if not all(isinstance(row, dict) and isinstance(row.get("evals", {}), dict) for row in rows):
            raise ValueError
    except (ValueError, RecursionError) as error:
        command = f"python -m vit_jax.evaluate WORKDIR --json > {path}"
        raise UserError(f"cannot read {path}: a line is not a JSON object; write it with {command}.") from error
    return rows


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.record", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workdirs", nargs="*", metavar="workdir", help="folder of a run, or of several")
    parser.add_argument("--evaluations", metavar="FILE", help="what vit_jax.evaluate WORKDIR --json printed of the run")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the records [results]")
    parser.add_argument("--page", type=Path, metavar="FILE", help="a page of all records, written anew")
    return parser


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: see `read_evaluations`, `monitoring.find_runs` and `experiments.make_record`; two runs have the same
            name; evaluations are given for several runs; or neither a run nor a page is named.
    """
    args = make_parser().parse_args(argv[1:])
    if not args.workdirs and not args.page:
        raise UserError("name the folder of a run, or --page=FILE for a page of all records.")
    runs = {run: name for workdir in args.workdirs for run, name in find_runs(workdir).items()}
    if len(set(runs.values())) < len(runs):
        raise UserError("two of these runs have the same name; record one of them from a folder with another name.")
    evaluations = read_evaluations(args.evaluations)
    if evaluations and len(runs) != 1:
        raise UserError(f"--evaluations is for one run, but {len(runs)} are given.")
    records = [make_record(run, name, evaluations) for run, name in runs.items()]
    for record in records:
        print(write_record(record, args.results))
    if args.page:
        folder = os.path.relpath(args.results, args.page.parent)
        print(write_page(str(args.page), format_records(list(read_records(args.results).values()), folder)))


if __name__ == "__main__":
    cli.run_command(main)
