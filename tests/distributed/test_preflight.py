"""What is refused before anything is compiled: hosts that differ, workdirs that are not shared or are in use."""

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest

import vit_jax
from tests.conftest import ROOT
from tests.distributed.test_coordination import everywhere, make_groups
from vit_jax import UserError, program, train
from vit_jax.distributed import SINGLE_HOST, preflight, workdir_lock
from vit_jax.storage import versions

OTHER = json.dumps({"run": "y", "pid": 7, "host": "elsewhere", "machine": "m", "started": "1"})


@pytest.fixture
def prepared(quick):
    quick.mesh.data = 8
    return program.prepare(quick)


def errors(calls):
    """Returns each host's sentence, or None."""

    def told(call):
        try:
            call()
        except UserError as error:
            return str(error)

    return everywhere([lambda call=call: told(call) for call in calls])


def passed(prepared, place):
    config, info, made = prepared
    return preflight.preflight_checks(
        SINGLE_HOST, config, info, made.batch_sharding, made.state, str(place), pytest.fail
    )


def enter(prepared, place):
    with passed(prepared, place):
        pass


def test_what_differs_is_named_on_every_host(prepared, tmp_path, monkeypatch):
    config, info, made = prepared
    own = preflight.collect_facts(config, info, made.mesh, str(tmp_path))
    assert own["--config.base_lr"] == "0.002" and own["the devices"] == "8 x cpu" and own["the Python version"]
    others = own | {"--config.base_lr": "0.5", "the version of jax": "0.1"}
    four = make_groups(4)
    calls = [lambda host=host: preflight.check_equal(host, others if host.host == 2 else own) for host in four]
    [sentence] = set(errors(calls))
    assert sentence == (
        "the hosts differ: --config.base_lr is 0.5 on host 2, 0.002 on hosts 0, 1 and 3; the version of jax is 0.1 on "
        f"host 2, {own['the version of jax']} on hosts 0, 1 and 3. Start all hosts with the same command, "
        "installation, data and workdir."
    )
    calls = [lambda host=host: preflight.check_equal(host, own) for host in four]
    assert errors(calls) == [None] * 4


def test_hosts_with_another_source_differ(prepared, tmp_path):
    package = Path(vit_jax.__file__).parent
    copy = shutil.copytree(package, tmp_path / "vit_jax", ignore=shutil.ignore_patterns("__pycache__"))
    own = versions.source_digest(package)
    assert versions.source_digest(copy) == own
    (copy / "stale.pyc").write_bytes(b"compiled")
    assert versions.source_digest(copy) == own
    config, info, made = prepared
    assert preflight.collect_facts(config, info, made.mesh, "w")["the source of vit_jax"] == own
    found = {own}
    for name in ("step.py", "models/vit.py", "interop/published.csv", "interop/imagenet2012.txt"):
        with (copy / name).open("a") as file:
            file.write("\n")
        found.add(versions.source_digest(copy))
    (copy / "step.py").rename(copy / "steps.py")
    found.add(other := versions.source_digest(copy))
    assert len(found) == 6
    calls = [
        lambda host=host, one=one: preflight.check_equal(host, {"the source of vit_jax": one})
        for host, one in zip(make_groups(3), (own, other, own), strict=True)
    ]
    [sentence] = set(errors(calls))
    assert f"the hosts differ: the source of vit_jax is {other} on host 1, {own} on hosts 0 and 2. Start" in sentence


def test_the_source_is_all_that_the_package_ships():
    lists = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"].values()
    assert {f"*{suffix}" for suffix in versions.SHIPPED} == {"*.py", *itertools.chain(*lists)}


def test_what_editors_leave_is_no_source(tmp_path):
    (tmp_path / "train.py").write_text("")
    before = versions.source_digest(tmp_path)
    (tmp_path / ".#train.py").symlink_to("nobody@nowhere")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "train.py").write_text("")
    assert versions.source_digest(tmp_path) == before
    (tmp_path / "train.py").write_text("#")
    assert versions.source_digest(tmp_path) != before


def test_a_workdir_that_is_not_shared_is_told_on_every_host(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "DISK_DELAY", 0.2)
    places = [tmp_path / "a", tmp_path / "b", tmp_path / "a"]
    for place in set(places):
        place.mkdir()
    calls = [
        lambda host=host, place=place: preflight.check_shared(host, place)
        for host, place in zip(make_groups(3), places, strict=True)
    ]
    sentences = errors(calls)
    assert all(
        "is not the same folder on all hosts; choose one on a disk that all hosts share" in one for one in sentences
    )
    assert sentences[0] == sentences[2] == f"on host 1: {sentences[1]}"
    calls = [lambda host=host: preflight.check_shared(host, places[0]) for host in make_groups(3)]
    assert errors(calls) == [None] * 3
    assert not any(path.name.startswith(".nonce") for place in places for path in place.iterdir())


