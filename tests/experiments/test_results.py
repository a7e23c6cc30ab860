"""Records of runs, the paper's numbers, and the page of both: nothing on it is typed by hand."""

import dataclasses
import importlib
import json
import re

import pytest

from configs import base, finetune, vtab
from tests.conftest import ROOT
from vit_jax import UserError, interop, record
from vit_jax.config import save_config
from vit_jax.experiments import (
    RunRecord,
    format_page,
    make_record,
    paper_tables,
    protocols,
    read_records,
    results_page,
    transfer,
)
from vit_jax.experiments.run_record import without_folders
from vit_jax.paper import PaperNumber, find_paper_number
from vit_jax.paper.numbers import read_paper_numbers, read_paper_runs

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


def test_the_page_is_that_of_the_records():
    """`python -m vit_jax.record` writes it anew."""
    assert (ROOT / "docs" / "results.md").read_text() == format_page(RECORDS)


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
    assert results_page.format_metrics(record) == ["test/accuracy 50.00 %", "fewshot/5shot 25.00 %"]


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
    with pytest.raises(UserError, match=r"contains no history\.json, since an earlier version of vit_jax trained"):
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
    record.main(["record", "runs/table5"])
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "results/table5/cifar10/full/seed=0.json",
        "results/table5/cifar10/full/seed=1.json",
        "docs/results.md",
    ]
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "| test/accuracy 50.00 % | 10 | 3.33 min | 2 cores of X | 0.1.0<br>abc<br>abd |" in text
    assert text.count("](../results/") == 4
    for words, sentence in (
        (["runs"], None),
        (["docs"], "there is no run in docs"),
        (["runs/table5", "--evaluations=evaluations.jsonl"], "--evaluations is for one run, but 2 are given"),
        (["runs/one", "--evaluations=docs/results.md"], "a line is not a JSON object"),
        (["runs/one", "--evaluations=list.jsonl"], "a line is not a JSON object; write it with python -m"),
    ):
        if sentence:
            with pytest.raises(UserError, match=sentence):
                record.main(["record", *words])


def test_the_pictures_are_drawn_with_the_page(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    words = ["record", f"--results={tmp_path}/results", f"--page={tmp_path}/page.md", f"--pictures={tmp_path}/pictures"]
    record.main(words)
    drawn = [f"{tmp_path}/pictures/figure{number}.svg" for number in (2, 3, 5)]
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path}/page.md", *drawn]
    with pytest.raises(UserError, match="cannot write to /proc/pictures"):
        record.main([*words[:3], "--pictures=/proc/pictures"])


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
    [line] = transfer.transfer_lines(records)
    found = {heading: cell for heading, cell in zip(transfer.HEADINGS, line, strict=True) if cell}
    assert found == {
        "weights": "[start](../results/start.json)",
        "data": "b",
        "5-shot": "25.00",
        "20 neighbours": "50.00",
        "probe by SGD": "75.00",
        "trained from scratch": "12.50",
        "fine-tuned": "62.50",
    }
    assert results_page.format_metrics(RunRecord("start", {"data": {"num_classes": 10}}, 10, frozen, [])) == [
        "test/accuracy 90.00 %"
    ]


def test_the_paper_agrees_with_the_recipe():
    """The docstring of configs/finetune.py was typed from the paper too."""
    text = re.search(r"\(Table 5\): (.*?)With polyak", finetune.__doc__, re.S)[1]
    datasets = ("imagenet2012", "cifar10", "cifar100", "oxford_iiit_pet", "oxford_flowers102")
    stated = re.findall(r"([BLH]/\d\d) ([\d.,\s]+) %", text)
    assert len(stated) == 5
    for model, values in stated:
        for dataset, value in zip(datasets, map(float, values.split(",")), strict=True):
            number = find_paper_number("5", f"ViT-{model}", f"ViT-{model}-imagenet21k", dataset)
            assert number.accuracy == value and number.std is None
    counts = {"2": 5 * 7 - 5, "5": 3 * 6 * 5 - 6, "6": 18 * 6, "9": 3 * 19}
    tables = [number.table for number in read_paper_numbers()]
    assert {table: tables.count(table) for table in dict.fromkeys(tables)} == counts
    means = {(run.model, run.epochs): paper_tables.mean_of_five(run) for run in read_paper_runs() if run.exaflops}
    assert (
        len(means) == 18
        and means["BiT-R50x1", 7] == pytest.approx(89.33)
        and means["BiT-R152x2", 7] == pytest.approx(94.01, abs=0.005)
    )  # Table 7
    assert protocols.LEARNING_RATES.keys() == finetune.DATASETS.keys() and protocols.list_learning_rates(
        "pets", "ViT-B/16"
    ) == (0.01,)
    assert (
        0.06 in protocols.list_learning_rates("imagenet2012", "R50+ViT-B/16")
        and len(protocols.LEARNING_RATES["cifar10"]) == 4
    )


