"""What a combination learns from beside its configuration: paths stay the same where files are replaced."""

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, data, interop, user_errors
from vit_jax.storage import filesystem

INPUTS_FILE = "inputs.json"  # in the folder of a combination, from before its first step


def describe_inputs(config: ConfigDict, info: data.DataInfo) -> dict[str, str]:
    """Returns field -> a digest of what its path or name stands for now: the data, the weights to start from, and those
    of a teacher.

    Published weights never change, and are not compared; nor are weights that were removed since.
    """
    evals = {name: [one["contents"], one.get("sample", "")] for name, one in info.evals.items()}
    contents = json.dumps([info.fingerprint["contents"], info.sample, evals], sort_keys=True)
    inputs = {"data.source": hashlib.sha256(contents.encode()).hexdigest()[:16]}
    weights = {"init_from": config.init_from, "task.teacher": config.task.teacher}
    for field, source in weights.items():
        if source and not interop.is_download_name(source):
            with contextlib.suppress(UserError):
                inputs[field] = interop.digest_weights(source)
    return inputs


def check_inputs(folder: str, config: ConfigDict, info: data.DataInfo, is_finished: bool) -> None:
    """Compares what a combination learns from now with what it began with.

    An unfinished run itself compares its data, and may be allowed to go on with others.

    Args:
        folder: of the combination.
        config: of the combination.
        info: what is known of its data now.
        is_finished: the combination has ended.

    Raises:
        UserError: they differ, or the file is not what `write_inputs` wrote.
    """
    path = filesystem.join_path(folder, INPUTS_FILE)
    if not filesystem.exists(path):  # of an older version
        return
    begun, inputs = read_object(path), describe_inputs(config, info)
    compared = [field for field in inputs if is_finished or field != "data.source"]
    if differ := [field for field in compared if begun.get(field, inputs[field]) != inputs[field]]:
        raise UserError(
            f"{folder} contains a run from before the contents of {' and '.join(differ)} were replaced; choose another "
            "--workdir."
        )


def write_inputs(folder: str, inputs: dict[str, str]) -> None:
    """Writes what a combination learns from into its folder, unless it has begun.

    Raises:
        UserError: it cannot be written.
    """
    if not filesystem.exists(filesystem.join_path(folder, "config.json")):
        if not filesystem.is_remote(folder):
            with user_errors(f"cannot write to {folder}"):
                Path(folder).mkdir(parents=True, exist_ok=True)
        filesystem.write_bytes(filesystem.join_path(folder, INPUTS_FILE), (json.dumps(inputs) + "\n").encode())


def read_object(path: str, is_valid: Callable[[dict[str, Any]], bool] = lambda found: True) -> dict[str, Any]:
    """Returns the JSON object that a file of a sweep contains.

    Raises:
        UserError: it contains something else.
    """
    try:
        found = json.loads(filesystem.read_bytes(path))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not is_valid(found):
        raise UserError(f"cannot read {path}: a sweep did not write it; remove it, or choose another --workdir.")
    return found
