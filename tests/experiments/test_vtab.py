"""VTAB: the recipe of a task, the command for all, means beside the paper's."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import vit_jax
from configs import vtab as recipe
from tests.conftest import ROOT, write_tfds
from vit_jax import UserError, cli, train, vtab
from vit_jax.config import check_config, parse_command_line, save_config
from vit_jax.data.preprocess import parse_pipe
from vit_jax.data.sources import VTAB_TASKS
from vit_jax.distributed import coordination, supervisor
from vit_jax.experiments import TaskResult, format_tasks, summarize_tasks
from vit_jax.experiments.vtab_table import MODELS, TABLE_9
from vit_jax.program import prepare

GROUPS = {name: task.group for name, task in VTAB_TASKS.items()}

IMAGES = "preprocess=resize(8)|value_range(0,1)"  # of the weights in these tests
SHORT = ["--config.total_steps=2", "--config.warmup_steps=1", "--config.batch=8", "--config.resolution=8"]
SHORT += ["--config.batch_eval=40", "--config.log_every=1", "--config.mesh.data=8"]


def parse(arg):
    return parse_command_line(["main.py", f"--config={ROOT}/configs/vtab.py:{arg}"])[0]


@pytest.mark.parametrize("task", VTAB_TASKS)
def test_the_recipe_of_a_task(task):
    full, dev = (parse(f"task={task},model=ViT-L/16,split={split}") for split in ("full", "dev"))
    for config in (full, dev):
        check_config(config)
        assert (config.batch, config.total_steps, config.base_lr, config.decay_type) == (512, 2500, 0.01, "cosine")
        assert (config.grad_norm_clip, config.optim.weight_decay, config.resolution) == (1.0, 0.0, 384)
        assert config.data.source == f"vtab:{task}" and config.data.num_classes == VTAB_TASKS[task].classes
    assert (full.data.split, full.data.num_examples, full.evals.test.split) == ("train800val200", 1000, "test")
    assert (dev.data.split, dev.data.num_examples, dev.evals.val.split) == ("train800", 800, "val200")
    # BiT's exceptions (arXiv 1912.11370).
    flips = task not in ("dsprites_location", "dsprites_orientation", "smallnorb_azimuth")
    crops = task not in ("clevr_count", "clevr_distance", "dmlab", "kitti_distance", "dsprites_location")
    start = "resize(448)|random_crop(384)" if crops else "resize(384)"
    text = start + "|flip_lr" * flips + "|value_range(-1,1)"
    assert parse_pipe(full.data.preprocess, 384).text == text == parse_pipe(dev.data.preprocess, 384).text
    assert parse_pipe(full.evals.test.preprocess, 384).text == "resize(384)|value_range(-1,1)"


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ViT-mu/4", {"pooling": "gap", "dropout_rate": 0.1}),
        ("R26+ViT-S/32", {"stages": (1, 1), "stem_width": 32, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 32}),
        ("BiT", {"stages": (1, 2), "width": 32}),
    ],
)
def test_the_words_of_weights_ask_for_their_model(name, fields, monkeypatch):
    model = vit_jax.create(name, num_classes=3, resolution=32, **fields)
    monkeypatch.setattr(vtab.interop, "read_model", lambda path: model)
    words = vtab.recipe_words("weights.npz")
    assert words[1] == "--config=configs/vtab.py:{},model=" + model.name
    config, _ = parse_command_line([words[0], f"--config={ROOT}/configs/smoke.py", *words[2:]])
    assert config.init_from == "weights.npz"
    wanted = vit_jax.interop.config_fields(model)
    assert {field: config.model[field] for field in wanted} == wanted


def test_every_task_has_a_recipe_and_a_number_of_the_paper():
    assert list(recipe.TASKS) == list(VTAB_TASKS)
    assert list(TABLE_9) == [name for name, task in VTAB_TASKS.items() if task.group]


@pytest.mark.parametrize(
    ("arg", "sentence"),
    [
        ("task=pet", "task=pet must be task=VALUE with one of the values cifar100, caltech101"),
        ("split=half", "split=half must be split=VALUE with one of the values full, dev"),
        ("dataset=dtd", "the argument 'dataset=dtd' is not task=TASK,model=MODEL,split=full|dev"),
        ("model=", "the argument 'model=' is not task=TASK"),
    ],
)
def test_a_wrong_argument(arg, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        parse(arg)


def test_the_means_of_table_9():
    """Group means derived from the table; the mean as the paper states it."""
    for column, means in enumerate(
        [(86.69, 87.0, 65.03, 77.6), (85.56, 86.72, 62.96, 76.3), (83.27, 84.65, 57.5, 72.7)]
    ):
        results = {task: TaskResult(row[column] / 100, "") for task, row in TABLE_9.items()}
        summary = summarize_tasks(results, GROUPS)
        found = [summary["means"][group]["accuracy"] * 100 for group in ("natural", "specialized", "structured", "all")]
        np.testing.assert_allclose(found, means, atol=0.05)
        row = summary["means"]["all"]
        assert row["accuracy"] == pytest.approx(row["paper"][MODELS[column]]) and (row["tasks"], row["diverged"]) == (
            19,
            0,
        )


def test_a_group_has_a_mean_only_of_all_its_tasks_and_diverged_ones_count_as_0():
    natural = {task: (0.5, "") for task in TABLE_9 if GROUPS[task] == "natural"}
    results = natural | {"pets": (None, "base_lr=0.03"), "dmlab": (0.3, ""), "cifar10": (0.9, "")}
    summary = summarize_tasks({task: TaskResult(*values) for task, values in results.items()}, GROUPS)
    assert list(summary["means"]) == ["natural", "run"]
    mean, run = summary["means"].values()
    assert (mean["tasks"], mean["diverged"], run["tasks"]) == (7, 1, 8)
    assert mean["accuracy"] == pytest.approx(6 * 0.5 / 7) and run["accuracy"] == pytest.approx((6 * 0.5 + 0.3) / 8)
    assert run["paper"]["H/14 JFT"] == pytest.approx((7 * 0.8669 + 0.531) / 8, abs=1e-4)
    table = [re.split(r"  +", line.strip()) for line in format_tasks(summary).splitlines()]
    assert table[0] == ["ours", *MODELS] and table[3] == ["dtd", "50.00%", "75.2%", "74.3%", "74.1%"]
    assert table[5][:2] == ["pets", "diverged"] and table[9] == ["cifar10", "90.00%", "-", "-", "-"]
    assert table[10][:3] == ["mean, natural (7)", "42.86%", "86.7%"] and table[10][-1] == "1 diverged, counted as 0"
    assert table[11][:2] == ["mean, the 8 of 19 tasks", "41.25%"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with CIFAR-10 as TFDS prepares it, of 2,000 + 40 images, and with weights."""
    for module in (supervisor, cli):
        monkeypatch.setattr(module, "join_cluster", coordination.ProcessGroup)
    monkeypatch.setattr(cli, "use_compilation_cache", lambda: None)
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    write_tfds(tmp_path, "cifar10", "3.0.2", list("abcdefghij"), {"train": 2000, "test": 40})
    pipe = IMAGES.removeprefix("preprocess=")
    model = vit_jax.create("ViT-mu/4", num_classes=3, resolution=8, pooling="gap", preprocess=pipe)
    images = jax.ShapeDtypeStruct((1, 8, 8, 3), np.float32)
    vit_jax.save(tmp_path / "weights.npz", model, jax.device_get(model.init(jax.random.key(0), images)))
    return tmp_path


