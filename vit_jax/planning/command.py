"""The command that runs what was planned."""

import re
import shlex
from pathlib import PurePath

from vit_jax.data import sources
from vit_jax.planning.chips import is_topology
from vit_jax.planning.compile_records import PlanRequest, Workload

TFDS_SOURCE = re.compile(r"\b(tfds|vtab):")  # also as a part of a mixture


def training_command(request: PlanRequest, workload: Workload) -> str:
    """Returns the shell command that trains as planned.

    The command for a TPU slice is that of the launcher for Cloud TPU. It has flags that place data which cloud machines
    cannot reach, and a workdir that they would lose, in a bucket. Its words in capitals (BUCKET, DATA, ZONE) are for
    the user to replace. Any other command trains on this machine.
    """
    given = dict(word.partition("=")[::2] for word in request.words)
    command = ["python", "-m", "vit_jax.main", *request.words]
    if not is_topology(request.target):
        variables = ["JAX_PLATFORMS=cpu", f"XLA_FLAGS={request.emulation_flag}"] if request.target == "cpu" else []
        return shlex.join([*variables, *command])
    recipe = PurePath(given["--config"].partition(":")[0]).stem
    source = sources.change_paths(workload.source, _path_in_bucket, str)
    if source != workload.source:
        command.append(f"--config.data.source={source}")
    if TFDS_SOURCE.search(source) and "://" not in (workload.data_dir or ""):
        command.append("--config.data.data_dir=gs://BUCKET/tensorflow_datasets")
    if "--workdir" not in given:
        command.append(f"--workdir=gs://BUCKET/{recipe}")
    slices = workload.mesh["slice"]
    run_name = re.sub(r"[^a-z0-9]+", "-", recipe.lower()).strip("-")[:40]
    options = [f"--topology={request.target}", *([f"--slices={slices}"] if slices > 1 else []), "--zone=ZONE"]
    return shlex.join(["python", "-m", "launch.tpu_vm", "run", run_name, *options, "--", *command])


def _path_in_bucket(path: str) -> str:
    return path if "://" in path else "gs://BUCKET/DATA"
