"""Runs from the command line on: training, resuming, evaluating, predicting, fine-tuning."""

import csv
import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.conftest import ROOT
from vit_jax import NonFiniteLoss, UserError, cli, evaluate, interop, models, predict, train, tree
from vit_jax import program as program_module
from vit_jax.checkpoint import find_checkpoint, latest_step
from vit_jax.data import loader
from vit_jax.evals import loaded_model
from vit_jax.model import create, parameter_shapes
from vit_jax.monitoring import train_metrics


def rows(workdir, drop=("train/images_per_sec", "train/images_per_sec_per_chip", "perf/data_wait")):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in drop} for line in lines]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished smoke run: (config, workdir, returned metrics)."""
    from configs import smoke

    config, workdir = smoke.get_config(), tmp_path_factory.mktemp("runs") / "smoke"
    config.mesh.data = 8
    config.model.position = "learned"
    return config, workdir, train.train(config, workdir)


def test_a_run_leaves_what_the_design_promises(run):
    _, workdir, metrics = run
    assert {"config.json", "metrics.jsonl", "train.log", "checkpoints", "model.npz", "model.json"} <= {
        path.name for path in workdir.iterdir()
    }
    assert list(workdir.glob("events.out.tfevents.*"))
    lines = rows(workdir, drop=())
    assert [line["step"] for line in lines if "train/loss" in line] == [5, 10, 15, 20]
    assert [line["step"] for line in lines if "test/accuracy" in line] == [10, 20]
    names = {"train/loss", "train/lr", "train/images_per_sec", "train/images_per_sec_per_chip", "perf/data_wait"}
    assert names | {"norm/grads", "norm/params", "norm/updates"} <= set(lines[0])
    assert metrics["test/n"] == 359  # every example once, though 360 do not divide it
    text = (workdir / "train.log").read_text()
    for word in ("jax", "Devices: 8 x cpu", "mesh data=8 x fsdp=1", "4 per device", "head/kernel", "ETA"):
        assert word in text


def test_the_command_lines_agree_with_the_run(run, tmp_path, capsys):
    _, workdir, metrics = run
    found = evaluate.evaluate(workdir)
    assert found["step"] == 20 and found["test/n"] == 359
    assert found["test/accuracy"] == metrics["test/accuracy"]
    np.testing.assert_allclose(found["test/loss"], metrics["test/loss"], rtol=1e-6)
    assert evaluate.evaluate(workdir, fsdp=4) == pytest.approx(found, rel=1e-5)  # another mesh
    scores = {line["step"]: line["test/accuracy"] for line in rows(workdir) if "test/accuracy" in line}
    best = evaluate.evaluate(workdir, best=True)
    assert best["test/accuracy"] == scores[best["step"]] == max(scores.values())

    Image.fromarray(np.full((20, 12, 3), 90, np.uint8)).save(tmp_path / "grey.png")
    [result] = predict.predict(workdir, [tmp_path / "grey.png"], top=10)
    assert sorted(entry["class"] for entry in result["classes"]) == [str(digit) for digit in range(10)]
    assert abs(sum(entry["probability"] for entry in result["classes"]) - 1) < 1e-5
    predict.main(["predict.py", str(workdir), str(tmp_path / "grey.png"), "--json", "--top=1"])
    assert json.loads(capsys.readouterr().out)["classes"][0] == pytest.approx(result["classes"][0])
    model, params = vit_jax.load(workdir)
    vit_jax.save(tmp_path / "sigmoid.npz", dataclasses.replace(model, loss="sigmoid"), params)
    [result] = predict.predict(tmp_path / "sigmoid.npz", [tmp_path / "grey.png"], top=10)
    assert sum(entry["probability"] for entry in result["classes"]) > 3  # ten classes, each about a half
    with pytest.raises(UserError, match=r"nothing\.png"):
        predict.predict(workdir, [tmp_path / "nothing.png"])


def test_predicting_a_folder(run, tmp_path, capsys):
    workdir, photos = str(run[1]), tmp_path / "photos"
    for number, name in enumerate(["b.png", "a.JPG", "cats/c.png", ".hidden/d.png"]):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 12, 3), 60 * number, np.uint8)).save(photos / name)
    (photos / "notes.txt").touch()
    names = [str(photos / name) for name in ("a.JPG", "b.png", "cats/c.png")]
    predict.main(["predict.py", workdir, str(photos), "--json", "--top=2"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["image"] for result in found] == names
    predict.main(["predict.py", workdir, str(photos / "cats"), names[0], "--csv", "--top=2"])
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(line["image"], line["rank"]) for line in lines] == [(names[i], rank) for i in (2, 0) for rank in "12"]
    for line, entry in zip(lines, [*found[2]["classes"], *found[0]["classes"]], strict=True):
        assert line["class"] == entry["class"] and float(line["probability"]) == pytest.approx(
            entry["probability"], rel=1e-5
        )

    (photos / "cats" / "e.png").write_bytes(b"no image")  # what comes before it is told
    with pytest.raises(UserError, match=r"e\.png"):
        predict.main(["predict.py", workdir, str(photos), "--batch=1"])
    assert capsys.readouterr().out.count(str(photos)) == 3
    predict.main(["predict.py", workdir, names[0], str(photos / "cats"), "--bad-images=skip", "--json", "--top=2"])
    printed = capsys.readouterr()
    kept = [json.loads(line) for line in printed.out.splitlines()]
    assert [result["image"] for result in kept] == [names[0], names[2]]
    assert [result["classes"] for result in kept] == [found[0]["classes"], found[2]["classes"]]
    assert f"left out: cannot decode the image {photos}/cats/e.png" in printed.err
    for wrong, sentence in (("fotos", "no folder .*fotos; did you mean '.*photos'"), ("none", "contains no images")):
        (tmp_path / "none").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=sentence):
            predict.main(["predict.py", "not even opened", str(tmp_path / wrong)])


@pytest.fixture
def large(run, tmp_path):
    """The same run as if it had been one of a slice: a batch of 4,096, 16 worker processes, and a second evaluation."""
    workdir = shutil.copytree(run[1], tmp_path / "large")
    config = json.loads((workdir / "config.json").read_text())
    config |= {"batch": 4096, "batch_eval": None, "accum_steps": 8}
    config["data"]["workers"] = 16
    config["evals"]["train"] = config["evals"]["test"] | {"split": "train[:80]"}
    (workdir / "config.json").write_text(json.dumps(config))
    return workdir


@pytest.mark.slow
def test_evaluation_chooses_batch_and_workers_for_this_machine(run, large, monkeypatch):
    """The numbers are the same whatever batch and workers are."""
    told, read, limit = [], loader.LocalBatches, loaded_model.MOST_ACTIVATION_BYTES

    def recorded(*args, batch, workers, **rest):
        told.append((batch, workers))
        return read(*args, batch=batch, **rest)  # processes take seconds to start

    monkeypatch.setattr(loader, "LocalBatches", recorded)
    monkeypatch.setattr(loaded_model, "MOST_ACTIVATION_BYTES", 2**16)  # the attention of an image takes 4 KiB
    found = evaluate.evaluate(large)
    assert told == [(8 * 16, 0)] * 2
    assert found.items() >= {"step": 20, "test/n": 359, "test/accuracy": run[2]["test/accuracy"]}.items()
    assert evaluate.evaluate(large, batch=20, workers=3) == pytest.approx(found, rel=1e-6)
    assert told[2:] == [(24, 3)] * 2  # over eight devices
    monkeypatch.setattr(loaded_model, "MOST_ACTIVATION_BYTES", limit)
    assert evaluate.evaluate(run[1]) == {name: found[name] for name in found if "train" not in name} | {
        "test/loss": pytest.approx(found["test/loss"], rel=1e-6)
    }
    assert told[4:] == [(120, 0)]  # as the run says: all of it fits
    for mistake, word in (({"batch": 0}, "batch"), ({"workers": -1}, "workers"), ({"fsdp": 0}, "fsdp")):
        with pytest.raises(UserError, match=f"^{word} must be at least"):
            evaluate.evaluate(large, **mistake)


@pytest.mark.slow
def test_evaluation_of_another_split(run, large, monkeypatch, capsys):
    """The first of the run's evaluations is made on it. Two parts make the whole."""
    parts = [evaluate.evaluate(large, split=split, batch=64) for split in ("test[:64]", "test[64:]")]
    assert [part["test/n"] for part in parts] == [64, 295] and not any("train/loss" in part for part in parts)
    for name in ("accuracy", "top5"):
        counts = [round(part[f"test/{name}"] * part["test/n"]) for part in parts]
        assert sum(counts) == round(run[2][f"test/{name}"] * 359)
    sums = [part["test/loss"] * part["test/n"] for part in parts]
    assert sum(sums) == pytest.approx(run[2]["test/loss"] * 359, rel=1e-6)
    words = [f"--workdir={large}", "--split=train[:10%]", "--batch=64", "--workers=0", "--json"]
    monkeypatch.setattr(cli, "join_cluster", lambda: None)  # this process has used its devices already
    evaluate.main(["evaluate.py", *words])
    printed = json.loads(capsys.readouterr().out)
    assert (printed["split"], printed["test/n"]) == ("train[:10%]", 144)
    evaluate.main(["evaluate.py", *words[:-1]])
    assert capsys.readouterr().out.splitlines()[0].split() == ["split", "train[:10%]"]
    with pytest.raises(UserError, match="unknown split 'tset'; did you mean 'test'"):
        evaluate.evaluate(large, split="tset")


