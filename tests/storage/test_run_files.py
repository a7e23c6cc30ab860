"""What a run uploads of its local folder to a remote workdir."""

import fsspec
import pytest

from vit_jax.storage import filesystem, run_files


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A remote workdir."""
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path))
    fsspec.filesystem("memory").store.clear()
    return "memory://bkt/run"


@pytest.fixture
def opened(place):
    one = run_files.RunFiles(place, ())
    yield one
    one.close()


def test_what_vanishes_while_it_is_listed_is_left_out(opened, place, monkeypatch):
    (opened.path / "train.log").write_text("1")
    (opened.path / "wandb" / "run").mkdir(parents=True)
    (opened.path / "wandb" / "run" / "working").write_text("2")
    (opened.path / "profile").mkdir()
    (opened.path / "profile" / "temporary").write_text("3")
    upload, stat = filesystem.upload, type(opened.path).stat

    def vanishing(path, **options):
        if path.name == "temporary":
            path.unlink(missing_ok=True)
        return stat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(opened.path), "stat", vanishing)
        opened.flush()
    assert filesystem.list_files(place) == ["train.log"]
    (opened.path / "profile" / "later").write_text("4")

    def late(path, remote):
        path.unlink()
        upload(path, remote)

    monkeypatch.setattr(filesystem, "upload", late)
    opened.flush()
    monkeypatch.setattr(filesystem, "upload", upload)
    opened.flush(is_final=True)
    assert filesystem.list_files(place) == ["train.log", "wandb/run/working"]


def test_growing_logs_are_uploaded_a_bounded_number_of_times(opened, place, monkeypatch):
    sent, upload = [], filesystem.upload

    def counted(path, remote):
        sent.append(path.stat().st_size)
        upload(path, remote)

    monkeypatch.setattr(filesystem, "upload", counted)
    monkeypatch.setattr(run_files, "UPLOAD_INTERVAL", 0.0)
    for line in range(1, 301):
        with (opened.path / "metrics.jsonl").open("a") as file:
            file.write("x" * 999 + "\n")
        opened.push()
        opened._thread.join()
        known = filesystem.read_bytes(f"{place}/metrics.jsonl").count(b"\n")
        assert known > line * 0.85 - 1
    assert sum(sent) <= 10 * 300 * 1000, sum(sent)
    before = len(sent)
    opened.flush()
    assert filesystem.read_bytes(f"{place}/metrics.jsonl").count(b"\n") == 300 and len(sent) <= before + 1