def test_a_disk_without_room_is_told_before_the_run(prepared, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=50_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"has 5e-05 GB free, but 2 more checkpoints need .*checkpoint.keep_last"):
        enter(prepared, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    config, _, made = prepared
    config = config.copy_and_resolve_references()
    config.checkpoint.keep_last = 10_000_000  # all: but the run saves twice only
    with pytest.raises(UserError, match="but 2 more checkpoints need"):
        preflight.check_disk_space(config, made.state, tmp_path)
    for name in ("10", "20", "15.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert preflight.check_disk_space(config, made.state, tmp_path) is None  # complete: nothing will be written


def test_one_run_at_a_time_writes_to_a_workdir(prepared, tmp_path):
    with passed(prepared, tmp_path):
        owner = json.loads((tmp_path / workdir_lock.FILE).read_text())
        assert owner["pid"] == os.getpid() and owner["host"] == socket.gethostname()
        sentence = rf"is in use by another run, process {os.getpid()} on {socket.gethostname()}; stop that run or"
        with pytest.raises(UserError, match=sentence):
            enter(prepared, tmp_path)
        assert (tmp_path / workdir_lock.FILE).exists()
    assert not (tmp_path / workdir_lock.FILE).exists()
    enter(prepared, tmp_path)


def dead():
    """The lock of a process of this machine that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return {"pid": process.pid, "started": "1"}


@pytest.mark.parametrize(
    "kind", ["killed here", "number taken by another process", "other machine", "cut short", "a zombie", "no owner"]
)
def test_a_run_that_is_no_more_does_not_keep_its_workdir(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(workdir_lock, "HEARTBEAT_SECONDS", 0.1)
    owner = {"run": "x", "machine": workdir_lock._machine(), "host": "h", "beats": 3, **dead()}
    if kind == "number taken by another process":
        owner["pid"] = os.getpid()
    if kind == "other machine":
        owner["machine"] = "elsewhere"
    if kind == "a zombie":
        process = subprocess.Popen([sys.executable, "-c", ""])
        owner |= {"pid": process.pid, "started": workdir_lock._started(process.pid)}
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    text = "[]" if kind == "no owner" else json.dumps(owner)
    (tmp_path / workdir_lock.FILE).write_text(text[:20] if kind == "cut short" else text)
    one = workdir_lock.WorkdirLock(str(tmp_path), pytest.fail)
    one.acquire()
    one.release()


def test_a_run_on_another_machine_is_seen_to_live(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir_lock, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(workdir_lock, "_machine", lambda: threading.current_thread().name)
    one = workdir_lock.WorkdirLock(str(tmp_path), pytest.fail)
    one.acquire()
    found = []
    other = threading.Thread(
        target=lambda: found.extend(errors([workdir_lock.WorkdirLock(str(tmp_path), pytest.fail).acquire]))
    )
    other.start()
    other.join()
    one.release()
    assert "is in use by another run" in found[0]


def test_a_run_whose_workdir_another_took_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir_lock, "HEARTBEAT_SECONDS", 0.05)
    found = []
    one = workdir_lock.WorkdirLock(str(tmp_path), found.append)
    one.acquire()
    (tmp_path / workdir_lock.FILE).write_text(OTHER)
    end = time.monotonic() + 5
    while not found and time.monotonic() < end:
        time.sleep(0.01)
    one.release()
    assert "process 7 on elsewhere" in str(found[0])
    assert (tmp_path / workdir_lock.FILE).read_text() == OTHER


@pytest.mark.slow
def test_a_run_whose_workdir_another_took_writes_nothing_more(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(workdir_lock, "HEARTBEAT_SECONDS", 0.05)
    quick.mesh.data, quick.log_every, quick.checkpoint_every = 8, 1, 100
    quick.total_steps = quick.eval_every = 400

    def watch(step, metrics):
        time.sleep(0.02)
        if step >= 3:  # as the other run goes on doing
            (tmp_path / workdir_lock.FILE).write_text(OTHER)

    with pytest.raises(UserError, match="is in use by another run, process 7 on elsewhere"):
        train.train(quick, tmp_path, watch)
    assert not list((tmp_path / "checkpoints").iterdir())
    assert (tmp_path / workdir_lock.FILE).read_text() == OTHER


def test_a_holder_whose_disk_is_full_is_alive(tmp_path, monkeypatch):
    """It cannot rewrite its file, but it shows that it is there, also to other machines."""
    monkeypatch.setattr(workdir_lock, "HEARTBEAT_SECONDS", 0.1)
    holder, other = (workdir_lock.WorkdirLock(str(tmp_path), pytest.fail) for _ in range(2))
    other._id["machine"] = "elsewhere"
    holder.acquire()

    def refuse(path, content):
        raise UserError("cannot write: No space left on device")

    monkeypatch.setattr(workdir_lock.filesystem, "write_bytes", refuse)
    with pytest.raises(UserError, match="is in use by another run"):
        other.acquire()
    holder.release()
    assert not (tmp_path / "owner.json").exists()
