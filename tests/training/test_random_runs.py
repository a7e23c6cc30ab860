"""Whatever passes the checks trains, evaluates and resumes; whatever fails after the first step costs an interval."""

import json
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from PIL import Image

from configs import smoke
from tests.training.test_workdir import failing, steps
from vit_jax import UserError, evals, train
from vit_jax.checkpoint.store import CheckpointStore
from vit_jax.config import OPTIMIZERS
from vit_jax.data import loader
from vit_jax.monitoring import train_metrics
from vit_jax.monitoring.metric_writer import MetricWriter
from vit_jax.training import workdir

SOME = {"derandomize": True, "deadline": None, "database": None, "phases": [Phase.generate]}
SOME["suppress_health_check"] = list(HealthCheck)

# What a run calls again and again, and may fail at.
PLACES = {
    "data": (loader.DevicePrefetcher, "__next__"),
    "report": (train_metrics.TrainMetrics, "__call__"),
    "log": (MetricWriter, "write_metrics"),
    "evaluation": (evals, "run_evaluators"),
    "save": (workdir.Workdir, "save"),
    "background": (CheckpointStore, "finish"),
    "metrics": (workdir.Workdir, "note_evaluation"),
    "about": (CheckpointStore, "write_manifest"),
    "poll": (workdir.Workdir, "poll"),
    "export": (workdir.Workdir, "export"),
}

# What is trained, and in how many passes.
TRAINED = [{}, {"optim.layer_decay": 0.5}, {"optim.frozen_blocks": 1}, {"adapt.rank": 2}, {"optim.sam_rho": 0.05}]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Photographs of 11 to 24 pixels on a side: some are too small for some crops."""
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("photos")
    for split, count in (("train", 40), ("test", 13)):
        for number in range(count):
            path = folder / split / "abc"[number % 3] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            size = (*random.integers(11, 25, 2), 3)
            Image.fromarray(random.integers(0, 256, size, np.uint8)).save(path)
    return folder


@st.composite
def configurations(draw):
    """Small runs: the sizes of images, batches, parts and intervals, pipes, optimizers and what is kept."""
    config = smoke.get_config()
    config.model.width, config.model.num_heads, config.model.mlp_dim = 8, 2, 8
    config.resolution = draw(st.sampled_from([8, 8, 12, 16]))
    small = draw(st.integers(15, 20))
    crops = [f"resize_small({small})|central_crop({{resolution}})", "central_crop({resolution})"]
    pipes = ["resize({resolution})", "inception_crop({resolution})|flip_lr", *crops[:1]]
    config.data.preprocess = f"{draw(st.sampled_from(pipes))}|value_range(-1,1)"
    tested = draw(st.sampled_from(["resize({resolution})", *crops, None]))
    default = "resize_small(18)|central_crop({resolution})"
    config.evals.test.preprocess = f"{tested or default}|value_range(-1,1)"
    config.evals.test.split = draw(st.sampled_from(["test", "test[:5]", "train[:50%]"]))
    config.batch = draw(st.sampled_from([8, 16, 24]))
    config.accum_steps = draw(st.sampled_from([1, config.batch // 8]))
    config.batch_eval = draw(st.sampled_from([None, 8, 16]))
    config.total_steps = draw(st.integers(3, 7))
    config.warmup_steps = draw(st.integers(0, 2))
    config.eval_every = draw(st.sampled_from([None, 1, 2, 3]))
    config.checkpoint_every = draw(st.integers(1, 5))
    config.log_every = draw(st.sampled_from([1, 1, 2]))
    config.base_lr = draw(st.sampled_from([0.0, 1e-3]))
    config.optim.decay_factor = draw(st.sampled_from(["rate", "schedule"]))
    config.optim.name = draw(st.sampled_from(list(OPTIMIZERS)))
    config.update_from_flattened_dict(draw(st.sampled_from(TRAINED)))
    config.optim.ema_decay = draw(st.sampled_from([0.0, 0.5]))
    config.checkpoint.keep_last, config.checkpoint.keep_best = draw(st.integers(1, 2)), draw(st.integers(0, 2))
    config.checkpoint.best_metric = draw(st.sampled_from(["test/accuracy", "test/top5"]))
    config.task.mixup = 0.0
    return config


def written(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], "train/loss" in line) for line in lines]


def expected(config):
    """Returns which steps' metrics a run has written that came to its end."""
    last, every = config.total_steps, config.eval_every or config.total_steps
    for step in range(1, last + 1):
        if step % config.log_every == 0 or step == last:
            yield step, True
        if step % every == 0 or step == last:
            yield step, False


def check(config, call, photos):
    place = sorted(PLACES)[zlib.crc32(config.to_json().encode()) % len(PLACES)]  # hypothesis would favour some
    config.data.source, made = f"folder:{photos}", []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        run, call_report = Path(folder) / "run", train_metrics.TrainMetrics.__call__
        count = lambda self, step, values: (made.append(step), call_report(self, step, values))  # noqa: E731
        patch.setattr(train_metrics.TrainMetrics, "__call__", count)
        try:
            with pytest.MonkeyPatch.context() as fault:
                failing(fault, *PLACES[place], RuntimeError("injected"), call)
                train.train(config, run)
        except UserError as error:
            assert not made, error  # all that is wrong with a run is told before its first step
            return event(f"refused: {str(error)[:40]}")
        except RuntimeError as error:
            assert "injected" in str(error)
            event(f"failed at {place}")
            lost = max(made, default=0) - max(steps(run), default=0)
            interval = min(config.checkpoint_every, config.eval_every or config.total_steps)
            # That a save fails is known when it is waited for, at the next one at the latest.
            assert lost <= interval * (2 if place == "background" else 1), (made, steps(run), interval)
        train.train(config, run)
        assert written(run) == list(expected(config))
        assert steps(run)[-1] == config.total_steps and (run / "model.npz").exists()


@pytest.mark.slow
@given(config=configurations(), call=st.integers(1, 3))
@settings(max_examples=6, **SOME)
def test_many_runs(config, call, photos):
    check(config, call, photos)
