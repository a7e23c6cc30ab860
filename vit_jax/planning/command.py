"""The command that runs what was planned."""

import re
import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

BUCKET = re.compile(r"\w+:(gs|s3)://")  # of a source


def next_command(words: list[str], facts: Mapping[str, Any], emulated: int = 1) -> str:
    """Returns the command that trains as planned: on this machine, or on Cloud TPU by its launcher.

    What the machines of a cloud cannot reach, or would lose, is put in a bucket; the words in capitals stand for what
    only the user knows.

    Args:
        words: flags of `vit_jax.main`.
        facts: of the plan.
        emulated: devices of `cpu`.
    """
    given = dict(word.partition("=")[::2] for word in words)
    command = ["python", "-m", "vit_jax.main", *words]
    if ":" not in facts["target"]:
        count = f"--xla_force_host_platform_device_count={emulated}"
        where = ["JAX_PLATFORMS=cpu", f"XLA_FLAGS={count}"] if facts["target"] == "cpu" else []
        return shlex.join([*where, *command])
    name = PurePath(given["--config"].partition(":")[0]).stem
    source = facts["source"]
    if source.startswith("tfds:") and not facts["data_dir"]:
        command.append("--config.data.data_dir=gs://BUCKET/tensorflow_datasets")
    elif not source.startswith("tfds:") and source != "digits" and not BUCKET.match(source):
        kind = "folder" if source.startswith("folder:") else "array_record"
        command.append(f"--config.data.source={kind}:gs://BUCKET/DATA")
    if "--workdir" not in given:
        command.append(f"--workdir=gs://BUCKET/{name}")
    slices = facts["mesh"]["slice"]
    launched = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    options = [f"--topology={facts['target']}", *([f"--slices={slices}"] if slices > 1 else []), "--zone=ZONE"]
    return shlex.join(["python", "-m", "launch.tpu_vm", "run", launched, *options, "--", *command])
