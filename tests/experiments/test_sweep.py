"""Sweeps: every combination once, whatever stops them; what diverges; mistakes before anything starts."""

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT
from vit_jax import NonFiniteLoss, UserError, cli, program, shared_step, sweep, train
from vit_jax.config import evaluation, load_config, parse_command_line, save_config
from vit_jax.distributed import coordination, supervisor
from vit_jax.experiments import combinations, outcomes

SHORT = ["--config.total_steps=4", "--config.eval_every=2", "--config.checkpoint_every=2", "--config.log_every=1"]
SHORT += ["--config.warmup_steps=1", "--config.mesh.data=8", "--config.evals.test.split=test[:40]"]
SHORT += ["--config.task.mixup=0.0"]  # it only takes long to compile
RATES = "--sweep.base_lr=0.001,1e30,0.02"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(
        supervisor, "join_cluster", coordination.ProcessGroup
    )  # this process has used its devices already
    monkeypatch.setattr(cli, "use_compilation_cache", lambda: None)


def words(workdir, *more):
    return ["sweep.py", f"--config={ROOT}/configs/smoke.py", *SHORT, *more, f"--workdir={workdir}"]


def rows(workdir, *more):
    return [
        dataclasses.replace(outcome, seconds=0.0)
        for outcome in sweep.train_combinations(sweep.list_combinations(words(workdir, *more)))
    ]


