"""Checkpoints of the Hugging Face hub, from a stand-in of its server."""

import jax
import numpy as np
import pytest

import vit_jax
from tests.interop import hub_server
from vit_jax import UserError
from vit_jax.interop import hub
from vit_jax.model import create, parameter_shapes

pytest.importorskip("huggingface_hub")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A model in transformers' layout, as a folder."""
    model = create(
        "ViT-mu/16", num_classes=2, activation="gelu", resolution=32, class_names=["cat", "dog"], licence="mit"
    )
    shapes = parameter_shapes(model)
    params = jax.tree.map(lambda leaf: np.random.default_rng(0).normal(size=leaf.shape).astype(np.float32), shapes)
    folder = tmp_path_factory.mktemp("hub") / "model"
    vit_jax.save(folder, model, params, layout="huggingface")
    return model, folder


@pytest.fixture
def server(written, tmp_path, monkeypatch):
    files = {path.name: path.read_bytes() for path in written[1].iterdir()}
    with hub_server.serve(files | {"pytorch_model.bin": b"not asked for"}) as server:
        hub_server.use(server, monkeypatch, tmp_path / "cache")
        yield server


def test_a_checkpoint_of_the_hub_loads_and_is_downloaded_once(server, written):
    model, params = vit_jax.load("hf-hub:owner/name")
    assert model.spec == written[0].spec and model.class_names == ("cat", "dog") and model.licence == "mit"
    assert model.preprocess == "torch_resize((32,32),'bicubic')|value_range(-1,1)"
    assert params["embed"]["kernel"].shape == (16, 16, 3, 32)
    assert not [path for path in server.asked if "pytorch_model.bin" in path]
    resolved = [path for path in server.asked if path.endswith("model.safetensors")]
    vit_jax.load("hf-hub:owner/name@v2")  # the same commit
    assert [path for path in server.asked if path.endswith("model.safetensors")] == resolved


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("owner/absent", r"the hub has no model owner/absent, or it is private; check the name \(vit_jax.list_models"),
        ("owner/name@absent", "owner/name has no revision absent"),
        ("a/b/c", "'a/b/c' is not the name of a model on the hub; write hf-hub:OWNER/NAME"),
        (
            "owner/gated",
            "no permission to read owner/gated; accept its terms on https://huggingface.co/owner/gated and log",
        ),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(server, name, sentence):
    with pytest.raises(UserError, match=rf"^hf-hub:{name}: {sentence}") as caught:
        vit_jax.load(f"hf-hub:{name}")
    assert "\n" not in str(caught.value)


def test_without_a_network_or_the_library_the_sentence_says_so(server, monkeypatch):
    server.shutdown()
    server.server_close()
    with pytest.raises(UserError, match="owner/name is not in the local cache, and the hub cannot be reached"):
        vit_jax.load("hf-hub:owner/name")
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[hub\]'"):
        hub.download_checkpoint("hf-hub:owner/name")
