"""Runs with several answers an image: what they learn, state, resume, export and predict."""

import json

import cv2
import numpy as np
import pytest

from configs import folder
from vit_jax import UserError, evaluate, interop, predict
from vit_jax.train import train

SLOW = pytest.mark.slow


@pytest.fixture
def colours(tmp_path):
    """120 images of one colour each, what their colours have, and how much of it."""
    random = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    lines = {"flags.csv": ["image,red,green,blue"], "numbers.csv": ["image,age,weight"]}
    for number in range(120):
        colour = random.random(3)
        cv2.imwrite(f"{tmp_path}/photos/{number}.png", np.full((16, 16, 3), colour[::-1] * 255, np.uint8))
        lines["flags.csv"].append(f"{number}.png,{','.join('01'[int(part > 0.5)] for part in colour)}")
        lines["numbers.csv"].append(f"{number}.png,{30 + 20 * colour[0]:.6f},{1000 * colour[2]:.6f}")
    for name, text in lines.items():
        (tmp_path / name).write_text("\n".join(text))
    return tmp_path


def configured(place, answers, options, steps=80):
    config = folder.get_config(f"answers={answers}")
    config.update({"batch": 24, "batch_eval": 16, "resolution": 16, "base_lr": 3e-3, "eval_every": 40, "log_every": 10})
    config.update({"total_epochs": None, "total_steps": steps, "warmup_epochs": None, "warmup_steps": 10})
    config.update({"eval_every_epochs": None, "checkpoint_every": 40})
    config.model.update({"name": "ViT-mu/8", "stochastic_depth": 0.0})
    config.data.update({"source": f"folder:{place}/photos,table={place}/{options}"})
    config.data.preprocess = "resize(16)|value_range(-1,1)"
    return config


@SLOW
def test_several_classes_are_learnt_and_predicted(colours, tmp_path):
    run = train(configured(colours, "several", "flags.csv"), tmp_path / "run")
    assert run["test/map"] > 0.95 and run["test/f1_micro"] > 0.8 and run["test/n"] == 12
    text = (colours / "flags.csv").read_text().splitlines()[1:41]
    images = [f"{colours}/photos/{line.partition(',')[0]}" for line in text]
    found = predict.predict(tmp_path / "run", images)
    assert all(entry["probability"] > 0.5 for result in found for entry in result["classes"])
    names = ("red", "green", "blue")
    given = [{name for name, flag in zip(names, line.split(",")[1:], strict=True) if flag == "1"} for line in text]
    told = [{entry["class"] for entry in result["classes"]} for result in found]
    assert np.mean([len(one ^ other) for one, other in zip(given, told, strict=True)]) < 0.5
    assert [len(result["classes"]) for result in predict.predict(tmp_path / "run", images[:2], top=2)] == [2, 2]
    empty = found[given.index(set())] | {"classes": []}
    assert predict.csv_rows(empty)[1:] == [[empty["image"], "", "", ""]]
    assert predict.text_lines(empty)[1] == "  no class above 50%"


@SLOW
def test_numbers_are_learnt_resumed_exported_and_predicted_in_their_units(colours, tmp_path):
    config = configured(colours, "numbers", "numbers.csv,targets=age+weight")
    whole = train(config, tmp_path / "whole")
    assert whole["test/r2"] > 0.8 and whole["test/mae_age"] < 2.5

    def stop(step, metrics):
        if step > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "half", stop)
    assert train(config, tmp_path / "half") == whole
    files = [np.load(tmp_path / name / "model.npz") for name in ("whole", "half")]
    assert all(np.array_equal(files[0][name], files[1][name]) for name in files[0])

    # The means and deviations are those of the training split, in all that states the model.
    table = np.loadtxt(colours / "numbers.csv", delimiter=",", skiprows=1, usecols=(1, 2))
    stored = json.loads((tmp_path / "whole" / "config.json").read_text())["task"]
    described = json.loads((tmp_path / "whole" / "model.json").read_text())
    scale = [*zip(stored["target_means"], stored["target_deviations"], strict=True)]
    assert described["target_scale"] == [list(pair) for pair in scale]
    assert np.abs(np.array(scale)[:, 0] - table.mean(axis=0)).max() < 40  # of 90 % of the images
    assert "Numbers are learnt as (number - mean) / deviation: age" in (tmp_path / "whole" / "train.log").read_text()

    # A changed number is other data.
    text = (colours / "numbers.csv").read_text()
    (colours / "numbers.csv").write_text(text.replace(f"{table[5, 0]:.6f}", "31.5"))
    with pytest.raises(UserError, match="was trained on other data"):
        train(config, tmp_path / "whole")
    (colours / "numbers.csv").write_text(text)

    # Evaluated from the run, and from its export: the same numbers, which predictions show too.
    assert evaluate.evaluate(tmp_path / "whole")["test/mae"] == pytest.approx(whole["test/mae"], rel=1e-5)
    request = f"test=regression:source={config.data.source},split=train[90%:]"
    exported = evaluate.evaluate(tmp_path / "whole" / "model.npz", requests=[request])
    assert exported["test/r2"] == pytest.approx(whole["test/r2"], rel=1e-5)
    images = [f"{colours}/photos/{number}.png" for number in range(120)]
    told = [[*result["numbers"].values()] for result in predict.predict(tmp_path / "whole", images)]
    assert np.abs(np.array(told) - table).mean(axis=0)[0] < 2.5
    with pytest.raises(UserError, match="predicts numbers, not classes"):
        predict.predict(tmp_path / "whole", images[:1], top=2)

    # Another layout states no scale: its head outputs the numbers.
    model, params = interop.load(tmp_path / "whole")
    interop.save(tmp_path / "timm", model, params, layout="timm")
    other, _ = interop.load(tmp_path / "timm")
    assert other.target_scale is None and other.loss == "huber" and other.class_names == ("age", "weight")
    again = [[*result["numbers"].values()] for result in predict.predict(tmp_path / "timm", images[:8])]
    np.testing.assert_allclose(again, told[:8], rtol=1e-4)

    # A kept head must be read by the scale with which it was trained.
    kept = configured(colours, "numbers", "numbers.csv,targets=age+weight", steps=0)
    kept.update({"init_from": str(tmp_path / "timm"), "keep_head": True, "warmup_steps": 0})
    with pytest.raises(UserError, match=r"--config.task.target_means=0.0,0.0 and --config.task.target_deviations=1.0"):
        train(kept, tmp_path / "kept")
    kept.task.update({"target_means": (0.0, 0.0), "target_deviations": (1.0, 1.0)})
    assert train(kept, tmp_path / "kept")["test/mae"] == pytest.approx(whole["test/mae"], rel=1e-3)
