"""The notebooks have no logic of their own; every cell runs, headless and small, and draws. Also what they import."""

import ast
import base64
import io
import json
import math
import os
import re
import subprocess
import sys
import tomllib
import types
import zipfile

import jax
import nbformat
import numpy as np
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from PIL import Image

import vit_jax
from tests.conftest import ROOT
from vit_jax import UserError, data, predict, train
from vit_jax.analysis import notebook, plot

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LOGIC = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While, ast.If, ast.Try, ast.comprehension)

# Stand-ins for git and pip in the cell that installs.
GIT = '#!/bin/sh\necho "$@" >> "$CALLS"\npwd\n'
PIP = "import os, sys\nprint(*sys.argv[1:], file=open(os.environ['CALLS'], 'a'))\n"


def read_notebook(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    return notebook


def code(path, tag=None):
    """The cells of code, or those with a tag."""
    cells = [cell for cell in read_notebook(path).cells if cell.cell_type == "code"]
    return [cell for cell in cells if tag is None or tag in cell.metadata.get("tags", [])]


def parsed(cell):
    return ast.parse(TransformerManager().transform_cell(cell.source))


@pytest.fixture
def photos(tmp_path):
    """Eight images of two classes."""
    random = np.random.default_rng(0)
    for number in range(8):
        folder = tmp_path / "photos" / ("bird" if number % 2 else "a very long name of a class, as ImageNet has some")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 100, (40, 60, 3)) + 150 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return tmp_path / "photos"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_hold_no_logic_and_no_outputs(path):
    assert f"/blob/main/notebooks/{path.name})" in read_notebook(path).cells[0].source.split("\n")[0]
    for cell in code(path):
        assert not cell.outputs and cell.execution_count is None
        for node in ast.walk(parsed(cell)):
            assert not isinstance(node, LOGIC), cell.source
            if "install" in cell.metadata.get("tags", []):
                continue
            if isinstance(node, ast.Import):
                assert all(alias.name in ("jax", "vit_jax") for alias in node.names)
            if isinstance(node, ast.ImportFrom):
                assert node.module.partition(".")[0] in ("vit_jax", "configs")
    [parameters] = code(path, "parameters")
    assert all(isinstance(node, ast.Assign) for node in parsed(parameters).body)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_and_draws(path, photos, tmp_path, monkeypatch):
    settings = {"workdir": str(tmp_path / "run")}
    if path.stem == "finetune":
        model = vit_jax.create("ViT-mu/16", num_classes=5, resolution=32)
        params = model.init(jax.random.key(0), np.zeros((1, 32, 32, 3), np.float32))
        params["head"]["kernel"] = np.ones_like(params["head"]["kernel"])
        vit_jax.save(tmp_path / "tiny.npz", model, params, layout="google")
        settings |= {"checkpoint": str(tmp_path / "tiny.npz"), "dataset": f"folder:{photos}", "resolution": 32}
        settings |= {"steps": 4, "batch": 8, "photos": str(photos / "bird"), "layout": "google"}
    elif path.stem == "look_inside":
        model = vit_jax.create("ViT-mu/8", num_classes=5, resolution=32, preprocess="resize(32)|value_range(-1,1)")
        vit_jax.save(tmp_path / "tiny.npz", model, model.init(jax.random.key(0), np.zeros((1, 32, 32, 3), np.float32)))
        settings |= {"checkpoint": str(tmp_path / "tiny.npz"), "photos": str(photos / "bird")}
    else:
        settings |= {"epochs": 6.0}
    drawn, calls = run(path, settings, tmp_path, monkeypatch)
    assert drawn == {"look_inside": 7}.get(path.stem, 3)
    [extras] = re.findall(r"install -q -e \.\[([\w,]+)\]", calls)
    assert set(extras.split(",")) <= set(extras_of_the_project())


