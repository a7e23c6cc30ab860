"""Evaluations of all kinds, in a run and by the command: on any mesh, with features read once, of any weights."""

import json
import re
import shutil
import sys
import types

import jax
import numpy as np
import pytest
from PIL import Image

import vit_jax
from configs import base
from tests.conftest import ROOT, write_tfds
from tests.data.test_parquet import write_table
from tests.evals.helpers import make_source
from tests.faults.hosts import Hosts, metrics
from vit_jax import UserError, cli, data, evals, evaluate, interop, predict, record, train
from vit_jax.config import (
    EVAL_KINDS,
    best_metrics,
    check_config,
    eval_fields,
    kinds_of_task,
    load_config,
    parse_command_line,
    save_config,
)
from vit_jax.data import loader
from vit_jax.evals import open_run
from vit_jax.evals.evaluators import METHODS, FrozenFeatures
from vit_jax.evals.outputs import compute_outputs
from vit_jax.evals.prediction_files import write_confusion
from vit_jax.evals.requests import choose_evaluations, request_evaluations
from vit_jax.inference import make_inference
from vit_jax.model import create
from vit_jax.program import prepare
from vit_jax.sharding import make_mesh
from vit_jax.storage import versions

RECIPE = """
from configs import base, smoke

def get_config():
    config = smoke.get_config()
    with config.unlocked():
        config.evals.few = base.evaluation("fewshot", shots=(1, 5), preprocess=config.evals.test.preprocess, every=5)
    config.checkpoint.best_metric = "few/5shot"
    return config
"""
WNIDS = interop.class_wnids(1000)
# A recipe with every kind of evaluation for a classifier, some on part of the images.
EVERY_KIND = """
from configs import base, smoke
from vit_jax.config import kinds_of_task

SHORT = {"probe": {"l2": (0.1, 10.0)}, "probe_sgd": {"rates": (0.01, 0.1), "epochs": 3}, "knn": {"k": (1, 5)}}
SHORT["zeroshot"] = {"texts": "FOLDER/words.npz"}

def get_config():
    config = smoke.get_config()
    config.task.mixup = 0.0
    for kind in (one for one in kinds_of_task("classify")[1:] if one != "multi_label"):  # which needs a sigmoid
        with config.unlocked():
            made = base.evaluation(kind, preprocess=config.evals.test.preprocess, **SHORT.get(kind, {}))
            if "train_split" in made:
                made.train_split = "train[:300]"
            config.evals[kind] = made
    return config
"""
REAL = ("loss", "calibration_error")  # metrics that are no counts
FEW = ("few/1shot", "few/1shot_std", "few/5shot", "few/5shot_std", "few/n")


def add(config, name, kind, **fields):
    with config.unlocked():
        config.evals[name] = base.evaluation(kind, preprocess=config.evals.test.preprocess, **fields)
    return config


@pytest.fixture
def every_kind(tmp_path):
    """The file of a recipe with every kind of evaluation."""
    path, vectors = tmp_path / "every_kind.py", np.random.default_rng(0).normal(size=(10, 16))
    path.write_text(EVERY_KIND.replace("FOLDER", str(tmp_path)))
    np.savez(tmp_path / "words.npz", names=[*map(str, range(10))], vectors=vectors, logit_scale=100.0)
    return path


