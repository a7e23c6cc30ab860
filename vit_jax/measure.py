"""Measures what the devices here do, beside what they should do.

That is products, memory, collectives, kernels, training steps, the loader, checkpoints, and whether a small model
learns as it does on a CPU.

Example:
  python -m vit_jax.measure

Takes at most 15 minutes, and writes a record and a page to results/hardware. What is off by more than 15 % is named
with the flag that avoids it. The same command goes on where it was interrupted. On several hosts run it on all of them,
with --out=gs://BUCKET/FOLDER or on a disk that they share, if checkpoints are to be measured.
--config.KEY=VALUE changes the programs that are measured, as in --config.mesh.fsdp=4 --config.data.source=folder:PATH.

Exit codes: 0 measured, whatever was found; 2 wrong usage; 130 Ctrl-C.
"""

import argparse
import contextlib
import dataclasses
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from ml_collections import ConfigDict

from vit_jax import UserError, choose, cli, reason, sharding, tell, user_errors
from vit_jax.config import flatten_config, get_config, parse_value
from vit_jax.distributed import Coordinator, Supervisor, run_on_all
from vit_jax.measurements import (
    FIELDS,
    MODELS,
    Bench,
    MachineRecord,
    Measurement,
    Section,
    format_off,
    format_row,
    hardware_page,
    make_key,
    measure_attention,
    measure_collectives,
    measure_curve,
    measure_loading,
    measure_memory,
    measure_products,
    measure_saving,
    measure_steps,
    merge_hosts,
    open_record,
    read_record,
    write_record,
)
from vit_jax.model import create
from vit_jax.monitoring import write_page
from vit_jax.storage import filesystem

