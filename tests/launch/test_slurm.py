"""Slurm: the batch script, run by a shell, and what sbatch is given."""

import re
import subprocess

import pytest

from launch import slurm
from tests.launch.helpers import HOSTILE, install_programs, make_run
from vit_jax import UserError


def batch(*command, restarts=10, extra=()):
    """A batch script of two nodes with 4 GPUs each."""
    return slurm.make_script(make_run(*command, restarts=restarts), 2, 4, 6, "1:00:00", list(extra))


@pytest.mark.parametrize(("code", "again"), [(0, False), (1, False), (2, False), (127, False), (42, True), (134, True)])
def test_the_batch_script_asks_for_a_restart_where_it_helps(code, again, tmp_path, monkeypatch):
    install_programs(
        tmp_path,
        monkeypatch,
        srun=f'printf "%s\\0" "$@" > "$PLAY/words"; exit {code}',
        scontrol='echo "$@" > "$PLAY/asked"',
    )
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.chdir(tmp_path)
    result = subprocess.run(["bash"], input=batch("python", *HOSTILE, restarts=3), text=True, stderr=subprocess.DEVNULL)
    assert (tmp_path / "asked").exists() == again
    assert result.returncode == (0 if again else code)
    if again:
        assert (tmp_path / "asked").read_text() == "requeue 77\n"
    assert (tmp_path / "words").read_text().split("\0")[-len(HOSTILE) - 2 : -1] == ["python", *HOSTILE]


def test_the_batch_script_says_what_jax_and_the_run_need():
    text = batch("x", extra=["partition=gpu"])
    options = set(re.findall(r"^#SBATCH --(.*)$", text, re.M))
    # A process for each GPU, which sees all of its node: JAX chooses by its number.
    assert {"nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=6"} <= options
    assert {"signal=TERM@120", "requeue", "open-mode=append", "time=1:00:00", "partition=gpu"} <= options
    assert not any("gpus-per-task" in option or "signal=B:" in option for option in options)
    assert "trap" not in text  # `scancel` ends the shell before it asks for a restart
    assert "\nsrun --kill-on-bad-exit=0 --wait=0 --gpu-bind=none --cpus-per-task=6 x\n" in text


def test_sbatch_gets_what_the_dry_run_prints(tmp_path, monkeypatch, capsys):
    install_programs(tmp_path, monkeypatch, sbatch='cat > "$PLAY/input"; exit "$(cat "$PLAY/code")"')
    argv = [
        "slurm",
        "run",
        "--nodes=4",
        "--gpus=8",
        "--slices=2",
        "--option=account=me",
        "--",
        "python",
        *HOSTILE,
    ]
    (tmp_path / "code").write_text("0")
    slurm.main(argv)
    assert "scancel --name=run\n" in capsys.readouterr().out
    slurm.main([*argv[:6], "--dry-run", *argv[6:]])
    text = capsys.readouterr().out
    assert (tmp_path / "input").read_text() == text and text.count("--config.mesh.slice=2") == 1
    (tmp_path / "code").write_text("1")
    with pytest.raises(UserError, match="Slurm rejected"):
        slurm.main(argv)


@pytest.mark.parametrize(
    "option",
    ["--nodes=0", "--gpus=0", "--cpus=0", "--nodes=3", "--option=a b", "--option=--p=x", "--time=1\n#SBATCH -x"],
)
def test_numbers_and_options_that_slurm_would_misread(option):
    with pytest.raises(UserError, match=r"at least 1|cannot pass '.*' to sbatch|not a time of Slurm"):
        slurm.main(["slurm", "run", "--gpus=8", "--nodes=2", option, "--slices=2", "--dry-run", "--", "x"])
