"""Checkpoints: what is damaged is noticed and set aside, what cannot be written is told, the best and newest stay."""

import errno
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import vit_jax
from tests.conftest import ROOT
from vit_jax import NonFiniteLoss, UserError, data, evals, evaluate, train
from vit_jax.checkpoint import store
from vit_jax.checkpoint.find import find_checkpoint, latest_step
from vit_jax.checkpoint.integrity import DamagedCheckpoint, add_checksum, is_checkpoint, storage_errors
from vit_jax.checkpoint.manager import BackgroundTasks, Checkpoints
from vit_jax.checkpoint.store import CheckpointStore
from vit_jax.config import check_data, check_resumes, flatten_config, load_config, save_config
from vit_jax.storage import filesystem
from vit_jax.training.workdir import GatheredArray


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def state(mesh):
    """A small state on eight devices: split, copied, rounded, counted."""
    random = np.random.default_rng(0)
    leaves = {
        "params": {"kernel": random.normal(size=(64, 24)), "bias": random.normal(size=24)},
        "moment": random.normal(size=(64, 24)),
        "step": np.array(3),
        "ema": None,
    }
    dtypes = {"params": {"kernel": np.float32, "bias": np.float32}, "moment": jnp.bfloat16, "step": np.int32}
    specs = {"params": {"kernel": P("a", "b"), "bias": P()}, "moment": P(None, "b"), "step": P()}
    placed = jax.tree.map(
        lambda leaf, dtype, spec: jax.device_put(leaf.astype(dtype), NamedSharding(mesh, spec)),
        leaves,
        dtypes | {"ema": None},
        specs | {"ema": None},
    )
    return placed


