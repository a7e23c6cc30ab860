"""Cross-validation: a run for each fold, their mean, and the predictions for images that a run has not seen."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from vit_jax import UserError, cli, doubts, evaluate, sweep
from vit_jax.data.sources import SourceConfig, open_split
from vit_jax.distributed import coordination, supervisor
from vit_jax.evals import confident_learning
from vit_jax.experiments import find_fold_runs, outcomes, predict_out_of_fold

DIGITS = ["sweep.py", f"--config={ROOT}/configs/digits.py"]
SMOKE = ["sweep.py", f"--config={ROOT}/configs/smoke.py", "--config.total_steps=2", "--config.eval_every=2"]
SMOKE += ["--config.task.mixup=0.0", "--config.data.split=test"]


def combinations(workdir, *more):
    return sweep.list_combinations([*DIGITS, *more, f"--workdir={workdir}"])


# The runs.


def test_a_run_for_each_fold_trains_on_the_others(tmp_path):
    runs = combinations(tmp_path, "--sweep.fold=3", "--sweep.base_lr=0.1,0.2", "--config.data.split=train[:80%]+test")
    assert {Path(run.folder).name for run in runs} == {
        f"base_lr={rate},fold={n}" for rate in (0.1, 0.2) for n in (1, 2, 3)
    }
    for run in runs:
        fold = f"fold {run.name[-1]}/3"
        assert run.config.data.split == f"train[:80%][not {fold}]+test[not {fold}]"
        assert run.config.evals.test.split == f"train[:80%][{fold}]+test[{fold}]"


def test_the_mean_over_folds_and_the_command_for_all_images(tmp_path):
    made = combinations(tmp_path, "--sweep.fold=2", "--sweep.base_lr=0.1,0.2")
    values = {
        "base_lr=0.1,fold=1": 0.9,
        "base_lr=0.1,fold=2": 0.2,
        "base_lr=0.2,fold=1": 0.6,
        "base_lr=0.2,fold=2": 0.8,
    }
    found = [outcomes.Outcome(name, last, last, 1, 1.0) for name, last in values.items()]
    report = sweep.make_report(found, made)
    assert (report.best, Path(report.workdir).name) == ("base_lr=0.2", "base_lr=0.2,fold=1")
    assert report.averages[0].mean == pytest.approx(0.7) and report.averages[0].std == pytest.approx(0.02**0.5)
    assert re.search(r"^base_lr=0\.2 +0\.7000 +0\.1414 +2$", report.render(), re.M)
    assert report.command == (
        f"python -m vit_jax.main --config={ROOT}/configs/digits.py --config.base_lr=0.2 --workdir={tmp_path}/full"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sweep.fold=1"], "--sweep.fold=1 must be the number of folds, from 2 to 1,000"),
        (["--sweep.fold=1,2"], "--sweep.fold=1,2 must be the number of folds"),
        (["--sweep.fold=2", "--config.data.split=train[fold 1/2]"], "has folds already; leave them to --sweep.fold=2"),
        (["--sweep.fold=2", "--config.evals.test.split=test"], "evals.test reads the folds of data.split"),
        (["--sweep.fold=2", "--config.evals.test.source=npz:a.npz"], "but evals.test reads others"),
    ],
)
def test_folds_that_do_not_fit_are_refused(tmp_path, more, message):
    with pytest.raises(UserError, match=re.escape(message)):
        combinations(tmp_path, *more)


# The predictions.


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The folder of a sweep over two folds, with the predictions and the lists."""
    workdir = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            supervisor, "join_cluster", coordination.ProcessGroup
        )  # this process has used its devices already
        patch.setattr(cli, "join_cluster", coordination.ProcessGroup)
        patch.setattr(cli, "use_compilation_cache", lambda: None)
        sweep.main([*SMOKE, "--sweep.fold=2", f"--workdir={workdir}"])
        doubts.main(["doubts.py", str(workdir)])
    return workdir


@pytest.mark.slow
def test_each_image_is_predicted_by_the_runs_that_have_not_seen_it(swept):
    found, whole = np.load(swept / "out_of_fold.npz"), open_split(SourceConfig("digits"), "test")
    assert found["names"].tolist() == [whole.example_key(index) for index in range(len(whole))]
    np.testing.assert_array_equal(found["labels"], whole.labels())
    fold = open_split(SourceConfig("digits"), "test[fold 2/2]")
    rows = np.isin(found["names"], [fold.example_key(index) for index in range(len(fold))])
    assert (found["folds"] == np.where(rows, 2, 1)).all()
    evaluate.evaluate(swept / "fold=2", save="predictions", save_dir=swept / "saved")
    logits = np.load(swept / "saved" / "test.test_fold_2_2.predictions.npz")["logits"]
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found["probabilities"][rows], expected, rtol=1e-5)


@pytest.mark.slow
def test_the_doubted_images_are_listed_shown_and_left_out(swept):
    found, lines = np.load(swept / "out_of_fold.npz"), (swept / "doubts.csv").read_text().splitlines()
    ranked = confident_learning.rank_doubted(found["labels"], found["probabilities"])
    assert lines[0] == "image,given,suggested,score,suggested_probability" and len(lines) == 1 + len(ranked) > 1
    image, given, suggested, score, _ = lines[1].split(",")
    assert image == found["names"][ranked[0]] and float(score) == pytest.approx(
        found["probabilities"][ranked[0]][int(given)]
    )
    assert int(suggested) == found["probabilities"][ranked[0]].argmax() != int(given)
    page = (swept / "doubts.html").read_text()
    assert image in page and page.count("<figure>") == min(len(ranked), doubts.SHOWN)
    left = open_split(SourceConfig("digits", exclude=str(swept / "doubts.csv")), "test")
    assert {left.example_key(index) for index in range(len(left))} == {*found["names"]} - {*found["names"][ranked]}


@pytest.mark.slow
def test_what_has_no_predictions_of_all_images_is_refused(swept, tmp_path):
    with pytest.raises(UserError, match=r"is not the folder of a sweep that has ended: it has no sweep\.json"):
        find_fold_runs(str(swept / "fold=1" / "checkpoints"))
    with pytest.raises(UserError, match="varied nothing but fold and seed; leave out --of"):
        find_fold_runs(str(swept), "base_lr=1")
    shutil.copytree(swept, tmp_path / "copy")
    runs = find_fold_runs(str(tmp_path / "copy"))
    assert [run.fold.number for run in runs] == [1, 2]
    result = tmp_path / "copy" / "fold=2" / "sweep.json"
    result.write_text(result.read_text().replace('"last": 0', '"last": null, "was": 0'))
    with pytest.raises(UserError, match="copy/fold=2 diverged, so it predicts nothing"):
        find_fold_runs(str(tmp_path / "copy"))
    result.unlink()
    with pytest.raises(UserError, match=r"fold 2 of 2 has no run in .*copy that has ended; the command of the sweep"):
        find_fold_runs(str(tmp_path / "copy"))
    digits = open_split(SourceConfig("digits"), "test")
    images = np.stack([digits[index]["image"] for index in range(len(digits))])
    np.savez(tmp_path / "other.npz", test_images=images[::-1], test_labels=digits.labels()[::-1])
    with pytest.raises(UserError, match=r"contents of data\.source were replaced after the run in .*choose another"):
        predict_out_of_fold(runs[:1], source=f"npz:{tmp_path}/other.npz")
