"""Several processes as the hosts of a pod: killed and resumed; `benchmarks.faults` tries the rest."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.faults import SPLIT
from benchmarks.hosts import Hosts, metrics, saved
from tests.conftest import ROOT
from vit_jax import train
from vit_jax.config import parse_command_line

pytestmark = pytest.mark.flaky(reruns=1)  # these wait on the clock

WORDS = [SPLIT, "--config.total_steps=40"]  # three epochs and a part


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """That of one of whose two hosts one was killed while a step was saved, which ended the other."""
    workdir = tmp_path_factory.mktemp("pods") / "lost"
    with Hosts(workdir, 2, 2, *WORDS, faults=dict.fromkeys((0, 1), "impatient:6")) as run:
        assert run.await_step(1), run.output()
        while not any((workdir / "checkpoints").glob("*tmp*")):
            assert run.processes[0].poll() is None, run.output()
            time.sleep(0.001)
        run.send(signal.SIGKILL, 1)
        assert run.wait() == [134, -signal.SIGKILL], run.output()
    return workdir


@pytest.mark.slow
def test_a_lost_host_ends_the_others_and_is_named(lost):
    text = lost.with_name("lost.0.log").read_text()
    assert re.search("\nvit_jax: host 1 has not been heard of for 6 s; .*host 1 '", text)
    assert "most recent call first" in text and "_watch" in text


@pytest.mark.slow
def test_killed_while_saving_and_resumed_on_another_mesh_it_has_the_same_losses(lost, tmp_path):
    workdir = shutil.copytree(lost, tmp_path / "other")
    config, _ = parse_command_line(["main.py", f"--config={ROOT}/configs/smoke.py", *Hosts.words, *WORDS[1:]])
    config.mesh.update(slice=2, fsdp=2, tensor=2)
    config.eval_every, config.checkpoint_every = 60, 60
    train.train(config, workdir)
    before, after = (
        {row["step"]: row["train/loss"] for row in metrics(folder) if "train/loss" in row} for folder in (lost, workdir)
    )
    assert len(before) >= 10 and sorted(after) == list(range(1, 41))  # those after the last save were made again
    for step, loss in before.items():
        assert after[step] == pytest.approx(loss, rel=1e-5)


LONG = [SPLIT, "--config.data.workers=1", "--config.total_steps=400", "--config.eval_every=400"]
SELDOM = dict.fromkeys((0, 1), "many_hosts:1024")  # they agree as slowly


@pytest.mark.slow
def test_sigterm_to_every_process_of_the_job_saves(tmp_path):
    with Hosts(tmp_path / "run", 2, 1, *LONG, faults=SELDOM) as run:
        run.await_step(5)
        assert run.workers(0) and run.workers(1)
        run.send_to_group(signal.SIGTERM)
        assert run.wait() == [42, 42], run.output()
        assert f"preempted; the state after step {saved(tmp_path / 'run')[-1]} is saved" in run.output()


@pytest.mark.slow
def test_what_was_learnt_before_a_worker_died_is_saved_by_all_hosts(tmp_path):
    with Hosts(tmp_path / "run", 2, 1, *LONG) as run:
        run.await_step(5)
        os.kill(run.workers(1)[0], signal.SIGKILL)
        assert run.wait() == [2, 2], run.output()
        words = f"ended by SIGKILL.*; step {saved(tmp_path / 'run')[-1]} is saved; run the same command again"
        assert all(re.search(words, run.output(host)) for host in (0, 1)), run.output()
        assert "Traceback" not in run.output()


@pytest.mark.slow
def test_hosts_that_were_started_differently_do_not_start(tmp_path):
    with Hosts(tmp_path / "run", 2, 1, each={1: ["--config.base_lr=0.5"]}) as run:
        assert run.wait() == [2, 2]
        for host in (0, 1):
            assert "the hosts differ: --config.base_lr is 0.002 on host 0, 0.5 on host 1." in run.output(host)
    assert not (tmp_path / "run").exists()


def launcher(*words, code):
    command = [sys.executable, "launch/local.py", *words, "--", sys.executable, "-c", code]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_the_launcher_says_who_failed_first_and_ends_the_others():
    code = "import os, sys, time; n = os.environ['JAX_PROCESS_ID']; print('I am', n, flush=True)\n"
    code += "if n == '1': time.sleep(0.5); sys.exit(3)\ntime.sleep(60)"
    process = launcher("-n", "3", "--grace=0.5", code=code)
    text = process.communicate(timeout=30)[1]
    assert process.returncode == 3
    assert "process 1 ended first, with exit code 3\n" in text and "killed after 0.5 s: process 0, 2\n" in text
    assert all(f"[{number}] I am {number}\n" in text for number in range(3))


def test_the_launcher_passes_sigterm_on_and_ends_as_its_processes():
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(42)); print('up', flush=True)\n"
    process = launcher("-n", "2", code=f"{code}time.sleep(60)")
    assert {process.stderr.readline(), process.stderr.readline()} == {"[0] up\n", "[1] up\n"}
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=30)[1]
    assert process.returncode == 42 and "with exit code 42" in text
    process = launcher("-n", "2", code="import os; os.kill(os.getpid(), 9)")
    assert "with signal SIGKILL" in process.communicate(timeout=30)[1] and process.returncode == 137
