"""The tables of the paper with ours beside them: which of our runs reproduce a number."""

import dataclasses
import json
import re

import pytest

from configs import base, finetune, vtab
from docs import paper_tables
from docs.results_page import format_page
from tests.experiments.test_results import PROCESS
from vit_jax import interop
from vit_jax.experiments import RunRecord
from vit_jax.paper import (
    LEARNING_RATES,
    PaperNumber,
    find_paper_number,
    list_learning_rates,
    read_paper_numbers,
    read_paper_runs,
)


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
    assert LEARNING_RATES.keys() == finetune.DATASETS.keys() and list_learning_rates("pets", "ViT-B/16") == (0.01,)
    assert 0.06 in list_learning_rates("imagenet2012", "R50+ViT-B/16") and len(LEARNING_RATES["cifar10"]) == 4


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