def test_the_run_to_evaluate_is_named_with_a_flag_or_without(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(cli, "join_cluster", lambda: None)
    monkeypatch.setattr(
        evaluate, "evaluate_model", lambda workdir, *args, **named: evaluate.EvaluationResult({}, {"weights": workdir})
    )
    for words in (["run"], ["--workdir=run"], ["run", "--workdir=run"]):
        evaluate.main(["evaluate.py", *words, "--json"])
        assert json.loads(capsys.readouterr().out) == {"weights": "run"}
    for words in ([], ["run", "--workdir=other"], [""]):
        with pytest.raises(UserError, match="give a run or other weights"):
            evaluate.main(["evaluate.py", *words])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no folder runn; did you mean 'run'"):
        evaluate.evaluate("runn")


@pytest.mark.parametrize(
    ("model", "resolution", "images"),
    [("ViT-L/16", 224, 83), ("ViT-L/16", 512, 3), ("ViT-H/14", 224, 51), ("R50+ViT-B/16", 224, 83)],
)
def test_the_activations_of_an_evaluation_fit_small_machines(tiny, model, resolution, images):
    """A few arrays of a quarter of a gigabyte a device, whatever the model."""
    tiny.batch, tiny.resolution, tiny.model.name, tiny.model.depth = 4096, resolution, model, None
    tiny.model.scan = True  # traced sooner
    tiny.evals.test.preprocess = "resize({resolution})|value_range(-1,1)"
    assert loaded_model.choose_batch(program_module.make_inference_program(tiny, fsdp=1)) == 8 * images


def test_images_predicted_together_are_predicted_as_alone(run, tmp_path):
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (20, 12 + number, 3), np.uint8) for number in range(5)]
    [alone, pairs, together] = [predict.predict(run[1], images, top=10, batch=batch) for batch in (1, 2, 8)]
    for one, pair, other in zip(alone, pairs, together, strict=True):
        assert one["image"] == pair["image"] == other["image"]
        probabilities = [
            {entry["class"]: entry["probability"] for entry in result["classes"]} for result in (one, pair, other)
        ]
        assert probabilities[0] == pytest.approx(probabilities[1], abs=1e-6)
        assert probabilities[0] == pytest.approx(probabilities[2], abs=1e-6)
    assert predict.predict(run[1], []) == []
    with pytest.raises(UserError, match="batch must be at least 1"):
        predict.predict(run[1], images, batch=0)


