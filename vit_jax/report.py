"""Writes the page of a run, or of several beside each other: curves, mistakes, filters, cost, configuration.

Examples:
  python -m vit_jax.report workdirs/digits
  python -m vit_jax.report workdirs/one workdirs/other --out=workdirs/both.html
  python -m vit_jax.report workdirs/digits --serve

The page is one file that needs no network: report.html in the folder of the run, or where --out says. A folder of
several runs, such as that of a sweep, stands for all of them. --serve writes nothing: it shows the page to a browser on
this machine, as the run is at that moment. --config.report=True of vit_jax.main writes the page at the end of a run.
"""

import argparse
from collections.abc import Sequence

import jax

from vit_jax import UserError, cli
from vit_jax.analysis import HOST, PAGE, make_page, make_server
from vit_jax.monitoring import RunFolder, find_runs, read_run, write_page
from vit_jax.storage import filesystem

REFRESH = 15  # seconds after which a browser asks for the page of a run that still trains


def read_runs(folders: Sequence[str]) -> list[RunFolder]:
    """Returns the runs in folders, local or remote, each once.

    Raises:
        UserError: there is no run in one of the folders, or a file cannot be read.
    """
    runs = {location: name for folder in folders for location, name in find_runs(folder).items()}
    names = list(runs.values())
    return [read_run(location, name if names.count(name) == 1 else location) for location, name in runs.items()]


def serve(folders: Sequence[str], port: int) -> None:
    """Serves the page to browsers on this machine until the process is interrupted.

    Raises:
        UserError: there is no run yet, or the port is taken.
    """
    runs = read_runs(folders)

    def make() -> str:
        nonlocal runs
        runs = read_runs(folders)
        return make_page(runs)

    def refresh() -> int | None:
        return None if all(run.is_complete for run in runs) else REFRESH

    with make_server(port, make, refresh) as server:
        print(f"http://{HOST}:{server.server_address[1]}/", flush=True)
        server.serve_forever()


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workdirs", nargs="+", metavar="workdir", help="folder of a run, or of several")
    parser.add_argument("--out", metavar="FILE", help=f"the page to write [{PAGE} in the folder of a single run]")
    parser.add_argument("--serve", action="store_true", help="show the page to this machine's browsers; write nothing")
    parser.add_argument("--port", type=int, default=8000, help="with --serve: to listen on; 0: any [%(default)s]")
    return parser


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: see `read_runs` and `vit_jax.analysis.run_report.make_page`; or the page cannot be written.
    """
    args = make_parser().parse_args(argv[1:])
    if args.serve and args.out:
        raise UserError("--serve writes nothing; leave out --out.")
    jax.config.update("jax_platforms", "cpu")  # the accelerators may be training
    if args.serve:
        serve(args.workdirs, args.port)
        return
    runs = read_runs(args.workdirs)
    if len(runs) > 1 and not args.out:
        raise UserError(f"say where to write the page of {len(runs)} runs: --out=FILE.html.")
    # The location of a run is absolute; the page is named as the user would.
    print(write_page(args.out or filesystem.relative_path(f"{runs[0].location}/{PAGE}"), make_page(runs)))


if __name__ == "__main__":
    cli.run_command(main, is_report=True)
