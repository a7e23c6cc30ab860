"""`model.name=init_from`: the model of a run is that of the weights it starts from."""

import json
import re

import pytest

import vit_jax
from tests.conftest import ROOT
from vit_jax import UserError, interop
from vit_jax.config import keep_choices, parse_command_line, save_config
from vit_jax.training import take_model

PARITY = ROOT / "tests" / "fixtures" / "parity"
NAMES = ("hf_dinov3_plus", "hf_clip", "big_vision_map.npz", "google_hybrid_stem_only.npz")
WEIGHTS = [PARITY / name for name in NAMES]


def parse(weights, *words):
    recipe = f"--config={ROOT}/configs/finetune.py:model=init_from,dataset=cifar10"
    return parse_command_line(["main.py", recipe, f"--config.init_from={weights}", *words])[0]


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda path: path.name)
def test_the_model_is_that_of_the_weights(weights):
    config = take_model(parse(weights, "--config.model.dropout_rate=0.2"))
    model = interop.read_model(weights)
    assert config.model.name == model.name
    assert config.model.dropout_rate == 0.2
    wanted = interop.config_fields(model)
    assert {name: config.model[name] for name in wanted} == wanted


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda path: path.name)
def test_a_model_is_read_without_its_arrays(weights):
    model, _ = vit_jax.load(weights, resolution="native")
    assert interop.read_model(weights) == model


def test_a_field_that_a_command_sets_is_kept():
    assert take_model(parse(WEIGHTS[0], "--config.model.pooling=gap")).model.pooling == "gap"


def test_another_model_is_left_alone():
    config = parse(WEIGHTS[0], "--config.model.name=ViT-S/16")
    assert take_model(config) is config


def test_a_resumed_run_needs_no_weights(tmp_path):
    config = take_model(parse(WEIGHTS[1]))
    save_config(config, tmp_path / "config.json")
    again = parse(WEIGHTS[1])
    assert take_model(keep_choices(again, str(tmp_path))).to_json() == config.to_json()
    assert json.loads((tmp_path / "config.json").read_text())["model"]["pre_norm"] is True


def test_a_resumed_run_keeps_a_field_that_the_command_changes(tmp_path):
    save_config(take_model(parse(WEIGHTS[0])), tmp_path / "config.json")
    again = take_model(keep_choices(parse(WEIGHTS[0], "--config.model.pooling=gap"), str(tmp_path)))
    assert again.model.pooling == "gap"  # which the resumption then refuses


def test_the_address_of_weights_may_have_another_signature(tmp_path):
    first = take_model(parse(WEIGHTS[1]))
    first.init_from = "https://example.org/w.npz?signature=1"
    save_config(first, tmp_path / "config.json")
    kept = keep_choices(parse("https://example.org/w.npz?signature=2"), str(tmp_path))
    assert kept.model.name == first.model.name and kept.model.pre_norm


def test_the_model_of_a_run(tmp_path):
    model, params = vit_jax.load(WEIGHTS[0], resolution="native")
    vit_jax.save(tmp_path / "model.npz", model, params)
    assert take_model(parse(tmp_path)).model.to_dict() == take_model(parse(WEIGHTS[0])).model.to_dict()


def test_without_weights_there_is_no_model():
    with pytest.raises(UserError, match=re.escape("model.name=init_from is the model of the weights that")):
        take_model(parse("None"))


def test_weights_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"init_from=.*does not exist"):
        take_model(parse(tmp_path / "absent"))