def test_every_way_in_gives_the_same_model(run, tmp_path):
    _, workdir, _ = run
    model, params = vit_jax.load(workdir)
    for path in (workdir / "model.npz", workdir / "checkpoints" / "20"):
        other, leaves = vit_jax.load(path)
        assert other == model
        jax.tree.map(np.testing.assert_array_equal, leaves, params)
    vit_jax.save(tmp_path / "copy.npz", model, params)
    again, leaves = vit_jax.load(tmp_path / "copy.npz")
    assert again == model and model.class_names == tuple("0123456789")
    jax.tree.map(np.testing.assert_array_equal, leaves, params)


def test_loading_says_what_is_wrong(run, tmp_path):
    _, workdir, _ = run
    with pytest.raises(UserError, match="does not exist"):
        vit_jax.load(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"contains neither model\.npz nor .* nor checkpoints"):
        vit_jax.load(tmp_path)
    model, params = vit_jax.load(workdir)
    params = {**params, "head": {"kernel": params["head"]["kernel"][:, :3]}, "more": params["position"]}
    words = r"missing head/bias; unexpected more; head/kernel is float32\[16,3\], not float32\[16,10\]"
    with pytest.raises(UserError, match=words):
        vit_jax.save(tmp_path / "bad.npz", model, params)


