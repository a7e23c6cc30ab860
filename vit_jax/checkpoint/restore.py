"""Reads checkpoints: the newest intact state of a run onto the devices, or the weights of one checkpoint."""

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit_jax import UserError
from vit_jax.checkpoint.checkpoint_errors import DamagedCheckpoint, damage_errors
from vit_jax.checkpoint.checkpoint_manifest import check_arrays, check_metadata, check_program
from vit_jax.checkpoint.directory import CheckpointDirectory, is_checkpoint, read_manifest
from vit_jax.checkpoint.orbax_io import read_state, read_subtree
from vit_jax.checkpoint.reader import list_others
from vit_jax.distributed import Coordinator, run_on_all
from vit_jax.models import merge_adapters
from vit_jax.tree import ArrayTree

ManifestCheck = Callable[[dict[str, Any]], object]


@dataclasses.dataclass(frozen=True)
class Restored:
    """The checkpoint from which a run is resumed.

    Attributes:
        step: the number of updates that the run had made.
        state: the training state, placed on the mesh.
        about: the manifest of the checkpoint.
        set_aside: a sentence on each damaged checkpoint that was set aside.
    """

    step: int
    state: ArrayTree
    about: dict[str, Any]
    set_aside: list[str]


def restore_newest(
    directory: CheckpointDirectory,
    steps: Iterable[int],
    coordinator: Coordinator,
    wanted: ArrayTree,
    shardings: ArrayTree,
    check_manifest: ManifestCheck,
) -> Restored | None:
    """Returns the newest state that is intact, its arrays placed by `shardings`, or None if there is no checkpoint.

    Damaged checkpoints are set aside as soon as an older one was found to be intact. If all are damaged, none is.

    Args:
        directory: where the checkpoints lie.
        steps: the steps of the checkpoints, the newest first.
        coordinator: how the hosts agree: all read the same checkpoint, or none goes on.
        wanted: the shapes and dtypes of the state.
        shardings: the placement of the state.
        check_manifest: called with the manifest of a checkpoint before its state is read. Its errors are passed on.

    Raises:
        UserError: all checkpoints are damaged, the arrays are not those of `wanted`, or the disk or store fails.
    """
    damage: dict[int, str] = {}
    for step in steps:
        try:
            state, manifest = _read(directory, step, coordinator, wanted, shardings, check_manifest)
        except DamagedCheckpoint as error:
            damage[step] = str(error)
            continue
        work = (lambda: _set_aside(directory, damage)) if jax.process_index() == 0 else list
        return Restored(step, state, manifest, run_on_all(coordinator, "set aside", work)[0])
    if damage:
        reasons = "; ".join(f"{step}: {reason}" for step, reason in damage.items())
        raise UserError(
            f"every checkpoint in {directory.folder} is damaged ({reasons}). Nothing was changed there. Put an intact "
            "copy in its place, or choose a new --workdir: a run never restarts from step 0 automatically."
        )
    return None


def _read(
    directory: CheckpointDirectory,
    step: int,
    coordinator: Coordinator,
    wanted: ArrayTree,
    shardings: ArrayTree,
    check_manifest: ManifestCheck,
) -> tuple[ArrayTree, dict[str, Any]]:
    """Returns the state and the manifest of a checkpoint.

    Raises:
        DamagedCheckpoint: the checkpoint is damaged on some host.
        UserError: some host cannot read it.
    """
    manifest, state = dict[str, Any](), None

    def read() -> None:
        nonlocal manifest, state
        manifest = directory.read_manifest(step)
        check_manifest(manifest)
        check_program(manifest, wanted, f"{directory.folder}/{step}")
        directory.fetch(step)
        with damage_errors(directory.folder):
            state = read_state(f"{directory.path}/{step}", partial(check_metadata, manifest), wanted, shardings)

    _run_intact(coordinator, f"read {step}", read)
    _run_intact(coordinator, f"compare {step}", lambda: check_arrays(manifest, state))
    return state, manifest


def _run_intact(coordinator: Coordinator, topic: str, work: Callable[[], None]) -> None:
    """Runs `work` on every host. Raises DamagedCheckpoint on every host if `work` raises it on one."""

    def attempt() -> str | None:
        try:
            work()
        except DamagedCheckpoint as error:
            return str(error)
        return None

    if reasons := list(dict.fromkeys(filter(None, run_on_all(coordinator, topic, attempt)))):
        raise DamagedCheckpoint("; ".join(reasons))


def _set_aside(directory: CheckpointDirectory, damage: dict[int, str]) -> list[str]:
    """Renames the folders of damaged checkpoints, given as step -> reason; returns a sentence on each."""
    return [
        f"checkpoint {step} is damaged and was renamed to {directory.set_aside(step)}: {reason}."
        for step, reason in damage.items()
    ]


def read_about(path: Path) -> dict[str, Any]:
    """Returns the manifest of one checkpoint folder: its step, `model`, `data` and the table of its arrays.

    Raises:
        UserError: the checkpoint is damaged.
    """
    try:
        return read_manifest(path)
    except DamagedCheckpoint as error:
        raise UserError(f"the checkpoint {path} is damaged: {error}{list_others(path)}") from error


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the weights in one checkpoint folder as NumPy arrays, and the checkpoint's manifest.

    They are the weights that a run evaluates: the moving average if the run has one, schedule-free AdamW's average if
    that is the optimizer, else the parameters. Adapters are merged into the kernels.

    Raises:
        UserError: the folder holds no checkpoint, or a damaged one. The message says what is damaged, and which other
            checkpoints the run has.
    """
    if not is_checkpoint(path):
        raise UserError(f"{path} is not a checkpoint: a checkpoint contains `state` and `about`.")
    try:
        manifest = read_manifest(path)
        groups = {name.partition("/")[0] for name in manifest["arrays"]}
        weights = _read_group(path, manifest, "ema" if "ema" in groups else "params")
        if "opt_state/weight_sum" in manifest["arrays"]:
            averaging = _read_group(path, manifest, "opt_state")
            beta1 = averaging["b1"]
            weights = jax.tree.map(lambda y, z: (y - (1 - beta1) * z) / beta1, weights, averaging["z"])
    except DamagedCheckpoint as error:
        raise UserError(f"the checkpoint {path} is damaged: {error}{list_others(path)}") from error
    return jax.tree.map(np.asarray, merge_adapters(weights)), manifest


def _read_group(path: Path, manifest: dict[str, Any], which: str) -> dict[str, Any]:
    """Returns one part of a state, such as `params`; raises DamagedCheckpoint unless its arrays are as saved."""
    group = read_subtree(path, lambda metadata: check_metadata(manifest, metadata, f"{which}/"), which)
    check_arrays(manifest, group, f"{which}/")
    return group
