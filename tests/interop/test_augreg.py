"""AugReg's index as a query, on a stand-in with its columns."""

import csv

import jax
import numpy as np
import pytest

import vit_jax
from vit_jax import UserError
from vit_jax.interop import augreg
from vit_jax.model import create, parameter_shapes

COLUMNS = [
    *("name", "ds", "epochs", "lr", "aug", "wd", "do", "sd", "best_val", "final_val", "final_test"),
    *("adapt_ds", "adapt_lr", "adapt_steps", "adapt_resolution", "adapt_final_val", "adapt_final_test"),
    *("params", "infer_samples_per_sec", "filename", "adapt_filename"),
]
# Model, data, final_val, adapted to, resolution, adapted_val, params, images per second.
ROWS = (
    ("B_16", "i21k", 0.46, "imagenet2012", 224, 0.84, 86e6, 600, "medium1"),
    ("B_16", "i21k", 0.46, "imagenet2012", 384, 0.86, 86e6, 600, "medium1"),
    ("B_16", "i21k", 0.45, "imagenet2012", 384, 0.87, 86e6, 600, "strong1"),
    ("S_16", "i21k", 0.40, "imagenet2012", 384, 0.83, 22e6, 2000, "light1"),
    ("S_16", "i21k", 0.20, "imagenet2012", 384, 0.70, 22e6, 2000, "heavy1"),
    ("R_Ti_16", "i21k", 0.30, "cifar100", 224, 0.9, 6e6, 5000, "none"),
    ("B_16", "i1k", 0.80, "cifar100", 224, 0.9, 86e6, 600, "strong2"),
)


def names(size, data, aug, adapted, resolution):
    before = f"{size}-{data}-300ep-lr_0.001-aug_{aug}-wd_0.2-do_0.0-sd_0.0"
    return before, f"{before}--{adapted}-steps_20k-lr_0.03-res_{resolution}"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The folder in which downloaded files lie, with an index as if downloaded."""
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path))
    folder = tmp_path / "published" / "storage.googleapis.com" / "vit_models" / "augreg"
    folder.mkdir(parents=True)
    with (folder / "index.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for size, data, val, adapted, resolution, adapted_val, params, speed, aug in ROWS:
            filename, adapt_filename = names(size, data, aug, adapted, resolution)
            row = {"ds": data, "final_val": val, "adapt_ds": adapted, "adapt_resolution": resolution}
            row |= {"adapt_final_val": adapted_val, "params": params, "infer_samples_per_sec": speed}
            writer.writerow(row | {"filename": filename, "adapt_filename": adapt_filename})
    augreg._read_index.cache_clear()
    return folder


def found(**query):
    return [one.name for one in vit_jax.list_models(source="augreg", **query)]


def test_the_index_is_a_query(index):
    assert len(COLUMNS) == 21
    best = names("B_16", "i21k", "medium1", "imagenet2012", 384)
    assert found(model="ViT-B/16", best=True) == [best[0]]
    assert len(found(model="ViT-B/16")) == 2 and found(model="ViT-L/16") == []
    # The pre-trained model decides, then the adapted one: not the best accuracy after adaptation.
    assert found(model="ViT-B/16", adapted_to="imagenet2012", best=True) == [best[1]]
    assert found(adapted_to="imagenet2012", max_params=30e6) == [
        names("S_16", "i21k", aug, "imagenet2012", 384)[1] for aug in ("light1", "heavy1")
    ]
    assert [name[:4] for name in found(min_images_per_sec=1000, best=True)] == ["S_16", "R_Ti"]
    assert len(found(data="i1k")) == 1 and len(found(pattern="*strong1*")) == 1
    table = vit_jax.list_models(source="augreg", best=True)
    assert [one.final_val for one in table] == [0.46, 0.4, 0.3]
    assert {one.model for one in table} == {"ViT-B/16", "ViT-S/16", "R+ViT-Ti/16"}
    assert "final_val" in repr(table).splitlines()[0] and "<td" in table._repr_html_()


def test_wrong_queries_are_reported(index):
    with pytest.raises(UserError, match="unknown source 'augre'; did you mean 'augreg'"):
        vit_jax.list_models(source="augre")
    with pytest.raises(UserError, match="unknown keyword 'max_param'; did you mean 'max_params'"):
        vit_jax.list_models(source="augreg", max_param=3)
    with pytest.raises(UserError, match="unknown keyword 'best'"):
        vit_jax.list_models(best=True)
    (index / "index.csv").write_text("a,b\n1,2\n")
    augreg._read_index.cache_clear()
    with pytest.raises(UserError, match=r"index\.csv has another form than expected"):
        vit_jax.list_models(source="augreg")


def test_a_name_of_the_index_loads(index):
    model = create("ViT-mu/16", num_classes=5)
    shapes = parameter_shapes(model)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    [name] = found(model="ViT-B/16", best=True)
    vit_jax.save(index / f"{name}.npz", model, params, layout="google")
    loaded = vit_jax.load(name)[0]
    assert (loaded.spec, loaded.loss) == (model.spec, "sigmoid")
    assert augreg.training_loss(names("B_16", "i21k", "medium1", "cifar100", 224)[1]) == "softmax"