def run(place, capsys, *words):
    vtab.main(["vtab", f"{place}/weights.npz", f"--data-dir={place}", "--json", *words])
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_task_is_tuned_then_trained_on_all_and_not_run_again(place, capsys, monkeypatch):
    begun = []

    def fake_train(config, workdir, **rest):
        begun.append((config.data.split, config.base_lr, workdir))
        Path(workdir).mkdir(parents=True, exist_ok=True)
        save_config(prepare(config)[0], Path(workdir) / "config.json")
        return {config.checkpoint.best_metric: abs(config.base_lr - 0.002)}

    monkeypatch.setattr(train, "train", fake_train)
    words = ["--tasks=cifar10,dtd", "--rates=0.001,0.1,0.01", f"--workdir={place}/runs", *SHORT]
    told = run(place, capsys, *words)
    folder = f"{place}/runs/cifar10"
    tried = [("train800", rate, f"{folder}/dev/base_lr={rate}") for rate in (0.001, 0.1, 0.01)]
    assert begun == [*tried, ("train800val200", 0.1, f"{folder}/full/base_lr=0.1")]
    result = {"accuracy": pytest.approx(0.098), "setting": "base_lr=0.1", "paper": {}}
    assert told["tasks"] == {"cifar10": result} and told["means"] == {}
    assert len(told["missing"]) == 1 and "tfds build dtd " in told["missing"][0]
    assert run(place, capsys, *words) == told and len(begun) == 4
    with pytest.raises(UserError, match=r"a run with other values of grad_norm_clip; choose another --workdir"):
        run(place, capsys, *words, "--config.grad_norm_clip=2")


@pytest.mark.slow
def test_frozen_features(place, capsys, monkeypatch):
    told = run(place, capsys, "--tasks=cifar10", "--frozen=fewshot")["tasks"]["cifar10"]
    chosen = float(told["setting"].removeprefix("l2="))
    assert chosen in vtab.STRENGTHS
    request = f"source=vtab:cifar10,shots=1000,seeds=1,l2={chosen},train_split=train800val200"
    metrics = vtab.evaluate(place / "weights.npz", requests=[f"a=fewshot:{request},{IMAGES}"], data_dir=str(place))
    assert metrics["a/1000shot"] == told["accuracy"] and metrics["a/n"] == 40


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tasks=pet"], "unknown VTAB task 'pet'; did you mean 'pets'?"),
        (["--tasks=dtd"], "none of the data sets is here; prepare one with its command above."),
        (["--rate=1", "--batch=8"], "unexpected '--batch=8'; fields of the recipe are written --config.KEY=VALUE."),
        (["--frozen=probe", "--config.batch=8"], "--rates and --config.KEY=VALUE are for fine-tuning"),
    ],
)
def test_mistakes(tmp_path, words, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        vtab.main(["vtab", "weights.npz", f"--data-dir={tmp_path}", *words])
