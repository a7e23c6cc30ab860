"""A run's folder: nothing that was learnt is lost, whatever fails beside the training, and nothing is overwritten."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import vit_jax
from configs import smoke
from tests.test_train import rows
from vit_jax import Preempted, UserError, data, evals, program, train
from vit_jax.checkpoint import find_checkpoint
from vit_jax.checkpoint.manager import Checkpoints
from vit_jax.data import loader
from vit_jax.data.sources import kinds
from vit_jax.distributed import Supervisor
from vit_jax.interop import download
from vit_jax.storage import run_files


def configured(**fields):
    """Ten steps, of which the fourth, the eighth and the last are evaluated, and saved."""
    config = smoke.get_config()
    config.update({"total_steps": 10, "eval_every": 4, "checkpoint_every": 100, "log_every": 1, **fields})
    config.mesh.data, config.task.mixup = 8, 0.0
    return config


@pytest.fixture(scope="module", autouse=True)
def programs_traced_once():
    """Lets runs with the same settings share a program."""
    make, made = program.make_program, {}

    def remembered(config, mesh, spec, check, teacher):
        key = (config.to_json(), mesh, spec)
        if key not in made:
            made[key] = make(config, mesh, spec, check, teacher)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "make_program", remembered)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The workdir of a run that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    train.train(configured(), workdir)
    return workdir


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of it that may be changed."""
    return shutil.copytree(whole, tmp_path / "run")


