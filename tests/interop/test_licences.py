"""Licences: taken from model cards and configurations, kept by everything that is made from weights, and stated."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import yaml

import vit_jax
from tests.conftest import ROOT
from vit_jax import interop
from vit_jax.interop import archives, licences
from vit_jax.model import parameter_shapes

PARITY = ROOT / "tests" / "fixtures" / "parity"
ADDRESS = licences.ADDRESSES["dinov3-license"]
STATED = f"license: other\nlicense_name: dinov3-license\nlicense_link: {ADDRESS}"
TOLD = f"licence: dinov3-license, {ADDRESS}; it also binds weights that are tuned from these; who passes them on must"


def card_of(folder, matter):
    (folder / "README.md").write_text(f"---\ntags:\n- images\n{matter}\n---\n# A model\n", encoding="utf-8")


@pytest.fixture(scope="module")
def dinov3(tmp_path_factory):
    """A folder of transformers with a model card, as the hub has it; and what `load` makes of it."""
    folder = tmp_path_factory.mktemp("licences") / "dinov3"
    shutil.copytree(PARITY / "hf_dinov3", folder)
    card_of(folder, STATED)
    return folder, *vit_jax.load(folder)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("m.npz", "ours"), ("m.safetensors", "ours"), ("folder", "ours"), ("folder", "huggingface")],
)
def test_what_is_written_states_the_licence_and_is_read_with_it(dinov3, tmp_path, capsys, name, layout):
    _, model, params = dinov3
    assert (model.licence, model.licence_address) == ("dinov3-license", ADDRESS)
    vit_jax.save(tmp_path / name, model, params, layout=layout)
    again, _ = vit_jax.load(tmp_path / name)
    assert (again.licence, again.licence_address) == ("dinov3-license", ADDRESS)
    assert capsys.readouterr().err.count(TOLD) == 1
    if name == "folder":
        card = (tmp_path / name / "README.md").read_text()
        assert yaml.safe_load(card.split("---\n")[1]).items() >= yaml.safe_load(STATED).items()
        assert TOLD.removeprefix("licence: ") in card
    if name == "m.safetensors":
        with archives.open_archive(tmp_path / name) as archive:
            assert json.loads(archive.notes["vit_jax"])["licence"] == "dinov3-license"


def test_a_card_of_somebody_else_is_kept(dinov3, tmp_path, capsys):
    _, model, params = dinov3
    for licence in ("mit", "apache-2.0"):
        vit_jax.save(tmp_path / "folder", dataclasses.replace(model, licence=licence), params, layout="huggingface")
    card = tmp_path / "folder" / "README.md"
    assert "license: apache-2.0\n" in card.read_text()  # the card of the model before was ours
    card.write_text("# Mine\n")
    capsys.readouterr()
    vit_jax.save(tmp_path / "folder", model, params, layout="huggingface")
    assert card.read_text() == "# Mine\n" and "this card is not changed; it must state" in capsys.readouterr().err


def test_models_that_start_from_weights_inherit_their_licence(dinov3):
    described = interop.describe_model(dinov3[1])
    wanted = {"resample": dinov3[1].resample, "licence": "dinov3-license", "licence_address": ADDRESS}
    assert interop.inherited(dinov3[1]) == interop.inherited(described) == wanted
    older = {key: value for key, value in described.items() if key not in wanted}
    assert interop.inherited(older) == {"resample": "linear", "licence": "", "licence_address": ""}
    assert interop.restore_model(older).licence == ""


def test_adapters_have_the_licence_of_the_weights_that_they_change(tmp_path, capsys, monkeypatch):
    shutil.copytree(PARITY / "peft_vit", tmp_path / "peft")
    monkeypatch.chdir(tmp_path / "peft")
    card_of(tmp_path / "peft" / "base", "license: cc-by-nc-4.0")
    model, _ = vit_jax.load("adapter")
    assert model.licence == "cc-by-nc-4.0" and capsys.readouterr().err.count("licence: ") == 1


def test_timms_configuration_states_a_licence_and_a_card_another(tmp_path, capsys):
    model = vit_jax.create("ViT-mu/16", num_classes=3, resolution=32, activation="gelu")
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), parameter_shapes(model))
    folder = tmp_path / "folder"
    vit_jax.save(folder, model, params, layout="timm")
    assert vit_jax.load(folder)[0].licence == "" and "licence" not in capsys.readouterr().err
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"]["license"] = "mit"
    (folder / "config.json").write_text(json.dumps(config))
    loaded, _ = vit_jax.load(folder)
    assert (loaded.licence, loaded.licence_address) == ("mit", licences.ADDRESSES["mit"])
    card_of(folder, "license: apache-2.0")
    assert vit_jax.load(folder)[0].licence == "apache-2.0"
    assert vit_jax.load(folder, licence="mine")[0].licence == "mine"


@pytest.mark.parametrize(
    ("matter", "licence"),
    [
        ("license: mit", ("mit", licences.ADDRESSES["mit"])),
        ("license: other\nlicense_name: dinov3-license\nlicense_link: LICENSE.md", ("dinov3-license", ADDRESS)),
        ("license: other\nlicense_link: LICENSE", ("other", "LICENSE")),
        ("license: bsd-3-clause", ("bsd-3-clause", "")),
        ("license: unknown", ("", "")),
        ("license: [mit, apache-2.0]", ("", "")),
        ("license: {a: [", ("", "")),
        ("[" * 10_000, ("", "")),
        ("license_name: mine", ("", "")),
    ],
)
def test_what_a_card_states(tmp_path, matter, licence):
    card_of(tmp_path, matter)
    assert licences.read_card(tmp_path) == licence


@pytest.mark.parametrize("text", ["", "# Title", "---\nlicense: mit", "\xff\xfe---\nlicense: mit\n---\n"])
def test_a_card_without_front_matter_states_nothing(tmp_path, text):
    (tmp_path / "README.md").write_bytes(text.encode("latin-1"))
    assert licences.read_card(tmp_path) == licences.Licence()
