"""Digests of the files that a combination of a sweep learns from: its configuration has only their paths.

They tell whether files were replaced while the paths stayed the same.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, data, interop, user_errors
from vit_jax.config import Place, list_places
from vit_jax.storage import filesystem

INPUTS_FILE = "inputs.json"  # in the folder of a combination; written before its first step


def describe_inputs(config: ConfigDict, info: data.DataInfo) -> dict[str, str]:
    """Returns field -> digest of what its path or name stands for now.

    The fields are `data.source` and those that name weights or files, such as labels and class maps. What is downloaded
    by name or part of the package is left out, as it never changes, and so is what cannot be read any more.
    """
    evals = {name: [one["contents"], one.get("sample", "")] for name, one in info.evals.items()}
    contents = json.dumps([info.fingerprint["contents"], info.sample, evals], sort_keys=True)
    inputs = {"data.source": hashlib.sha256(contents.encode()).hexdigest()[:16]}
    for field, source, place in list_places(config):
        with contextlib.suppress(UserError):
            if place is Place.WEIGHTS and not interop.is_download_name(source):
                inputs[field] = interop.digest_weights(source)
            elif place is Place.FILE and filesystem.exists(path := filesystem.absolute_path(source)):
                inputs[field] = hashlib.sha256(filesystem.read_bytes(path)).hexdigest()[:16]
    return inputs


def check_inputs(folder: str, config: ConfigDict, info: data.DataInfo, is_finished: bool) -> None:
    """Compares the data, weights and files of a combination now with those that it began with.

    The data of an unfinished combination are not compared here: its run compares them when it resumes, and the user may
    allow other data.

    Args:
        folder: the folder of the combination.
        config: the configuration of the combination.
        info: what is known of its data now.
        is_finished: whether the combination has ended.

    Raises:
        UserError: the data, the weights or a file differ, or the file of digests is not what `write_inputs` wrote.
    """
    path = filesystem.join_path(folder, INPUTS_FILE)
    if not filesystem.exists(path):  # an older version wrote no such file
        return
    begun, inputs = read_object(path), describe_inputs(config, info)
    compared = [field for field in inputs if is_finished or field != "data.source"]
    if differ := [field for field in compared if begun.get(field, inputs[field]) != inputs[field]]:
        raise UserError(
            f"the contents of {' and '.join(differ)} were replaced after the run in {folder} began; choose another "
            "--workdir."
        )


def write_inputs(folder: str, inputs: dict[str, str]) -> None:
    """Writes the digests of `describe_inputs` into the folder of a combination, unless the combination has begun.

    Raises:
        UserError: the file cannot be written.
    """
    if not filesystem.exists(filesystem.join_path(folder, "config.json")):
        if not filesystem.is_remote(folder):
            with user_errors(f"cannot write to {folder}"):
                Path(folder).mkdir(parents=True, exist_ok=True)
        filesystem.write_bytes(filesystem.join_path(folder, INPUTS_FILE), (json.dumps(inputs) + "\n").encode())


def read_object(path: str, is_valid: Callable[[dict[str, Any]], bool] = lambda content: True) -> dict[str, Any]:
    """Returns the JSON object in a file that a sweep wrote.

    Args:
        path: the file, local or remote.
        is_valid: returns whether the object has the expected form.

    Raises:
        UserError: the file contains something else.
    """
    try:
        content = json.loads(filesystem.read_bytes(path))
    except ValueError:
        content = None
    if not isinstance(content, dict) or not is_valid(content):
        advice = "remove it, or choose another --workdir"
        raise UserError(f"cannot read {path}: it is damaged or was not written by a sweep; {advice}.")
    return content
