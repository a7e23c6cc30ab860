"""Records of runs and their tables."""

import dataclasses
import importlib
import json
import re

import pytest

from configs import base
from tests.conftest import ROOT
from vit_jax import UserError, record
from vit_jax.config import save_config
from vit_jax.experiments import RunRecord, make_record, read_records, record_tables
from vit_jax.experiments.run_record import without_folders

PROCESS = {"first": 0, "seconds": 100.0, "hardware": "2 cores of X", "vit_jax": "0.1.0", "commit": "abc"}
RECORDS = list(read_records(ROOT / "results").values())


def write_run(folder, last=10, accuracy=0.5, **fields):
    """Writes the folder of a run of 10 steps, without its weights."""
    folder.mkdir(parents=True)
    config = base.get_config()
    config.total_steps, config.total_epochs, config.data.num_classes = 10, None, 2
    config.data.source = "folder:/home/me/photos"
    config.update(fields)
    save_config(config, folder / "config.json")
    lines = [{"step": 5, "test/accuracy": 0.1}, {"step": last, "train/loss": 1.0, "norm/grads": 2.0}]
    lines += [{"step": last, "test/accuracy": accuracy, "test/n": 100}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = [PROCESS | {"last": 6}, PROCESS | {"first": 6, "last": last, "commit": "abd"}]
    (folder / "history.json").write_text(json.dumps(history))
    return folder


def test_a_recipe_states_what_is_recorded():
    recorded = [one for one in RECORDS if (ROOT / "configs" / f"{one.name}.py").exists()]
    assert recorded
    for one in recorded:
        stated = importlib.import_module(f"configs.{one.name}").__doc__.partition("Ours: ")[2]
        assert f"{100 * one.metrics[one.config['checkpoint']['best_metric']]:.2f} %" in stated, one.name


def test_records_are_small_and_name_no_place():
    for path in (ROOT / "results").rglob("*.json"):
        assert path.stat().st_size < 20_000 and not re.search(r'"/|:/\w', path.read_text()), path


def test_a_record_has_what_was_run_and_what_came_of_it(tmp_path):
    record = make_record(str(write_run(tmp_path / "run")), "name")
    assert record.metrics == {"train/loss": 1.0, "test/accuracy": 0.5, "test/n": 100} and record.steps == 10
    assert record.config["data"]["source"] == "folder:photos" and record.seconds == 200
    assert record.ledger == {}
    assert record.curve == [
        {"step": 5, "test/accuracy": 0.1},
        {"step": 10, "test/accuracy": 0.5, "test/n": 100},
    ]
    early = dataclasses.replace(record, curve=[{"step": 5, "test/accuracy": 0.6, "val/accuracy": 0.2}])
    assert (early.stopped_by("val/accuracy")["test/accuracy"], record.stopped_by("val/accuracy")) == (
        0.6,
        record.metrics,
    )
    row = {"first": 0, "last": 10, "began": 1.7e9, "seconds": {"step": 30.04, "compiling": 10.0}}
    (tmp_path / "run" / "ledger.json").write_text(json.dumps([row, row | {"began": 1.7e9 + 49.0}]))
    assert make_record(str(tmp_path / "run"), "name").ledger == {
        "step": 60.1,
        "compiling": 20.0,
        "idle between starts": 9.0,
    }
    assert record.distinct("commit") == ["abc", "abd"] and record.distinct("hardware") == ["2 cores of X"]
    record = dataclasses.replace(record, metrics=record.metrics | {"fewshot/5shot": 0.25})
    assert record_tables.format_metrics(record) == ["test/accuracy 50.00 %", "fewshot/5shot 25.00 %"]


def test_what_cannot_be_recorded(tmp_path):
    run = write_run(tmp_path / "run")
    with pytest.raises(UserError, match="an evaluation in --evaluations=FILE is of step 5, but"):
        make_record(str(run), "name", [{"step": 5, "knn/1nn": 0.1, "weights": "0", "evals": {}}])
    with pytest.raises(UserError, match="is at step 9 of 10; finish the run first"):
        make_record(str(write_run(tmp_path / "unfinished", last=9)), "name")
    unevaluated = write_run(tmp_path / "unevaluated")
    lines = (unevaluated / "metrics.jsonl").read_text().splitlines(keepends=True)
    (unevaluated / "metrics.jsonl").write_text("".join(lines[:2]))  # trained to the end; its last accuracy is of step 5
    with pytest.raises(UserError, match="is not evaluated at its last step, 10; finish the run first"):
        make_record(str(unevaluated), "name")
    (run / "history.json").unlink()
    with pytest.raises(UserError, match="does not name the processes that trained it, since an earlier version"):
        make_record(str(run), "name")
    with pytest.raises(UserError, match=r"it contains no config\.json"):
        make_record(str(tmp_path), "name")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "other.json").write_text("{}")
    with pytest.raises(UserError, match="it is not the record of a run; remove it"):
        read_records(tmp_path / "results")


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("/data/tfds", "tfds"),
        ("folder:/data/photos", "folder:photos"),
        ("gs://bucket/tfds", "gs://bucket/tfds"),
        ("array_record:gs://bucket/a", "array_record:gs://bucket/a"),
        ("tfds:a/b", "tfds:a/b"),
        ("data/photos", "data/photos"),
        ("resize(18)|value_range(-1,1)", "resize(18)|value_range(-1,1)"),
    ],
)
def test_where_data_lie_is_not_recorded(path, short):
    assert without_folders({"data": {"source": path}}) == {"data": {"source": short}}