@pytest.mark.slow
def test_fine_tuning_on_images_of_another_shape_with_another_head(run, quick, tmp_path):
    _, workdir, _ = run
    quick.init_from = str(workdir)
    quick.model.position = "learned"
    quick.resolution = 24
    quick.total_steps, quick.warmup_steps = 1, 0
    quick.base_lr = 0.0  # the weights are those that training starts from
    quick.data.preprocess = "resize((24,8))|value_range(-1,1)"
    quick.evals.test.preprocess = "resize((24,8))|value_range(-1,1)"
    quick.mesh.data, quick.mesh.fsdp = 1, 8
    train.train(quick, tmp_path / "tuned")
    old, before = vit_jax.load(workdir)
    new, after = vit_jax.load(tmp_path / "tuned")
    assert (old.spec.grid, new.spec.grid) == ((4, 4), (6, 2))
    assert not np.any(after["head"]["kernel"]) and np.any(before["head"]["kernel"])
    jax.tree.map(np.testing.assert_array_equal, after["encoder"], before["encoder"])
    corners = np.ix_([0, -1], [0, -1])
    grids = [p["position"].reshape(*m.spec.grid, -1)[corners] for m, p in ((old, before), (new, after))]
    np.testing.assert_allclose(*grids, rtol=1e-6)

    quick.model.width = 32
    with pytest.raises(
        UserError,
        match=r"init_from=.*: the checkpoint contains .* width 16, not 32; to match it, set --config\.model\.width=16$",
    ):
        train.train(quick, tmp_path / "wider")


def test_patches_of_another_size_start_a_run_only_where_that_is_asked_for(run, quick, tmp_path, capsys):
    _, workdir, _ = run
    quick.init_from, quick.keep_head, quick.total_steps, quick.warmup_steps = str(workdir), True, 0, 0
    quick.model.position = "learned"
    quick.model.name = f"{quick.model.name.rpartition('/')[0]}/8"
    with pytest.raises(
        UserError, match=r"patch_size 4, not 8 \(--config\.resample=flexi resizes the patches, as Flexi"
    ):
        train.train(quick, tmp_path / "refused")
    quick.resample = "flexi"
    train.train(quick, tmp_path / "resized")
    assert "patches resized from 4x4 to 8x8 pixels" in capsys.readouterr().err
    expected, found = vit_jax.load(workdir, patch_size=8, resolution=16)[1], vit_jax.load(tmp_path / "resized")[1]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_what_differs_ends_with_the_flags_to_paste():
    source = create("ViT-S/16", num_classes=1000, pooling="gap", pre_logits=True)

    def sentence(target, keep_head=False):
        with pytest.raises(UserError) as raised:
            interop.adapt_parameters(source, {}, target, {}, keep_head)
        return str(raised.value)

    target = create("ViT-B/16", num_classes=10)
    found = sentence(target)
    assert found.startswith(
        "the checkpoint contains a model with width 384, not 768, mlp_dim 1536, not 3072, num_heads 6, not 12, pool"
    )
    assert found.endswith("; to match it, set --config.model.name=ViT-S/16 --config.model.pooling=gap")
    assert sentence(target, True).endswith("-S/16 --config.model.pooling=gap --config.model.pre_logits=True")
    target = create("ViT-mu/4", width=384, depth=3, pooling="gap")
    assert sentence(target).endswith("; to match it, set --config.model.name=ViT-S/16 --config.model.depth=12")
    target = create("ViT-S/16", num_classes=10, pooling="gap", pre_logits=True)
    assert (
        sentence(target, True)
        == "the checkpoint's head has 1,000 classes, not 10; without --config.keep_head the run starts with a new head."
    )
    source = create("ViT/8", width=64, depth=2, mlp_dim=128, num_heads=2, num_classes=10)
    flags = " ".join(
        f"--config.model.{flag}" for flag in ("name=ViT/8", "width=64", "depth=2", "mlp_dim=128", "num_heads=2")
    )
    assert sentence(target).endswith(f"; to match it, set {flags} --config.model.pooling=token")
    source = create("R50+ViT-B/16")
    assert sentence(create("ViT-B/16")).endswith("; to match it, set --config.model.name=R50+ViT-B/16")
    source = create("ViT-S/16", pooling="gap", patch_size=8)
    assert sentence(create("ViT-S/16")).endswith("; no field of config.model sets patch_size 8")


