"""What the tests of the launchers share."""

import os

from launch import compute_engine, gke, job, slurm, tpu_vm

MAINS = {"compute_engine": compute_engine.main, "tpu_vm": tpu_vm.main, "gke": gke.main, "slurm": slurm.main}
GOLDEN = {
    "compute_engine": "launch_compute_engine.txt",
    "tpu_vm": "launch_tpu_vm.txt",
    "gke": "launch_gke.yaml",
    "slurm": "launch_slurm.sh",
}
# Words that a shell would change if they were not quoted.
HOSTILE = ["--config.optim.rates=head/.*=10", "a  b", "it's", '"$HOME"', "`pwd`;x", "*", "", "new\nline", "\\"]

# From the tables of the clouds' documentation: a slice, gcloud's flags for it, its machines, the chips of each.
SLICES = [
    ("v4:2x2x1", "--type=v4 --topology=2x2x1", 1, 4),
    ("v4:4x4x8", "--type=v4 --topology=4x4x8", 32, 4),
    ("v5p:2x2x1", "--type=v5p --topology=2x2x1", 1, 4),
    ("v5p:8x8x8", "--type=v5p --topology=8x8x8", 128, 4),
    ("v5e:1x1", "--accelerator-type=v5litepod-1", 1, 1),
    ("v5e:2x2", "--accelerator-type=v5litepod-4", 1, 4),
    ("v5e:2x4", "--accelerator-type=v5litepod-8", 1, 8),
    ("v5e:4x4", "--accelerator-type=v5litepod-16", 4, 4),
    ("v5e:16x16", "--accelerator-type=v5litepod-256", 64, 4),
    ("v6e:2x4", "--accelerator-type=v6e-8", 1, 8),
    ("v6e:8x16", "--accelerator-type=v6e-128", 32, 4),
]


def make_run(*command, **options):
    """A run, with some options of the command line."""
    flags = job.make_parser("test", None)
    job.add_job_arguments(flags)
    given = [f"--{name}={value}" for name, value in options.items() if name != "name"]
    return job.make_job(flags.parse_args([options.get("name", "run"), *given]), command)


def install_programs(folder, monkeypatch, **programs):
    """Writes small shell scripts and puts them on PATH; in them $PLAY is the folder."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PLAY", str(folder))
