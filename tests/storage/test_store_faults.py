"""A store that misbehaves: what is asked again, what ends a run in a sentence, and that no byte is another."""

import itertools
import json
import logging
import re
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.data.test_array_record import write_set
from tests.data.test_stream import COUNT, stream
from tests.storage import fake_gcs
from vit_jax import UserError
from vit_jax.data.shards import array_record_file
from vit_jax.data.sources import SourceConfig, open_split
from vit_jax.storage import filesystem, stores

CONTENT = np.random.default_rng(0).bytes(300_000)
SHARDS = 10_000
QUICK = 0.02  # seconds of the first wait


@pytest.fixture(scope="module")
def port():
    """A server that fails as it is told, with a bucket `bkt`."""
    with fake_gcs.started("bkt") as port, pytest.MonkeyPatch.context() as patch:
        for key, value in fake_gcs.environment(port).items():
            patch.setenv(key, value)
        filesystem.open_store.cache_clear()
        yield port
        filesystem.open_store.cache_clear()


@pytest.fixture
def bucket(port, tmp_path, monkeypatch):
    """(faults) -> None: what the server fails with, next; its one object is `x`, and all waits are short."""
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stores, "FIRST_WAIT", QUICK)
    monkeypatch.setattr("gcsfs.retry.min", lambda *seconds: QUICK, raising=False)
    monkeypatch.setattr(stores, "SOCKET_TIMEOUT_SECONDS", 0.5)
    filesystem.open_store.cache_clear()
    fake_gcs.tell(port)
    filesystem.write_bytes("gs://bkt/x", CONTENT)
    yield lambda *faults, **seed: fake_gcs.tell(port, *faults, **seed)
    fake_gcs.tell(port)
    filesystem.open_store.cache_clear()


def warnings(caplog):
    """The warnings about this store; a thread that an earlier test left may tell of others."""
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in messages if "gs://bkt/" in message]


FAULTS = {
    "latency": ("latency", {"seconds": [0.005, 0.5], "share": 1}, None),
    "reset": ("reset", {}, "broke off|Connection|reset|disconnected"),
    "429": ("429", {}, "429"),
    "503": ("503", {}, "503"),
    "stall": ("stall", {"seconds": 3}, "broke off"),
    "short": ("short", {}, "broke off"),
}


@pytest.mark.flaky(reruns=1)  # a busy machine may take longer than the short timeout, and ask once more
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_time_alone_and_is_told_once(bucket, port, name, tmp_path, caplog):
    kind, more, words = FAULTS[name]
    bucket({"kind": kind, "count": 2, "path": "/o/x", **more})
    assert filesystem.read_bytes("gs://bkt/x") == CONTENT
    assert fake_gcs.told(port)[0] == [2 if words else 1]
    told = warnings(caplog)
    caplog.clear()
    bucket({"kind": kind, "count": 2, "path": "alt=media", **more})
    local = filesystem.local_copy("gs://bkt/x")
    with open(local, "rb") as file:
        assert file.read() == CONTENT
    for messages in (told, warnings(caplog)):
        assert len(messages) == (1 if words else 0), messages
        assert all(re.search(rf"gs://bkt/x failed at first \(.*({words})", message) for message in messages), messages


def test_a_store_of_which_every_third_answer_fails_gives_every_byte(bucket, port):
    names = [f"many/{number:02}" for number in range(40)]
    for name in names:
        filesystem.write_bytes(f"gs://bkt/{name}", name.encode() * 50)
    kinds = ("reset", "429", "503", "short")
    bucket(*({"kind": kind, "share": 0.1} for kind in kinds), {"kind": "stall", "share": 0.02, "seconds": 2}, seed=2)
    assert filesystem.list_files("gs://bkt/many") == [name.removeprefix("many/") for name in names]
    assert [filesystem.read_bytes(f"gs://bkt/{name}") for name in names] == [name.encode() * 50 for name in names]
    met, requests = fake_gcs.told(port)
    assert min(met[:4]) > 0 and 0.2 * requests < sum(met) and requests < 4 * 41


def test_a_store_is_waited_for_as_long_as_it_asks(bucket):
    bucket({"kind": "429", "count": 1, "retry_after": 1})
    began = time.monotonic()
    assert filesystem.read_bytes("gs://bkt/x") == CONTENT
    assert 1 <= time.monotonic() - began < 3


def test_what_is_certain_is_not_asked_again(bucket, port, caplog):
    bucket({"kind": "403"})
    with pytest.raises(UserError, match="cannot read gs://bkt/x: Forbidden"):
        filesystem.read_bytes("gs://bkt/x")
    assert fake_gcs.told(port) == ([1], 1)
    bucket()
    with pytest.raises(UserError, match="there is no gs://bkt/nothing"):
        filesystem.read_bytes("gs://bkt/nothing")
    assert fake_gcs.told(port)[1] == 1
    assert not warnings(caplog)


@pytest.mark.parametrize("kind", ["503", "reset", "stall", "short"])
def test_after_the_limit_a_sentence_names_the_file_and_the_reason(bucket, kind, monkeypatch):
    monkeypatch.setattr(stores, "TIMEOUT", 1.0)
    bucket({"kind": kind, "path": "/o/x", "seconds": 5})
    began = time.monotonic()
    with pytest.raises(UserError, match="gs://bkt/x") as error:
        filesystem.local_copy("gs://bkt/x")
    assert 0.5 < time.monotonic() - began < 3 and str(error.value).count("\n") == 0
    assert kind != "503" or "503" in str(error.value) or "busy" in str(error.value)