def test_the_command_records_a_run_or_all_below_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "one")
    for seed in (0, 1):
        write_run(tmp_path / "runs" / "table5" / "cifar10" / "full" / f"seed={seed}")
    (tmp_path / "list.jsonl").write_text('[{"step": 10, "knn/1nn": 0.75}]\n')
    (tmp_path / "evaluations.jsonl").write_text('{"step": 10, "knn/1nn": 0.75}\n')
    record.main(["record", "runs/one"])
    assert not (tmp_path / "docs").exists()
    record.main(["record", "runs/table5", "--page=pages/runs.md"])
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "results/table5/cifar10/full/seed=0.json",
        "results/table5/cifar10/full/seed=1.json",
        "pages/runs.md",
    ]
    text = (tmp_path / "pages" / "runs.md").read_text()
    assert "| test/accuracy 50.00 % | 10 | 3.33 min | 2 cores of X | 0.1.0<br>abc<br>abd |" in text
    linked = re.findall(r"]\((\S+)\)", text)
    assert len(linked) == 3 and all((tmp_path / "pages" / link).exists() for link in linked)
    record.main(["record", "--page=all.md"])
    assert "](results/one.json)" in (tmp_path / "all.md").read_text()
    for words, sentence in (
        (["runs"], None),
        (["pages"], "there is no run in pages"),
        ([], "name the folder of a run, or --page=FILE"),
        (["runs/table5", "--evaluations=evaluations.jsonl"], "--evaluations is for one run, but 2 are given"),
        (["runs/one", "--evaluations=pages/runs.md"], "a line is not a JSON object"),
        (["runs/one", "--evaluations=list.jsonl"], "a line is not a JSON object; write it with python -m"),
    ):
        if sentence:
            with pytest.raises(UserError, match=sentence):
                record.main(["record", *words])


def test_frozen_features_stand_beside_runs_on_the_same_data():
    def run(name, source, weights, metrics, seed=0):
        config = {"data": {"source": source}, "init_from": weights, "seed": seed}
        return RunRecord(name, config, 10, metrics, [])

    frozen = {"test/accuracy": 0.9, "fewshot_b/5shot": 0.25, "knn_b/20nn": 0.5, "probe_sgd_b/accuracy": 0.75}
    records = [
        run("start", "folder:a", None, frozen),
        *(
            run(f"tuned/seed={seed:.0f}", "folder:data/b", "runs/start/", {"test/accuracy": 0.5 + seed / 4}, seed)
            for seed in (0, 1)
        ),
        run("methods/plain/0.01", "folder:data/b", "runs/start", {"test/accuracy": 1.0}),  # one of several rates
        run("scratch", "folder:data/b", None, {"test/accuracy": 0.125}),
        run("other_seed", "folder:data/b", None, {"test/accuracy": 1.0}, seed=5),
        run("other_weights", "folder:data/b", "runs/else", {"test/accuracy": 1.0}),
        run("other_data", "folder:data/c", "runs/start", {"test/accuracy": 1.0}),
    ]
    [line] = record_tables.transfer_lines(records, "../results")
    found = {heading: cell for heading, cell in zip(record_tables.HEADINGS, line, strict=True) if cell}
    assert found == {
        "weights": "[start](../results/start.json)",
        "data": "b",
        "5-shot": "25.00",
        "20 neighbours": "50.00",
        "probe by SGD": "75.00",
        "trained from scratch": "12.50",
        "fine-tuned": "62.50",
    }
    assert record_tables.format_metrics(RunRecord("start", {"data": {"num_classes": 10}}, 10, frozen, [])) == [
        "test/accuracy 90.00 %"
    ]


@pytest.mark.parametrize(("seconds", "text"), [(31.6, "32 s"), (119, "119 s"), (150, "2.5 min"), (9000, "2.5 h")])
def test_times(seconds, text):
    assert record_tables.format_time(seconds) == text