def steps(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def same(one, other):
    assert rows(one) == rows(other)
    first, second = np.load(one / "model.npz"), np.load(other / "model.npz")
    assert all(np.array_equal(first[name], second[name]) for name in first)


def failing(monkeypatch, place, name, error, call):
    """Lets the call of that number raise an error."""
    function, calls = getattr(place, name), []

    def fails(*args, **options):
        calls.append(name)
        if len(calls) == call:
            raise error
        return function(*args, **options)

    monkeypatch.setattr(place, name, fails)


def test_an_evaluation_that_fails_costs_no_training(whole, tmp_path, monkeypatch):
    saved = r"step 8 is saved; run the same command again to continue from that step\."
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17 bytes.")
    faults = [
        (UserError("cannot read 7.jpg."), UserError, f"cannot read 7.jpg; {saved}"),
        (full, UserError, rf"more memory than .*17 bytes\.\); lower --config\.batch_eval; {saved}"),
        (ZeroDivisionError("a bug"), ZeroDivisionError, "a bug"),
    ]
    for number, (error, kind, sentence) in enumerate(faults):  # the same command again and again
        with monkeypatch.context() as patch:
            failing(patch, evals, "run_evaluators", error, call=1 if number else 2)
            with pytest.raises(kind, match=sentence) as raised:
                train.train(configured(), tmp_path / "run")
        assert steps(tmp_path / "run") == [4, 8]
    assert raised.value.__notes__ == ["step 8 is saved; run the same command again to continue from that step."]
    train.train(configured(), tmp_path / "run")
    same(tmp_path / "run", whole)


@pytest.mark.parametrize(
    "error", [UserError("a worker died."), pytest.param(ZeroDivisionError("a bug"), marks=pytest.mark.slow)]
)
def test_data_that_fail_cost_no_training(whole, tmp_path, monkeypatch, error):
    with monkeypatch.context() as patch:
        failing(patch, loader.LocalBatches, "__next__", error, call=3)
        with pytest.raises(type(error)) as raised:
            train.train(configured(), tmp_path / "run")
    words = "step 2 is saved; run the same command again to continue from that step."
    assert words in "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert steps(tmp_path / "run") == [2]
    train.train(configured(), tmp_path / "run")
    same(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_run_that_is_killed_before_its_evaluation_is_kept_evaluates_again(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failing(patch, Checkpoints, "add_metrics", KeyboardInterrupt(), call=2)
        with pytest.raises(KeyboardInterrupt):
            train.train(configured(), tmp_path / "run")
    assert [line["step"] for line in rows(tmp_path / "run")][-2:] == [8, 8]  # the evaluation is written already
    train.train(configured(), tmp_path / "run")
    same(tmp_path / "run", whole)


def test_a_run_without_its_checkpoints_is_not_overwritten(finished):
    shutil.rmtree(finished / "checkpoints")  # to save disk
    before = contents(finished)
    other = configured()
    other.model.depth = 2
    with pytest.raises(UserError, match=r"contains a run with other settings .*model\.depth: 1 -> 2"):
        train.train(other, finished)
    with pytest.raises(UserError, match=r"contains a run's model\.npz, but no checkpoint .*; choose another --workdir"):
        train.train(configured(), finished)
    assert contents(finished) == before
    (finished / "model.npz").unlink()
    with pytest.raises(UserError, match="contains the metrics of a run of 10 steps, but none of its checkpoints"):
        train.train(configured(), finished)
    (finished / "config.json").unlink()
    with pytest.raises(UserError, match=r"contains the metrics of a run, but no config\.json"):
        train.train(configured(), finished)
    left = {path: data for path, data in before.items() if path.name not in ("model.npz", "config.json")}
    assert contents(finished) == left


def test_a_run_that_was_killed_before_its_first_save_starts_anew(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failing(patch, loader.DevicePrefetcher, "__next__", KeyboardInterrupt(), call=4)
        with pytest.raises(KeyboardInterrupt):
            train.train(configured(), tmp_path / "run")
    assert [line["step"] for line in rows(tmp_path / "run")] == [1, 2]  # metrics are read one step late
    train.train(configured(), tmp_path / "run")
    same(tmp_path / "run", whole)


@pytest.mark.slow
def test_the_model_of_a_run_stays_until_there_is_a_newer_checkpoint(finished, monkeypatch):
    longer = configured(total_steps=14, eval_every=2)

    def stopped(call):
        with monkeypatch.context() as patch:
            failing(patch, loader.DevicePrefetcher, "__next__", KeyboardInterrupt(), call=call)
            with pytest.raises(KeyboardInterrupt):
                train.train(longer, finished)

    model = (finished / "model.npz").read_bytes()
    stopped(call=2)  # step 11 is not saved
    assert (finished / "model.npz").read_bytes() == model and steps(finished)[-1] == 10
    wait, patch = Checkpoints.poll, pytest.MonkeyPatch()
    patch.setattr(Checkpoints, "poll", lambda self: (self.wait(), wait(self)))  # so that it is known in time
    stopped(call=8)  # step 12 is; its evaluation asks for batches too
    patch.undo()
    assert not (finished / "model.npz").exists() and steps(finished)[-1] == 12
    _, params = vit_jax.load(finished)
    _, newest = vit_jax.load(finished / "checkpoints" / "12")
    jax.tree.map(np.testing.assert_array_equal, params, newest)


@pytest.mark.slow
def test_a_model_stays_though_its_checkpoint_was_lost(finished):
    model = (finished / "model.npz").read_bytes()
    shutil.rmtree(finished / "checkpoints" / "10")
    start = steps(finished)[-1]  # the run goes on from here, and saves the next step before it fails
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, evals, "run_evaluators", UserError("unreadable."), call=1)
        with pytest.raises(UserError, match=f"step {start + 1} is saved"):
            train.train(configured(total_steps=14, eval_every=start + 1), finished)
    assert steps(finished)[-1] == start + 1 < 10 and (finished / "model.npz").read_bytes() == model


def test_a_finished_run_exports_what_it_stored(finished):
    """Whatever the evaluations of the command that looks at it again, and whether its model is still there."""
    files = [finished / name for name in ("model.json", "model.npz", "config.json")]
    before = [path.read_bytes() for path in files]
    config = configured()
    config.evals.test.preprocess = "resize(16)|value_range(-1,1)"
    files[0].unlink()
    files[1].unlink()
    train.train(config, finished)
    assert [path.read_bytes() for path in files] == before


@pytest.mark.slow
def test_adapters_name_the_weights_from_which_the_run_started(finished, tmp_path):
    """Also if it is resumed, or its end is looked at again, with others or with none; and they are of its last step."""
    workdir, weights = tmp_path / "adapted", tmp_path / "weights.npz"
    for suffix in (".npz", ".json"):
        shutil.copy(finished / f"model{suffix}", weights.with_suffix(suffix))
    described = json.loads(weights.with_suffix(".json").read_text())
    stated = {"resample": "bicubic", "licence": "mit"}
    weights.with_suffix(".json").write_text(json.dumps(described | stated))

    def run(init_from, total_steps):
        config = configured(total_steps=total_steps, eval_every=2, init_from=init_from)
        config.adapt.rank = 2
        train.train(config, workdir)

    def loaded():
        found = workdir.parent / "found"
        shutil.rmtree(found, ignore_errors=True)
        found.mkdir()
        for path in workdir.glob("adapter_*"):
            shutil.copy(path, found)
        (_, params), (_, merged) = vit_jax.load(workdir), vit_jax.load(found)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), params, merged)
        assert json.loads((workdir / "model.json").read_text()).items() >= stated.items()  # as for the weights
        return json.loads((found / "adapter_config.json").read_text())["base_model_name_or_path"]

    run(str(weights), 2)
    for other in (None, str(finished / "checkpoints" / "4")):
        run(other, 2)
        assert loaded() == str(weights)
    run(None, 4)
    assert loaded() == str(weights)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        failing(patch, loader.DevicePrefetcher, "__next__", KeyboardInterrupt(), call=8)
        poll = Checkpoints.poll
        patch.setattr(Checkpoints, "poll", lambda self: (self.wait(), poll(self)))
        run(None, 9)
    assert not list(workdir.glob("adapter_*")) and not (workdir / "model.npz").exists()


@pytest.mark.slow
def test_a_run_keeps_no_query_of_an_address(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    for query, total_steps in (("SECRET", 2), ("SECRET2", 4)):
        config = configured(total_steps=total_steps, init_from=f"https://host/model.npz?{query}")
        config.adapt.rank = 2
        place = tmp_path / "cache" / "published" / download.relative_path(config.init_from)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(whole / "model.npz", place)  # as if it were downloaded
        shutil.copy(whole / "model.json", place.with_name("model.json"))
        train.train(config, tmp_path / "run")
    assert "init_from" not in (tmp_path / "run/train.log").read_text()  # nothing has changed but the length
    for path, content in contents(tmp_path / "run").items():
        assert b"SECRET" not in content, path
    described = json.loads((tmp_path / "run/adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == "https://host/model.npz?..."


@pytest.mark.parametrize("part", ["", "/model.npz", "/checkpoints/8"])
def test_a_run_does_not_replace_what_it_starts_from(part, finished):
    before = contents(finished)
    with pytest.raises(UserError, match=r"is in the workdir .*; choose another --workdir\."):
        train.train(configured(init_from=f"{finished}{part}", base_lr=1e-4), finished)
    assert contents(finished) == before


def test_a_run_may_start_from_what_it_does_not_replace(tmp_path):
    for source, place in (("run/pretrained.npz", "run"), ("runs/photos", "runs"), ("ViT-B/16", "."), (None, ".")):
        run_files.check_init_from(source, place)
    for source, place in (
        ("run/", "./run"),
        ("gs://b/r/checkpoints/5", "gs://b/r/"),
        ("r/model.npz", f"{Path.cwd()}/r"),
    ):
        with pytest.raises(UserError, match="is in the workdir"):
            run_files.check_init_from(source, str(place))


def test_a_run_that_failed_before_its_first_step_may_be_corrected(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, data, "train_batches", UserError("no memory."), call=1)
        with pytest.raises(UserError, match="no memory"):
            train.train(configured(), tmp_path / "run")
    assert (tmp_path / "run" / "config.json").exists()
    train.train(configured(batch=16, total_steps=2), tmp_path / "run")
    assert steps(tmp_path / "run") == [2]


def test_metrics_of_another_program_are_left_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n')
    with pytest.raises(UserError, match=r"cannot read .*metrics\.jsonl: .* is not .*; move the file away"):
        train.train(configured(), tmp_path)


def test_the_log_lists_the_classes(whole):
    text = (whole / "train.log").read_text()
    assert "\nClasses:\n0  0\n1  1\n" in text and "\n9  9\n" in text


def test_a_checkpoint_says_what_was_measured_and_how(whole):
    about = json.loads((whole / "checkpoints" / "8" / "about" / "metadata").read_text())
    [measured] = [line for line in rows(whole) if line["step"] == 8 and "test/accuracy" in line]
    assert about["metrics"] == {name: value for name, value in measured.items() if name != "step"}
    evaluation, contents = configured().evals.test, about["evals"]["test"].pop("contents")
    assert about["evals"] == {"test": {"split": evaluation.split, "preprocess": evaluation.preprocess}}
    assert contents == kinds.open_source(configured(), "test").fingerprint
    assert find_checkpoint(whole, best=True).name in ("4", "8", "10")


# -- What comes between -----------------------------------------------------------------------------------------------


class Interrupted(Supervisor):
    """A supervisor of a run that is preempted at a step, whose workdir another run may have taken by then."""

    def __init__(self, step, taken=False):
        super().__init__()
        self.left, self.taken = step, taken

    def count_step(self):
        super().count_step()
        self.left -= 1
        if self.left == 0:
            if self.taken:
                self.raise_later(UserError("in use by another run."))
            raise Preempted("preempted.")


@pytest.mark.parametrize("taken", [False, True])
def test_a_preempted_run_saves_nothing_where_another_writes(tmp_path, taken):
    with pytest.raises(UserError if taken else Preempted, match="another run" if taken else "after step 3 is saved"):
        train.train(configured(), tmp_path / "run", supervisor=Interrupted(3, taken))
    assert steps(tmp_path / "run") == ([] if taken else [3])


def test_a_run_whose_workdir_was_taken_at_its_end_exports_nothing(tmp_path, monkeypatch):
    supervisor, evaluate = Supervisor(), evals.run_evaluators

    def taken(*args):
        supervisor.raise_later(UserError("in use by another run."))
        return evaluate(*args)

    monkeypatch.setattr(evals, "run_evaluators", taken)
    config = configured()
    config.total_steps = config.warmup_steps = 0
    with pytest.raises(UserError, match="another run"):
        train.train(config, tmp_path / "run", supervisor=supervisor)
    assert not (tmp_path / "run" / "model.npz").exists()


def test_settings_with_which_no_step_was_made_are_not_those_of_the_run(whole, tmp_path, monkeypatch):
    workdir = shutil.copytree(whole, tmp_path / "run")
    before = (workdir / "config.json").read_text()
    config = configured()
    config.total_steps, config.batch_eval = config.total_steps + 1, 64
    failing(monkeypatch, evals, "check_fits", UserError("set --config.batch_eval to less."), call=1)
    with pytest.raises(UserError, match="batch_eval to less"):
        train.train(config, workdir)
    assert (workdir / "config.json").read_text() == before


@pytest.mark.slow
def test_an_interruption_of_the_last_save_says_what_is_saved(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failing(patch, Checkpoints, "close", KeyboardInterrupt(), call=1)
        with pytest.raises(KeyboardInterrupt) as end:
            train.train(configured(), tmp_path / "run")
    [note] = end.value.__notes__
    assert re.match(r"step \d+ is saved\. Run the same command again", note)


def test_an_interval_that_is_unset_is_a_sentence(tmp_path):
    config = configured()
    with config.unlocked():
        config.checkpoint_every_minutes = None
    with pytest.raises(UserError, match="checkpoint_every_minutes must be set"):
        train.train(config, tmp_path / "run")