def test_the_waits_grow_and_differ():
    several = [list(itertools.islice(stores.backoff_seconds(), 9)) for _ in range(200)]
    longest = [min(stores.FIRST_WAIT * 2**number, stores.MAX_WAIT) for number in range(9)]
    for number, most in enumerate(longest):
        found = [waits[number] for waits in several]
        assert most / 2 <= min(found) < 0.6 * most and 0.9 * most < max(found) <= most
    assert longest[-1] == stores.MAX_WAIT


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (stores.ShortRead(), True),
        (FileNotFoundError(), False),
        (PermissionError(), False),
        (ValueError(), False),
        (OSError(28, "No space left on device"), False),
        (UserError("no."), False),
    ],
)
def test_errors_are_transient_or_certain(error, again):
    assert stores.is_transient(error) == again


@pytest.mark.parametrize(
    ("status", "again"),
    [(429, True), ("503", True), (500, True), (408, True), (404, False), (400, False), (None, False)],
)
def test_answers_are_busy_or_certain(status, again):
    assert stores.is_busy(status) == again


def test_a_shard_that_is_replaced_or_deleted_is_named(bucket, tmp_path):
    for name in ("gone", "other"):
        filesystem.write_bytes(f"gs://bkt/set/{name}", CONTENT)
    versions = filesystem.expand_pattern("gs://bkt/set/*")
    kept, close = filesystem.borrow_copy("gs://bkt/set/other", versions["gs://bkt/set/other"])
    filesystem.write_bytes("gs://bkt/set/other", CONTENT)  # equal bytes, as far as is known another set
    filesystem.remove_files("gs://bkt/set", ["gone"])
    again, close_again = filesystem.borrow_copy("gs://bkt/set/other", versions["gs://bkt/set/other"])
    assert again == kept  # what is here is still what was listed
    close(), close_again()
    with pytest.raises(UserError, match="there is no gs://bkt/set/gone"):
        filesystem.borrow_copy("gs://bkt/set/gone", versions["gs://bkt/set/gone"])
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UserError, match="gs://bkt/set/other was replaced after this run had listed it; run the same"):
        filesystem.borrow_copy("gs://bkt/set/other", versions["gs://bkt/set/other"])
    present = filesystem.expand_pattern("gs://bkt/set/*")["gs://bkt/set/other"]
    filesystem.borrow_copy("gs://bkt/set/other", present)[1]()


def test_ten_thousand_shards_are_listed_in_pages_and_opened_without_a_request_each(bucket, port):
    names = [array_record_file.file_name("train", number, SHARDS) for number in range(SHARDS)]
    bucket(empty=[f"large/{name}" for name in names])
    info = {"version": 1, "name": "large", "num_classes": 2, "class_names": None, "max_labels": None, "made_from": {}}
    info["splits"] = {"train": [{"name": name, "records": 3, "bytes": 0} for name in names]}
    filesystem.write_bytes("gs://bkt/large/info.json", json.dumps(info).encode())
    bucket()
    source = open_split(SourceConfig("array_record:gs://bkt/large"), "train", streams=True)
    assert [run.path for run in source.shards.runs] == [f"gs://bkt/large/{name}" for name in names]
    assert all(run.version.is_known for run in source.shards.runs) and len(source) == 3 * SHARDS
    stamp = source.file_stamp("train", range(len(source)))
    assert fake_gcs.told(port)[1] <= SHARDS / fake_gcs.PAGE + 12
    filesystem.write_bytes(f"gs://bkt/large/{names[7_000]}", b"")
    again = open_split(SourceConfig("array_record:gs://bkt/large"), "train", streams=True)
    assert again.file_stamp("train", range(len(again))) != stamp


@pytest.fixture
def packed(bucket, tmp_path):
    """A source of shards on the bucket."""
    write_set(tmp_path / "set", [[row % 4] for row in range(COUNT)], 24)
    for path in (tmp_path / "set").iterdir():
        filesystem.upload(path, f"gs://bkt/set/{path.name}")
    yield "array_record:gs://bkt/set"
    bucket()
    filesystem.remove_files("gs://bkt/set", filesystem.list_files("gs://bkt/set"))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["replaced", "deleted"])
def test_a_shard_that_changes_while_it_is_streamed_is_named(packed, fault, workers):
    calls = itertools.count()

    def change():
        if next(calls):
            return
        names = [name for name in filesystem.list_files("gs://bkt/set") if name.endswith("array_record")]
        for name in names:
            if fault == "replaced":
                filesystem.write_bytes(f"gs://bkt/set/{name}", filesystem.read_bytes(f"gs://bkt/set/{name}"))
            else:
                filesystem.remove_files("gs://bkt/set", [name])

    words = "was replaced after this run had listed it" if fault == "replaced" else "there is no gs://bkt/set"
    with pytest.raises(UserError, match=words) as error:
        stream(packed, COUNT // 8, workers=workers, watch=change)
    assert "gs://bkt/set/train-000" in str(error.value)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shards")]


PROGRAM = """
import sys, time
from tests.data import test_stream
from tests.storage import fake_gcs

def stall():
    fake_gcs.tell(sys.argv[2], {"kind": "stall", "path": "array_record", "seconds": 100})
    time.sleep(1)

test_stream.stream(sys.argv[1], 1, watch=stall, wait=0)
print(time.time(), flush=True)
"""


def test_a_process_ends_though_shards_are_being_copied(packed, port):
    command = [sys.executable, "-c", PROGRAM, packed, str(port)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert fake_gcs.told(port)[0][0] >= 1 and time.time() - float(done.stdout) < 20  # the store stalls for 100