def test_positions_are_resampled_as_is_said():
    source, target = (create("ViT-mu/4", resolution=size, num_classes=3) for size in (16, 24))
    shapes, wanted = parameter_shapes(source), parameter_shapes(target)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), shapes)
    linear, bicubic = (
        interop.adapt_parameters(source, params, target, wanted, method=method)["position"]
        for method in ("linear", "bicubic")
    )
    np.testing.assert_array_equal(bicubic, models.resample_positions(params["position"], (4, 4), (6, 6), 1, "bicubic"))
    assert np.abs(linear - bicubic).max() > 1e-3


def test_weights_of_another_range_of_values_are_named(run, quick, tmp_path, caplog):
    _, workdir, _ = run
    quick.init_from, quick.keep_head, quick.total_steps, quick.warmup_steps = str(workdir), True, 0, 0
    quick.model.position = "learned"
    quick.data.preprocess = quick.evals.test.preprocess = "resize({resolution})|value_range(0,1)"
    words = "its preprocessing ends with value_range(-1,1), but data.preprocess of this run with value_range(0,1)"
    with pytest.raises(UserError, match=re.escape(words)):
        train.train(quick, tmp_path / "kept")
    quick.keep_head = False
    train.train(quick, tmp_path / "adapted")
    assert words in caplog.text and "to use the range of the weights, end data.preprocess" in caplog.text


@pytest.mark.slow
def test_a_head_that_is_kept_is_evaluated_without_training_and_trained_on(run, quick, tmp_path):
    _, workdir, metrics = run
    quick.model.position, quick.mesh.data = "learned", 8
    quick.init_from, quick.keep_head, quick.total_steps = str(workdir), True, 0
    for _ in range(2):
        assert train.train(quick, tmp_path / "kept") == metrics
        assert rows(tmp_path / "kept") == [{"step": 0, **metrics}]  # once, however often it is asked for
    _, before = vit_jax.load(workdir)
    _, after = vit_jax.load(tmp_path / "kept")
    jax.tree.map(np.testing.assert_array_equal, after, before)
    text = (tmp_path / "kept" / "train.log").read_text()
    assert f"Starting from {workdir}, head included." in text and "Length: 0 steps, 0 epochs" in text
    assert "Nothing to train: total_steps is 0." in text and "complete" not in text and "ETA" not in text

    quick.total_steps, quick.warmup_steps, quick.log_every, quick.base_lr = 1, 0, 1, 0.0
    assert train.train(quick, tmp_path / "kept")["test/accuracy"] == metrics["test/accuracy"]
    assert [line["step"] for line in rows(tmp_path / "kept")] == [1, 1]
    quick.total_steps = 0
    with pytest.raises(UserError, match="at step 1 already, beyond total_steps=0"):
        train.train(quick, tmp_path / "kept")
    quick.init_from = None
    with pytest.raises(
        UserError, match=r"keep_head=True needs --config\.init_from, the checkpoint whose head is kept\."
    ):
        train.train(quick, tmp_path / "kept")


