"""What all launchers share: runs, their exit codes, and how often they are started again."""

import re
import subprocess
import sys

import pytest

from launch import clouds, job
from tests.conftest import ROOT
from tests.faults.preemptions import LAUNCHERS
from tests.launch.helpers import MAINS, SLICES, make_run
from vit_jax import UserError
from vit_jax.planning import parse_topology


@pytest.mark.parametrize(("text", "accelerator", "hosts", "chips"), SLICES)
def test_what_the_clouds_call_a_slice(text, accelerator, hosts, chips):
    tpu = parse_topology(text)
    assert clouds.accelerator_flags(tpu) == accelerator.split()
    assert (tpu.hosts, tpu.chips_per_host) == (hosts, chips)
    assert {kind for kind, names in clouds.CHIP_NAMES.items() if names.accelerator} == {
        name.split(":")[0] for name, *_ in SLICES
    }


def test_an_exit_code_says_whether_to_start_again():
    assert {code for code in range(256) if job.should_restart(code)} == {42, *range(128, 256)}
    for codes, end in [
        ([0, 0], 0),
        ([0, 42], 42),
        ([42, 134, 42], 134),
        ([134, 1, 134], 1),
        ([2, 2], 2),
        ([137, 0, 127], 127),
    ]:
        assert job.combined_exit_code(codes) == end


def test_the_mesh_knows_of_the_slices():
    assert make_run("python", "x").command == ("python", "x")
    assert make_run("python", "x", slices=3).command == ("python", "x", "--config.mesh.slice=3")
    assert make_run("x", "--config.mesh.slice=3", slices=3).command == ("x", "--config.mesh.slice=3")
    assert make_run("x", "--config.mesh.slice=3").command == ("x", "--config.mesh.slice=3")
    with pytest.raises(UserError, match=r"contradicts --config\.mesh\.slice=30;"):
        make_run("x", "--config.mesh.slice=30", slices=3)


@pytest.mark.parametrize("name", ["", "L16", "1l", "l_16", "l16-", "l" * 41, "l 16", "a;b", "-l"])
def test_names_that_clouds_refuse(name):
    with pytest.raises((UserError, SystemExit)):
        make_run("x", name=name)
    assert make_run("x", name="l" * 40).name == "l" * 40


def test_what_cannot_be_run_is_refused():
    with pytest.raises(UserError, match="put the command to run after --"):
        make_run()
    for options in ({"slices": 0}, {"restarts": -1}):
        with pytest.raises(UserError, match="at least"):
            make_run("x", **options)


@pytest.mark.parametrize("name", [pytest.param("Cloud TPU", marks=pytest.mark.slow), "Slurm"])
def test_preemptions_do_not_use_up_the_restarts_of_faults(name, tmp_path):
    launch, preempted = LAUNCHERS[name]
    ends = [*preempted * 4, "137", *preempted * 2, "134"]
    assert launch(tmp_path / "a", [*ends, *preempted, "0"], 2)[:2] == (0, 17)
    assert launch(tmp_path / "b", [*ends, *preempted, "139", "0"], 2)[:2] == (139, 17)
    assert launch(tmp_path / "c", [*preempted, "1"], 0)[:2] == (1, 3)


def test_mistakes_are_a_sentence_and_exit_code_2():
    command = [sys.executable, "-m", "launch.gke", "run", "--topology=v5e:3x3", "--image=i", "--dry-run", "--", "x"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"vit_jax: no cloud offers a v5e slice of 3x3; .*\n", result.stderr)


@pytest.mark.parametrize(
    "argv",
    [
        ["gke", "run", "--topology=v5e:4x4", "--image=i", "--allow-local-output", "--", "x"],
        ["slurm", "run", "--gpus=1", "--", "x"],
        ["tpu_vm", "run", "r", "--topology=v4:2x2x1", "--zone=us-west4-a", "--allow-local-output", "--", "x"],
        ["compute_engine", "run", "r", "--topology=v5p:2x2x1", "--zone=us-west4-a", "--allow-local-output", "--", "x"],
    ],
)
def test_a_program_that_is_not_installed_is_named(argv, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^(kubectl|sbatch|gcloud) is not installed; "):
        MAINS[argv[0]](argv)
