"""The ledger of real runs: killed and resumed, and with parts that are made slow."""

import re
import signal
import time

import pytest

from tests.faults.hosts import Hosts, metrics, saved, step_seconds
from vit_jax import evals, train
from vit_jax.checkpoint import Checkpoints
from vit_jax.data import loader
from vit_jax.monitoring import Category, goodput, read_processes, run_ledger, total_seconds

pytestmark = [pytest.mark.slow, pytest.mark.flaky(reruns=1)]  # these measure time


def read(workdir):
    return read_processes({"processes.json": (workdir / "processes.json").read_bytes()}, "").starts


def test_a_run_that_is_killed_and_resumed_accounts_for_every_second(tmp_path):
    """A clock outside the run measures it. Steps after the last save, as far as they were written, are done again."""
    workdir, pause, slow = tmp_path / "run", 3.0, 0.4
    words = ["--config.checkpoint_every=20"]
    began = time.time()
    with Hosts(workdir, 1, 1, *words, slow=slow) as run:
        run.await_step(38, limit=300)
        run.send(signal.SIGKILL)
        run.wait()
    killed = time.time()
    assert max(saved(workdir)) == 20
    made, before = max(line["step"] for line in metrics(workdir)), step_seconds(workdir)
    time.sleep(pause)
    again = time.time()
    with Hosts(workdir, 1, 1, *words, slow=slow) as run:
        assert run.wait(300) == [0]
    whole = (workdir / "processes.json").stat().st_mtime - began
    first, second = read(workdir)
    total = total_seconds([first, second])
    # A process begins some time after it is asked for, and its last row is written some time before its file is:
    # seconds on a machine where other processes wait for the cores too.
    assert sum(total.values()) == pytest.approx(whole, rel=0.01, abs=5)
    assert total[Category.UNKNOWN] < 0.02 * whole
    assert (second.first, second.last, second.complete, second.saves) == (20, 40, True, 1)
    assert again - 0.5 < second.began < again + 5 and 0 <= killed - first.end < run_ledger.INTERVAL + slow + 5
    assert total[Category.IDLE] == pytest.approx(second.began - first.end, abs=0.01)
    # The row counts a step at its dispatch; its metrics are written one dispatch later.
    assert made - (run_ledger.INTERVAL / slow + 2) <= first.last <= made + 1
    assert first.last > 22  # the first step of a start is compiled
    # By the metrics' clock, since steps on a busy machine take longer than they wait; it is at most one step ahead.
    after = step_seconds(workdir)
    redone = sum(after[step] for step in range(22, first.last + 1))
    assert total[Category.REDONE] == pytest.approx(redone, rel=0.1, abs=1.5 * slow)
    # Once each: the second start makes those that are not done again. The killed start may not have logged its last.
    once = sum(before[step] for step in range(2, first.last)) + sum(after[step] for step in range(first.last, 41))
    assert total[Category.STEP] == pytest.approx(once, rel=0.1, abs=1.5 * slow)
    told = re.search(r"Goodput: ([\d.]+)%", (workdir / "train.log").read_text())[1]
    assert float(told) / 100 == pytest.approx(goodput(total), abs=0.01)


def slowly(call, seconds):
    def wait(*args, **options):
        time.sleep(seconds)
        return call(*args, **options)

    return wait


def test_what_is_slow_is_found_in_its_category(quick, tmp_path, monkeypatch):
    quick.eval_every, quick.checkpoint_every, quick.total_steps = 10, 10, 20
    train.train(quick, tmp_path / "first")
    before = total_seconds(read(tmp_path / "first"))
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", slowly(Checkpoints.save, 2.0))
        patch.setattr(evals, "run_evaluators", slowly(evals.run_evaluators, 3.0))
        patch.setattr(loader.LocalBatches, "__next__", slowly(loader.LocalBatches.__next__, 0.2))
        train.train(quick, tmp_path / "slow")
    after = total_seconds(read(tmp_path / "slow"))
    batches = 20 + 2  # those of training that are read ahead, too
    least = {Category.SAVING: 2 * 2.0, Category.EVALUATING: 2 * 3.0, Category.DATA: 0.19 * batches}
    for category in set(Category) - {Category.COMPILING, Category.STARTING}:
        floor = least.get(category, 0.0)
        assert floor <= after[category] <= floor + before[category] + 1.9, (
            category
        )  # batches of evaluations are slow too