@pytest.mark.slow
def test_metrics_are_read_one_step_late(quick, tmp_path, monkeypatch):
    events = []
    make, fetch = program_module.make_program, train_metrics.fetch_metrics

    def recording(*args):
        program = make(*args)
        step = program.train_step

        def train_step(state, batch):
            events.append(("dispatch", sum(kind == "dispatch" for kind, _ in events) + 1))
            return step(state, batch)

        return type(program)(**{**vars(program), "train_step": train_step})

    def reading(values):
        events.append(("read", sum(kind == "read" for kind, _ in events) + 1))
        return fetch(values)

    monkeypatch.setattr(program_module, "make_program", recording)
    monkeypatch.setattr(train_metrics, "fetch_metrics", reading)
    quick.eval_every, quick.checkpoint_every = 20, 100
    quick.mesh.data, quick.log_every, quick.profile_steps = 8, 1, 2
    train.train(quick, tmp_path)
    assert list(tmp_path.glob("profile/**/*.xplane.pb"))
    for step in range(1, 20):
        assert events.index(("read", step)) == events.index(("dispatch", step + 1)) + 1
    assert events[-1] == ("read", 20)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_good_checkpoint(quick, tmp_path, monkeypatch):
    quick.mesh.data = 8
    quick.eval_every = quick.checkpoint_every = 5
    make = program_module.make_program

    def poisoned(*args):
        program = make(*args)

        def train_step(state, batch):
            if int(state.step) in (7, 8):
                batch = batch | {"image": batch["image"] * np.nan}
            return program.train_step(state, batch)

        return type(program)(**{**vars(program), "train_step": train_step})

    monkeypatch.setattr(program_module, "make_program", poisoned)
    with pytest.raises(NonFiniteLoss, match=r"step 8 \(batch 7 of seed 0\)"):
        train.train(quick, tmp_path)
    assert find_checkpoint(tmp_path).name == "5"
    assert all(np.all(np.isfinite(leaf)) for leaf in tree.flatten(vit_jax.load(tmp_path)[1]).values())
    quick.optim.max_nonfinite_skips = 2
    metrics = train.train(quick, tmp_path)
    assert np.isfinite(metrics["test/loss"])
    assert "Skipped" in (tmp_path / "train.log").read_text()


def command(workdir, *words):
    """The command line of a smoke run."""
    return ["main.py", f"--config={ROOT}/configs/smoke.py", f"--workdir={workdir}", "--config.mesh.fsdp=2", *words]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--config.btch=3"], "did you mean 'batch'"),
        (["--config.batch=x"], "--config.batch=x"),
        (["--config.batch=12"], "is not divisible"),
        (["--config.data.source=folder:/nowhere"], "/nowhere"),
        (["--config.data.split=trian"], "trian"),
        (["--config.data.preprocess=resise(16)|value_range(-1,1)"], "did you mean 'resize'"),
        (["--config.model.name=ViT-X/16"], "unknown model 'ViT-X/16'"),
        (["--config.data.num_classes=11"], "data.num_classes is 11"),
        (["--config.evals.test.split=val"], "evals.test"),
        (["--config.data.source=digit"], "did you mean 'digits'"),
        (["--config.data.source=tfds:jft300m"], "to run without data, use --config.data.source=synthetic"),
        (["--workdir=http://host/run"], "neither a local folder nor gs://BUCKET/... nor s3://BUCKET/..."),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(words, sentence, tmp_path, monkeypatch, capsys):
    from vit_jax import cli, main
    from vit_jax.distributed import coordination, supervisor

    monkeypatch.setattr(cli.os, "_exit", sys.exit)
    monkeypatch.setattr(
        supervisor, "join_cluster", coordination.ProcessGroup
    )  # this process has used its devices already
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", command(tmp_path / "run", *words))
    with pytest.raises(SystemExit) as exit:
        cli.run_command(main.main)
    text = capsys.readouterr().err
    assert exit.value.code == 2, text
    assert sentence in text and text.startswith("vit_jax: ") and text.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_interruption_tells_from_where_the_same_command_goes_on(quick, tmp_path):
    def interrupt(step, values):
        if step == 5:
            raise KeyboardInterrupt

    quick.total_steps, quick.warmup_steps, quick.log_every, quick.checkpoint_every = 8, 1, 1, 2
    quick.eval_every = 8
    with pytest.raises(KeyboardInterrupt) as end:
        train.train(quick, tmp_path / "run", watch=interrupt)
    assert end.value.__notes__ == ["step 4 is saved. Run the same command again to continue from that step."]
    assert latest_step(str(tmp_path / "run")) == 4
    quick.checkpoint_every = 8
    with pytest.raises(KeyboardInterrupt) as end:
        train.train(quick, tmp_path / "early", watch=interrupt)
    assert end.value.__notes__ == ["nothing was saved yet; the same command will start from step 0."]


