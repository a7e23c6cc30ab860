"""Cross-validation: a run for each fold, their mean, and the predictions for images that a run has not seen."""

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from vit_jax import UserError, sweep
from vit_jax.experiments import outcomes

DIGITS = ["sweep.py", f"--config={ROOT}/configs/digits.py"]


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
