"""Data sets of the Hugging Face hub, from a stand-in of its server that the hub's own library reads."""

import http.server
import json
import re
import shutil
import threading
from urllib.parse import unquote, urlsplit

import fsspec
import pytest

from tests.data.test_formats import FIXTURES, examples
from tests.data.test_stream import config_of
from vit_jax import UserError, data
from vit_jax.config import keep_choices, save_config
from vit_jax.data.shards import readers
from vit_jax.data.sources import SourceConfig, list_splits, open_split
from vit_jax.storage import cache, pin_revision, stores, unpin_revision

pytest.importorskip("huggingface_hub.hf_file_system")

OLD, NEW = "0" * 40, "1" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does for one data set, owner/name, whose branch main is `server.main`."""

    protocol_version = "HTTP/1.1"

    def answer(self, body=True):
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, path, self.headers.get("Range")))
        match = re.fullmatch(r"(?:/api)?/datasets/owner/name(?:/(\w[\w-]*)/([^/]+)(?:/(.*))?)?", path)
        if not match:
            return self.send(b"", 404, {"X-Error-Code": "RepoNotFound"})
        kind, revision, name = match[1], match[2] or "main", match[3]
        commit = {"main": self.server.main}.get(revision, revision)
        if commit not in self.server.commits:
            return self.send(b"", 404, {"X-Error-Code": "RevisionNotFound"})
        files = {f"data/{file}": content for file, content in self.server.commits[commit].items()}
        if kind in (None, "revision"):
            return self.send(json.dumps({"id": "owner/name", "sha": commit, "siblings": []}).encode())
        if kind == "tree":
            listed = [{"type": "directory", "path": "data", "size": 0, "oid": "d"}]
            listed += [
                {"type": "file", "path": file, "size": len(content), "oid": f"{commit} {file}"}
                for file, content in files.items()
            ]
            below = [one for one in listed if "recursive=true" in self.path.lower() or "/" not in one["path"]]
            if name:
                below = [one for one in listed if one["path"].startswith(f"{name}/")]
            return self.send(json.dumps(below).encode()) if below else self.send(b"", 404)
        if kind == "resolve" and name in files:
            content, wanted = files[name], re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
            if wanted:
                return self.send(content[int(wanted[1]) : int(wanted[2]) + 1], 206)
            return self.send(content, headers={"ETag": f'"{commit}"', "X-Repo-Commit": commit}, body=body)
        return self.send(b"", 404, {"X-Error-Code": "EntryNotFound"})

    def send(self, content, status=200, headers=None, body=True):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer()

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        files = {path.name: path.read_bytes() for path in (FIXTURES / "parquet").iterdir()}
        swapped = {
            name: files[re.sub("0000[01]-of", lambda one: f"0000{1 - int(one[0][4])}-of", name)] for name in files
        }
        server.asked, server.main, server.commits = [], OLD, {OLD: files, NEW: swapped}
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address, template = f"http://127.0.0.1:{server.server_port}", "{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{template}")
        stores.open_store.cache_clear()
        fsspec.get_filesystem_class("hf").clear_instance_cache()
        yield server
        server.shutdown()
    stores.open_store.cache_clear()
    readers.forget_readers()
    for path in (tmp_path / "cache" / "files").glob("*.lock"):
        cache.unlock_folder(path.with_suffix(""))


def test_a_dataset_is_read_from_the_hub(server):
    source = open_split(SourceConfig("hf://datasets/owner/name"), "train")
    assert examples(source) == [(level, level % 3) for level in range(20)] and source.class_names == (
        "cat",
        "dog",
        "owl",
    )
    assert list_splits(SourceConfig("hf://datasets/owner/name")) == ["test", "train"]
    assert examples(open_split(SourceConfig(f"hf://datasets/owner/name@{NEW}/data,label=label"), "train"))[0] == (10, 1)
    for name, sentence in (
        (
            "hf://datasets/owner/other",
            r"there is no hf://datasets/owner/other|cannot (list|read) hf://datasets/owner/ot",
        ),
        ("hf://owner/name", r"cannot read the data source hf://owner/name; write hf://datasets/OWNER/NAME"),
        ("hf:", r"say which dataset of the Hugging Face hub: --config.data.source=hf://datasets/OWNER/NAME"),
    ):
        with pytest.raises(UserError, match=sentence):
            open_split(SourceConfig(name), "train")


def test_a_revision_is_a_commit():
    pinned = f"hf://datasets/a/b@{OLD}/data/*.parquet,label=x"
    assert pin_revision(pinned) == pinned and unpin_revision(pinned) == "hf://datasets/a/b/data/*.parquet,label=x"
    for other in ("folder:gs://b/hf", "digits", "hf://datasets/a/b@main"):
        assert unpin_revision(other) == other
    assert pin_revision("gs://bucket/a@b") == "gs://bucket/a@b"


def test_a_run_keeps_the_revision_that_it_began_with(server, tmp_path):
    def complete(order="global"):
        config = config_of("hf://datasets/owner/name", order=order)
        return data.complete_config(keep_choices(config, str(tmp_path)))

    first, info = complete()
    assert first.data.source == f"hf://datasets/owner/name@{OLD}"
    save_config(first, tmp_path / "config.json")
    server.main = NEW
    again, later = complete()
    assert again.data.source == first.data.source and later.sample == info.sample
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    (tmp_path / "config.json").unlink()
    other, moved = complete()
    assert other.data.source == f"hf://datasets/owner/name@{NEW}" and moved.sample != info.sample
