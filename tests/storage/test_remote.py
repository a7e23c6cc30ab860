"""Runs whose data and workdir lie on a bucket: of S3 (moto's server) and of Google Cloud Storage (`fake_gcs`)."""

import asyncio
import dataclasses
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import chex
import fsspec
import numpy as np
import pytest
from orbax.checkpoint import PyTreeCheckpointer
from PIL import Image

import vit_jax
from tests.conftest import ROOT, bytes_in
from tests.data.test_array_record import SINGLE, write_set
from tests.faults.hosts import Hosts, metrics
from tests.faults.table import SPLIT, fill
from tests.storage import fake_gcs
from tests.training.test_workdir import failing
from vit_jax import NoAnswer, UserError, cli, describe, evaluate, pack, predict, sweep, train, tree
from vit_jax.checkpoint import local_workdir, manager, store
from vit_jax.config import parse_command_line
from vit_jax.data import loader
from vit_jax.monitoring import TrainMetrics
from vit_jax.storage import filesystem, run_files, stores

pytestmark = pytest.mark.flaky(reruns=1)  # these wait on the clock

BUCKETS = {"s3": "s3://bkt", "gs": "gs://bkt"}
SOME = ["s3", pytest.param("gs", marks=pytest.mark.slow)]
SLOWLY = [pytest.param(kind, marks=pytest.mark.slow) for kind in BUCKETS]  # what starts processes
WORDS = [
    "--config.data.split=train",
    "--config.evals.test.split=train[:16]",
    "--config.batch=24",
    "--config.batch_eval=8",
]
WORDS += ["--config.model.dropout_rate=0.0", "--config.task.mixup=0.0"]  # they only take long to compile
WORDS += ["--config.log_every=1", "--config.optim.ema_decay=0.9", "--config.mesh.fsdp=2"]
WORDS += [f"--config.{key}.preprocess=resize(16)|value_range(-1,1)" for key in ("data", "evals.test")]


