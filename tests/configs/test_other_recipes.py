"""The lists that compare recipes of ours with those of others, setting by setting (docs/imagenet.py)."""

import dataclasses
import fnmatch
import json

import pytest

from configs import base
from docs import imagenet
from docs.imagenet import SOURCES
from tests.conftest import ROOT
from tests.planning.builders import EXECUTABLE, make_compilation
from vit_jax.config import OPTIMIZERS, flatten_config
from vit_jax.planning.records import Plan
from vit_jax.planning.time_estimate import estimate_step

BASE = flatten_config(base.get_config())
# Fields of reading, evaluation and saving, which change nothing that is learnt.
RUN_TIME = {"eval_every", "eval_every_epochs", "data.workers", "init_from"}


def is_setting(source, row):
    return any(fnmatch.fnmatchcase(key, row["setting"]) for key in source.settings())


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_every_setting_of_theirs_is_explained(source):
    rows = source.rows()
    for key in source.settings():
        assert any(fnmatch.fnmatchcase(key, row["setting"]) for row in rows), key
    for row in rows:
        assert row["relation"] in imagenet.RELATIONS
        # A setting's value is in the list that was read; what only the code has is in the row.
        assert is_setting(source, row) != bool(row["theirs"]), row
        assert (row["relation"] == "differs") == bool(row["why"]), row


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_every_value_of_ours_is_that_of_the_recipe(source):
    fields = flatten_config(source.config())
    rows = [row for row in source.rows() if row["field"]]
    assert [row for row in rows if str(fields[row["field"]]) != row["ours"]] == []
    adamw = {f"optim.{name}": value for name, value in OPTIMIZERS["adamw"].defaults.items()}
    changed = {key for key, value in fields.items() if value not in (BASE.get(key), adamw.get(key))}
    named = {row["field"] for row in rows}
    left = {key for key in changed - named - RUN_TIME if not key.startswith("evals.minival")}
    assert left == set(), "fields that the recipe changes and the list does not name"


def test_numbers_there_are_the_numbers_here():
    """Settings with the same meaning and unit have the same value, not only the same row."""
    for source in SOURCES:
        fields, settings = flatten_config(source.config()), source.settings()
        for row in source.rows():
            theirs, ours = settings.get(row["setting"]), fields.get(row["field"])
            if row["relation"] == "same" and type(theirs) in (int, float) and type(ours) in (int, float):
                assert theirs == ours, row


def test_settings_are_read_from_code(tmp_path):
    (tmp_path / "rosetta" / "conf").mkdir(parents=True)
    (tmp_path / "rosetta" / "conf" / "a.gin").write_text(
        "include 'conf/b.gin'\nfrom x import y\nSTEPS = 7  # seven\nf.g:\n  size = (2, 3)\n  of = @h()\n"
    )
    (tmp_path / "rosetta" / "conf" / "b.gin").write_text(
        "STEPS = 5\n## a comment\ntrain.steps = %STEPS\nf.g:\n  size = 1\n"
    )
    found = imagenet.read_gin(tmp_path / "rosetta", "conf/a.gin")
    assert found == {"train.steps": 7, "f.g.size": (2, 3), "f.g.of": "@h()"}
    (tmp_path / "main.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('-b', '--batch-size', default=256, type=int)\n"
        "p.add_argument('data', default='imagenet')\np.add_argument('--flag', action='store_true')\n"
    )
    assert imagenet.read_mup_vit(tmp_path) == {"batch-size": 1024, "data": "imagenet", "flag": False}
    (tmp_path / "big_vision" / "configs").mkdir(parents=True)
    (tmp_path / "big_vision" / "configs" / "vit_s16_i1k.py").write_text(
        "import ml_collections\ndef get_config():\n  return ml_collections.ConfigDict({'a': {'b': [1]}, 'c': None})\n"
    )
    assert imagenet.read_big_vision(tmp_path) == {"a.b": [1], "c": None}


def test_the_page_has_the_lists(tmp_path, monkeypatch):
    page, copy = ROOT / "docs" / "imagenet.md", tmp_path / "imagenet.md"
    copy.write_text(page.read_text())
    imagenet.main(["recipes", f"--write={copy}"])
    assert copy.read_text() == page.read_text(), "run python -m docs.imagenet --write=docs/imagenet.md"
    monkeypatch.setattr(imagenet, "FOLDER", tmp_path)
    (tmp_path / "big_vision" / "configs").mkdir(parents=True)
    (tmp_path / "big_vision" / "configs" / "vit_s16_i1k.py").write_text(
        "get_config = __import__('ml_collections').ConfigDict"
    )
    imagenet.main(["recipes", "--read=big_vision_s16", f"--checkout={tmp_path}"])
    assert json.loads((tmp_path / "big_vision_s16.json").read_text()) == {}


def test_a_prepared_run_is_what_its_plan_says(tmp_path, monkeypatch):
    second = dataclasses.replace(EXECUTABLE, cycles=1_500_000_000)  # on a v5e
    compilation = make_compilation(3 * 2**30, executable=second, memory_bytes=2**34, steps=7200, batch=8340)
    monkeypatch.setattr(imagenet, "plan_recipe", lambda recipe, target: Plan(compilation, estimate_step(compilation)))
    page = tmp_path / "page.md"
    names = ["runs", *(source.name for source in SOURCES)]
    page.write_text("".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in names))
    imagenet.main(["recipes", f"--write={page}", "--plan"])
    rows = [line for line in page.read_text().splitlines() if line.startswith(f"| {imagenet.RUNS[0][0]} ")]
    told = (
        f"{imagenet.RUNS[0][1]}, 8 | 7,200 | 3.0 GiB | 1000 ms | 2.0 | 16 | {16 * imagenet.PRICE:.0f} | 128 | 0 of 224"
    )
    assert rows == [f"| {imagenet.RUNS[0][0]} | {told} |"]