def test_a_notebook_and_a_recipe_do_not_share_their_default_workdir():
    """Otherwise a run in a notebook would find the run of a command line in its folder, and be refused."""
    recipes = {path.stem for path in (ROOT / "configs").glob("*.py")}
    found = [re.search(r'^workdir = "workdirs/(\w+)"', code(path, "parameters")[0].source, re.M) for path in NOTEBOOKS]
    names = [match[1] for match in found]
    assert len({*names}) == len(names) and recipes.isdisjoint(names)
    assert all(name.startswith("notebook_") for name in names)


def extras_of_the_project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def run(path, settings, tmp_path, monkeypatch):
    """Runs a notebook with other parameters; returns how many cells drew, and how git and pip were called."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text(GIT)
    (tmp_path / "bin" / "git").chmod(0o755)
    (tmp_path / "lib" / "pip").mkdir(parents=True)
    (tmp_path / "lib" / "pip" / "__init__.py").touch()  # else the installed one, a regular package, is preferred
    (tmp_path / "lib" / "pip" / "__main__.py").write_text(PIP)
    call = [sys.executable, "-c", "import pip; print(pip.__path__)"]
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    assert str(tmp_path) in subprocess.run(call, capture_output=True, text=True, check=True).stdout
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    opened = read_notebook(path)
    [at] = [i for i, cell in enumerate(opened.cells) if "parameters" in cell.metadata.get("tags", [])]
    names = {node.targets[0].id for node in parsed(opened.cells[at]).body}
    assert set(settings) <= names
    lines = [f"{name} = {value!r}" for name, value in settings.items()]
    opened.cells.insert(at + 1, nbformat.v4.new_code_cell("\n".join(lines)))
    NotebookClient(opened, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert all(cell.execution_count for cell in opened.cells if cell.cell_type == "code")
    outputs = [output for cell in opened.cells for output in cell.get("outputs", []) if "data" in output]
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.data]
    for picture in pictures:
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB"))
        assert min(pixels.shape[:2]) > 300 and pixels.std() > 10
    return len(pictures), (tmp_path / "calls").read_text()


@pytest.mark.slow
def test_training_is_watched_from_its_beginning_on(quick, tmp_path):
    quick.mesh.data, quick.log_every, quick.eval_every, quick.checkpoint_every = 8, 2, 4, 4

    def told(steps):
        quick.total_steps, quick.decay_type = steps, "constant"
        heard = {}
        train.train(quick, tmp_path, watch=lambda step, metrics: heard.setdefault(step, {}).update(metrics))
        return heard

    first, whole = told(4), told(8)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert list(whole) == list(dict.fromkeys(json.loads(line)["step"] for line in lines))
    assert first.items() <= whole.items()
    assert {"train/loss", "train/lr", "test/accuracy"} <= {name for metrics in whole.values() for name in metrics}
    assert "step 8/8" in (tmp_path / "train.log").read_text()


def test_a_live_picture_shows_what_there_is():
    with plot.Live() as live:
        live(1, {"train/loss": 2.0, "train/lr": 0.1, "norm/grads": 1.0})
        live(2, {"train/loss": math.nan, "train/lr": 0.2})
        live(2, {"val/accuracy": 0.5, "val/loss": 1.5, "val/n": 3})
    panels = {axes.get_ylabel(): axes.get_legend_handles_labels()[1] for axes in live.figure.axes}
    assert panels == {
        "loss (nats)": ["train/loss nan", "val/loss 1.5"],
        "accuracy (%)": ["val/accuracy 50"],
        "learning rate": ["train/lr 0.2"],
    }
    png, shape = live.figure._repr_png_()
    assert Image.open(io.BytesIO(png)).size == (2 * shape["width"], 2 * shape["height"])
    with plot.Live() as nothing:
        pass
    assert not nothing.figure.axes


def test_pictures_without_matplotlib_say_what_to_install():
    advice = "pictures need matplotlib: pip install -e '.[plot]'"
    program = """