def finished(workdir):
    """The steps of the finished checkpoints, the oldest first."""
    return sorted(store.CheckpointStore(workdir).list_steps())


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Both servers, each with an empty bucket `bkt`, and the environment that leads all clients to them."""
    s3, gcs = fake_gcs.free_port(), fake_gcs.free_port()
    environment = {
        "VIT_JAX_CACHE": str(tmp_path_factory.mktemp("cache")),
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        **fake_gcs.environment(gcs),
    }
    output = (tmp_path_factory.mktemp("servers") / "out").open("w")
    commands = [["moto.server", "-H", "127.0.0.1", "-p", str(s3)], ["tests.storage.fake_gcs", str(gcs), "bkt"]]
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        processes = [
            subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, stdout=output, stderr=output)
            for words in commands
        ]
        try:
            for port in (s3, gcs):
                fake_gcs.await_port(port)
            filesystem.open_store.cache_clear()
            fsspec.filesystem("s3").mkdir("bkt")
            yield
        finally:
            for process in processes:
                process.kill()
                process.wait()
            filesystem.open_store.cache_clear()


@pytest.fixture(scope="module")
def photos(servers, tmp_path_factory):
    """The same images in a folder here and on the buckets: where -> path."""
    random, here = np.random.default_rng(0), tmp_path_factory.mktemp("photos")
    for number in range(32):
        path = here / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(random.integers(0, 256, (20, 30, 3), np.uint8)).save(path)
        for bucket in BUCKETS.values():
            filesystem.upload(path, f"{bucket}/photos/{path.parent.name}/{path.name}")
    packed = tmp_path_factory.mktemp("packed")
    # What is evaluated is the first shard, so that its batches are those of the folder: several are cut into parts.
    pack.main(["vit_jax.pack", f"folder:{here}", str(packed), "--shards=2"])
    for path in packed.iterdir():
        filesystem.upload(path, f"s3://bkt/packed/{path.name}")
    return {"here": str(here), **{kind: f"{bucket}/photos" for kind, bucket in BUCKETS.items()}}


def source(name, photos):
    """What a run reads: files, or on S3 shards of records made of them."""
    return "array_record:s3://bkt/packed" if name == "s3" else f"folder:{photos[name]}"


@pytest.mark.parametrize("kind", SOME)
def test_shards_of_another_program_are_described_on_a_bucket(kind, servers, tmp_path):
    write_set(tmp_path / "set", SINGLE, info=False)
    where = f"{BUCKETS[kind]}/described"
    for path in (tmp_path / "set").iterdir():
        filesystem.upload(path, f"{where}/{path.name}")
    shards = [f"array_record:{tmp_path / 'set'}", f"array_record:{where}"]
    for place in shards:
        describe.main(["vit_jax.describe", place, "--num-classes=4"])
    here, there = (json.loads(filesystem.read_bytes(f"{place}/info.json")) for place in (tmp_path / "set", where))
    assert there == here | {"name": "described"} and [shard["records"] for shard in there["splits"]["train"]] == [
        3,
        4,
        4,
    ]


@pytest.fixture(scope="module")
def runs(photos, tmp_path_factory, request):
    """One configuration, run here and on each bucket that is asked for, where it is killed between its checkpoints
    (after 10 and 20 steps) and gone on with here. Gives the folder of the first.
    """
    folder = tmp_path_factory.mktemp("runs")
    asking = [item for item in request.session.items if "runs" in item.fixturenames]
    kinds = {item.callspec.params["kind"] for item in asking if hasattr(item, "callspec")} | {"s3"}
    buckets = {kind: bucket for kind, bucket in BUCKETS.items() if kind in kinds}

    def words(name, workdir):
        given = [f"--config={ROOT}/configs/smoke.py", f"--workdir={workdir}", *WORDS]
        return ["-m", "vit_jax.main", *given, f"--config.data.source={source(name, photos)}"]

    processes = {}
    for name, bucket in buckets.items():
        output = (folder / f"{name}.out").open("w")
        command = [sys.executable, *words(name, f"{bucket}/run")]
        processes[name] = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    deadline = time.monotonic() + 180
    waiting = set(buckets)
    while waiting and time.monotonic() < deadline:
        for name in list(waiting):
            if finished(f"{BUCKETS[name]}/run"):
                processes[name].send_signal(signal.SIGKILL)
            if processes[name].poll() is not None:
                waiting.remove(name)
        time.sleep(0.02)
    for name in buckets:
        assert processes[name].wait() in (0, -signal.SIGKILL), (folder / f"{name}.out").read_text()
        run = f"{BUCKETS[name]}/run"
        # Were the machine too quick, its second half is forgotten. A checkpoint that was cut short lies there.
        filesystem.remove_files(
            run, [file for file in filesystem.list_files(run) if "/20/" in file or file.startswith("model.")]
        )
        for file in ("state/manifest.ocdbt", "about/metadata"):
            filesystem.upload(__file__, f"{run}/checkpoints/15/{file}")
        assert finished(run) == [10]
    for name, workdir in {
        "here": folder / "here",
        **{name: f"{bucket}/run" for name, bucket in buckets.items()},
    }.items():
        config, _ = parse_command_line(words(name, workdir)[1:])
        train.train(config, workdir)
    return folder


@pytest.mark.parametrize("kind", SLOWLY)
def test_killed_and_resumed_on_a_bucket_is_never_stopped_here_bitwise(runs, kind, tmp_path):
    run = f"{BUCKETS[kind]}/run"
    assert f"Resuming {run} after step 10." in filesystem.read_bytes(f"{run}/train.log").decode()
    (tmp_path / "metrics.jsonl").write_bytes(filesystem.read_bytes(f"{run}/metrics.jsonl"))
    assert metrics(tmp_path) == metrics(runs / "here") and len(metrics(tmp_path)) == 22
    there = local_workdir(run) / "checkpoints" / "20" / "state"
    reader = PyTreeCheckpointer()
    first, second = (tree.flatten(reader.restore(path)) for path in (there, runs / "here/checkpoints/20/state"))
    assert any("mu/" in name for name in first)
    chex.assert_trees_all_equal(first, second)
    chex.assert_trees_all_equal(vit_jax.load(run)[1], vit_jax.load(runs / "here")[1])


@pytest.mark.parametrize("kind", SLOWLY)
def test_what_lies_on_the_bucket(runs, photos, kind):
    run = f"{BUCKETS[kind]}/run"
    found = filesystem.list_files(run)
    top = {name for name in found if "/" not in name}
    assert {"config.json", "metrics.jsonl", "train.log", "processes.json", "model.npz", "model.json"} <= top
    assert sum("tfevents" in name for name in top) == 2
    assert {name.split("/")[1] for name in found if name.startswith("checkpoints/")} == {"10", "20"}
    assert finished(run) == [10, 20]
    assert json.loads(filesystem.read_bytes(f"{run}/config.json"))["data"]["source"] == source(kind, photos)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3"])
def test_the_command_lines_read_from_the_bucket(runs, photos, kind, tmp_path, capsys):
    run = f"{BUCKETS[kind]}/run"
    for best in (False, True):
        assert evaluate.evaluate(run, best) == evaluate.evaluate(runs / "here", best, source=f"folder:{photos['here']}")
    images = ["cat/0.png", "dog/1.png"]
    predict.main(["predict.py", run, *[f"{photos[kind]}/{image}" for image in images], "--json"])
    there = [json.loads(line)["classes"] for line in capsys.readouterr().out.splitlines()]
    here = predict.predict(runs / "here", [f"{photos['here']}/{image}" for image in images])
    assert there == [result["classes"] for result in here]
    _, params = vit_jax.load(runs / "here")
    for path in (f"{run}/model.npz", f"{run}/checkpoints/20", f"{run}/"):
        chex.assert_trees_all_equal(vit_jax.load(path)[1], params)
    with pytest.raises(UserError, match=f"there is no {BUCKETS[kind]}/nothing"):
        vit_jax.load(f"{BUCKETS[kind]}/nothing")
    with pytest.raises(UserError, match=f"there is no {BUCKETS[kind]}/nothing"):
        evaluate.evaluate(f"{BUCKETS[kind]}/nothing")


@pytest.mark.slow
def test_a_run_here_starts_from_a_bucket_and_writes_to_another(runs, quick):
    quick.mesh.data, quick.total_steps, quick.warmup_steps, quick.profile_steps = 8, 3, 1, 1
    quick.init_from = "s3://bkt/run"
    train.train(quick, "gs://bkt/tuned")
    found = filesystem.list_files("gs://bkt/tuned")
    assert any(name.startswith("profile/") and name.endswith(".xplane.pb") for name in found)
    assert "Starting from s3://bkt/run." in filesystem.read_bytes("gs://bkt/tuned/train.log").decode()
    assert not list(Path(os.environ["VIT_JAX_CACHE"]).glob("runs/*/*"))  # nothing stays here


@pytest.mark.slow
def test_a_run_on_a_bucket_is_not_overwritten_but_started_again_if_nothing_was_saved(servers, quick, monkeypatch):
    quick.mesh.data, quick.total_steps, quick.warmup_steps, quick.log_every = 8, 3, 1, 1
    with monkeypatch.context() as patch:
        failing(patch, loader.DevicePrefetcher, "__next__", KeyboardInterrupt(), call=3)
        with pytest.raises(KeyboardInterrupt):
            train.train(quick, "gs://bkt/killed")
    assert filesystem.read_bytes("gs://bkt/killed/metrics.jsonl") and not finished("gs://bkt/killed")
    train.train(quick, "gs://bkt/killed")
    filesystem.remove_files(
        "gs://bkt/killed", [name for name in filesystem.list_files("gs://bkt/killed") if "checkpoints/" in name]
    )
    before = {
        name: filesystem.read_bytes(f"gs://bkt/killed/{name}") for name in filesystem.list_files("gs://bkt/killed")
    }
    with pytest.raises(UserError, match=r"gs://bkt/killed contains a run's model\.npz, but no checkpoint"):
        train.train(quick, "gs://bkt/killed")
    quick.model.depth = 2
    with pytest.raises(UserError, match=r"contains a run with other settings .*model\.depth: 1 -> 2"):
        train.train(quick, "gs://bkt/killed")
    assert {
        name: filesystem.read_bytes(f"gs://bkt/killed/{name}") for name in filesystem.list_files("gs://bkt/killed")
    } == before


def swept(workdir):
    """The rows of a sweep of two rates, the first of which diverges, but for the seconds that they took."""
    given = [f"--config={ROOT}/configs/smoke.py", f"--workdir={workdir}", "--sweep.base_lr=1e30,0.01", *SWEPT]
    return [
        dataclasses.replace(row, seconds=0.0)
        for row in sweep.train_combinations(sweep.list_combinations(["sweep.py", *given]))
    ]


SWEPT = ["--config.total_steps=3", "--config.eval_every=2", "--config.warmup_steps=1", "--config.log_every=1"]
SWEPT += ["--config.task.mixup=0.0", "--config.mesh.data=8", "--config.evals.test.split=test[:40]"]


@pytest.fixture(scope="module")
def swept_here(tmp_path_factory):
    """The rows of a sweep that nothing stopped, in a folder here."""
    return swept(tmp_path_factory.mktemp("sweep"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gs"])
def test_a_sweep_stopped_and_resumed_on_a_bucket_is_never_stopped_here(servers, swept_here, kind, monkeypatch):
    workdir, run, begun = f"{BUCKETS[kind]}/sweep", train.train, []

    def recorded(config, folder, **rest):
        begun.append(folder)
        if len(begun) == 2:
            raise cli.Terminated
        return run(config, folder, **rest)

    monkeypatch.setattr(train, "train", recorded)
    with pytest.raises(cli.Terminated):
        swept(workdir)
    assert swept(workdir) == swept_here
    assert begun == [f"{workdir}/base_lr={rate}" for rate in ("1e30", "0.01", "0.01")]
    assert json.loads(filesystem.read_bytes(f"{workdir}/base_lr=0.01/sweep.json"))["last"] == swept_here[0].last
    assert swept(workdir) == swept_here and len(begun) == 3  # the table is read
    with pytest.raises(UserError, match=f"there is no .*bucket {kind}://nothing|{kind}://nothing"):
        swept(f"{kind}://nothing/sweep")


@pytest.mark.parametrize("kind", BUCKETS)
def test_a_bucket_that_is_not_there_is_told_before_the_first_step(servers, quick, kind, monkeypatch):
    quick.mesh.data = 8
    monkeypatch.setattr(TrainMetrics, "__call__", lambda *args: pytest.fail("a step was run"))
    with pytest.raises(UserError, match=f"there is no .*bucket {kind}://nothing|{kind}://nothing"):
        train.train(quick, f"{kind}://nothing/run")


def test_a_store_that_never_answers_is_told_before_the_first_step(servers, quick, monkeypatch):
    quick.mesh.data = 8
    monkeypatch.setattr(stores, "TIMEOUT", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        forget_stores()
        try:
            with pytest.raises(UserError, match=r"s3://bkt/run2\S* did not answer within 1 s"):
                train.train(quick, "s3://bkt/run2")
            with pytest.raises(UserError, match=r"s3://bkt/sweep2\S* did not answer within 1 s"):
                swept("s3://bkt/sweep2")
        finally:
            forget_stores()


def forget_stores():
    filesystem.open_store.cache_clear()
    fsspec.filesystem("s3").clear_instance_cache()


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_a_slow_line_is_no_silence(servers, kind, tmp_path, monkeypatch):
    """24 MiB at 10 MiB/s, under a limit of two seconds without progress."""
    (tmp_path / "x").write_bytes(content := np.random.default_rng(0).bytes(3 * 2**23))
    store, line, parts = filesystem.open_store(f"{kind}://bkt", os.getpid()), asyncio.Lock(), []

    def slowed(call):
        async def slow(*args, **kwargs):
            size = len(kwargs.get("Body") or kwargs.get("data") or b"")
            if size > 2**20:
                parts.append(size)
                async with line:
                    await asyncio.sleep(size / 10 / 2**20)
            return await call(*args, **kwargs)

        return slow

    name = "_call_s3" if kind == "s3" else "_call"
    monkeypatch.setattr(store, name, slowed(getattr(store, name)))
    monkeypatch.setattr(stores, "TIMEOUT", 2.0)
    filesystem.upload(tmp_path / "x", f"{kind}://bkt/slow/x")
    assert parts == [2**23] * 3 and filesystem.read_bytes(f"{kind}://bkt/slow/x") == content


def test_s3_is_read_as_a_stream(servers, tmp_path, monkeypatch):
    filesystem.upload(__file__, "s3://bkt/stream/x")
    store, told = filesystem.open_store("s3://bkt", os.getpid()), []
    monkeypatch.setattr(store, "default_block_size", 2**10)  # else 50 MB, of which each part tells when it is whole
    in_parts = "_download_file_part_concurrent"  # versions before 2026 do not have it
    monkeypatch.setattr(store, in_parts, lambda *args, **kwargs: pytest.fail("in parts"), raising=False)
    monkeypatch.setattr(stores.Progress, "call", lambda *args, **kwargs: told.append(1))
    filesystem.download("s3://bkt/stream", ["x"], tmp_path)
    assert (tmp_path / "x").read_bytes() == Path(__file__).read_bytes() and told


@pytest.mark.slow
def test_a_store_that_falls_silent_is_waited_for_once(servers, quick, monkeypatch):
    quick.mesh.data, quick.total_steps, quick.checkpoint_every, quick.eval_every = 8, 4, 1, 4
    closed, sent, upload, close = [], [], filesystem.upload, manager.Checkpoints.close

    def silent(path, remote):
        if sent or "/checkpoints/2/" in remote:
            sent.append(remote)
            raise NoAnswer("no answer")
        upload(path, remote)

    monkeypatch.setattr(filesystem, "upload", silent)
    monkeypatch.setattr(manager.Checkpoints, "close", lambda self: (close(self), closed.append(self)))
    with pytest.raises(UserError, match="no answer"):
        train.train(quick, "s3://bkt/silent")
    assert 1 <= len(sent) <= 2  # by who sends checkpoints, and by who sends logs
    deadline = time.monotonic() + 20
    while not closed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert closed and finished("s3://bkt/silent") == [1]


@pytest.mark.slow
def test_after_an_error_other_processes_may_use_the_workdir(servers, quick, monkeypatch):
    quick.mesh.data, quick.total_steps, quick.checkpoint_every, quick.eval_every = 8, 2, 1, 2
    with monkeypatch.context() as patch, pytest.raises(UserError, match="no permission"):
        failing(patch, filesystem, "upload", UserError("no permission."), call=3)
        train.train(quick, "s3://bkt/refused")
    lock = Path(os.environ["VIT_JAX_CACHE"], "runs", f"{run_files.owner_of('s3://bkt/refused')}.lock")
    deadline = time.monotonic() + 20
    with lock.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
    train.train(quick, "s3://bkt/refused")


@pytest.mark.slow
def test_a_full_disk_here_costs_no_training_on_a_bucket(servers, quick, small_disk, monkeypatch, caplog):
    monkeypatch.setenv("VIT_JAX_CACHE", str(small_disk))
    quick.mesh.data, quick.total_steps, quick.checkpoint_every, quick.eval_every, quick.log_every = 8, 20, 5, 20, 1

    def watch(step, metrics):
        if step == 3:
            fill(small_disk / "other")
        if step == 14:
            assert finished("gs://bkt/full")[0] == 5
            (small_disk / "other").unlink()

    train.train(quick, "gs://bkt/full", watch=watch)
    lines = filesystem.read_bytes("gs://bkt/full/metrics.jsonl").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, 21), 20]
    assert [message for message in caplog.messages if "the logs in" in message][1].endswith(
        "0 of their records are lost"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3"])
def test_a_damaged_checkpoint_on_a_bucket_is_set_aside_there(servers, quick, kind, tmp_path):
    run = f"{BUCKETS[kind]}/damaged"
    quick.mesh.data, quick.total_steps, quick.warmup_steps = 8, 2, 0
    quick.eval_every, quick.checkpoint_every = 100, 1
    train.train(quick, run)
    folder = f"{run}/checkpoints/2"
    contents = {
        name: filesystem.read_bytes(f"{folder}/{name}") for name in filesystem.list_files(folder) if "/d/" in name
    }
    for name, content in contents.items():  # whole: what a single byte means depends on the order of the writes
        filesystem.write_bytes(f"{folder}/{name}", bytes(byte ^ 1 for byte in content))
    quick.total_steps = 3
    train.train(quick, run)
    assert f"checkpoint 2 is damaged and was renamed to {run}/checkpoints/damaged-2" in (
        filesystem.read_bytes(f"{run}/train.log").decode()
    )
    assert finished(run) == [2, 3]
    assert set(contents) < set(filesystem.list_files(f"{run}/checkpoints/damaged-2"))


def test_checkpoints_on_s3_come_from_one_host(servers, monkeypatch, tmp_path):
    monkeypatch.setattr(store.jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="can be used by one host only; for a run on several hosts, use gs://BUCKET"):
        store.CheckpointStore("s3://bkt/hosts", tmp_path)


@pytest.mark.slow
def test_two_hosts_write_to_one_bucket(photos, tmp_path):
    words = [*WORDS, SPLIT, f"--config.data.source=folder:{photos['gs']}"]
    with (
        Hosts(tmp_path / "hosts", 2, 4, *words, "--workdir=gs://bkt/hosts") as hosts,
        Hosts(tmp_path / "alone", 1, 8, *words) as alone,
    ):
        assert hosts.wait(300) == [0, 0], hosts.output()
        assert alone.wait(300) == [0], alone.output()
    (tmp_path / "metrics.jsonl").write_bytes(filesystem.read_bytes("gs://bkt/hosts/metrics.jsonl"))
    for one, other in zip(metrics(tmp_path), metrics(tmp_path / "alone"), strict=True):
        assert one == pytest.approx(other, rel=1e-3)
    assert finished("gs://bkt/hosts")[-1] == 40


@pytest.fixture(scope="module")
def digits_shards(servers, tmp_path_factory):
    """The sizes of the 96 shards in gs://bkt/digits."""
    folder = tmp_path_factory.mktemp("packed")
    pack.main(["vit_jax.pack", "digits", str(folder), "--splits=train", "--shards=96"])
    for path in folder.iterdir():
        filesystem.upload(path, f"gs://bkt/digits/{path.name}")
    return [path.stat().st_size for path in folder.glob("*.array_record")]


