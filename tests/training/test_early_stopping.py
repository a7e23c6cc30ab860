"""A run that ends before `total_steps`: when, with which learning rates, and with which weights."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from configs import smoke
from tests.test_train import rows
from tests.training.test_workdir import programs_traced_once  # noqa: F401 (used by all tests)
from vit_jax import evals, train
from vit_jax.checkpoint import find_checkpoint, manifest_of
from vit_jax.checkpoint.store import read_weights
from vit_jax.experiments.run_record import make_record
from vit_jax.monitoring import read_run
from vit_jax.training import Run
from vit_jax.training.early_stopping import EarlyStopping
from vit_jax.tree import flatten


def configured(**fields):
    """At most 20 steps, evaluated every 2; two evaluations without a better one end it, 3 steps later."""
    config = smoke.get_config()
    config.update(
        {"total_steps": 20, "eval_every": 2, "log_every": 1, "checkpoint_every": 100, "decay_type": "constant"}
    )
    config.update({"stop_after": 2, "stop_cooldown": 3, "warmup_steps": 0})
    config.mesh.data, config.task.mixup = 8, 0.0
    config.update_from_flattened_dict(fields)
    return config


DUE = evals.due_evaluators
UP = {0: 0.1, 2: 0.5, 4: 0.7, 6: 0.6, 8: 0.7}  # at 8 the end is decided; 0.1 at the steps 10 and 11


def script(patch, values, metric="test/accuracy", killed_at=None):
    """Fixes the value of a metric at each step, or at step 0 for steps that are not named."""
    at = [0]

    def measured(*_):
        if at[-1] == killed_at:
            raise KeyboardInterrupt
        return {metric: values.get(at[-1], values[0]), "test/n": 9}

    patch.setattr(evals, "due_evaluators", lambda *args: at.append(args[2]) or DUE(*args))
    patch.setattr(evals, "run_evaluators", measured)


def weights(file):
    with np.load(file) as arrays:
        return dict(arrays)


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_what_counts_as_better():
    config, found = configured(stop_difference=0.1), EarlyStopping()
    for step, value in enumerate([np.nan, 0.5, 0.59, 0.65, 0.7, 0.74], start=1):
        found = found.count(config, step, value)
    assert found == EarlyStopping(0.65, 4, 2, 6) and found.is_decided(config)
    assert (found.last_step(config), found.final_steps(config)) == (9, (6, 9))
    longer = configured(stop_difference=0.1, stop_after=3)
    assert (found.last_step(longer), found.final_steps(longer)) == (20, None)
    assert found.last_step(configured(stop_after=None)) == 20
    assert found.last_step(configured(stop_cooldown=100)) == 20  # a run is never longer than it would have been
    assert "by more than 0.1" in found.describe(config) and "65.00% at step 4" in found.describe(config)
    falling = configured(**{"checkpoint.best_metric": "test/loss"})
    losses = EarlyStopping().count(falling, 1, 2.0).count(falling, 2, 1.5)
    assert (losses.best, losses.count(falling, 3, 1.6).misses) == (1.5, 1)
    rising = configured(**{"checkpoint.best_metric": "test/loss", "checkpoint.best_is": "highest"})
    assert EarlyStopping(best=2.0).count(rising, 2, 1.5).misses == 1


def test_all_hosts_take_what_the_first_finds():
    """Metrics that hosts compute by themselves may differ in the last bit."""
    first = {"value": EarlyStopping(0.7, 4, 2, 8).to_json(), "error": None, "is_user_error": False}
    hosts = SimpleNamespace(host=1, hosts=2, all_gather=lambda topic, value: [first, value])
    run = SimpleNamespace(
        _config=configured(),
        _workdir=SimpleNamespace(stopping=EarlyStopping(0.7, 4, 1, 6)),
        _supervisor=hosts,
        metrics={"test/accuracy": 0.70001},
        step=8,
    )
    assert Run._count_evaluation(run) == EarlyStopping(0.7, 4, 2, 8)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The workdir of a run that ended early, and what it returned."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        script(patch, UP)
        return workdir, train.train(configured(), workdir)


def test_a_run_cools_down_and_exports_the_best(whole):
    workdir, metrics = whole
    lines = rows(workdir)
    assert [line["step"] for line in lines if "test/accuracy" in line] == [2, 4, 6, 8, 10, 11]
    rates = {line["step"]: line["train/lr"] for line in lines if "train/lr" in line}
    assert list(rates) == list(range(1, 12))
    np.testing.assert_allclose([*rates.values()], configured().base_lr * np.array([1] * 9 + [2 / 3, 1 / 3]), rtol=1e-6)
    log = (workdir / "train.log").read_text()
    sentence = (
        "Early stopping: test/accuracy has not improved in 2 evaluations (the best is 70.00% at step 4); the learning "
        "rate falls to 0 until step 11, where the run ends."
    )
    assert log.count(sentence) == 1 and "The best checkpoint is exported, that of step 8." in log
    assert metrics["test/accuracy"] == 0.7  # of the exported weights, of the newer of two that are equally good
    best, manifest = read_weights(workdir / "checkpoints" / "8")
    exported = weights(workdir / "model.npz")
    assert manifest["stopping"] == EarlyStopping(0.7, 4, 2, 8).to_json()
    assert all(np.array_equal(exported[name], leaf) for name, leaf in flatten(best).items())
    run = read_run(str(workdir), "run")
    assert run.is_complete and (run.step, run.exported_step, run.exported["test/accuracy"]) == (11, 8, 0.7)
    record = make_record(str(workdir), "run")
    assert record.metrics["test/accuracy"] == 0.7 and record.as_run("x").last["test/accuracy"] == 0.1
    assert find_checkpoint(workdir, best=True).name == "8"


def test_the_same_command_finds_that_it_is_complete(whole, tmp_path, monkeypatch):
    workdir = shutil.copytree(whole[0], tmp_path / "again")
    script(monkeypatch, UP)
    train.train(configured(), workdir)
    assert "it stopped early, after 11 of 20 steps." in (workdir / "train.log").read_text()
    assert same(weights(workdir / "model.npz"), weights(whole[0] / "model.npz")) and rows(workdir) == rows(whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["before", "evaluation", "cooldown"])
def test_a_stopped_run_ends_bitwise_as_a_whole_one(whole, tmp_path, monkeypatch, stop):
    """Stopped before the end is decided, as it is about to be, or during the cooldown."""

    def watch(step, metrics):
        if (stop, step) in (("before", 5), ("cooldown", 10)) and "train/loss" in metrics:
            raise KeyboardInterrupt

    script(monkeypatch, UP, killed_at=8 if stop == "evaluation" else None)
    config = configured(checkpoint_every=3)
    with pytest.raises(KeyboardInterrupt):
        train.train(config, tmp_path, watch)
    script(monkeypatch, UP)
    train.train(config, tmp_path)
    assert same(weights(tmp_path / "model.npz"), weights(whole[0] / "model.npz"))
    assert rows(tmp_path) == rows(whole[0])
    log = (tmp_path / "train.log").read_text()
    assert "Resuming" in log and log.count("Early stopping: ") == 1


@pytest.mark.slow
def test_the_lowest_loss_is_the_best(tmp_path, monkeypatch):
    """Without a cooldown the run ends where that is decided."""
    script(monkeypatch, {0: 1.0, 2: 0.5, 4: 0.7, 6: 0.6}, "test/loss")
    config = configured(stop_cooldown=0, **{"checkpoint.best_metric": "test/loss"})
    assert train.train(config, tmp_path)["test/loss"] == 0.5
    assert rows(tmp_path)[-1]["step"] == 6
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "4", "6"}
    manifest = manifest_of(tmp_path / "checkpoints" / "6")
    assert (manifest["best_is"], manifest["score"]) == ("lowest", 0.6)
    assert find_checkpoint(tmp_path, best=True).name == "2"