import sys
sys.modules["matplotlib"] = None
from vit_jax import UserError, look
try:
    look.look("model.npz", ["photo.png"], "look")
except UserError as error:
    print(error)
from vit_jax.analysis import plot
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout == f"cannot draw: {advice}\n"
    assert ended.stderr.endswith(f"ModuleNotFoundError: {advice}\n")


def test_attention_is_drawn_on_the_grid_of_patches():
    for pooling, rows in (("token", 1), ("gap", 0)):
        model = vit_jax.create("ViT-mu/16", resolution=(32, 48), pooling=pooling, num_classes=2)
        weights = np.full((7, 2, 6 + rows, 6 + rows), 1 / (6 + rows), np.float32)
        drawn = [axes.images for axes in plot.attention(model, np.zeros((32, 48, 3), np.float32), weights).axes]
        maps = [images[0].get_array() for images in drawn[1:] if images]
        assert len(maps) == 6
        np.testing.assert_allclose(maps[0], np.full((2, 3), 100 / (6 + rows)), rtol=1e-6)


@pytest.mark.slow
def test_pixels_are_predicted_like_files_and_drawn(quick, photos, tmp_path):
    quick.total_steps, quick.warmup_steps = 1, 0
    train.train(quick, tmp_path / "run")
    images, names = data.sample_images(quick, "test", 3)
    assert [image.shape for image in images] == [(8, 8, 3)] * 3 and set(names) <= set("0123456789")
    results = predict.predict(tmp_path / "run", images)
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    files = [tmp_path / f"{number}.png" for number in range(3)]
    assert [row["classes"] for row in predict.predict(tmp_path / "run", files)] == [row["classes"] for row in results]
    assert [row["image"] for row in results] == ["0", "1", "2"]
    assert len(plot.predictions(files, results, names).axes) == 8


def test_files_come_and_go_by_their_paths_outside_colab(photos, tmp_path, capsys):
    birds = sorted((photos / "bird").iterdir())
    assert notebook.upload(photos / "bird") == birds and notebook.upload(birds[0]) == birds[:1]
    notebook.download(birds[0])
    assert capsys.readouterr().out == f"{birds[0]}\n"
    with pytest.raises(UserError, match=r"^files can be uploaded in Colab only: .*; give a path\.$"):
        notebook.upload()
    with pytest.raises(UserError, match="there are no images in"):
        notebook.upload(tmp_path / "absent")
    with pytest.raises(UserError, match="there is no"):
        notebook.download(tmp_path / "absent")


def test_colab_uploads_and_downloads(photos, tmp_path, monkeypatch):
    sent = []
    module = types.ModuleType("google.colab")
    module.files = types.SimpleNamespace(upload=lambda: {str(photos / "bird" / "1.png"): b""}, download=sent.append)
    monkeypatch.setitem(sys.modules, "google.colab", module)
    assert notebook.upload() == [photos / "bird" / "1.png"]
    for name in ("model.npz", "model.json"):
        (tmp_path / name).write_text("")
    notebook.download(tmp_path / "model.npz")
    assert sent == [str(tmp_path / "model.npz"), str(tmp_path / "model.json")]


def test_a_zip_of_images_becomes_a_folder(photos, tmp_path):
    archive = tmp_path / "mine.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in photos.rglob("*.png"):
            file.write(path, f"some/where/{path.relative_to(photos)}")
            file.writestr(f"__MACOSX/{path.name}", "")
    assert notebook.dataset(f"folder:{archive}") == f"folder:{tmp_path}/mine/some/where"
    assert notebook.dataset(f"folder:{photos}") == f"folder:{photos}" and notebook.dataset("cifar10") == "cifar10"
    assert notebook.dataset("folder:gs://bucket/photos") == "folder:gs://bucket/photos"
    archive.write_text("no zip")
    with pytest.raises(UserError, match=r"^cannot unpack .*: File is not a zip file"):
        notebook.dataset(f"folder:{archive}")