def test_weights_that_the_paper_is_about():
    def find(table, model, weights):
        number = find_paper_number(table, model, weights, "cifar10")
        return number and (number.pretraining, number.epochs)

    assert find("5", "ViT-B/16", "ViT-B/16-imagenet21k") == ("imagenet21k", None)
    assert find("5", "ViT-B/16", "gs://bucket/vit_b16_jft/") == ("jft", None)
    for other in (None, "ViT-B/16-augreg-imagenet21k", "ViT-B/32-imagenet21k", "ViT-B/16-imagenet2012-384", "x"):
        assert find("5", "ViT-B/16", other) is None
    for epochs in (7, 14):
        assert find("6", "R50+ViT-L/16", f"workdirs/compute/hybrid/r50_vit_l16_jft_{epochs}") == ("jft", epochs)
    assert find("6", "ViT-L/16", "workdirs/vit_l16_jft") is None  # of how many epochs?
    names = {entry.name for entry in interop.list_models()}
    assert all(f"{model}-imagenet21k" in names for model in ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32"))


def fine_tuned(dataset="cifar10", accuracy=0.98, steps=10_000, **fields):
    """The record of a run on the whole training split."""
    config = finetune.get_config(f"dataset={dataset}")
    config.init_from = "ViT-B/16-imagenet21k"
    config.update(fields)
    return RunRecord("run", config.to_dict(), steps, {"test/accuracy": accuracy}, [PROCESS | {"last": steps}])


def test_ours_stands_beside_the_number_that_it_is_about():
    cifar10 = find_paper_number("5", "ViT-B/16", "ViT-B/16-imagenet21k", "cifar10")
    assert cifar10 == PaperNumber("5", "imagenet21k", "ViT-B/16", "cifar10", 98.95, None)
    runs = [fine_tuned(), dataclasses.replace(fine_tuned(accuracy=0.99), name="other")]
    others = [fine_tuned(steps=100), fine_tuned(batch=128), fine_tuned(init_from=None), fine_tuned("cifar100")]
    others += [dataclasses.replace(fine_tuned(), config=finetune.get_config("dataset=cifar10,split=dev").to_dict())]
    assert paper_tables.format_ours(cifar10, [*runs, *others]) == "98.50 ± 0.71 (2 runs)"
    for group, field, value in (
        *((None, field, value) for field, value in (("resolution", 32), ("base_lr", 1.0), ("grad_norm_clip", None))),
        *(("model", field, value) for field, value in (("depth", 1), ("dropout_rate", 0.1))),
        *(("optim", field, value) for field, value in (("lr_multipliers", (".*", 0.0)), ("ema_decay", 0.9))),
        ("data", "preprocess", "resize({resolution})|value_range(-1,1)"),
        ("evals", "test", base.evaluation("classify", split="test[:10]").to_dict()),
    ):
        record = json.loads(json.dumps(dataclasses.asdict(fine_tuned())))  # as it is read from its file
        (record["config"][group] if group else record["config"])[field] = value
        assert paper_tables.format_ours(cifar10, [RunRecord(**record)]) == "", field
    for group, field, value in (
        (None, "seed", 5),
        (None, "base_lr", 0.001),
        ("data", "workers", 3),
        ("mesh", "fsdp", 2),
    ):
        record = json.loads(json.dumps(dataclasses.asdict(fine_tuned())))
        (record["config"][group] if group else record["config"])[field] = value
        assert paper_tables.format_ours(cifar10, [RunRecord(**record)]) == "98.00 (1 run)", field
    assert paper_tables.format_ours(cifar10, others) == ""
    [row] = [line for line in format_page(runs).splitlines() if line.startswith("| ImageNet-21k | CIFAR-10 | 98.95")]
    assert row.startswith("| ImageNet-21k | CIFAR-10 | 98.95 | 98.50 ± 0.71 (2 runs) | 98.79 | |")


def test_vtab_is_the_mean_of_all_its_tasks():
    number = find_paper_number("2", "ViT-L/16", "ViT-L/16-imagenet21k", "vtab")
    runs = []
    for index, task in enumerate(vtab.TASKS):
        config = vtab.get_config(f"task={task},model=ViT-L/16")
        config.init_from = "ViT-L/16-imagenet21k"
        runs.append(RunRecord(task, config.to_dict(), 2500, {"test/accuracy": index / 20}, [PROCESS]))
    assert [*vtab.TASKS][-1] == "cifar10"  # which is none of the 19
    assert paper_tables.format_ours(number, runs) == "45.00 (1 run)"
    again = dataclasses.replace(runs[0], name="again", metrics={"test/accuracy": 1.0})  # another seed
    assert paper_tables.format_ours(number, [*runs, again]) == f"{45 + 50 / 19:.2f} (1 run)"
    assert paper_tables.format_ours(number, runs[1:]) == ""
    runs[0].config["data"]["split"] = "train800"
    assert paper_tables.format_ours(number, runs) == ""


def test_real_is_of_all_validation_images():
    number = find_paper_number("5", "ViT-B/16", "ViT-B/16-imagenet21k", "imagenet2012_real")
    run = fine_tuned("imagenet2012", steps=20_000)
    metrics = run.metrics | {"real/accuracy": 0.9}
    for split, counts in (
        ("validation labels=real.json class_map=None", True),
        ("val labels=real.json class_map=None", True),
        ("validation[:10%] labels=real.json class_map=None", False),
        ("validation labels=None class_map=None", False),
        ("train labels=real.json class_map=None", False),
    ):
        real = {"source": "tfds:imagenet2012", "split": split, "preprocess": "resize(384)|value_range(-1,1)"}
        found = paper_tables.format_ours(
            number, [dataclasses.replace(run, metrics=metrics, evaluations={"real": real})]
        )
        assert found == ("90.00 (1 run)" if counts else ""), split
    assert paper_tables.format_ours(number, [dataclasses.replace(run, metrics=metrics)]) == ""


@pytest.mark.parametrize(("seconds", "text"), [(31.6, "32 s"), (119, "119 s"), (150, "2.5 min"), (9000, "2.5 h")])
def test_times(seconds, text):
    assert results_page.format_time(seconds) == text


def test_studies_stand_beside_the_paper(tmp_path):
    records = [
        make_record(str(write_run(tmp_path / f"{run[0]}{seed}", accuracy=value)), f"cifar10_pooling/{run},seed={seed}")
        for run in ("token/0.0008", "gap/0.0024")
        for seed, value in ((0, 0.5), (1, 0.7))
    ]
    records[0].config["checkpoint"]["best_metric"] = "val/accuracy"  # which stops it, and is not the result
    text = format_page([*records, make_record(str(write_run(tmp_path / "other")), "pooling_not")])
    table = text.partition("## Class token or mean (Figure 9): cifar10_pooling\n")[2]
    assert table.splitlines()[3:6] == [
        "| | | | | | 5-shot on ImageNet, B/16 on JFT; curves without numbers |",
        "| gap/0.0024 | 60.00 ± 14.14 | test/accuracy | 10 | 2 | |",
        "| token/0.0008 | 60.00 ± 14.14 | test/accuracy | 10 | 2 | the class token |",
    ]