def shapes(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


def placement(state):
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def resumed(config, workdir, state, **options):
    return restore(Checkpoints(config, workdir, **options), shapes(state), placement(state))


def restore(checkpoints, wanted, shardings):
    """The newest checkpoint that is intact, as a run takes it; None: there is none."""
    for manifest in checkpoints.candidates():
        if restored := checkpoints.restore(manifest, wanted, shardings):
            return restored
    return None


def write(config, workdir, state, *steps):
    checkpoints = Checkpoints(config, workdir)
    for step in steps:
        checkpoints.save(state, step, {"model": {}, "data": {}})
    checkpoints.close()


@pytest.fixture
def saved(written, tmp_path):
    """A workdir with the checkpoints 1 and 2."""
    shutil.copytree(written, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def written(tmp_path_factory, state):
    from configs import smoke

    workdir = tmp_path_factory.mktemp("written")
    write(smoke.get_config(), workdir, state, 1, 2)
    return workdir


def names(workdir):
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


def same(one, other):
    return all(
        np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        if a.ndim
    )


def flip(path, bit):
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


# -- What is damaged --------------------------------------------------------------------------------------------------


ARRAYS = "state/d/*"  # where their bytes are


def flipped(config, written, folder, state, seed, pattern="**/*"):
    """Flips a random bit of a random file of checkpoint 2, of those that a pattern names. Returns the file, and whether
    that was reported, harmless or silent.
    """
    random = np.random.default_rng(seed)
    workdir = folder / str(seed)
    shutil.copytree(written, workdir)
    folder = workdir / "checkpoints" / "2"
    found = sorted(path for path in folder.glob(pattern) if path.is_file())
    sizes = np.array([path.stat().st_size for path in found])
    # Half by size, half by file, so that small ones have their turn.
    path = found[random.choice(len(found), p=sizes / sizes.sum() if seed % 2 else None)]
    flip(path, int(random.integers(path.stat().st_size * 8)))
    name = path.relative_to(folder).as_posix()
    try:
        restored = resumed(config, workdir, state)
        assert restored
        outcome = "reported" if restored.step == 1 and restored.set_aside else "harmless"
        good = same(restored.state, state) and restored.manifest["model"] == {}
    except UserError as error:
        outcome, good = f"reported: {error}", True
    shutil.rmtree(workdir)
    return name, outcome if good else "silent"


def test_a_flipped_bit_is_never_silent(quick, written, tmp_path, state):
    patterns = [ARRAYS, ARRAYS, ARRAYS, "about/metadata", "state/_METADATA", "state/*.ocdbt"]
    outcomes = [flipped(quick, written, tmp_path, state, *pair) for pair in enumerate(patterns)]
    assert "silent" not in [outcome for _, outcome in outcomes]
    assert {("about/metadata", "reported"), ("state/manifest.ocdbt", "reported")} <= set(outcomes)
    assert "reported" in [outcome for name, outcome in outcomes if name.startswith("state/d/")]


@pytest.mark.slow
def test_flipped_bits_are_never_silent(quick, written, tmp_path, state):
    outcomes = [flipped(quick, written, tmp_path, state, seed) for seed in range(60)]
    counts = {word: sum(found.startswith(word) for _, found in outcomes) for word in ("reported", "harmless", "silent")}
    assert counts["silent"] == 0 and counts["reported"] > 0, counts
    outcomes = [flipped(quick, written, tmp_path, state, seed, ARRAYS)[1] for seed in range(20)]
    assert "silent" not in outcomes and "reported" in outcomes, outcomes


def spoil(workdir, kind):
    """Damages checkpoint 2; returns what is said of it."""
    folder = workdir / "checkpoints" / "2"
    about = folder / "about" / "metadata"
    if kind == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
        return "it is incomplete: it has no state or no manifest"
    if kind == "cut short":
        about.write_text(about.read_text()[:-20])
        return "about/metadata is not JSON"
    if kind == "another number":
        about.write_text(about.read_text().replace('"score"', '"Score"'))
        return "about/metadata does not agree with its checksum"
    if kind == "lost":
        for path in (folder / "state" / "d").iterdir():
            path.unlink()
        return "it cannot be read: "
    if kind == "another step":
        shutil.rmtree(folder)
        shutil.copytree(workdir / "checkpoints" / "1", folder)
        return "it holds step 1"
    if kind == "another state":
        shutil.rmtree(folder / "state")
        shutil.copytree(workdir / "other" / "checkpoints" / "2" / "state", folder / "state")
        return "the values are not those that were saved in moment, params/kernel"
    if kind == "another type":
        shutil.rmtree(folder / "state")
        shutil.copytree(workdir / "cast" / "checkpoints" / "2" / "state", folder / "state")
        return r"its arrays are not described as they were saved: moment is float32\[64,24\], not bfloat16\[64,24\]"
    raise AssertionError(kind)


KINDS = ["empty", "cut short", "another number", "lost", "another step", "another state", "another type"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used(quick, saved, state, kind):
    if kind == "another state":
        changed = {"kernel": state["params"]["kernel"] * 2, "bias": state["params"]["bias"]}
        write(quick, saved / "other", state | {"params": changed, "moment": state["moment"] + 1}, 2)
    if kind == "another type":
        write(quick, saved / "cast", state | {"moment": state["moment"].astype(np.float32)}, 2)
    reason = spoil(saved, kind)
    restored = resumed(quick, saved, state)
    assert restored.step == 1 and same(restored.state, state)
    assert names(saved) == ["1", "damaged-2"] and latest_step(str(saved)) == 1
    [told] = restored.set_aside
    with pytest.raises(UserError, match=f"^checkpoint 2 is damaged and was renamed to .*/damaged-2: {reason}"):
        raise UserError(told)
    write(quick, saved, state, 2)
    assert names(saved) == ["1", "2", "damaged-2"]
    spoil(saved, "empty")
    assert "damaged-2-2" in resumed(quick, saved, state).set_aside[0]


def test_if_all_are_damaged_the_run_stops_and_nothing_is_moved(quick, saved, state):
    for step in (1, 2):
        (saved / "checkpoints" / str(step) / "about" / "metadata").write_text("{")
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged \(2: about/.*; 1: about/.* choose a new"):
        resumed(quick, saved, state)
    assert names(saved) == ["1", "2"]
    for step in (1, 2):
        (saved / "checkpoints" / str(step)).rename(saved / "checkpoints" / f"damaged-{step}")
    with pytest.raises(UserError, match=r"all checkpoints in .* damaged and were renamed \(damaged-1, damaged-2\)"):
        resumed(quick, saved, state)


def test_what_is_not_the_checkpoints_fault_sets_nothing_aside(quick, saved, state, monkeypatch):
    for error in (PermissionError(13, "Permission denied"), MemoryError(), OSError(errno.EIO, "Input/output error")):

        def fail(*args, error=error):
            raise error

        monkeypatch.setattr(store, "read_arrays", fail)
        with pytest.raises(UserError, match=r"the checkpoints in .* cannot be read"):
            resumed(quick, saved, state)
    assert names(saved) == ["1", "2"]


def test_an_intact_checkpoint_of_another_program_is_refused_array_by_array(quick, saved, state):
    wanted = shapes(state) | {"moment": jax.ShapeDtypeStruct((64, 24), np.float32), "extra": state["step"]}
    wanted["params"] = {"kernel": jax.ShapeDtypeStruct((32, 24), np.float32)}
    with pytest.raises(UserError) as raised:
        restore(Checkpoints(quick, saved), wanted, wanted)
    words = "missing extra; unexpected params/bias; moment is bfloat16[64,24], not float32[64,24]; params/kernel is "
    assert f"{words}float32[64,24], not float32[32,24]" in str(raised.value) and "is intact" in str(raised.value)
    assert names(saved) == ["1", "2"]


def test_only_what_looks_finished_counts(saved):
    (saved / "checkpoints" / "7").mkdir()
    (saved / "checkpoints" / "8" / "state").mkdir(parents=True)
    assert find_checkpoint(saved).name == "2" and latest_step(str(saved)) == 2
    assert not is_checkpoint(saved / "checkpoints" / "8")


class TwoHosts:
    """The first of two hosts; `answer` gives what the other one says, from the topic and what this one says."""

    hosts = 2

    def __init__(self, answer, host=0):
        self.answer, self.host, self.topics = answer, host, []

    def all_gather(self, topic, value=None):
        self.topics.append(topic)
        values = [value, self.answer(topic, value)]
        return values if self.host == 0 else values[::-1]


def test_hosts_agree_on_what_is_damaged(quick, saved, state):
    def damaged_there(topic, own):
        return own | {"value": "it cannot be read: gone"} if topic == "read 2" else own

    hosts = TwoHosts(damaged_there)
    restored = resumed(quick, saved, state, coordinator=hosts)
    assert hosts.topics == ["checkpoints", "manifest 2", "read 2", "manifest 1", "read 1", "compare 1", "set aside"]
    assert restored.step == 1 and "gone" in restored.set_aside[0]
    assert names(saved) == ["1", "damaged-2"]


@pytest.mark.parametrize(("users", "kind"), [(True, UserError), (False, RuntimeError)])  # a bug is one on all hosts
def test_what_fails_on_another_host_fails_here(quick, saved, state, users, kind):
    def fails_there(topic, own):
        return {"value": None, "error": "no permission", "is_user_error": users} if topic == "read 2" else own

    with pytest.raises(kind, match="on host 1: no permission"):
        resumed(quick, saved, state, coordinator=TwoHosts(fails_there))
    assert names(saved) == ["1", "2"]


@pytest.mark.parametrize("process", [1, 0])  # libtpu may number processes otherwise than the launcher has
def test_a_host_that_is_not_the_first_takes_its_list_and_renames_nothing(quick, saved, state, process, monkeypatch):
    spoil(saved, "cut short")
    (saved / "checkpoints" / "9").mkdir()  # not yet seen by the first
    monkeypatch.setattr(jax, "process_index", lambda: process)

    def first(topic, own):
        found = {"steps": [2, 1], "manifests": {}, "set_aside": []}
        values = {"checkpoints": found, "set aside": ["by the first"]}
        return own | {"value": values[topic]} if topic in values else own

    checkpoints = Checkpoints(quick, saved, coordinator=TwoHosts(first, host=1))
    assert checkpoints.steps == [2, 1]
    restored = restore(checkpoints, shapes(state), placement(state))
    assert (restored.step, restored.set_aside) == (1, ["by the first"])
    assert names(saved) == ["1", "2", "9"]


HOST = """
import json
import sys

import jax

rank, port, workdir, phase = int(sys.argv[1]), *sys.argv[2:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, heartbeat_timeout_seconds=30)
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from configs import smoke
from vit_jax import UserError
from vit_jax.checkpoint import Checkpoints, store
from vit_jax.checkpoint.fingerprint import fingerprints

client, calls = jax._src.distributed.global_state.client, iter(range(100))


class Hosts:
    host, hosts = rank, 2

    def all_gather(self, topic, value=None):
        key = f"{next(calls)} {topic}"
        client.key_value_set(f"{key} {rank}", json.dumps(value))
        return [json.loads(client.blocking_key_value_get(f"{key} {host}", 60_000)) for host in range(2)]


def fail(path, *rest):
    if path.endswith("/2"):
        raise KeyError("here only") if phase == "damaged" else PermissionError(13, "Permission denied")
    return read(path, *rest)


mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
whole = {"kernel": np.arange(4096, dtype=np.float32).reshape(64, 64), "step": np.int32(7)}
places = {"kernel": NamedSharding(mesh, P("a", "b")), "step": NamedSharding(mesh, P())}
state = {
    name: jax.make_array_from_callback(leaf.shape, places[name], lambda index, leaf=leaf: leaf[index])
    for name, leaf in whole.items()
}
assert fingerprints(state) == fingerprints(whole)
checkpoints = Checkpoints(smoke.get_config(), workdir, coordinator=Hosts())
if phase == "write":
    for step in (1, 2):
        checkpoints.save(state, step, {})
    checkpoints.close()
else:
    read = store.read_arrays
    if rank == 1:
        store.read_arrays = fail
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    try:
        found = (checkpoints.restore(manifest, shapes, places) for manifest in checkpoints.candidates())
        restored = next(filter(None, found))
        assert fingerprints(restored.state) == fingerprints(whole)
        print("told:", restored.step, *restored.set_aside)
    except UserError as error:
        print("told:", error)
"""


@pytest.mark.flaky(reruns=1)  # it waits on the clock
@pytest.mark.slow
def test_two_hosts_go_back_together(tmp_path):
    def both(phase):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", HOST, str(rank), port, str(tmp_path), phase],
                cwd=ROOT,
                env={**os.environ, "XLA_FLAGS": flags},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [process.communicate(timeout=120)[0].splitlines() for process in processes]
            assert [process.returncode for process in processes] == [0, 0]
            return [" ".join(line for line in lines if line.startswith("told: ")) for lines in outputs]
        finally:
            for process in processes:
                process.kill()

    assert both("write") == ["", ""] and names(tmp_path) == ["1", "2"]
    first, second = both("refused")
    assert "on host 1: the checkpoints in" in first and "Permission denied" in second
    assert names(tmp_path) == ["1", "2"]
    first, second = both("damaged")
    assert first == second and first.startswith("told: 1 checkpoint 2 is damaged and was renamed to ")
    assert names(tmp_path) == ["1", "damaged-2"]


def test_a_damaged_checkpoint_moves_on_a_bucket_too(quick, saved, monkeypatch):
    memory = filesystem.open_store("memory://b", os.getpid())
    memory.store.clear()
    for path in saved.rglob("*"):
        if path.is_file():
            memory.pipe(f"/b/{path.relative_to(saved).as_posix()}", path.read_bytes())
    memory.pipe("/b/checkpoints/5/state/x", b"")  # unfinished
    bucket = CheckpointStore("memory://b")
    assert bucket.list_steps() == [2, 1] and bucket.read_manifest(2)["step"] == 2 and bucket.list_set_aside() == []
    before = {
        name: memory.cat_file(f"/b/checkpoints/2/{name}") for name in filesystem.list_files("memory://b/checkpoints/2")
    }
    assert bucket.set_aside(2) == "memory://b/checkpoints/damaged-2" and bucket.list_set_aside() == ["damaged-2"]
    assert bucket.list_steps() == [1] and latest_step("memory://b") == 1
    assert not filesystem.list_files("memory://b/checkpoints/2")
    assert before == {name: memory.cat_file(f"/b/checkpoints/damaged-2/{name}") for name in before}
    manifest = bucket.read_manifest(1)
    bucket.write_manifest(1, add_checksum(manifest | {"score": 0.5}))
    assert bucket.read_manifest(1)["score"] == 0.5
    memory.rm("/b/checkpoints/1/about/metadata")
    with pytest.raises(DamagedCheckpoint, match="incomplete"):
        bucket.read_manifest(1)


# -- What cannot be written -------------------------------------------------------------------------------------------


def until_told(checkpoints, seconds=30):
    """Polls as training does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        checkpoints.poll()
        time.sleep(0.01)
    raise AssertionError("nothing was told")


def test_a_save_that_fails_is_told_and_the_last_good_one_stays(quick, saved, state, monkeypatch):
    checkpoints = Checkpoints(quick, saved)
    checkpoints.open()
    finish = CheckpointStore.finish

    def full(checkpoint_store):
        finish(checkpoint_store)
        if not (saved / "checkpoints" / "3").exists():  # asked before it begins
            return
        shutil.rmtree(saved / "checkpoints" / "3")
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints.poll()  # nothing is being written
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "finish", full)
        checkpoints.save(state, 3, {"data": {}})
        with pytest.raises(UserError, match=r"cannot be written: .*No space left.*; the last good checkpoint is 2\.$"):
            until_told(checkpoints)
    assert checkpoints.latest == 2 and find_checkpoint(saved).name == "2"
    checkpoints.close()
    write(quick, saved, state, 3)
    assert resumed(quick, saved, state).step == 3


def test_a_disk_that_is_really_full(quick, tmp_path, mesh):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk]).returncode:
        pytest.skip("cannot mount")
    try:
        random = np.random.default_rng(0)  # does not compress
        leaf = random.normal(size=(1024, 768)).astype(np.float32)  # 3 MiB
        state = {"params": jax.device_put(leaf, NamedSharding(mesh, P("a", "b")))}
        checkpoints = Checkpoints(quick, disk)
        checkpoints.save(state, 1, {"data": {}})
        checkpoints.wait()
        checkpoints.save(state, 2, {"data": {}})
        with pytest.raises(UserError, match=r"cannot be written: .*; the last good checkpoint is 1\.$"):
            until_told(checkpoints)
        checkpoints.close()
        assert find_checkpoint(disk).name == "1" and checkpoints.latest == 1
        subprocess.run(["mount", "-o", "remount,size=32m", disk], check=True)
        checkpoints = Checkpoints(quick, disk)
        assert same(restore(checkpoints, shapes(state), placement(state)).state, state)
        checkpoints.save(state, 2, {"data": {}})
        checkpoints.close()
        assert names(disk) == ["1", "2"]
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_bug_in_saving_keeps_its_traceback(tmp_path):
    with pytest.raises(ZeroDivisionError), storage_errors(str(tmp_path), "written"):
        raise ZeroDivisionError


def test_a_state_that_is_not_finite_is_not_saved(quick, saved, state):
    bad = state | {"params": {**state["params"], "kernel": state["params"]["kernel"].at[3, 3].set(jnp.nan)}}
    checkpoints = Checkpoints(quick, saved)
    words = r"after step 3 the state has infinite or NaN values in params/kernel .* checkpoint is 2\. Lower base_lr"
    with pytest.raises(NonFiniteLoss, match=words):
        checkpoints.save(bad, 3, {"data": {}})
    checkpoints.close()
    assert names(saved) == ["1", "2"]


# -- Which stay -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", [float("nan"), None])
def test_best_is_kept_and_nan_never_wins(quick, tmp_path, score):
    state = {"weights": np.arange(3.0)}
    for steps in ([0.1, 0.9, 0.5], [score, 0.2]):  # the best is known after a restart
        checkpoints = Checkpoints(quick, tmp_path)
        for step, accuracy in enumerate(steps, start=(checkpoints.latest or 0) + 1):
            checkpoints.save(state, step, {})
            checkpoints.add_metrics({} if accuracy is None else {"test/accuracy": accuracy})
        checkpoints.close()
    assert sorted(map(int, names(tmp_path))) == [2, 4, 5]
    save_config(quick, tmp_path / "config.json")
    assert (find_checkpoint(tmp_path, best=True).name, checkpoints.latest) == ("2", 5)


def kept_as_best(config, folder, steps, evaluations=None, named=False):
    """Saves and measures steps; returns which checkpoints are there then."""
    checkpoints = Checkpoints(config, folder, evaluations=evaluations, scores_are_named=named)
    checkpoints.open()
    for step, metrics in steps.items():
        checkpoints.save({"weights": np.arange(3.0)}, step, {})
        checkpoints.add_metrics(metrics)
    checkpoints.close()
    save_config(config, folder / "config.json")
    return [*sorted(map(int, names(folder))), find_checkpoint(folder, best=True).name]


def test_the_best_is_the_best_by_one_metric(quick, tmp_path):
    quick.checkpoint.keep_last = 1
    found = {1: (0.2, 0.9), 2: (0.6, 0.7), 3: (0.1, 0.3)}
    measured = {step: {"test/accuracy": one, "test/top5": five} for step, (one, five) in found.items()}
    assert kept_as_best(quick, tmp_path, measured) == [2, 3, "2"]
    quick.checkpoint.best_metric = "test/top5"  # 0.95 is more than any accuracy: only top5 is compared
    better = {4: {"test/accuracy": 0.9, "test/top5": 0.65}, 5: {}}
    assert kept_as_best(quick, tmp_path, better) == [2, 5, "2"]


@pytest.mark.parametrize("field", ["split", "preprocess", "contents"])
def test_what_is_measured_otherwise_is_not_compared(field, quick, tmp_path):
    quick.checkpoint.keep_last = 1
    told = {"split": "test", "preprocess": "value_range(0,1)", "contents": "a"}
    was, now = {"test": told}, {"test": told | {field: "b"}}
    assert kept_as_best(quick, tmp_path, {1: {"test/accuracy": 0.9}, 2: {"test/accuracy": 0.5}}, was) == [1, 2, "1"]
    assert kept_as_best(quick, tmp_path, {3: {}, 4: {}}, now) == [1, 4, "1"]  # the old best stays
    # As soon as another is measured in the new way, that is the best, however good the old one was in the old way.
    assert kept_as_best(quick, tmp_path, {5: {"test/accuracy": 0.1}, 6: {}, 7: {}}, now) == [5, 7, "5"]


@pytest.mark.parametrize(("named", "best"), [(True, "10"), (False, "13")])
def test_a_score_without_a_name_counts_where_the_run_is_measured_as_before(named, best, quick, tmp_path):
    workdir = shutil.copytree(ROOT / "tests/golden/workdir", tmp_path / "run")
    quick.checkpoint.keep_last = 1
    assert find_checkpoint(workdir, best=True).name == "10"
    assert kept_as_best(quick, workdir, {11: {}, 12: {}}, named=named) == [10, 12, "10"]
    assert kept_as_best(quick, workdir, {13: {"test/accuracy": 0.05}, 14: {}}, named=named)[-1] == best
    assert kept_as_best(quick, workdir, {15: {}})[0] == int(best)  # it is written there, whatever comes later


def test_what_was_measured_after_resuming_is_added(quick, saved, state):
    checkpoints = Checkpoints(quick, saved)
    assert not restore(checkpoints, shapes(state), placement(state)).manifest["evaluated"]
    checkpoints.add_metrics({"test/accuracy": 0.5, "test/loss": math.nan})
    checkpoints.close()
    save_config(quick, saved / "config.json")
    assert find_checkpoint(saved, best=True).name == "2"
    restored = resumed(quick, saved, state)
    assert restored.manifest["evaluated"] and restored.step == 2
    assert restored.manifest["metrics"] == {"test/accuracy": 0.5, "test/loss": None}


# -- Runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The workdir of a finished run with the checkpoints 1 and 2."""
    from configs import smoke

    config, workdir = smoke.get_config(), tmp_path_factory.mktemp("runs") / "run"
    train.train(short(config), workdir)
    return workdir


def short(config, steps=2):
    config.mesh.data, config.total_steps, config.warmup_steps = 8, steps, 0
    config.eval_every, config.checkpoint_every, config.task.mixup = 100, 1, 0.0
    return config


@pytest.mark.slow
def test_a_run_tells_what_was_set_aside_and_goes_on(quick, run, tmp_path, caplog, monkeypatch):
    shutil.copytree(run, tmp_path / "run")
    [largest] = sorted((tmp_path / "run/checkpoints/2/state/d").iterdir(), key=lambda path: path.stat().st_size)[-1:]
    flip(largest, largest.stat().st_size * 4)
    for path in (tmp_path / "run", tmp_path / "run/checkpoints/2"):
        with pytest.raises(
            UserError, match=r"checkpoints/2 is damaged: .*; the same run has others, of the steps 1\.$"
        ):
            evaluate.evaluate(path) if path.name == "run" else vit_jax.load(path)
    with pytest.raises(UserError, match="is damaged"):
        evaluate.evaluate(tmp_path / "run", best=True)
    monkeypatch.setattr(evals, "run_evaluators", lambda *args: {})
    train.train(short(quick, 3), tmp_path / "run")
    told = (tmp_path / "run" / "train.log").read_text()
    assert "Resuming" in told and "after step 1." in told and names(tmp_path / "run") == ["2", "3", "damaged-2"]
    assert "WARNING: checkpoint 2 is damaged and was renamed to" in told
    assert "checkpoint 2 is damaged and was renamed" in caplog.text


def test_other_data_are_refused_in_words_unless_accepted(quick, run, tmp_path, caplog):
    shutil.copytree(run, tmp_path / "run")
    config = short(quick)
    config.data.split = "train[:1000]"
    with pytest.raises(
        UserError, match=r"contains a run with other settings \(.*data.split: train -> .*--config\.data\.accept_change"
    ):
        train.train(config, tmp_path / "run")
    changed = load_config(run / "config.json")
    with changed.unlocked():
        changed.data.split, changed.data.num_examples = "train[:1000]", 1000
    save_config(changed, tmp_path / "run" / "config.json")  # only the checkpoint knows
    words = r"trained on other data \(split: train\[0:1438\] -> train\[0:1000\]; examples: 1438 -> 1000; names and "
    with pytest.raises(UserError, match=words):
        train.train(config, tmp_path / "run")
    config.data.accept_change = True
    train.train(config, tmp_path / "run")
    assert "the data is not that of the earlier steps, as data.accept_change allows: split: train" in caplog.text
    assert "WARNING: the data is not that" in (tmp_path / "run" / "train.log").read_text()


def test_seed_batch_and_model_are_never_accepted(quick):
    old, new = quick.copy_and_resolve_references(), quick.copy_and_resolve_references()
    new.data.accept_change, new.data.split = True, "train[:5]"
    assert len(check_resumes(old, new, "here")) == 2
    for change in ({"seed": 1}, {"batch": 64}, {"resolution": 24}, {"model.depth": 3}, {"data.num_classes": 3}):
        new.update_from_flattened_dict(change)
        with pytest.raises(UserError, match=f"other settings .*{next(iter(change))}: .*new --workdir\\.$"):
            check_resumes(old, new, "here")
        new.update_from_flattened_dict({key: flatten_config(old)[key] for key in change})
    saved = {"split": "a", "seed": 0}
    assert check_data(saved, saved | {"split": "b"}, True, "here") == ["split: a -> b"]
    with pytest.raises(UserError, match=r"other data \(seed: 0 -> 1\); choose a new --workdir\.$"):
        check_data(saved, saved | {"seed": 1}, True, "here")


def test_the_fingerprint_of_the_data_is_words(quick):
    found = data.complete_config(quick)[1].fingerprint
    assert found["data set"] == "digits" and found["examples"] == 1438 and found["batch"] == quick.batch
    assert json.loads(json.dumps(found)) == found


def test_a_run_ends_within_a_step_of_a_save_that_failed(quick, tmp_path, monkeypatch):
    def full(writer):
        raise UserError("no space left")

    monkeypatch.setattr(CheckpointStore, "finish", full)
    monkeypatch.setattr(BackgroundTasks, "poll", BackgroundTasks.wait)  # as if every task were over when it is asked
    monkeypatch.setattr(evals, "run_evaluators", lambda *args: pytest.fail("step 2 was finished"))
    with pytest.raises(UserError, match="no space left"):
        train.train(short(quick), tmp_path / "run")


def test_an_array_is_gathered_from_any_placement(state, mesh):
    for leaf in (state["params"]["kernel"], state["params"]["bias"], state["moment"]):
        gathered = GatheredArray(leaf)
        assert (gathered.shape, gathered.dtype) == (leaf.shape, leaf.dtype)
        np.testing.assert_array_equal(np.ascontiguousarray(gathered), np.asarray(leaf))


def test_a_thread_that_failed_to_write_waits_for_no_other_host(monkeypatch):
    waited = []
    monkeypatch.setattr(
        store.ocp.multihost, "get_barrier_sync_fn", lambda: lambda key, timeout_ms: waited.append((key, timeout_ms))
    )

    def write(fault):
        try:
            if fault:
                raise fault
        finally:
            store.wait_for_hosts(key="saved", timeout_ms=5)

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(OSError, match="full"):
            pool.submit(write, OSError("full")).result()
        assert not waited
        pool.submit(write, None).result()
    with pytest.raises(KeyboardInterrupt):  # what ends the main thread is no fault of the checkpoint
        write(KeyboardInterrupt())
    assert waited == [("saved", 5)] * 2
