"""Fine-tuning on the data sets of a table: the rate from a held-out part, then the whole split with each seed."""

import json
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT, write_tfds
from vit_jax import NonFiniteLoss, UserError, cli, data, finetune, train
from vit_jax.config import resolve_config, save_config
from vit_jax.data.sources import tfds
from vit_jax.distributed import coordination, supervisor
from vit_jax.experiments import outcomes

MODEL = ["--config.model.name=ViT-mu/16", "--config.model.depth=1", "--config.resolution=32", "--config.batch=8"]
MODEL += ["--config.data.num_examples=None", "--config.data.num_classes=None"]


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """What is trained, by folder; the accuracy is a function of the rate, the seed and the split."""
    runs = []

    def fake(config, workdir, supervisor=None):
        name = Path(workdir).relative_to(tmp_path / "runs").as_posix()
        runs.append(name)
        Path(workdir).mkdir(parents=True, exist_ok=True)
        save_config(prepare(config)[0], Path(workdir) / "config.json")
        if config.base_lr > 1:
            raise NonFiniteLoss("the loss is nan")
        whole = config.data.split == "train"
        return {"test/accuracy" if whole else "val/accuracy": 0.5 + config.base_lr + config.seed / 100 + whole / 10}

    def prepare(config):
        completed, info = data.complete_config(config)
        return resolve_config(completed), info, None  # no model, whose shapes take a second

    monkeypatch.setattr(train, "train", fake)
    monkeypatch.setattr(outcomes, "prepare", prepare)
    monkeypatch.setattr(supervisor, "join_cluster", coordination.ProcessGroup)
    monkeypatch.setattr(cli, "use_compilation_cache", lambda: None)
    monkeypatch.setattr(tfds, "is_reachable", lambda url: False)
    write_tfds(tmp_path / "data", "cifar10", "3.0.2", list("abcdefghij"), {"train": 100, "test": 20})
    return runs


def words(tmp_path, *more):
    recipe = f"--config={ROOT}/configs/finetune.py:model=ViT-B/16"
    return ["", recipe, *MODEL, f"--config.data.data_dir={tmp_path}/data", f"--workdir={tmp_path}/runs", *more]


@pytest.mark.slow
def test_the_whole_protocol_once(trained, tmp_path, capsys):
    argv = words(tmp_path, "--table=2", "--sweep.base_lr=0.01,0.02,2", "--datasets=cifar10,cifar100")
    finetune.main(argv)
    rates = ["0.01", "0.02", "2"]
    assert trained == [f"cifar10/base_lr={r}" for r in rates] + [f"cifar10/full/seed={n}" for n in range(3)]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["cifar10", "base_lr=0.02", "52.00", "63.00", "1.00", "3", "-"]
    assert (
        lines[2].startswith("cifar100: there is no TFDS dataset 'cifar100' in ") and "tfds build cifar100" in lines[2]
    )
    finetune.main([*argv, "--json"])
    assert len(trained) == 6  # nothing twice
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((tmp_path / "runs" / "finetune.json").read_text())
    [row] = told["rows"]
    assert (row["mean"], row["std"]) == pytest.approx((0.63, 0.01)) and list(told["missing"]) == ["cifar100"]
    with pytest.raises(NonFiniteLoss, match="training diverged on cifar10; try lower"):
        finetune.main(words(tmp_path, "--table=2", "--sweep.base_lr=2", "--datasets=cifar10"))


@pytest.mark.slow
def test_the_rate_is_chosen_by_the_mean_over_seeds(trained, tmp_path, capsys):
    finetune.main(
        words(tmp_path, "--table=5", "--datasets=cifar10", "--sweep.base_lr=0.01,0.02", "--sweep.seed=1,2", "--json")
    )
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["chosen"] == "base_lr=0.02" and row["held_out"] == pytest.approx(0.535)
    assert (row["mean"], row["std"], row["runs"]) == (pytest.approx(0.62), None, 1)
    assert trained[-1] == "cifar10/full/seed=0" and len(trained) == 5


def test_what_is_tried_is_what_table_4_states(tmp_path):
    def rates(table, model, dataset, *more):
        recipe = f"--config={ROOT}/configs/finetune.py:model={model}"
        words = [f"--table={table}", f"--datasets={dataset}", "--workdir=w", *more]
        trials = finetune.list_all_trials(["", recipe, *words])
        assert {trial.config.data.split for trial in trials} < {"train[:98%]", "train[:99%]", "train[:90%]"}
        assert {trial.folder.partition("/base_lr")[0] for trial in trials} == {f"w/{dataset}"}
        return {trial.config.resolution for trial in trials}, [trial.config.base_lr for trial in trials]

    assert rates(5, "ViT-B/16", "cifar10") == ({384}, [0.001, 0.003, 0.01, 0.03])
    assert rates(5, "ViT-B/16", "imagenet2012") == ({384}, [0.003, 0.01, 0.03])
    assert rates(2, "ViT-L/16", "imagenet2012") == ({512}, [0.003, 0.01, 0.03])
    assert rates(2, "ViT-L/16", "cifar10")[0] == {384}
    assert rates(5, "R50+ViT-B/16", "imagenet2012")[1] == [0.003, 0.01, 0.03, 0.06]
    assert rates(5, "R50+ViT-B/16", "oxford_iiit_pet")[1][-1] == 0.03
    both = rates(5, "R50+ViT-B/16", "imagenet2012", "--sweep.model.dropout_rate=0.1,0.2")[1]
    assert sorted(both) == sorted(2 * [0.003, 0.01, 0.03, 0.06])


def test_the_paper_is_beside_its_weights():
    number = finetune.find_paper_number("2", "ViT-L/16", "ViT-L/16-imagenet21k", "cifar10")
    row = finetune.DatasetResult("cifar10", "base_lr=0.01", 0.99, 0.991, 0.0004, 3, number)
    lines = finetune.format_rows(
        [row, finetune.DatasetResult("cifar100", "base_lr=1", None, None, None, 0, None)]
    ).splitlines()
    assert lines[1].split()[1:] == ["base_lr=0.01", "99.00", "99.10", "0.04", "3", "99.15", "±", "0.03"]
    assert lines[2].split()[1:] == ["base_lr=1", "-", "diverged", "-", "0", "-"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "add --table=2, --table=5 or --table=6, and --config="),
        (["--table=5"], "add --table=2, --table=5 or --table=6, and --config="),
        (["--table=3", "--config=c.py"], "unknown table '3'; choose from 2, 5, 6."),
        (["--table=5", "--config=c.py:dataset=cifar10"], "leave dataset= and split= out of --config;"),
        (["--table=5", "--config=c.py", "--datasets=cifar"], "unknown data set 'cifar'; did you mean 'cifar10'?"),
        (["--table=5", "--config=configs/finetune.py", "--cofnig.seed=1"], "did you mean --config.seed=VALUE?"),
    ],
)
def test_mistakes(given, sentence, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=re.escape(sentence)):
        finetune.main(["", *given])


def test_no_data_set_at_all(trained, tmp_path):
    with pytest.raises(UserError, match=r"none of the data sets is here: .* tfds build cifar100 "):
        finetune.main(words(tmp_path, "--table=5", "--datasets=cifar100"))
    assert not trained