@pytest.fixture
def few(quick):
    """Few-shot regression on the digits every fifth step of twenty; the head every tenth."""
    config = add(quick, "few", "fewshot", shots=(1, 5), every=5)
    config.checkpoint.best_metric = "few/5shot"
    return config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of such a run, of the recipe above."""
    folder = tmp_path_factory.mktemp("few")
    (folder / "few.py").write_text(RECIPE)
    words = [f"--config={folder}/few.py", "--config.task.mixup=0.0"]
    config, _ = parse_command_line(["main.py", *words])
    train.train(config, folder / "run")
    return folder / "run"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def passes(monkeypatch):
    """The split of each pass over images, as passes begin."""
    began, read = [], loader.LocalBatches

    def recorded(source, *args, on_bad, **options):
        if on_bad == "raise":  # not of training
            began.append(source.parts[0][0])
        return read(source, *args, on_bad=on_bad, **options)

    monkeypatch.setattr(loader, "LocalBatches", recorded)
    return began


# What a configuration accepts.


def test_every_kind_has_a_method_for_what_it_evaluates():
    assert METHODS.keys() == EVAL_KINDS.keys()
    for kind, rules in EVAL_KINDS.items():
        learns = isinstance(METHODS[kind], FrozenFeatures)
        assert learns == ("train_split" in rules.fields) and (not rules.task) == (learns or kind == "zeroshot"), kind


@pytest.mark.parametrize("kind", EVAL_KINDS)
def test_the_base_makes_every_kind(quick, kind, tmp_path):
    config = add(quick, "other", kind, every=3)
    config.checkpoint.best_metric = f"other/{best_metrics(config.evals.other)[-1]}"
    check_config(config)
    assert set(config.evals.other) == set(eval_fields(kind))
    save_config(config, tmp_path / "config.json")
    again = load_config(tmp_path / "config.json")
    assert again.evals.other == config.evals.other  # tuples are not lists
    check_config(again)


def test_names_of_the_best_follow_the_fields(quick):
    names = [f"few/{n}shot_l2_{l2}" for n in (1, 5) for l2 in ("0.5", "1024")]
    config = add(quick, "few", "fewshot", shots=(1, 5), l2=(0.5, 1024.0))
    assert [f"few/{name}" for name in best_metrics(config.evals.few)] == names
    config.checkpoint.best_metric = "few/5shot"
    with pytest.raises(UserError, match=r"unknown checkpoint.best_metric 'few/5shot'; did you mean 'few/\dshot_l2"):
        check_config(config)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"shot": (1,)}, r"unknown field of evals.few \(kind fewshot\) 'shot'; did you mean 'shots'"),
        ({"k": (1,)}, r"unknown field of evals.few \(kind fewshot\) 'k'"),
        ({"shots": (5, 0)}, r"evals.few.shots=\(5, 0\) must be at least 1"),
        ({"every": 0}, "evals.few.every=0 must be at least 1"),
        ({"kind": "fewshots"}, "unknown evals.few.kind 'fewshots'; did you mean 'fewshot'"),
        ({"kind": "knn"}, r"unknown field of evals.few \(kind knn\) 'l2'"),
    ],
)
def test_a_wrong_field_is_named(few, fields, sentence):
    with few.unlocked():
        few.evals.few.update(fields)
    with pytest.raises(UserError, match=sentence):
        check_config(few)


def test_a_missing_field_is_named(few):
    with few.unlocked():
        del few.evals.few["seeds"]
    with pytest.raises(UserError, match=r"evals\.few lacks seeds"):
        check_config(few)


# In a run.


def test_each_evaluation_has_its_own_steps_and_any_may_be_the_best(run, tmp_path):
    lines = {line["step"]: line for line in metrics(run) if "few/n" in line or "test/n" in line}
    assert {step: ("few/n" in line, "test/n" in line) for step, line in lines.items()} == {
        5: (True, False),
        10: (True, True),
        15: (True, False),
        20: (True, True),
    }
    kept = {int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit()}
    best = max(lines, key=lambda step: (lines[step]["few/5shot"], step))
    assert kept == {15, 20, best}
    assert evaluate.evaluate(run, best=True)["few/5shot"] == lines[best]["few/5shot"]
    stopped = shutil.copytree(run, tmp_path / "stopped")  # which exports its best
    config = json.loads((stopped / "config.json").read_text())
    (stopped / "config.json").write_text(json.dumps(config | {"stop_after": 3}))
    assert open_run(stopped, False, 1, None).step == best and open_run(run, False, 1, None).step == 20


@pytest.mark.slow
def test_killed_and_resumed_it_measures_the_same(run, few, tmp_path, monkeypatch):
    """Killed as the few-shot evaluation of step 15 begins, which its checkpoint precedes."""
    evaluate_all, calls = evals.run_evaluators, []

    def killed(evaluators, *args):
        calls.append(list(evaluators))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return evaluate_all(evaluators, *args)

    monkeypatch.setattr(evals, "run_evaluators", killed)
    with pytest.raises(KeyboardInterrupt):
        train.train(few, tmp_path / "run")
    train.train(few, tmp_path / "run")
    assert calls[2:] == [["few"], ["few"], ["few", "test"]]
    assert metrics(tmp_path / "run") == metrics(run)


def test_a_batch_is_tried_with_what_it_is_for(few, monkeypatch):
    config, info, program = prepare(few)
    tried = []
    for name in ("features", "eval_step"):
        object.__setattr__(program, name, lambda params, batch, name=name: tried.append(name))
    evals.check_fits(config, program, program.eval_batch, program.init(jax.random.key(0), {}).params)
    assert tried == ["features", "eval_step"] and info.eval_parts == {"few": 2, "test": 1}


def test_data_of_other_classes_suit_what_does_not_use_the_head(quick, tmp_path):
    config = add(quick, "other", "knn", source=f"folder:{ROOT}/tests/fixtures/photos", split="train", k=(1,))
    assert data.describe_evals(config)["other"]["split"].startswith("train folder:")
    config.evals.other = base.evaluation("classify", source="synthetic", preprocess=config.evals.test.preprocess)
    config.data.num_classes, config.data.num_examples = 10, 1438
    with pytest.raises(UserError, match=r"evals.other.split=test has other classes than the training data"):
        prepare(config)


# Features.


@pytest.mark.parametrize("probes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_kind_is_the_same_on_one_device_and_on_eight(run, every_kind, probes):
    """359 images in batches of 100 and of 64 leave rows to pad; features are those of each image once, in order."""
    model, params = interop.load(run)
    config = load_config(run / "config.json")
    all_kinds = parse_command_line(["main.py", f"--config={every_kind}"])[0].evals
    with config.unlocked():
        config.evals = {name: one for name, one in all_kinds.items() if name == "test" or ("probe" in name) == probes}
    metrics, features = [], []
    for batch, devices in ((100, 1), (64, 8)):
        config.batch_eval, config.mesh.data = batch, devices
        program = make_inference(model, make_mesh(config, jax.devices()[:devices]), params)
        batches, cache = data.EvalBatches(config, "test", program.batch_sharding), {}
        features.append(compute_outputs(program, "features", params, batches, cache))
        metrics.append(evals.run_evaluators(evals.make_evaluators(config, program), params, cache=cache))
    one, eight = metrics
    assert one.keys() == eight.keys() and len(one) > 2 * len(config.evals)
    for name, own in config.evals.items():
        stated = "|".join([*EVAL_KINDS[own.kind].best, *EVAL_KINDS[own.kind].others, "n", "n_train"])
        stated = re.compile(re.sub(r"{\w+:g}", r"\\d+", stated))
        assert all(stated.fullmatch(metric.partition("/")[2]) for metric in one if metric.startswith(f"{name}/"))
        assert {f"{name}/{metric}" for metric in best_metrics(own)} <= one.keys()
    for name, value in one.items():
        assert eight[name] == (pytest.approx(value, rel=1e-5) if name.endswith(REAL) else value), name
    images = np.stack([data.load_image(row["image"], model.preprocess) for row in batches.source])
    _, out = jax.jit(model.apply)(params, images)
    for found, labels in features:
        np.testing.assert_allclose(found, out["pre_logits"], rtol=1e-5, atol=1e-5)
        assert labels.tolist() == [row["label"] for row in batches.source]


@pytest.mark.slow
def test_two_hosts_find_what_one_finds(every_kind, tmp_path):
    words = [f"--config={every_kind}", "--config.total_steps=0"]
    with Hosts(tmp_path / "two", 2, 4, *words, slow=0) as pair:
        assert pair.wait() == [0, 0], pair.output()
    config, _ = parse_command_line(["main.py", *Hosts.words, *words])
    config.mesh.data = 8
    train.train(config, tmp_path / "one")
    two, one = (next(line for line in metrics(tmp_path / name) if "test/n" in line) for name in ("two", "one"))
    kinds = {*kinds_of_task("classify")[1:]} - {"multi_label"}  # which needs a sigmoid
    assert two.keys() == one.keys() >= {f"{kind}/n" for kind in kinds}
    for name, value in one.items():
        assert two[name] == (pytest.approx(value, rel=1e-5) if name.endswith(REAL) else value), name


# The command.


def test_evaluate_gives_the_numbers_of_the_run_by_name_and_by_kind(run, passes):
    found = evaluate.evaluate(run, requests=["few", "fewshot:shots=1,5", "knn:k=1,5", "test:split=test[:50]"])
    last = next(line for line in metrics(run) if line["step"] == 20 and "few/n" in line)
    assert {name: found[name] for name in FEW} == {name: last[name] for name in FEW}
    assert [found[f"fewshot/{n}shot"] for n in (1, 5)] == [found[f"few/{n}shot"] for n in (1, 5)]
    assert found["knn/n"] == 359 and found["test/n"] == 50 and found["step"] == 20
    assert passes == ["train", "test", "test"]  # images that were seen once are not read again


@pytest.mark.slow
def test_weights_without_a_run_are_measured_and_features_stay_on_disk(run, passes, tmp_path, monkeypatch):
    words = {"source": "digits", "requests": ["knn", "classify"], "save": "features", "save_dir": tmp_path / "saved"}
    first = evaluate.evaluate(run / "model.npz", **words)
    assert first["classify/accuracy"] == evaluate.evaluate(run, requests=["test"])["test/accuracy"]
    assert sorted(passes) == ["test", "test", "test", "train"]
    del passes[:]
    assert evaluate.evaluate(run / "model.npz", source="digits", requests=["knn"]).items() <= first.items()
    assert passes == []
    assert evaluate.evaluate(run / "checkpoints" / "15", source="digits", requests=["knn:k=1"])["knn/n"] == 359
    assert passes == ["train", "test"]  # other weights
    monkeypatch.setattr(versions, "library_versions", lambda names: dict.fromkeys(names, "1") | {"pillow": "2"})
    assert evaluate.evaluate(run / "model.npz", source="digits", requests=["knn"]).items() <= first.items()
    assert passes == ["train", "test"] * 2  # another library may decode images otherwise
    files = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert files == ["classify.test.features.npz", "knn.test.features.npz", "knn.train.features.npz"]
    with np.load(tmp_path / "saved" / "knn.test.features.npz") as arrays:
        assert arrays["features"].shape == (359, 16) and arrays["names"].tolist()[:2] == ["test/0", "test/1"]
        assert set(arrays) == {"features", "labels", "names", "class_names"}


SGD = pytest.param("probe_sgd:rates=0.01,0.1,epochs=3", marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", ["probe:l2=0.1,10", SGD])
def test_a_linear_probe_becomes_a_model_that_classifies_as_it_does(run, passes, tmp_path, kind):
    request = f"p={kind},source=digits,train_split=train[:300]"
    found = evaluate.evaluate(run / "model.npz", requests=[request], save="model", save_dir=tmp_path / "probed")
    assert passes == ["train", "test"]  # features are computed once
    again = evaluate.evaluate(tmp_path / "probed" / "p.model.npz", requests=["classify"], source="digits")
    assert again["classify/accuracy"] == pytest.approx(found["p/accuracy"], abs=1.5 / 359)  # but for a near tie
    model, params = vit_jax.load(tmp_path / "probed" / "p.model.npz")
    frozen, before = vit_jax.load(run / "model.npz")
    assert model.class_names == frozen.class_names and model.preprocess == frozen.preprocess
    assert model.spec == frozen.spec and model.loss == "softmax"
    np.testing.assert_array_equal(params["embed"]["kernel"], before["embed"]["kernel"])


def test_predictions_are_saved_with_names_from_one_pass(run, passes, tmp_path):
    found = evaluate.evaluate(run, requests=["test", "again=predictions"], save="predictions", save_dir=tmp_path)
    assert passes == ["test"]
    with np.load(tmp_path / "test.test.predictions.npz") as arrays:
        accuracy = np.mean(arrays["logits"].argmax(axis=1) == arrays["labels"])
        assert accuracy == found["test/accuracy"] and len(arrays["names"]) == 359
    plain = evaluate.evaluate(run / "checkpoints" / "20", source="digits", requests=["test=classify"])
    for metric, value in plain.items():
        assert found[metric] == pytest.approx(value, rel=1e-6)
    assert all(found[f"test/{metric}"] == plain[f"test/{metric}"] for metric in ("accuracy", "top5", "n"))
    with pytest.raises(UserError, match="--save=predictions needs an evaluation of the head"):
        evaluate.evaluate(run, requests=["few"], save="predictions", save_dir=tmp_path)


def test_a_kind_takes_the_splits_of_the_run(quick):
    """It evaluated 'test', which a folder without splits does not have, and learnt from what it was tested on."""
    quick.data.split, quick.evals.test.split = "train[:90%]", "train[90%:]"
    words = ["predictions", "knn", "all=knn:split=test,train_split=train", "other=knn:source=digits"]
    choose_evaluations(quick, (16, 16), quick.data.preprocess, words, None)
    read = {name: (one.split, one.get("train_split")) for name, one in quick.evals.items()}
    assert read == {
        "predictions": ("train[90%:]", None),
        "knn": ("train[90%:]", "train[:90%]"),
        "all": ("test", "train"),
        "other": ("test", "train"),
    }
    with quick.unlocked():  # whose first evaluation is on other data
        quick.evals = {"test": base.evaluation("classify", source="tfds:cifar10", split="a", preprocess="resize(16)")}
    quick.evals.test.preprocess = quick.data.preprocess
    choose_evaluations(quick, (16, 16), None, ["knn"], None)
    assert (quick.evals.knn.split, quick.evals.knn.train_split) == ("test", "train[:90%]")


def test_several_outputs_are_saved_at_once(run, passes, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "join_hosts", lambda: None)
    words = ["evaluate", str(run), "--evals=predictions", f"--save-dir={tmp_path}"]
    evaluate.main([*words, "--save=confusion,mistakes", "--save=predictions", "--save=mistakes"])
    suffixes = ("confusion.csv", "confusion.png", "mistakes.npz", "predictions.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"predictions.test.{one}" for one in suffixes]
    assert passes == ["test"] and "predictions/accuracy" in capsys.readouterr().out
    for wrong, sentence in (
        ("mistake", "unknown word of --save 'mistake'; did you mean 'mistakes'"),
        ("confusion,model", "--save=model needs a linear probe"),
    ):
        with pytest.raises(UserError, match=sentence):
            evaluate.main([*words, f"--save={wrong}"])
    assert passes == ["test"]  # refused before an image is read


def test_the_confusion_matrix_is_saved_with_its_picture(run, tmp_path, monkeypatch):
    evaluate.evaluate(run, requests=["test:split=test[:50]"], save="confusion", save_dir=tmp_path)
    start = tmp_path / "test.test_0_50.confusion"
    rows = [line.split(",") for line in start.with_name(f"{start.name}.csv").read_text().splitlines()]
    assert sum(int(count) for row in rows[1:] for count in row[1:-1]) == 50
    assert start.with_name(f"{start.name}.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # not installed
    model, labels = create("ViT-mu/8", num_classes=2), np.array([0, 1])
    write_confusion(tmp_path / "plain", base.evaluation("classify"), make_source("ab"), model, np.eye(2), labels)
    assert (tmp_path / "plain.csv").exists() and not (tmp_path / "plain.png").exists()


def test_features_are_not_compared_with_classes_of_other_numbers(run, tmp_path):
    for split, names in (("train", ["a", "b", "c"]), ("test", ["b", "a", "c"])):
        write_table(tmp_path / f"{split}.parquet", {"label": {"_type": "ClassLabel", "names": names}})
    request = f"knn:source=parquet:{tmp_path},train_split=train,split=test"
    with pytest.raises(UserError, match=r"learns from train, whose classes are other ones than those of test"):
        evaluate.evaluate(run, requests=[request])


def test_slices_of_one_split_are_saved_in_files_of_their_own(run, tmp_path, caplog, capsys):
    splits = "split=test[:50],train_split=test[40:]"
    evaluate.evaluate(run, requests=[f"knn:k=1,{splits}"], save="features", save_dir=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "knn.test_0_50.features.npz",
        "knn.test_40_end.features.npz",
    ]
    told = capsys.readouterr().err.splitlines()
    assert told == [f"Wrote {tmp_path}/knn.{split}.features.npz" for split in ("test_0_50", "test_40_end")]
    assert "evals.knn learns from images that it is tested on" in caplog.text


@pytest.mark.slow
def test_a_cache_that_is_full_or_damaged_costs_no_evaluation(run, passes, tmp_path, monkeypatch, caplog):
    words = {"source": "digits", "requests": ["knn:k=1"]}
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path))
    expected = evaluate.evaluate(run / "model.npz", **words)
    for file in tmp_path.rglob("outputs.npz"):
        file.write_bytes(b"no archive")
    assert evaluate.evaluate(run / "model.npz", **words) == expected
    assert "cannot read" in caplog.text and "remove the folder" in caplog.text
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "full"))
    monkeypatch.setenv("VIT_JAX_CACHE_GB", "1e-9")
    assert evaluate.evaluate(run / "model.npz", **words) == expected
    assert "more than the 1e-09 GB" in caplog.text and passes == ["train", "test"] * 3


@pytest.mark.slow
def test_real_labels_go_by_the_file_names_of_tfds(tmp_path):
    write_tfds(tmp_path, "imagenet2012", "5.1.0", WNIDS, {"validation": 5}, "ILSVRC2012_val_{:08}.JPEG")
    model = create("ViT-mu/4", num_classes=1000, resolution=8, preprocess="resize(8)|value_range(-1,1)")
    weights = model.init(jax.random.key(0), jax.ShapeDtypeStruct((1, 8, 8, 3), np.float32))
    weights["head"]["bias"] = jax.nn.one_hot(7, 1000) * 100  # it predicts class 7 whatever it sees
    interop.save(tmp_path / "model.npz", model, jax.device_get(weights))
    (tmp_path / "real.json").write_text("[[7], [3, 7], [], [3], [3]]")
    words = f"source=tfds:imagenet2012,split=validation[1:],labels={tmp_path}/real.json"
    found = evaluate.evaluate(
        tmp_path / "model.npz", requests=[f"real=predictions:{words}"], data_dir=str(tmp_path), batch=8
    )
    assert (found["real/accuracy"], found["real/n"]) == (pytest.approx(1 / 3), 3)


def test_classes_of_other_names_are_refused_with_a_way_out(run, tmp_path):
    """A head that knows the digits as words, or in another order, and data that have them as folders."""
    for label in range(10):
        folder = tmp_path / "photos" / f"class {9 - label}"
        folder.mkdir(parents=True)
        Image.fromarray(np.full((20, 20, 3), 25 * label, np.uint8)).save(folder / "0.png")
    names = [f"class {label}" for label in range(10)]
    model, params = interop.load(run / "model.npz", class_names=names[::-1])
    interop.save(tmp_path / "model.npz", model, params)
    words = f"source=folder:{tmp_path}/photos,split=train"
    with pytest.raises(UserError, match=r"whose class 0 is 'class 9', but .* 10 of 10 names are shared"):
        evaluate.evaluate(tmp_path / "model.npz", requests=[f"classify:{words}"])
    requests = [f"{kind}=predictions:{words},class_map={kind}" for kind in ("names", "order")]
    found = evaluate.evaluate(tmp_path / "model.npz", requests=requests)
    assert found["names/n"] == found["order/n"] == 10


@pytest.mark.slow
def test_a_record_takes_only_evaluations_of_its_own_weights_and_images(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "join_hosts", lambda: None)

    places = [f"--results={tmp_path}/results", f"--page={tmp_path}/page.md"]

    def record_with(*words, **changes):
        """Records the run with what `evaluate --json` prints, changed."""
        capsys.readouterr()
        evaluate.main(["evaluate", *map(str, words), "--json"])
        row = json.loads(capsys.readouterr().out) | changes
        (tmp_path / "rows.jsonl").write_text(
            json.dumps({key: value for key, value in row.items() if value is not None})
        )
        record.main(["record", str(run), f"--evaluations={tmp_path}/rows.jsonl", *places])
        return json.loads((tmp_path / "results" / "run.json").read_text())

    written = record_with(run, "--evals=test", "--evals=near=knn:k=1")
    near = written["evaluations"].pop("near")
    assert written["metrics"]["near/n"] == 359 and near["split"].startswith("test ") and near["source"] == "digits"
    assert not written["evaluations"]
    for word in ("--split=test[:10]", "--split=train", "--evals=test:split=test[:10]"):
        with pytest.raises(
            UserError, match=r"the evaluation test in .* has split t.*, but the evaluation .* has split test; "
        ):
            record_with(run, word)
    weights = [run / "checkpoints" / "15", "--source=digits", "--evals=knn:k=1"]
    with pytest.raises(UserError, match="an evaluation in --evaluations=FILE is of step None, but"):
        record_with(*weights)
    with pytest.raises(UserError, match=r"is not of the weights of .* at step 20; write it anew with "):
        record_with(*weights, step=20)
    with pytest.raises(UserError, match="an evaluation in --evaluations=FILE does not state its weights"):
        record_with(run, weights=None)


def test_top5_of_few_classes_is_not_shown():
    metrics = {"test/accuracy": 0.5, "test/top5": 1.0, "real/top5_all": 1.0}
    for classes, shown in ((3, ["test/accuracy"]), (6, [*metrics]), (None, [*metrics])):
        assert [*evaluate.EvaluationResult(metrics, {}, classes).shown] == shown


def test_several_models_are_a_table_or_lines_of_json(run, capsys, monkeypatch):
    monkeypatch.setattr(cli, "join_hosts", lambda: None)
    words = ["evaluate.py", str(run), str(run / "model.npz"), "--source=digits", "--evals=knn:k=1"]
    evaluate.main(words)
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head == ["model", "step", "knn/1nn", "knn/n", "knn/n_train"] and [row[0] for row in rows] == words[1:3]
    assert rows[0][2:] == rows[1][1:]  # the second has no step
    evaluate.main([*words, "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["model"] for line in lines] == words[1:3] and lines[0]["knn/1nn"] == lines[1]["knn/1nn"]


def test_requests_are_read():
    own = {"test": base.evaluation("classify", split="test[:9]", preprocess="own")}
    found = request_evaluations(["test", "x=test:split=train", "fewshot:shots=1,5,preprocess=a(1,2)|b"], own, "pipe")
    assert [*found] == ["fewshot", "test", "x"] and found.test == own["test"] and found.x.split == "train"
    assert (found.fewshot.shots, found.fewshot.preprocess) == ((1, 5), "a(1,2)|b")
    found = request_evaluations(["knn:source=tfds:cifar10,folder:a/pets,split=test,train[:9%]", "knn"], own, "pipe")
    names = {f"knn_{one}" for one in ("cifar10_test", "cifar10_train_9", "pets_test", "pets_train_9")}
    assert {*found} == names | {"knn"} and found.knn.preprocess == "pipe"
    assert found.knn_pets_train_9.source == "folder:a/pets" and found.knn_pets_train_9.split == "train[:9%]"
    assert [*request_evaluations(["knn:source=tfds:dtd"], own, None)] == ["knn_dtd"]
    found = request_evaluations([f"{ROOT}/configs/cifar10.py:fewshot=yes"], {}, None)
    assert [*found] == ["fewshot", "test"] and found.test.source == "tfds:cifar10"


def test_values_with_commas():
    words = [
        "knn:source=parquet:a,label=fine_label,image=img,split=test,k=1,3",
        "probe:preprocess=resize((16,8),antialias=True)|value_range(-1,1),validation=0.2",
        "fewshot:source=parquet:a,label=fine,parquet:b,digits,shots=1,5",
        "m=knn:source=mix:1*folder:a,classes=b.json+2*digits",
    ]
    found = request_evaluations(words, {}, None)
    knn, probe = found.knn_a_label_fine_label_image_img, found.probe
    assert (knn.source, knn.split, knn.k) == ("parquet:a,label=fine_label,image=img", "test", (1, 3))
    assert (probe.preprocess, probe.validation) == ("resize((16,8),antialias=True)|value_range(-1,1)", 0.2)
    sources = {name: one.source for name, one in found.items() if one.kind == "fewshot"}
    assert sources == {
        "fewshot_a_label_fine": "parquet:a,label=fine",
        "fewshot_b": "parquet:b",
        "fewshot_digits": "digits",
    }
    assert found.m.source == "mix:1*folder:a,classes=b.json+2*digits"


@pytest.mark.parametrize("stored", [False, True])
def test_requests_share_no_field(stored, tmp_path):
    config = base.get_config()
    if stored:
        save_config(config, tmp_path / "config.json")
        config = load_config(tmp_path / "config.json")
    words = ["a=test:source=digits", "knn:source=tfds:cifar10,folder:a/pets", "test:source=b,c,every=5", "test"]
    found = request_evaluations(words, dict(config.evals.items()), None)
    sources = {"a": "digits", "knn_cifar10": "tfds:cifar10", "knn_pets": "folder:a/pets", "test_b": "b", "test_c": "c"}
    assert {name: one.source for name, one in found.items()} == {**sources, "test": None}
    assert (found.test_b.every, found.test_c.every, found.test.every) == (5, 5, None)
    recipe = f"{ROOT}/configs/vit_b16_imagenet2012_augreg.py"
    found = request_evaluations([recipe], {}, None)
    found.test.source, found.test.every = "digits", 3
    assert (found.minival.source, found.minival.every) == ("tfds:imagenet2012", None)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tset"], "unknown evaluation or kind of evaluation 'tset'; did you mean 'test'"),
        (["fewshot:shot=5"], "unknown field of the fewshot evaluation 'shot'; did you mean 'shots'"),
        (["fewshot:shots=five"], "in --evals, shots=five: the value must be numbers with commas between them"),
        (["fewshot:5"], "cannot read '5' in --evals; write FIELD=VALUE"),
        (["knn", "knn:k=3"], "two evaluations are called knn; give one another name: --evals=NAME=knn:k=3"),
        ([":k=3"], "cannot read --evals=:k=3"),
    ],
)
def test_requests_that_cannot_be_read(words, sentence):
    with pytest.raises(UserError, match=sentence):
        request_evaluations(words, {"test": base.evaluation("classify")}, None)


def test_what_does_not_suit_the_model_is_refused_before_it_is_read(run, passes):
    file = run / "model.npz"
    for words, sentence in (
        ({}, "weights that are not a run have no evaluations of their own; add one"),
        ({"requests": ["knn"]}, "the evaluation knn has no data source; add one, for example --evals=knn:source="),
        ({"best": True, "requests": ["knn"]}, "leave out --best and --split, which only runs have"),
        ({"requests": ["knn:source=digits,preprocess=resize(8)|value_range(-1,1)"]}, r"images of \(8, 8, 3\)"),
        (
            {"requests": ["knn:source=digits,preprocess=resize(16)|value_range(0,1)"]},
            r"the model needs value_range\(-1,1\)",
        ),
        ({"requests": [f"classify:source=folder:{ROOT}/tests/none"]}, "tests/none"),
        ({"requests": ["predictions:source=digits,class_map=imagenet_a"]}, "covers 200 classes that the model lacks"),
        ({"requests": ["predictions:source=digits,labels=real.json"]}, "for models with the 1,000 classes of ImageNet"),
    ):
        with pytest.raises(UserError, match=sentence):
            evaluate.evaluate(file, **words)
    with pytest.raises(UserError, match="write the split in --evals"):
        evaluate.evaluate(run, split="test", requests=["few"])
    assert passes == []


@pytest.mark.slow
def test_metrics_go_to_weights_and_biases_too(few, run, tmp_path, monkeypatch):
    """A stand-in takes the place of the library, which the tests do not need."""
    logged, begun = [], []
    module = types.ModuleType("wandb")
    module.errors = types.SimpleNamespace(Error=RuntimeError)
    module.init = lambda **options: (
        begun.append(options)
        or types.SimpleNamespace(
            log=logged.append, define_metric=lambda *args, **options: None, finish=lambda: logged.append("end")
        )
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    few.wandb, few.total_steps = "digits", 10
    few.warmup_steps = 1
    train.train(few, tmp_path / "run")
    assert logged.pop() == "end" and begun[0]["project"] == "digits" and begun[0]["resume"] == "allow"
    assert [line["step"] for line in logged if "few/n" in line] == [5, 10]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb is not installed"):
        train.train(few, tmp_path / "other")


def test_a_folder_without_splits_is_divided_as_the_message_says(run, tmp_path):
    random = np.random.default_rng(0)
    for number in range(10):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (16, 16, 3), np.uint8)).save(path)
    words = f"knn:k=1,source=folder:{tmp_path / 'photos'}"
    with pytest.raises(UserError, match=r"choose from train\. To learn from a part of train .*, set ") as raised:
        evaluate.evaluate(run / "model.npz", requests=[words])
    found = evaluate.evaluate(run / "model.npz", requests=[f"{words},{str(raised.value).rpartition('set ')[2]}"])
    assert (found["knn_photos/n_train"], found["knn_photos/n"]) == (7, 3)


def test_logits_that_are_not_finite_are_refused(tmp_path, monkeypatch, capsys):
    """The weights are finite, but the logits overflow."""
    monkeypatch.setattr(cli, "join_hosts", lambda: None)
    for number, level in enumerate((0, 99, 255)):
        folder = tmp_path / "data" / "test" / str(number)
        folder.mkdir(parents=True)
        Image.fromarray(np.full((8, 8, 3), level, np.uint8)).save(folder / "x.png")
    pipe = {"preprocess": "resize(8)|value_range(-1,1)", "resolution": 8, "num_classes": 3}
    model = create("ViT-mu/8", depth=1, **pipe)
    params = model.init(jax.random.key(0), np.zeros((1, 8, 8, 3), np.float32))
    params["head"]["kernel"] = np.full(params["head"]["kernel"].shape, 3e38, np.float32)
    vit_jax.save(tmp_path / "m.npz", model, params)
    words = ["evaluate", str(tmp_path / "m.npz"), f"--source=folder:{tmp_path}/data", "--json"]
    for more in (["--evals=classify"], ["--evals=predictions"], ["--evals=predictions", "--save=predictions"]):
        with pytest.raises(UserError, match=r"evals\.\w+: the logits of \d of 3 images are not finite"):
            evaluate.main([*words, *more, f"--save-dir={tmp_path}"])
    with pytest.raises(UserError, match=r"m\.npz: the logits of \d of 3 images are not finite"):
        predict.main(["predict", str(tmp_path / "m.npz"), str(tmp_path / "data"), "--json"])
    assert "NaN" not in capsys.readouterr().out