def test_a_workdir_of_another_model_is_refused(run, quick):
    _, workdir, _ = run
    quick.model.position, quick.model.depth = "learned", 2
    with pytest.raises(UserError, match=r"contains a run with other settings .*model\.depth: 1 -> 2"):
        train.train(quick, workdir)


@pytest.mark.slow
def test_a_truncated_image_is_named_and_what_was_learnt_is_kept(quick, tmp_path):
    random = np.random.default_rng(0)
    for i in range(24):
        folder = tmp_path / "photos" / ("cat", "dog")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (20, 30, 3), np.uint8)).save(folder / f"{i}.jpg")
    bad = tmp_path / "photos" / "dog" / "7.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    quick.data.source, quick.data.split, quick.evals.test.split = f"folder:{tmp_path}/photos", "train", "train[:4]"
    quick.data.preprocess = quick.evals.test.preprocess = "resize(16)|value_range(-1,1)"
    quick.batch, quick.batch_eval, quick.mesh.data = 8, 8, 8
    quick.eval_every = quick.checkpoint_every = 100
    with pytest.raises(UserError, match=r"7\.jpg.*data.bad_images=replace"):
        train.train(quick, tmp_path / "run")
    quick.data.bad_images = "replace"
    quick.data.max_bad = 0.05
    quick.total_steps, quick.evals.test.split = 8, "train[:1]"
    train.train(quick, tmp_path / "run")
    assert (
        "Unreadable images, each replaced by the next readable one: 1." in (tmp_path / "run" / "train.log").read_text()
    )


def test_the_front_door_from_a_fresh_interpreter():
    code = "import vit_jax; print(vit_jax.create, vit_jax.load, vit_jax.save, vit_jax.train.train)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.count("function") == 4, result.stderr


def test_a_finished_run_is_left_as_it_is(run):
    config, workdir, metrics = run
    files = [workdir / "metrics.jsonl", workdir / "config.json"]
    before = [path.read_text() for path in files]
    config = config.copy_and_resolve_references()
    config.base_lr = 0.5  # has no part in what is trained already
    again = train.train(config, workdir)
    assert [path.read_text() for path in files] == before
    assert again["test/accuracy"] == metrics["test/accuracy"]
    advice = "This run is complete (20 of 20 steps). To train again, choose another --workdir; to train longer, raise"
    assert advice in (workdir / "train.log").read_text()
    config.total_steps = 10
    with pytest.raises(UserError, match="at step 20 already, beyond total_steps=10"):
        train.train(config, workdir)


def test_mistakes_that_would_train_for_nothing(quick, tmp_path):
    with pytest.raises(UserError, match=r"produces images of 16x16 pixels, but resolution=24; write \{resolution\}"):
        quick.resolution = 24
        train.train(quick, tmp_path)
    for number in range(4):
        (tmp_path / "photos" / "only").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / "photos" / "only" / f"{number}.png")
    quick.resolution, quick.data.source = 16, f"folder:{tmp_path}/photos"
    quick.data.num_classes = quick.data.num_examples = None
    quick.evals.test.split = quick.data.split = "train"
    with pytest.raises(
        UserError, match=r"the data has 1 class\(es\), but softmax needs two or more; if the data is a folder"
    ):
        train.train(quick, tmp_path)
