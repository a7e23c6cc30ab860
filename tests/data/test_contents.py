"""Images replaced under their names: what was kept of the old ones is not told of the new ones."""

import dataclasses
import io
import logging
import os
import shutil

import fsspec
import jax
import numpy as np
import pytest
from PIL import Image

from configs import smoke
from tests.conftest import write_tfds
from vit_jax import create, evaluate, pack, save, train
from vit_jax.checkpoint import find_checkpoint
from vit_jax.data import sources
from vit_jax.data.sources.source import sample_contents, sample_indices
from vit_jax.storage import filesystem

DARK, BRIGHT = 60, 190
SLICES = "train_split=train[:50%],split=train[50%:]"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The file of a model that was never trained."""
    path = tmp_path_factory.mktemp("weights") / "model.npz"
    model = create("ViT/4", num_classes=2, width=16, depth=1, mlp_dim=16, num_heads=2, resolution=8)
    model = dataclasses.replace(model, preprocess="resize(8)|value_range(-1,1)")
    save(path, model, jax.jit(model.init)(jax.random.key(0), np.zeros((1, 8, 8, 3), np.float32)))
    return path


def encoded(level, random):
    """A PNG of noise about a grey level: all files have the same size to a few bytes."""
    file = io.BytesIO()
    pixels = np.clip(random.normal(level, 20, (8, 8, 3)), 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(file, "PNG", compress_level=0)
    return file.getvalue()


def write_folder(place, classes=(DARK, BRIGHT), count=24, seed=0):
    """Writes `{a,b}/*.png`, local or remote; the grey level is that of the class."""
    random = np.random.default_rng(seed)
    for number in range(count):
        filesystem_path = f"{place}/{'ab'[number % 2]}/{number:02}.png"
        if not filesystem.is_remote(filesystem_path):
            os.makedirs(os.path.dirname(filesystem_path), exist_ok=True)
        filesystem.write_bytes(filesystem_path, encoded(classes[number % 2], random))
    return place


@pytest.fixture
def bucket():
    """An empty folder in the file system in memory."""
    fsspec.filesystem("memory").store.clear()
    return "memory://bucket"


def nearest(weights, source):
    return evaluate.evaluate(weights, source=source, requests=[f"knn:k=1,{SLICES}"])["knn/1nn"]


@pytest.mark.slow
def test_images_replaced_in_a_bucket_are_evaluated_again(weights, bucket):
    folder = write_folder(f"{bucket}/photos")
    assert nearest(weights, f"folder:{folder}") == nearest(weights, f"folder:{folder}") == 1
    write_folder(folder, seed=1, classes=(100, 100))  # now the classes look alike
    assert nearest(weights, f"folder:{folder}") < 1


@pytest.mark.parametrize("remote", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_shards_replaced_under_their_names_are_evaluated_again(remote, weights, bucket, tmp_path):
    packed = str(tmp_path / "packed")
    place = f"{bucket}/packed" if remote else packed

    def write(classes, seed):
        shutil.rmtree(packed, ignore_errors=True)
        pack.main(["pack", f"folder:{write_folder(tmp_path / 'photos', classes, seed=seed)}", packed, "--shards=1"])
        for name in os.listdir(packed) if remote else ():
            fsspec.filesystem("memory").put_file(f"{packed}/{name}", f"{place}/{name}")

    write((DARK, BRIGHT), 0)
    assert nearest(weights, f"array_record:{place}") == 1
    write((100, 100), 1)
    assert nearest(weights, f"array_record:{place}") < 1


def test_a_store_that_knows_no_versions_keeps_nothing_for_another_process(bucket, monkeypatch):
    folder = write_folder(f"{bucket}/photos", count=2)
    memory, info = type(fsspec.filesystem("memory")), {"type": "file", "size": 9}
    monkeypatch.setattr(memory, "info", lambda self, path, **options: info | {"name": path})
    first = filesystem.file_version(f"{folder}/a/00.png")
    assert filesystem.file_version(f"{folder}/a/00.png") == first
    monkeypatch.delenv(filesystem.PROCESSES)
    assert filesystem.file_version(f"{folder}/a/00.png") != first


# A sample of the contents.


def opened(source, split="train", **fields):
    config = smoke.get_config()
    config.data.update({"source": source, **fields})
    return sources.open_source(config, split)


def test_the_sample_covers_small_data_whole_and_large_data_evenly():
    assert sample_indices(256) == list(range(256))
    indices = sample_indices(100_003)
    assert indices == sample_indices(100_003) and len(set(indices)) == 256 and max(indices) < 100_003
    assert np.histogram(indices, 8, (0, 100_003))[0].tolist() == [32] * 8
    assert len(set(sample_indices(257))) > 200


def test_a_sample_differs_with_the_contents_and_not_with_place_and_time(tmp_path, bucket):
    folder = write_folder(tmp_path / "photos")
    first = sample_contents(opened(f"folder:{folder}"))
    assert first and sample_contents(opened(f"folder:{write_folder(tmp_path / 'copy')}")) == first
    assert sample_contents(opened(f"folder:{write_folder(f'{bucket}/photos')}")) == first
    write_folder(folder, seed=1)
    assert sample_contents(opened(f"folder:{folder}")) != first
    (tmp_path / "copy" / "a" / "00.png").write_bytes(b"not an image, but a file")
    assert sample_contents(opened(f"folder:{tmp_path / 'copy'}")) != first
    write_tfds(tmp_path, "tiny", "1.2.3", ["a", "b"], {"train": 4, "test": 2})
    assert sample_contents(opened("tfds:tiny", data_dir=str(tmp_path)))
    assert sample_contents(opened("digits")) == ""  # the fingerprint covers them


# A run.


def configured(folder, steps):
    config = smoke.get_config()
    config.update({"batch": 8, "total_steps": steps, "warmup_steps": 0, "eval_every": 2, "checkpoint_every": 2})
    config.resolution, config.task.mixup, config.mesh.data = 8, 0.0, 8
    config.model.depth, config.data.num_classes, config.data.num_examples = 1, None, None
    config.data.update({"source": f"folder:{folder}", "split": "train", "preprocess": "resize(8)|value_range(-1,1)"})
    config.evals.test.update({"split": "train", "preprocess": "resize(8)|value_range(-1,1)"})
    config.checkpoint.keep_last, config.checkpoint.keep_best = 1, 1
    return config


@pytest.mark.slow
def test_a_run_whose_images_were_replaced_says_so_and_ranks_scores_of_both_apart(tmp_path, caplog, monkeypatch):
    folder, workdir = write_folder(tmp_path / "photos"), tmp_path / "run"
    scores = iter([0.9, 0.8, 0.1])
    evaluated = train.evals.run_evaluators
    monkeypatch.setattr(train.evals, "run_evaluators", lambda *args: evaluated(*args) | {"test/accuracy": next(scores)})
    with caplog.at_level(logging.WARNING):
        train.train(configured(folder, 4), workdir)
    assert "replaced" not in caplog.text and find_checkpoint(workdir, best=True).name == "2"
    write_folder(folder, seed=1)
    with caplog.at_level(logging.WARNING):
        train.train(configured(folder, 6), workdir)
    assert f"images of folder:{folder} train were replaced under their names after step 4" in caplog.text
    assert "replaced under their names" in (workdir / "train.log").read_text()
    assert find_checkpoint(workdir, best=True).name == "6"  # the first that was measured on these images
