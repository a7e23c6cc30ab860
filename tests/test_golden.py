"""A workdir and shards of version 0.1.0 can be resumed, evaluated, used to predict, and read; see golden/README.md."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import base, smoke
from tests.conftest import ROOT
from tests.test_train import rows
from vit_jax import checkpoint, evaluate, interop, predict, train
from vit_jax.config import FIELDS, flatten_config, load_config
from vit_jax.config.fields import RENAMED
from vit_jax.data.sources import kinds
from vit_jax.interop import model_json

GOLDEN = ROOT / "tests" / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


def close(found, wanted):
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_the_run_of_the_first_version_is_resumed(tmp_path):
    config = smoke.get_config()
    config.optim.ema_decay, config.task.mixup, config.total_steps = 0.9, 0.0, 20
    config.eval_every, config.checkpoint_every, config.log_every = 5, 5, 1
    workdir = shutil.copytree(GOLDEN / "workdir", tmp_path / "run")
    train.train(config, workdir)
    written = rows(workdir)
    assert written[:12] == rows(GOLDEN / "workdir")
    assert [line["step"] for line in written[12:]] == [line["step"] for line in EXPECTED["resumed"]]
    for found, wanted in zip(written[12:], EXPECTED["resumed"], strict=True):
        close(found, wanted)
    assert "total_steps: 10 -> 20" in (workdir / "train.log").read_text()


def test_the_run_of_the_first_version_is_evaluated():
    close(evaluate.evaluate(GOLDEN / "workdir"), EXPECTED["evaluate"])
    close(evaluate.evaluate(GOLDEN / "workdir", best=True), EXPECTED["best"])


def test_the_run_of_the_first_version_predicts():
    image = np.arange(20 * 16 * 3, dtype=np.uint8).reshape(20, 16, 3)
    for path in ("workdir", "workdir/model.npz", "workdir/checkpoints/10"):
        [found] = predict.predict(GOLDEN / path, [image], top=10)
        for one, other in zip(found["classes"], EXPECTED["predict"], strict=True):
            assert one["class"] == other["class"]
            close(one["probability"], other["probability"])


def test_the_names_of_the_first_version_stay():
    assert rows(GOLDEN / "workdir")[0].keys() == {"step", "train/loss", "train/lr"} | {
        f"norm/{what}" for what in ("grads", "params", "updates")
    }
    _, manifest = checkpoint.read_weights(GOLDEN / "workdir" / "checkpoints" / "10")
    assert {"step", "skips", "opt_state/1/mu/head/kernel", "ema/head/kernel"} < manifest["arrays"].keys()
    model, _ = interop.load(GOLDEN / "workdir")
    stored = json.loads((GOLDEN / "workdir" / "model.json").read_text())
    younger = model_json.INHERITED | model_json.ANSWERS  # which version 0.1.0 did not state
    assert younger | stored == interop.describe_model(model)


def test_the_shards_of_the_first_version_are_read():
    config = base.get_config()
    config.data.source = f"array_record:{GOLDEN}/packed"
    for split, wanted in EXPECTED["packed"]["rows"].items():
        source = kinds.open_source(config, split)
        read = [source[index] for index in range(len(source))]
        images = [np.asarray(row["image"]) for row in read]
        digests = [hashlib.sha256(image.tobytes()).hexdigest()[:16] for image in images]
        found = [
            [int(row["label"]), list(image.shape), digest]
            for row, image, digest in zip(read, images, digests, strict=True)
        ]
        assert found == wanted
        assert list(source.class_names) == EXPECTED["packed"]["class_names"]
        assert source.fingerprint == EXPECTED["packed"]["fingerprints"][split]  # or no run on them would go on


def test_a_field_that_is_younger_than_a_config_file_has_a_default():
    path, now = GOLDEN / "workdir/config.json", flatten_config(base.get_config())
    written = flatten_config(ConfigDict(json.loads(path.read_text())))
    assert now.keys() == flatten_config(load_config(path)).keys()
    younger = {name.replace("*", "test") for name, field in FIELDS.items() if field.later}
    assert now.keys() - written.keys() == younger | set(RENAMED.values())