STEPS = 240  # a training step may last 1 / STEPS of all the time
# Name of a section -> (the function that measures it, its share of the time). Time that a section does not need is left
# to the sections after it.
SECTIONS: dict[str, tuple[Callable[[Bench], Iterator[Measurement]], float]] = {
    "products": (measure_products, 0.04),
    "memory": (measure_memory, 0.04),
    "collectives": (measure_collectives, 0.10),
    "steps": (measure_steps, 0.40),
    "loading": (measure_loading, 0.12),
    "attention": (measure_attention, 0.15),
    "saving": (measure_saving, 0.05),
    "curve": (measure_curve, 0.10),
}


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: a flag is wrong, or the record cannot be read or written.
    """
    args, arguments = make_parser().parse_known_args(argv[1:])
    chosen = tuple(args.models.split(","))
    for name in chosen:
        create(name)
    cli.join_hosts()
    coordinator = Supervisor()
    config, given = read_config(arguments)
    mesh = sharding.make_mesh(config)
    devices = list(mesh.devices.flat)
    key = make_key(devices, coordinator.hosts, mesh.shape, [f"--models={args.models}", *arguments])
    name = args.name or default_name(devices)
    record_path, page_path = (filesystem.join_path(args.out, f"{name}.{kind}") for kind in ("json", "html"))
    record = broadcast_record(coordinator, lambda: open_record(name, record_path, key))
    earlier = broadcast_record(coordinator, lambda: read_record(args.against)) if args.against else None
    with without_compilation_cache(), shared_folder(coordinator, args.out) as folder:
        seconds = 60 * args.minutes
        bench = Bench(config, mesh, coordinator, chosen, folder, given, seconds / STEPS)
        for measured in measure(bench, record, seconds, earlier):
            record = measured
            if coordinator.host == 0:
                write_record(record, record_path)
                write_page(page_path, hardware_page(record))
    if coordinator.host == 0:
        print("\n".join(["", *(format_off(record) or ["Nothing is off by more than 15 %."])]))
        tell(f"Wrote {record_path} and {page_path}")


def measure(
    bench: Bench, record: MachineRecord, seconds: float, earlier: MachineRecord | None
) -> Iterator[MachineRecord]:
    """Yields the record as it is at first, and after each section.

    Args:
        bench: what is measured on.
        record: what was measured before; its sections are not measured again.
        seconds: the time that the missing sections may take.
        earlier: a record of another time, or None. Its rows are the predictions of rows for which no better is known.
    """
    end = time.monotonic() + seconds
    yield record
    for name, (function, share) in SECTIONS.items():
        if name not in record.sections:
            remaining_share = sum(each for other, (_, each) in SECTIONS.items() if other not in record.sections)
            began = time.monotonic()
            bench.deadline = began + (end - began) * share / remaining_share
            rows = []
            for row in measured_rows(function, bench):
                rows.append(beside_earlier(row, earlier.find(name, row.name) if earlier else None))
                if bench.coordinator.host == 0:
                    print(format_row(name, rows[-1]), flush=True)
            record = record.with_section(name, Section(round(time.monotonic() - began, 1), tuple(rows)))
            yield record
        if name == "products":
            bench.product_flops = 1e9 * (record.sections[name].rows[0].measured or 0.0)


def measured_rows(function: Callable[[Bench], Iterator[Measurement]], bench: Bench) -> Iterator[Measurement]:
    """Yields the rows of a section. Of several hosts' rows for one quantity, the worst is yielded.

    If the devices fail, a last row says so.
    """

    def own_rows() -> Iterator[Measurement]:
        try:
            yield from function(bench)
        except jax.errors.JaxRuntimeError as error:
            yield Measurement("the rest", "", None, advice="products", note=reason(error))

    if bench.coordinator.hosts == 1:
        yield from own_rows()  # each is printed at once
        return
    answers = bench.coordinator.all_gather("the rows of a part", [row.to_json() for row in own_rows()])
    yield from merge_hosts([[Measurement(**row) for row in rows] for rows in answers])


def beside_earlier(row: Measurement, earlier: Measurement | None) -> Measurement:
    """Returns a row with the measured value of an earlier row as its prediction.

    The row is returned unchanged if `earlier` has no value, or if the row has a prediction that is not just a bound.
    """
    if earlier is None or earlier.measured is None or (row.predicted is not None and row.kind != "bound"):
        return row
    return dataclasses.replace(row, predicted=earlier.measured, source="an earlier record", kind="limit")


def broadcast_record(coordinator: Coordinator, read: Callable[[], MachineRecord]) -> MachineRecord:
    """Returns what host 0 reads, on every host.

    Raises:
        UserError: see `read`.
    """
    records = run_on_all(coordinator, "the record", lambda: None if coordinator.host else read().to_json())
    return MachineRecord.from_json(records[0])


@contextlib.contextmanager
def shared_folder(coordinator: Coordinator, out: str) -> Iterator[str | None]:
    """Yields the path of a new folder in `out`, which is removed at the end, or None if some host does not see it.

    Raises:
        UserError: the folder cannot be made.
    """
    folder = filesystem.join_path(out, coordinator.all_gather("the folder", f"measure-{secrets.token_hex(4)}")[0])
    remote = filesystem.is_remote(folder)
    with contextlib.ExitStack() as stack:
        if not remote and coordinator.host == 0:
            with user_errors(f"cannot write to {Path(folder).parent}", advice="choose another --out."):
                Path(folder).mkdir(parents=True)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        coordinator.all_gather("the folder is made")
        seen = coordinator.all_gather("who sees it", remote or Path(folder).is_dir())
        yield folder if all(seen) else None
        coordinator.all_gather("the folder is used no more")
        if remote and coordinator.host == 0:
            filesystem.remove_files(folder, filesystem.list_files(folder))


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Makes the compiler compile everything anew inside, so that it can be timed."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def default_name(devices: list[jax.Device]) -> str:
    """Returns the kind and the number of devices, as a file's name: tpu-v5-lite-8."""
    return f"{re.sub('[^a-z0-9]+', '-', devices[0].device_kind.lower())}-{len(devices)}"


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # all other words are fields
    )
    parser.add_argument("--name", help="of the record [the kind and number of the devices]")
    parser.add_argument(
        "--out", default="results/hardware", help="folder of the record and the page, also gs:// [%(default)s]"
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="that it may take [15]")
    parser.add_argument("--models", default=",".join(MODELS), help="whose steps are measured [%(default)s]")
    parser.add_argument(
        "--against", metavar="FILE", help="an earlier record, to compare what no prediction is known of"
    )
    return parser


def read_config(arguments: list[str]) -> tuple[ConfigDict, frozenset[str]]:
    """Returns the configuration of what is measured, and the names of the fields that the command line gives.

    Raises:
        UserError: a word is no field, or its value is wrong.
    """
    config = get_config()
    config.update_from_flattened_dict(FIELDS)
    config.batch = jax.device_count()
    given = {}
    for argument in arguments:
        name, equals, text = argument.removeprefix("--config.").partition("=")
        if not argument.startswith("--config.") or not equals:
            raise UserError(f"unexpected {argument!r}; fields are written --config.KEY=VALUE.")
        choose("config field", name, flatten_config(config), "vit_jax/config/fields.py")
        if name == "model.name":
            raise UserError(f"{argument} changes nothing here; name the models to measure with --models={text}.")
        given[name] = parse_value(config, name, text)
    config.update_from_flattened_dict(given)
    return config, frozenset(given)


if __name__ == "__main__":
    cli.run_command(main, rerun_advice="the same command measures what is left.", is_report=True)
