"""Checkpoints of the Hugging Face hub, from a stand-in of its server."""

import http.server
import json
import threading
from urllib.parse import unquote, urlsplit

import jax
import numpy as np
import pytest

import vit_jax
from vit_jax import UserError
from vit_jax.interop import hub
from vit_jax.model import create, parameter_shapes

huggingface_hub = pytest.importorskip("huggingface_hub")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", "v2", COMMIT)


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does for one repository, owner/name."""

    def answer(self, body):
        path, files = unquote(urlsplit(self.path).path), self.server.files
        self.server.asked.append(path)
        if not path.startswith(("/owner/name/", "/api/models/owner/name")):
            return self.refuse("GatedRepo" if "gated" in path else "RepoNotFound", 401)  # without a token
        inside = path.removeprefix("/api/models").removeprefix("/owner/name/")
        kind, revision, name = [*inside.split("/", 2), ""][:3]
        if revision not in REVISIONS:
            return self.refuse("RevisionNotFound", 404)
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            content = json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}).encode()
        elif kind == "tree":
            listed = [{"type": "file", "path": name, "size": len(files[name]), "oid": "0"} for name in files]
            content = json.dumps(listed).encode()
        elif name in files:
            content = files[name]
        else:
            return self.refuse("EntryNotFound", 404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hash(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def refuse(self, code, status):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def log_message(self, *args):
        pass


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
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked, server.files = [], {path.name: path.read_bytes() for path in written[1].iterdir()}
        server.files["pytorch_model.bin"] = b"not asked for"
        monkeypatch.setenv("no_proxy", "*")
        address = f"http://127.0.0.1:{server.server_port}"
        real = huggingface_hub.snapshot_download

        def download(name, **words):  # the library reads HF_ENDPOINT and HF_HUB_CACHE when it is imported
            return real(name, **words, endpoint=address, cache_dir=tmp_path / "cache")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


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