def cache_of(folder, gigabytes):
    """host -> the variables that give it a cache of its own."""
    return lambda host: {"VIT_JAX_CACHE": f"{folder}-{host}", "VIT_JAX_CACHE_GB": str(gigabytes)}


def watch_copies(run, folder, pattern, watch=lambda: False):
    """Waits until a run ends or `watch` says so; returns cache that matches a pattern -> names of what is copied there.

    What has gone from a cache leaves nothing behind, but stays for many times the pause between two looks.
    """
    copied = {}
    while any(process.poll() is None for process in run.processes):
        for path in folder.glob(pattern):
            copied.setdefault(path, set()).update(lock.name for lock in path.glob("files/*.lock"))
        if watch():
            break
        time.sleep(0.05)
    return copied


@pytest.mark.slow
def test_an_evaluation_is_divided_between_hosts_whose_disks_hold_a_part_of_it(digits_shards, tmp_path):
    found = {}
    words = [*WORDS, "--config.total_steps=0", "--config.evals.test.source=array_record:gs://bkt/digits"]
    words += ["--config.evals.test.split=train", "--config.batch_eval=32", "--config.data.source=digits"]
    for hosts in (2, 4):
        bound = 0.8 * sum(digits_shards) / 1e9
        variables = cache_of(tmp_path / f"cache{hosts}", bound)
        with Hosts(tmp_path / f"{hosts}", hosts, 4 // hosts, SPLIT, *words, slow=0, variables=variables) as run:
            copied = watch_copies(run, tmp_path, f"cache{hosts}-*")
            assert run.wait() == [0] * hosts, run.output()
        [found[hosts]] = [line for line in metrics(tmp_path / f"{hosts}") if "test/n" in line]
        # Its share, and where the eight stretches lie that are compared.
        assert max(map(len, copied.values())) <= 96 / hosts + 24
    assert found[2] == found[4] and found[2]["test/n"] == 1438


@pytest.mark.slow
def test_a_set_is_streamed_by_hosts_whose_disks_hold_a_tenth_of_it(digits_shards, tmp_path):
    total, largest = sum(digits_shards), max(digits_shards)
    bound = 7 * largest  # a reader's window of two, the next, those of the batches ahead, and one that ends
    assert bound < total / 10
    most = 0

    def run(name, hosts, *more, until=None):
        words = [
            *WORDS,
            SPLIT,
            "--config.data.source=array_record:gs://bkt/digits",
            "--config.evals.test.source=digits",
        ]
        words += ["--config.evals.test.split=test", "--config.data.order=stream", "--config.data.readers=4", *more]
        words += ["--config.data.window=2", "--config.total_steps=66"]
        variables = cache_of(tmp_path / "caches" / f"{name}{hosts}", bound * 4 / hosts / 1e9)

        def watch():
            nonlocal most
            for cache in (tmp_path / "caches").glob(f"{name}{hosts}-*/files"):
                most = max(most, bytes_in(cache) * hosts / 4)
            return until and any(line["step"] >= until for line in metrics(tmp_path / name))

        with Hosts(tmp_path / name, hosts, 4 // hosts, *words, slow=0, variables=variables) as started:
            copied = watch_copies(started, tmp_path / "caches", f"{name}{hosts}-*", watch)
            if not until:
                assert started.wait() == [0] * hosts, started.output()
                told = f"Fetched in an epoch: {total / 1e9:.3g} GB by all hosts, of {total / 1e9:.3g} GB of shards; "
                assert (f"{told}{total / hosts / 1e9:.3g} GB by one." in started.output()) == (hosts > 1)
        return [len(names) for names in copied.values()]

    # 66 batches of 24 are an epoch and a tenth; of each, a host needs its share, and a shard for each end of a range.
    assert max(run("two", 2)) <= 0.5 * 96 * 1.1 + 2 * 4
    run("other", 4, until=35)
    before = metrics(tmp_path / "other")
    run("other", 1)
    assert before == metrics(tmp_path / "two")[: len(before)] and len(before) >= 35
    for one, other in zip(metrics(tmp_path / "other"), metrics(tmp_path / "two"), strict=True):
        assert one == pytest.approx(other, rel=1e-3)
        assert one.get("train/loss", 0) == pytest.approx(other.get("train/loss", 0), rel=1e-5)
    assert 0.5 * bound < most <= bound
