"""The progress of writing shards into a folder: which examples are packed there, and which shards are finished."""

import contextlib
import fcntl
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vit_jax import UserError
from vit_jax.data.shards.files import report_write_errors
from vit_jax.data.shards.shard_manifest import MANIFEST_NAME, Manifest, ShardEntry, read_manifest
from vit_jax.storage import atomic_write

UNFINISHED = "*.partial"  # the temporary files of `atomic_write`, which a killed process leaves
PROGRESS = "progress.jsonl"  # while packing: line 1 is what is packed, then a line for each finished shard


@contextlib.contextmanager
def writing_lock(out: str) -> Iterator[None]:
    """Makes a folder and keeps other processes from packing into it, if the file system has locks.

    Raises:
        UserError: the folder cannot be written, or another process is packing into it.
    """
    with report_write_errors(out):
        os.makedirs(out, exist_ok=True)
        folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            advice = "wait for it to end, or choose another folder"
            raise UserError(f"another process is packing into {out}; {advice}") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(folder)


def resume_progress(out: str, manifest: Manifest, counts: Mapping[str, int]) -> dict[str, ShardEntry]:
    """Prepares a folder for packing, and returns the entries of the shards in it that are finished, by name.

    Unfinished files are removed. What is going to be packed is recorded in the file `PROGRESS`.

    Args:
        out: the folder.
        manifest: what is going to be packed, without the shards.
        counts: split -> number of its shards.

    Raises:
        UserError: the folder contains shards of another program, or was packed with other settings.
    """
    plan = fixed_settings(manifest, counts)
    lines = read_json_lines(f"{out}/{PROGRESS}")
    plans, finished = lines[:1], list(map(ShardEntry.from_json, lines[1:]))
    if complete := read_manifest(f"{out}/{MANIFEST_NAME}"):
        plans.append(fixed_settings(complete, {split: len(entries) for split, entries in complete.splits.items()}))
        finished = [*itertools.chain(*complete.splits.values()), *finished]  # later entries replace earlier ones
    if not plans and any(name.endswith(".array_record") for name in os.listdir(out)):
        raise UserError(f"{out} contains shards that this command did not write; choose another folder")
    for old in plans:
        before, after = flatten_json(old), flatten_json(plan)
        keys = [key for key in {**before, **after} if key != "made_from.source"]
        changed = [key for key in keys if before.get(key) != after.get(key)]
        if changed:
            details = "; ".join(f"{key}: {before.get(key)!s:.60} -> {after.get(key)!s:.60}" for key in changed)
            raise UserError(
                f"{out} was packed with other settings ({details}); restore them, choose another folder or remove this "
                "one"
            )
    for leftover in Path(out).glob(UNFINISHED):
        leftover.unlink()
    with atomic_write(f"{out}/{PROGRESS}") as temporary, open(temporary, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in (plan, *(entry.to_json() for entry in finished)))
    return {entry.name: entry for entry in finished}


def record_finished(out: str, entry: ShardEntry) -> None:
    """Records that a shard is finished."""
    with report_write_errors(out), open(f"{out}/{PROGRESS}", "a") as file:
        file.write(json.dumps(entry.to_json()) + "\n")


def fixed_settings(manifest: Manifest, counts: Mapping[str, int]) -> dict[str, Any]:
    """Returns, as JSON values, the settings of a folder of shards, with which alone an interrupted writing goes on.

    Args:
        manifest: the manifest; its shards are left out.
        counts: split -> number of shards.
    """
    fields = manifest.to_json()
    del fields["splits"]
    return {**fields, "shards": dict(counts)}


def read_json_lines(path: str) -> list[dict]:
    """Returns the parsed lines of a JSON Lines file before the first that is cut off; no lines if there is no file."""
    lines: list[dict] = []
    with contextlib.suppress(ValueError, FileNotFoundError, NotADirectoryError), open(path) as file:
        lines.extend(map(json.loads, file))
    return lines


def flatten_json(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns dotted name -> value of all leaves of a tree of JSON objects; `prefix` precedes each name."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten_json(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
