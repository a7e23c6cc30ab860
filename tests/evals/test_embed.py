"""Outputs for all images of a source as Parquet files: each once, after kills and on hosts; read again; neighbours."""

import json
import subprocess
import sys

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

import vit_jax
from launch.local import process_environments
from tests.conftest import ROOT
from tests.data.test_formats import KINDS, config_of, here, there  # noqa: F401
from tests.models.test_models import params_of
from vit_jax import UserError, data, embed, evaluate, predict
from vit_jax.data import sources
from vit_jax.evals import embedding, neighbours
from vit_jax.model import create

PIPE = "resize(32)|value_range(-1,1)"
NAMES = ("cat", "dog", "owl")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A file of a tiny model of three classes, the model and its parameters."""
    fields = {"resolution": 32, "depth": 2, "num_classes": 3, "preprocess": PIPE, "class_names": NAMES}
    model = create("ViT-mu/8", **fields)
    path, params = tmp_path_factory.mktemp("weights") / "model.npz", params_of(model)
    vit_jax.save(path, model, params)
    return str(path), model, params


@pytest.fixture
def photos(tmp_path):
    """A folder of ten photos of three classes, one of them damaged, the last a copy of the first."""
    random = np.random.default_rng(0)
    for number in range(9):
        folder = tmp_path / "photos" / "train" / NAMES[number // 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (40, 36, 3), np.uint8)).save(folder / f"{number}.png")
    (tmp_path / "photos" / "train" / "dog" / "4.png").write_bytes(b"damaged")
    first = (tmp_path / "photos" / "train" / "cat" / "0.png").read_bytes()
    (tmp_path / "photos" / "train" / "owl" / "9.png").write_bytes(first)
    return tmp_path / "photos"


def read(folder):
    """All columns of all files, in order."""
    tables = [pq.read_table(path) for path in sorted(folder.glob("vectors-*.parquet"))]
    return {name: [row for table in tables for row in table[name].to_pylist()] for name in tables[0].column_names}


def expected(weights, images):
    """The outputs of the model for images, one at a time."""
    _, model, params = weights
    pixels = np.stack([data.load_image(image, PIPE) for image in images])
    logits, out = jax.jit(model.apply)(params, pixels)
    return {"logits": logits, "features": out["pre_logits"], "tokens": out["tokens"], "block_0": out["blocks"][0]}


def test_each_image_is_a_row_and_what_is_missing_is_written_by_the_same_command(weights, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "FEW_ROWS", 3)
    computed = []
    given = {"outputs": ("features", "logits", "block_0"), "top": 2, "batch": 8, "max_bad": 0.1, "workers": 0}

    def count(total, files):
        computed.append((total, files))
        return lambda images: None

    result = embed.embed(f"folder:{photos}", str(tmp_path / "out"), weights[0], **given, start=count)
    assert (result.images, result.errors, result.files, result.missing) == (10, 1, 4, 0)
    rows = read(tmp_path / "out")
    source = sources.open_images(f"folder:{photos}", "train", None, True)
    assert rows["name"] == [source.example_name(index) for index in range(10)]
    paths, bad = [photos / name for name in rows["name"]], rows["name"].index("train/dog/4.png")
    assert [number for number, error in enumerate(rows["error"]) if error is not None] == [bad]
    assert "4.png" in rows["error"][bad] and all(rows[name][bad] is None for name in (*given["outputs"], "classes"))
    good = [number for number in range(10) if number != bad]
    assert [rows["label"][number] for number in good] == [NAMES.index(paths[number].parent.name) for number in good]
    for name, values in expected(weights, [paths[number] for number in good]).items():
        if name in given["outputs"]:
            found = np.array([rows[name][number] for number in good]).reshape(values.shape)
            np.testing.assert_allclose(found, values, atol=1e-5 * abs(values).max())
    answers = predict.predict(weights[0], [paths[number] for number in good], top=2)
    for number, answer in zip(good, answers, strict=True):
        assert rows["classes"][number] == [one["class"] for one in answer["classes"]]
        np.testing.assert_allclose(
            rows["probabilities"][number], [one["probability"] for one in answer["classes"]], rtol=1e-5
        )
    whole = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / "vectors-00001-of-00004.parquet").unlink()
    damaged = tmp_path / "out" / "vectors-00003-of-00004.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    embed.embed(f"folder:{photos}", str(tmp_path / "out"), weights[0], **given, start=count)
    assert computed == [(10, 0), (4, 2)]
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == whole


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_vectors_of_few_bits_are_read_as_they_were_computed(weights, photos, tmp_path, dtype):
    out = str(tmp_path / "out")
    embed.embed(str(photos / "train" / "owl"), out, weights[0], outputs=("tokens", "features"), dtype=dtype)
    info = embedding.read_info(out)
    assert info.vectors == {"tokens": [17, 32], "features": [32]} and not info.labels
    columns = embedding.read_vectors(out, info, ["name", "tokens", "features"])
    assert columns["name"] == ["6.png", "7.png", "8.png", "9.png"]
    values = expected(weights, [photos / "train" / "owl" / name for name in columns["name"]])
    for name in ("tokens", "features"):
        assert columns[name].dtype == jnp.dtype(dtype)
        step = float(jnp.finfo(dtype).eps) * abs(values[name]).max()
        np.testing.assert_allclose(columns[name].astype(np.float32), values[name], atol=step)
    schema = pq.read_schema(f"{out}/vectors-00000-of-00001.parquet")
    assert schema.field("tokens").metadata == {b"dtype": dtype.encode(), b"shape": b"[17, 32]"}


@pytest.mark.slow
def test_evaluations_read_the_features_of_their_images(weights, photos, tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    (photos / "train" / "dog" / "4.png").unlink()
    source, out = f"folder:{photos}", str(tmp_path / "out")
    *_, last = [data.SourceImage(sources.open_images(source, "train", None, True), row) for row in range(9)]
    embed.embed(source, out, weights[0], split="train[1:]")
    fields = "train_split=train[4:],split=train[1:4],k=1"
    asked = [f"knn:source={source},{fields}"]
    plain = evaluate.evaluate(weights[0], requests=asked)
    with monkeypatch.context() as patch:
        patch.setattr(data.EvalBatches, "__iter__", lambda batches: pytest.fail("the images are read"))
        assert evaluate.evaluate(weights[0], requests=asked, features=[out]) == plain
    with pytest.raises(UserError, match=r"does not contain the images train\[:3\] of folder:"):
        evaluate.evaluate(weights[0], requests=[asked[0].replace("train[1:4]", "train[:3]")], features=[out])
    with pytest.raises(UserError, match="no evaluation is one of features; leave out --features"):
        evaluate.evaluate(weights[0], requests=[f"classify:source={source},split=train"], features=[out])
    other = str(tmp_path / "other.npz")
    vit_jax.save(other, weights[1], jax.tree.map(lambda leaf: 2 * leaf, weights[2]))
    with pytest.raises(UserError, match="contains outputs of other weights, ViT-mu/8"):
        evaluate.evaluate(other, requests=asked, features=[out])
    with pytest.raises(UserError, match=r"was written with weights '\w+', not '\w+'; write to another folder"):
        embed.embed(source, out, other, split="train[1:]")
    Image.new("RGB", (40, 36)).save(photos / str(last))
    for again in (
        lambda: evaluate.evaluate(weights[0], requests=asked, features=[out]),
        lambda: embed.embed(source, out, weights[0], split="train[1:]"),
    ):
        with pytest.raises(UserError, match=r"images .*have changed since"):
            again()


def test_neighbours_are_the_nearest_and_copies_are_found(weights, photos, tmp_path):
    source, out = str(photos), tmp_path / "out"
    result = embed.embed(source, str(out), weights[0], max_bad=0.1, neighbours_of=3, min_cosine=0.99999)
    assert [path.rpartition("/")[2] for path in result.pages] == [
        "neighbours.html",
        "neighbours.parquet",
        "near_duplicates.csv",
        "outliers.csv",
    ]
    rows = read(out)
    names = [name for name, error in zip(rows["name"], rows["error"], strict=True) if error is None]
    features = np.array([row for row in rows["features"] if row is not None], np.float64)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    cosines = features @ features.T
    np.fill_diagonal(cosines, -np.inf)
    table = pq.read_table(out / "neighbours.parquet").to_pydict()
    assert table["name"] == names
    for row, (found, values) in enumerate(zip(table["neighbours"], table["cosines"], strict=True)):
        np.testing.assert_allclose(values, np.sort(cosines[row])[:-4:-1], atol=1e-6)
        np.testing.assert_allclose([cosines[row, names.index(name)] for name in found], values, atol=1e-6)
    assert (out / "near_duplicates.csv").read_text().splitlines() == [
        "image,near_duplicate,cosine",
        "train/cat/0.png,train/owl/9.png,1.000000",
    ]
    lines = (out / "outliers.csv").read_text().splitlines()
    assert len(lines) == 1 + 9 and lines[1].split(",")[0] == names[int(np.mean(table["cosines"], axis=1).argmin())]
    page = (out / "neighbours.html").read_text()
    assert page.count("data:image/webp") >= 9 * 4 and "http" not in page.replace("http-equiv", "")
    info = embedding.read_info(str(out))
    sampled = neighbours.find(str(out), info, 2, 4)
    assert sampled.indices.tolist() == [0, 2, 5, 7] and sampled.rows.shape == (4, 2)


def test_an_image_behind_its_own_copies_is_not_its_neighbour():
    rows, cosines = neighbours.find_others(np.ones((6, 4), np.float32), 2)
    assert rows.shape == (6, 2) and (rows != np.arange(6)[:, None]).all()
    found = neighbours.Neighbours(np.arange(6, dtype=np.int32), rows, cosines)
    assert len(found.pairs(0.99)) == 9 and found.pairs(1.01) == []  # 2 neighbours each: not all 15


BAD = {
    "an unknown output": (
        {"outputs": ("pooled",)},
        "has no output pooled; choose from features, tokens, logits",
    ),
    "an absent block": ({"outputs": ("block_2",)}, "no output block_2; .* block_0 to block_1"),
    "an output twice": ({"outputs": ("tokens", "tokens")}, "an output is named twice in tokens,tokens"),
    "no output": ({"outputs": ()}, "nothing is to be written"),
    "too many classes": ({"top": 4}, "top must be between 0 and 3, not 4"),
    "an unknown dtype": ({"dtype": "int8"}, "vectors are written as float32, float16, bfloat16, not int8"),
    "a batch of none": ({"batch": 0}, "batch must be at least 1, not 0"),
    "a fraction above 1": ({"max_bad": 2.0}, "max-bad must be a fraction, between 0 and 1, not 2"),
    "too many unreadable": ({}, r"4.png.*; 1 of 10 images are unreadable so far, more than the 0 that --max-bad=0.01"),
    "no split": ({"source": "folder:", "split": "test"}, "unknown split .* 'test'; choose from train"),
    "a split of a folder": ({"split": "train"}, "is a place of images without splits; write folder:/"),
    "a sample of nothing": ({"sample": 5}, "ask for some"),
    "no folder": ({"source": "/nowhere"}, "there is no image file and no folder /nowhere"),
    "too many neighbours": ({"neighbours_of": 10}, "each of 10 images has up to 9 neighbours, not 10"),
    "neighbours of nothing": ({"neighbours_of": 1, "outputs": ("tokens",)}, "add features to the outputs"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_written_is_a_sentence(case, weights, photos, tmp_path):
    given, message = BAD[case]
    given = dict(given)
    source = given.pop("source", str(photos))
    source = f"folder:{photos}" if source == "folder:" else source
    with pytest.raises(UserError, match=message):
        embed.embed(source, str(tmp_path / "out"), weights[0], **given)


def test_a_full_disk_is_a_sentence(weights, photos, small_disk, monkeypatch):
    monkeypatch.setattr(embedding, "FEW_ROWS", 3)
    with pytest.raises(UserError, match=r"cannot write \S+vectors-\S+: No space left on device"):
        embed.embed(str(photos), str(small_disk), weights[0], outputs=("tokens", "block_0", "block_1"), max_bad=1)


def test_too_many_vectors_for_exact_neighbours_need_a_sample():
    with pytest.raises(UserError, match=r"too long for 1,000,000 images; .* --sample=100000"):
        neighbours.check_count(10**6, 5, None)
    neighbours.check_count(10**6, 5, 100_000)


def test_images_without_labels_are_told_how_to_be_read(weights, tmp_path):
    image = (ROOT / "tests" / "fixtures" / "formats" / "parquet").rglob("*.parquet")
    rows = pq.read_table(next(iter(sorted(image)))).drop_columns("label").replace_schema_metadata(None)
    pq.write_table(rows, tmp_path / "train.parquet")
    source = f"parquet:{tmp_path}/train.parquet"
    with pytest.raises(UserError, match=r"; or leave out labels, with --no-labels"):
        embed.embed(source, str(tmp_path / "out"), weights[0])
    embed.embed(source, str(tmp_path / "out"), weights[0], labels=False)
    assert "label" not in read(tmp_path / "out") and len(read(tmp_path / "out")["features"]) == len(rows)


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": 2}', "not JSON", "null"])
def test_another_info_json_is_not_believed(text, tmp_path):
    (tmp_path / "info.json").write_text(text)
    with pytest.raises(UserError, match=r"info.json was not written by this version|cannot read \S*info.json"):
        embedding.read_info(str(tmp_path))


# From a bucket, and on several hosts.


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_bucket_is_read_and_written_to(kind, here, there, weights, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(embedding, "FEW_ROWS", 6)
    known = []
    for place, out in ((here, str(tmp_path / "out")), (there, "memory://b/out")):
        config = config_of(kind, place)
        monkeypatch.setattr(
            sources, "open_images", lambda *_, config=config: sources.open_split(config, "train[3:]", streams=True)
        )
        embed.embed(config.source, out, weights[0], batch=4)
        store = fsspec.filesystem("memory" if place is there else "file")
        files = sorted(name for name in store.ls(out, detail=False) if name.endswith(".parquet"))
        known.append([store.cat_file(name) for name in files])
    assert len(known[0]) == 3 and known[0] == known[1]


@pytest.mark.slow
def test_two_hosts_write_what_one_writes_and_a_killed_one_goes_on(weights, photos, tmp_path, monkeypatch):
    (photos / "train" / "dog" / "4.png").unlink()
    program = (
        "import sys; from vit_jax import cli, embed; from vit_jax.evals import embedding; embedding.FEW_ROWS = 2;"
        "cli.run_command(embed.main)"
    )
    given = [f"folder:{photos}", str(tmp_path / "two"), f"--of={weights[0]}", "--batch=4", "--fsdp=2"]

    def start(environment):
        command = [sys.executable, "-c", program, *given]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    hosts = [start(environment) for environment in process_environments(2, 4)]
    outputs = [host.communicate(timeout=300)[0].decode() for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    monkeypatch.setattr(embedding, "FEW_ROWS", 2)
    embed.embed(f"folder:{photos}", str(tmp_path / "one"), weights[0])
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    assert json.loads((tmp_path / "one" / "info.json").read_text()) == json.loads(
        (tmp_path / "two" / "info.json").read_text()
    )
    assert all(one[name] == two[name] for name in ("name", "label", "error"))
    np.testing.assert_allclose(one["features"], two["features"], atol=1e-5)
    assert "9 images, files: 5, unreadable: 0; computed now: 4 in" in outputs[0]