def config_of(*more):
    return parse_command_line(words("unused", *more))[0]


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder and the rows of a sweep that nothing stopped, and the rates of the steps that were traced."""
    workdir, traced = tmp_path_factory.mktemp("sweep") / "whole", []

    def make_train_step(*args):
        traced.append(args)
        return program.make_train_step(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_step, "make_train_step", make_train_step)
        return workdir, rows(workdir, RATES), traced


@pytest.mark.slow
def test_best_first_and_what_diverges_last(whole):
    workdir, found, _ = whole
    assert sorted(row.name for row in found[:2]) == ["base_lr=0.001", "base_lr=0.02"] and found[0].last >= found[1].last
    assert (found[2].name, found[2].last, found[2].steps) == ("base_lr=1e30", None, 2)
    for row in found:
        lines = [json.loads(line) for line in (workdir / row.name / "metrics.jsonl").read_text().splitlines()]
        scores = {line["step"]: line["test/accuracy"] for line in lines if "test/accuracy" in line}
        assert (row.last, row.best, row.steps) == (scores.get(4), max(scores.values()), max(scores))
        assert (workdir / row.name / "model.npz").exists() == (row.last is not None)


@pytest.mark.slow
def test_a_stopped_sweep_goes_on_exactly_and_runs_nothing_twice(whole, tmp_path, monkeypatch):
    share, run, begun, stops = train.share_step, train.train, [], [True]

    def stopped(made, config):
        made = share(made, config)

        def train_step(state, batch):
            if config.base_lr == 0.02 and int(state.step) == 3 and stops:
                raise cli.Terminated
            return made.train_step(state, batch)

        return type(made)(**{**vars(made), "train_step": train_step})

    def recorded(config, workdir, **rest):
        begun.append(Path(workdir).name)
        return run(config, workdir, **rest)

    monkeypatch.setattr(train, "share_step", stopped)
    monkeypatch.setattr(train, "train", recorded)
    shutil.copytree(whole[0] / "base_lr=0.001", tmp_path / "base_lr=0.001")  # as if it had begun with this
    with pytest.raises(cli.Terminated):
        rows(tmp_path, RATES)
    stops.clear()
    alone = tmp_path.parent / "alone"
    shutil.copytree(tmp_path / "base_lr=0.02", alone)
    assert rows(tmp_path, RATES) == whole[1]
    assert begun == ["base_lr=1e30", "base_lr=0.02", "base_lr=0.02"]
    assert "Resuming" in (tmp_path / "base_lr=0.02" / "train.log").read_text()
    assert rows(tmp_path, "--sweep.base_lr=0.02") == [row for row in whole[1] if row.name == "base_lr=0.02"]
    assert len(begun) == 3
    run(config_of("--config.base_lr=0.02"), alone)  # as `vit_jax.main` does: it keeps the form of the step
    assert losses(alone) == losses(whole[0] / "base_lr=0.02")
    with pytest.raises(UserError, match="step_numbers: arguments -> constants"):
        run(config_of("--config.base_lr=0.02", "--config.step_numbers=constants"), alone)


@pytest.mark.slow
def test_the_runs_share_a_step_whose_losses_are_those_of_a_run_alone(whole, tmp_path):
    workdir, _, traced = whole
    assert len(traced) == 1
    run = config_of("--config.base_lr=0.02")
    train.train(run, tmp_path)
    assert load_config(tmp_path / "config.json").step_numbers == "constants"
    found, expected = losses(tmp_path), losses(workdir / "base_lr=0.02")
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-6)
    assert len(found) == 4


def test_the_best_of_several_seeds_is_named(tmp_path):
    found = [outcomes.Outcome(f"base_lr=0.1,seed={seed}", last, last, 1, 1.0) for seed, last in ((1, 0.9), (0, 0.5))]
    made = sweep.list_combinations(words(tmp_path, "--sweep.base_lr=0.1", "--sweep.seed=0,1"))
    report = sweep.make_report(found, made)
    assert (report.best, Path(report.workdir).name) == ("base_lr=0.1", "base_lr=0.1,seed=1")


def test_the_best_loss_is_the_lowest(tmp_path):
    rates = "--sweep.base_lr=0.1,0.2", "--config.checkpoint.best_metric=test/loss"
    made = sweep.list_combinations(words(tmp_path, *rates))
    found = [outcomes.Outcome(f"base_lr={rate}", loss, loss, 1, 1.0) for rate, loss in ((0.1, 0.9), (0.2, 0.5))]
    assert [sweep.make_report(some, made).best for some in (found, found[::-1])] == 2 * ["base_lr=0.2"]


@pytest.mark.slow
def test_what_is_printed(whole, capsys):
    workdir, found, _ = whole
    best = found[0].name
    sweep.main(words(workdir, RATES))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "test/accuracy" and [line.split()[0] for line in lines[2:5]] == [row.name for row in found]
    assert lines[4].split()[1] == "diverged" and lines[5:] == [f"Best: {best}, in {workdir}/{best}"]
    sweep.main(words(workdir, RATES, "--json"))
    told = json.loads(capsys.readouterr().out)
    assert (told["metric"], told["best"], told["command"]) == ("test/accuracy", best, None)
    assert [outcomes.Outcome(**{**row, "seconds": 0.0}) for row in told["runs"]] == found
    with pytest.raises(NonFiniteLoss, match="every combination diverged"):
        sweep.main(words(workdir, "--sweep.base_lr=1e30"))
    sweep.main(["sweep.py", "--help"])
    assert capsys.readouterr().out.endswith(f"{sweep.__doc__}\n")


@pytest.mark.slow
def test_a_closed_terminal_ends_no_sweep(whole, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)  # as a `tee` that dies does
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        assert rows(whole[0], RATES) == whole[1]


@pytest.mark.slow
def test_another_configuration_in_the_folder_is_refused(whole):
    workdir, *_ = whole
    with pytest.raises(
        UserError,
        match=r"base_lr=0\.02 contains a run with other values of optim\.beta1, warmup_steps; choose another --workd",
    ):
        rows(workdir, "--sweep.base_lr=0.02", "--config.warmup_steps=2", "--config.optim.beta1=0.8")


@pytest.fixture
def begun(tmp_path):
    """A combination that has finished, and what it learnt from: a folder of images and a file of weights."""
    for label in ("a", "b"):
        for number in range(4):
            path = tmp_path / "images" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (60 * number, 0, 90 if label == "a" else 0)).save(path)
    for name in ("weights", "teacher"):
        (tmp_path / f"{name}.npz").write_bytes(b"some weights")
    [run] = sweep.list_combinations(
        words(
            *(tmp_path / "runs", "--sweep.base_lr=0.1", f"--config.init_from={tmp_path}/weights.npz"),
            *(f"--config.data.source=folder:{tmp_path}/images", "--config.data.split=train[:6]"),
            *("--config.task.kind=distill", f"--config.task.teacher={tmp_path}/teacher.npz"),
            "--config.evals.test.split=train[6:]",
        )
    )
    config, info, _ = program.prepare(run.config)
    outcomes.write_inputs(run.folder, outcomes.describe_inputs(config, info))
    save_config(config, Path(run.folder) / "config.json")
    outcome = {"name": run.name, "last": 0.5, "best": 0.5, "steps": 4, "seconds": 1.0}
    (Path(run.folder) / "sweep.json").write_text(json.dumps(outcome))
    return tmp_path, run


def test_an_outcome_is_of_the_images_and_weights_that_are_there(begun):
    place, run = begun
    assert outcomes.read_outcome(run).last == 0.5
    weights = place / "weights.npz"
    weights.replace(place / "moved.npz")
    (place / "moved.npz").replace(weights)
    os.utime(weights)  # a copy has other times
    assert outcomes.read_outcome(run).last == 0.5
    weights.write_bytes(b"other weight")
    with pytest.raises(UserError, match=r"the contents of init_from were replaced after .*; choose another --work"):
        outcomes.read_outcome(run)
    weights.unlink()  # what has finished needs them no more
    assert outcomes.read_outcome(run).last == 0.5
    (place / "teacher.npz").write_bytes(b"other weight")
    with pytest.raises(UserError, match=r"contents of task\.teacher were replaced"):
        outcomes.read_outcome(run)
    (place / "teacher.npz").unlink()
    assert outcomes.read_outcome(run).last == 0.5
    Image.new("RGB", (8, 8), (1, 2, 3)).save(place / "images" / "a" / "0.png")
    with pytest.raises(UserError, match=r"the contents of data\.source were replaced after"):
        outcomes.read_outcome(run)
    (Path(run.folder) / "sweep.json").unlink()
    assert outcomes.read_outcome(run) is None  # the run itself compares the images when it goes on
    (Path(run.folder) / "inputs.json").write_text("[]")
    with pytest.raises(UserError, match=r"inputs\.json: it is damaged or was not written by a sweep"):
        outcomes.read_outcome(run)


def test_an_unfinished_run_does_not_go_on_from_other_weights(begun):
    place, run = begun
    (Path(run.folder) / "sweep.json").unlink()
    (place / "weights.npz").write_bytes(b"other weight")
    with pytest.raises(UserError, match="contents of init_from were replaced"):
        outcomes.read_outcome(run)


@pytest.mark.parametrize("field", ["labels", "class_map"])
def test_an_outcome_is_of_the_labels_and_class_maps_that_are_there(begun, field):
    place, run = begun
    config, info, _ = program.prepare(run.config)
    with config.unlocked():
        config.evals.test = evaluation("predictions", **{field: f"{place}/file.json"})
        config.evals.named = evaluation("predictions", class_map="imagenet_a")  # a file of the package
    (place / "file.json").write_text("[]")
    inputs = outcomes.describe_inputs(config, info)
    assert f"evals.test.{field}" in inputs and "evals.named.class_map" not in inputs
    (Path(run.folder) / "inputs.json").write_text(json.dumps(inputs))
    outcomes.check_inputs(run.folder, config, info, is_finished=True)
    (place / "file.json").write_text("{}")
    for is_finished in (True, False):
        with pytest.raises(UserError, match=rf"the contents of evals\.test\.{field} were replaced after"):
            outcomes.check_inputs(run.folder, config, info, is_finished)
    (place / "file.json").unlink()  # what has finished needs it no more
    outcomes.check_inputs(run.folder, config, info, is_finished=True)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ([], "add --sweep.KEY=VALUE,VALUE, the values to try"),
        (["--sweep.bse_lr=1,2"], "unknown config field 'bse_lr'; did you mean 'base_lr'?"),
        (["--sweep.base_lr=0.1,fast"], "--config.base_lr=fast: the value must be a number."),
        (["--sweep.base_lr=0.1,"], "--sweep.base_lr=0.1, gives no values"),
        (["--sweep.base_lr"], "--sweep.base_lr gives no values"),
        (
            ["--sweep.base_lr=0.1", "--config.base_lr=0.2"],
            "base_lr is given twice; write all its values in one --sweep.base_lr=",
        ),
        (
            ["--sweep.base_lr=0.1", "--sweep.base_lr=0.2"],
            "base_lr is given twice; write all its values in one --sweep.base_lr=",
        ),
        (["--sweep.base_lr=0.1,-1"], "base_lr=-1.0 must be at least 0"),
        (["--sweep.data.split=train,trian"], "unknown split 'trian'"),
        (["--sweep.model.name=ViT-mu/4,ViT-X/4"], "unknown model 'ViT-X/4'"),
        (
            ["--sweep.data.source=folder:/a/b,folder:/a_b"],
            "data.source=folder:/a/b and data.source=folder:/a_b would both use ",
        ),
        (["--sweep.base_lr=0.1", "--workdir=http://host/sweep"], "the workdir http://host/sweep is neither a local"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(more, sentence, tmp_path):
    given = [word for word in words(tmp_path / "run") if not (word.startswith("--workdir") and "http" in str(more))]
    with pytest.raises(UserError, match=re.escape(sentence)):
        sweep.main([*given, *more])
    assert not list(tmp_path.iterdir())


def test_a_number_written_in_two_ways_is_one_configuration(tmp_path):
    runs = sweep.list_combinations(words(tmp_path, "--sweep.base_lr=0.1,0.10,1e-1,0.2", "--sweep.seed=1,01"))
    assert [run.name for run in runs] == ["base_lr=0.1,seed=1", "base_lr=0.2,seed=1"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", ""),
        ("config.json", "[]"),
        ("config.json", "\udcff"),
        ("sweep.json", ""),
        ("sweep.json", "null"),
        ("sweep.json", "{}"),
        ("sweep.json", '{"name": "base_lr=0.1", "last": "", "best": null, "steps": 1, "seconds": 1.0}'),
        ("sweep.json", '{"name": "other", "last": 0.5, "best": 0.5, "steps": 1, "seconds": 1.0}'),
    ],
)
def test_files_that_a_sweep_did_not_write_are_refused(tmp_path, file, text):
    [run] = sweep.list_combinations(words(tmp_path, "--sweep.base_lr=0.1"))
    folder = Path(run.folder)
    folder.mkdir()
    save_config(program.prepare(run.config)[0], folder / "config.json")
    (folder / file).write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=rf"/{re.escape(file)}(: it is damaged or was not written by| is damaged)"):
        outcomes.read_outcome(run)


def test_preprocessing_may_be_written_in_another_way(tmp_path):
    [run] = sweep.list_combinations(words(tmp_path, "--sweep.base_lr=0.1"))
    before, _, _ = program.prepare(run.config)
    before.evals.test.preprocess = "resize_small({resolution*256/224})|central_crop(16)|value_range(-1,1)"
    Path(run.folder).mkdir()
    save_config(before, Path(run.folder) / "config.json")
    run.config.evals.test.preprocess = "resize_small(18)|central_crop({resolution})|value_range(-1,1)"
    assert outcomes.read_outcome(run) is None  # it is the same run, and has not finished
    run.config.evals.test.preprocess = "resize_small(19)|central_crop({resolution})|value_range(-1,1)"
    with pytest.raises(UserError, match=r"other values of evals\.test\.preprocess;"):
        outcomes.read_outcome(run)


def test_queries_of_addresses_name_no_folder(tmp_path):
    varied = "--sweep.init_from=https://host/a.npz?SECRET,https://host/b.npz?SECRET"
    runs = sweep.list_combinations(words(tmp_path, varied))
    assert [run.config.init_from for run in runs] == varied.partition("=")[2].split(",")
    assert not any("SECRET" in f"{run.name} {run.folder}" for run in runs)
    held_out = dataclasses.replace(runs[0], words=["--config=configs/finetune.py:split=dev", *runs[0].words])
    assert "init_from=https://host/a.npz?..." in combinations.full_split_command(held_out)


def test_a_long_value_makes_no_folder_with_a_longer_name_than_there_may_be(tmp_path):
    runs = sweep.list_combinations(words(tmp_path, f"--sweep.init_from={'a' * 300},{'a' * 301}"))
    assert len({run.folder for run in runs}) == 2
    for run in runs:
        Path(run.folder).mkdir()


def test_folders_and_the_command_of_the_whole_split(tmp_path):
    flags = [f"--config={ROOT}/configs/finetune.py:dataset=cifar10,split=dev", "--config.accum_steps=8"]
    flags += ["--sweep.model.name=ViT-B/16,ViT-B/32", "--sweep.base_lr=0.003,0.01", "--workdir=runs"]
    runs = sweep.list_combinations(["sweep.py", *flags])
    assert [run.folder for run in runs] == [
        f"runs/base_lr={rate},model.name=ViT-B_{patch}" for patch in (16, 32) for rate in ("0.003", "0.01")
    ]
    assert [(run.config.model.name, run.config.base_lr) for run in runs][1] == ("ViT-B/16", 0.01)
    assert combinations.full_split_command(runs[1]) == (
        f"python -m vit_jax.main --config={ROOT}/configs/finetune.py:dataset=cifar10,split=full --config.accum_steps=8 "
        "--config.model.name=ViT-B/16 --config.base_lr=0.01 --workdir=runs/full"
    )
