"""Runs on data as other libraries write them: trained, stopped, resumed, evaluated, and packed to the same losses."""

import jax
import numpy as np
import pytest

from configs import smoke
from tests.data.test_formats import KINDS, config_of, here, there  # noqa: F401
from tests.test_train import rows
from vit_jax import data, evals, evaluate, interop, pack, train
from vit_jax.config import load_config
from vit_jax.data.sources import SourceConfig, open_split
from vit_jax.inference import make_inference
from vit_jax.predict import predict
from vit_jax.sharding import make_mesh


def recipe(source, order="global"):
    config = smoke.get_config()
    config.task.mixup = 0.0
    config.batch, config.batch_eval, config.total_steps = 8, 8, 6
    config.log_every, config.checkpoint_every, config.eval_every = 1, 2, 6
    config.data.source, config.data.data_dir, config.data.num_classes = source.source, source.data_dir, 3
    config.data.split, config.data.order, config.evals.test.split = "train", order, "test"
    return config


def stop(step, metrics):
    if step == 4:
        raise KeyboardInterrupt


def assert_same_runs(one, other):
    first, second = (np.load(folder / "model.npz") for folder in (one, other))
    assert set(first) == set(second) and all((first[name] == second[name]).all() for name in first)
    assert rows(one) == rows(other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_same_stopped_packed_and_from_a_bucket(kind, here, there, tmp_path):  # noqa: F811
    config = recipe(config_of(kind, here))
    metrics = train.train(config, tmp_path / "whole")
    assert metrics["test/n"] == 7
    words = [f"--data-dir={config.data.data_dir}"] if config.data.data_dir else ["--num-classes=3"]
    pack.main(["vit_jax.pack", config.data.source, str(tmp_path / "packed"), "--shards=2", *words])
    config.data.source = f"array_record:{tmp_path / 'packed'}"
    train.train(config, tmp_path / "from_packed")
    assert rows(tmp_path / "from_packed") == rows(tmp_path / "whole")

    # In the global order, which numbers the images, every kind goes on as the digits do.
    train.train(recipe(config_of(kind, here), "stream"), tmp_path / "streamed")
    streamed = recipe(config_of(kind, there), "stream")
    with pytest.raises(KeyboardInterrupt):
        train.train(streamed, tmp_path / "stopped", stop)
    train.train(streamed, tmp_path / "stopped")
    assert_same_runs(tmp_path / "stopped", tmp_path / "streamed")

    model, params = interop.load(tmp_path / "whole")
    config, found = load_config(tmp_path / "whole" / "config.json"), []
    for batch, devices in ((3, 1), (8, 8)):
        config.batch_eval, config.mesh.data = batch, devices
        program = make_inference(model, make_mesh(config, jax.devices()[:devices]), params)
        found.append(evals.run_evaluators(evals.make_evaluators(config, program), params))
    assert found[1] == pytest.approx(found[0], rel=1e-5) and found[0]["test/n"] == 7
    evaluate.evaluate(tmp_path / "whole", save="predictions", save_dir=tmp_path)
    with np.load(tmp_path / "test.test.predictions.npz") as arrays:
        assert sorted(arrays["labels"].tolist()) == [0, 0, 0, 1, 1, 2, 2]
        assert all("10" in name for name in arrays["names"].tolist())  # the images are called 100 to 106
        saved = dict(zip(arrays["names"].tolist(), jax.nn.softmax(arrays["logits"]).max(axis=1).tolist(), strict=True))
    for place in (here, there):
        read = config_of(kind, place)
        images = data.list_source_images(read.source, "test", read.data_dir)
        found = predict(tmp_path / "whole", images, top=1)
        best = {one["image"].removeprefix("test/"): one["classes"][0]["probability"] for one in found}
        assert best == pytest.approx({name.removeprefix("test/"): best for name, best in saved.items()}, rel=1e-5)


@pytest.mark.slow
def test_a_mixture_goes_on_bitwise_and_is_packed(here, tmp_path):  # noqa: F811
    config = recipe(config_of("tfds", here))
    config.data.source = f"mix:0.7*tfds:tiny+0.3*webdataset:{here}/webdataset"
    metrics = train.train(config, tmp_path / "whole")
    assert metrics["test/n"] == 14  # both test splits, each image once
    with pytest.raises(KeyboardInterrupt):
        train.train(config, tmp_path / "stopped", stop)
    train.train(config, tmp_path / "stopped")
    assert_same_runs(tmp_path / "stopped", tmp_path / "whole")
    words = [f"--data-dir={config.data.data_dir}", "--num-classes=3"]
    pack.main(["vit_jax.pack", config.data.source, str(tmp_path / "packed"), *words, "--splits=train"])
    assert len(open_split(SourceConfig(f"array_record:{tmp_path}/packed"), "train")) == 40
    pack.main(["vit_jax.pack", "tfds:tiny", str(tmp_path / "a"), *words])
    pack.main(["vit_jax.pack", f"webdataset:{here}/webdataset", str(tmp_path / "b"), *words])
    config.data.source = f"mix:0.7*array_record:{tmp_path}/a+0.3*array_record:{tmp_path}/b"
    train.train(config, tmp_path / "from_packed")
    assert rows(tmp_path / "from_packed") == rows(tmp_path / "whole")


@pytest.mark.slow
def test_a_streamed_mixture_goes_on_bitwise_wherever_it_lies(here, there, tmp_path):  # noqa: F811
    for place, name in ((here, "here"), (there, "there")):
        config = recipe(config_of("tfds", place), "stream")
        config.data.source, config.data.readers = f"mix:0.7*tfds:tiny+0.3*webdataset:{place}/webdataset", 2
        with pytest.raises(KeyboardInterrupt):
            train.train(config, tmp_path / name, stop)
        metrics = train.train(config, tmp_path / name)
        assert metrics["test/n"] == 14
    assert_same_runs(tmp_path / "here", tmp_path / "there")
