"""Remote files in fsspec's `memory://`, and what goes wrong with servers."""

import concurrent.futures
import contextlib
import fcntl
import functools
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

import vit_jax
from vit_jax import NoAnswer, UserError, data
from vit_jax.analysis import notebook
from vit_jax.checkpoint import manager
from vit_jax.checkpoint.integrity import FINISHED, storage_errors
from vit_jax.checkpoint.retention import UNNAMED, Retention
from vit_jax.checkpoint.store import CheckpointStore
from vit_jax.config import parse_command_line
from vit_jax.data.sources import kinds
from vit_jax.evals import loaded_model
from vit_jax.interop import layout_table
from vit_jax.monitoring import find_runs
from vit_jax.storage import cache, filesystem, paths, run_files, stores


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache of the test's own, of 100 kB."""
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VIT_JAX_CACHE_GB", "0.0001")
    yield tmp_path / "cache"
    forget(tmp_path / "cache")


def forget(root):
    """Ends the use of everything in the cache, as the end of the process does."""
    for path in root.glob("*/*.lock"):
        cache.unlock_folder(path.with_suffix(""))


@contextlib.contextmanager
def locked_elsewhere(folder, kind):
    """Locks a cached folder as another process does that copies it, or, of version 0.1.0, uses it."""
    with folder.with_name(f"{folder.name}.lock").open("a+") as lock:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        yield


@pytest.fixture
def bucket():
    """An empty folder of the file system in memory: name -> content."""
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]

    def write(**contents):
        for name, content in contents.items():
            store.pipe(f"memory://b/{name.replace('__', '/').replace('_', '.')}", content)

    return write


def cached(folder):
    return sorted(path.name for path in folder.glob("files/*/*"))


def test_reading_and_listing(bucket):
    bucket(a_txt=b"1", sub__b_txt=b"22", sub__deep__c_txt=b"333", ab_txt=b"4")
    assert filesystem.read_bytes("memory://b/a.txt") == b"1"
    assert (
        filesystem.list_files("memory://b")
        == filesystem.list_files("memory://b/")
        == ["a.txt", "ab.txt", "sub/b.txt", "sub/deep/c.txt"]
    )
    assert filesystem.list_files("memory://b/a") == filesystem.list_files("memory://nothing") == []
    assert [filesystem.read_bytes(path) for path in filesystem.expand_pattern("memory://b/a*.txt")] == [b"1", b"4"]
    filesystem.remove_files("memory://b", ["a.txt", "sub/b.txt", "nothing.txt"])
    assert filesystem.list_files("memory://b") == ["ab.txt", "sub/deep/c.txt"]


def test_names_are_taken_as_they_are(bucket):
    store = fsspec.filesystem("memory")
    for name in ("a*", "ab", "[x]", "x"):
        store.pipe(f"memory://b/{name}", b"")
    filesystem.remove_files("memory://b", ["a*", "[x]"])
    assert filesystem.list_files("memory://b") == ["ab", "x"]


def test_writing(bucket, tmp_path):
    (tmp_path / "x").write_bytes(b"new")
    bucket(x=b"old")
    filesystem.upload(tmp_path / "x", "memory://b/x")
    assert filesystem.read_bytes("memory://b/x") == b"new"


def test_local_files_are_what_they_are(tmp_path):
    (tmp_path / "x").write_bytes(b"1")
    assert (
        filesystem.local_copy(str(tmp_path / "x")) == str(tmp_path / "x")
        and filesystem.read_bytes(str(tmp_path / "x")) == b"1"
    )
    assert filesystem.expand_pattern(f"{tmp_path}/*") == {str(tmp_path / "x"): None}
    assert (
        filesystem.absolute_path("~") == os.path.expanduser("~") and filesystem.absolute_path("gs://b/x") == "gs://b/x"
    )
    with pytest.raises(UserError, match=r"cannot read .*nothing: No such file"):
        filesystem.read_bytes(str(tmp_path / "nothing"))


def test_a_copy_is_made_once_and_anew_when_the_file_changes(bucket, own_cache):
    bucket(x_npz=b"1", x_json=b"{}", other=b"")
    first = filesystem.local_copy("memory://b/x.npz", "x.json")
    assert filesystem.local_copy("memory://b/x.npz", "x.json") == first
    assert sorted(os.listdir(os.path.dirname(first))) == ["x.json", "x.npz"]
    bucket(x_npz=b"2")
    second = filesystem.local_copy("memory://b/x.npz")
    assert filesystem.read_bytes(first) == b"1" and filesystem.read_bytes(second) == b"2"
    assert (own_cache.stat().st_mode & 0o777) == 0o700


def test_the_cache_is_bounded_and_what_is_in_use_stays(bucket, own_cache, monkeypatch):
    for name in "abcd":
        bucket(**{name: name.encode() * 40_000})
    for name in "ab":
        filesystem.local_copy(f"memory://b/{name}")
        time.sleep(0.02)  # the order is that of the clock of the disk
    with pytest.raises(UserError, match=r"b/c needs 4e-05 GB in addition to 8e-05 GB in use, more than the 0\.0001 GB"):
        filesystem.local_copy("memory://b/c")
    forget(own_cache)
    filesystem.local_copy("memory://b/a")
    forget(own_cache)
    filesystem.local_copy("memory://b/c")
    assert cached(own_cache) == ["a", "c"]  # b was used longest ago
    filesystem.local_copy("memory://b/a")
    with pytest.raises(UserError, match=r"set VIT_JAX_CACHE_GB=\S+ or more"):
        filesystem.local_copy("memory://b/d")
    monkeypatch.setenv("VIT_JAX_CACHE_GB", "much")
    with pytest.raises(UserError, match="VIT_JAX_CACHE_GB=much must be a number"):
        filesystem.local_copy("memory://b/d")


def test_processes_share_the_cache(bucket, own_cache):
    for name in "ab":
        bucket(**{name: name.encode() * 80_000})
    first = filesystem.local_copy("memory://b/a")
    forget(own_cache)
    with locked_elsewhere(Path(first).parent, fcntl.LOCK_SH):
        with pytest.raises(UserError, match="in addition to 8e-05 GB in use"):
            filesystem.local_copy("memory://b/b")
        assert filesystem.local_copy("memory://b/a") == first and cached(own_cache) == ["a"]
        forget(own_cache)
    filesystem.local_copy("memory://b/b")
    assert cached(own_cache) == ["b"]


def test_one_copies_and_the_other_waits(own_cache):
    copied, others = [], []

    def fill(place):
        copied.append(place)
        with pytest.raises(UserError, match="in addition to 6e-05 GB in use"):  # what is being copied counts, and stays
            cache.cached_folder("other", "other", 60_000, others.append)
        (place / "x").write_bytes(bytes(60_000))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        places = list(pool.map(lambda _: cache.cached_folder("key", "it", 60_000, fill), range(8)))
    assert len(copied) == 1 and set(places) == {own_cache / "files" / "key"} and not others
    forget(own_cache)
    cache.cached_folder("other", "other", 60_000, lambda place: None)  # leaves nothing of the first
    names = ["lock", "other", "other.lock", "total", "uses"]
    assert sorted(path.name for path in (own_cache / "files").iterdir()) == names


def test_what_a_killed_process_left_goes(own_cache):
    with pytest.raises(ZeroDivisionError):
        cache.cached_folder("key", "it", 60_000, lambda place: 1 / 0)
    (own_cache / "files" / "key.partial").mkdir()
    cache.cached_folder("other", "other", 60_000, lambda place: None)
    assert not (own_cache / "files" / "key.partial").exists()


def keep(name, size, use=cache.cached_folder):
    """Makes a copy in the cache."""
    return use(name, "it", size, lambda place: (place / "x").write_bytes(bytes(size)))


def test_copies_in_use_take_one_descriptor(own_cache):
    keep("0", 1)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(50):
        keep(str(number), 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_another_process_uses_copies_until_it_ends(own_cache):
    code = """if True:
        import sys
        from vit_jax.storage import cache
        cache.cached_folder("0", "it", 80_000, lambda place: (place / "x").write_bytes(bytes(80_000)))
        print("ready", flush=True)
        sys.stdin.read()
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(UserError, match="in addition to 8e-05 GB in use"):
            keep("1", 80_000)
        _, release = keep("0", 80_000, cache.borrow_folder)
        release()  # does not end the other's use
        with pytest.raises(UserError, match="in addition to 8e-05 GB in use"):
            keep("1", 80_000)
        process.kill()
    keep("1", 80_000)
    assert not (own_cache / "files" / "0").exists()


def test_a_copy_that_was_borrowed_twice_stays_until_it_is_released_twice(own_cache):
    (first, release), (second, release_again) = (keep("0", 80_000, cache.borrow_folder) for _ in range(2))
    assert first == second
    release()
    with pytest.raises(UserError, match="in addition to 8e-05 GB in use"):
        keep("1", 80_000)
    release_again()
    keep("1", 80_000)


def test_a_copy_costs_the_same_however_many_there_are(own_cache, monkeypatch):
    opened, plain = [], Path.open
    monkeypatch.setattr(Path, "open", lambda path, *more, **named: opened.append(path) or plain(path, *more, **named))

    def count(*names):
        opened.clear()
        for name in names:
            keep(name, 500, cache.borrow_folder)[1]()
        return len(opened) / len(names)

    first = count(*map(str, range(10)))
    assert count(*map(str, range(10, 200))) <= first <= 10
    assert count(*map(str, range(200, 250))) <= first + 64  # though for each something must go
    assert len(list((own_cache / "files").glob("*.lock"))) <= 200


def test_a_lock_file_of_zeros_is_written_anew(own_cache):
    for name in ("0", "1"):
        keep(name, 30_000)
        time.sleep(0.02)  # the order is that of the clock of the disk
    forget(own_cache)
    for name in ("0.lock", "1.lock", "total"):
        (own_cache / "files" / name).write_bytes(bytes(5))
    keep("2", 60_000)
    assert (own_cache / "files" / "1.lock").read_text() == "30000"
    assert not (own_cache / "files" / "0").exists()


def test_a_cache_that_cannot_be_written_is_told(bucket, own_cache, tmp_path, monkeypatch):
    bucket(x=b"1")
    monkeypatch.setattr(filesystem, "download", raising(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match=f"cannot write to {own_cache}: No space left on device; set VIT_JAX_CACHE"):
        filesystem.local_copy("memory://b/x")
    (tmp_path / "file").touch()
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot write to .*file: File exists"):
        filesystem.local_copy("memory://b/x")
    monkeypatch.setenv("VIT_JAX_CACHE", "/proc/nothing")
    with pytest.raises(UserError, match="cannot write to /proc/nothing: No such file"):
        cache.root()


def test_a_copy_that_fails_leaves_nothing(bucket, own_cache, monkeypatch):
    bucket(x=b"123")
    monkeypatch.setattr(stores, "TIMEOUT", 0.2)
    short = lambda store, key, path, callback: Path(path).write_bytes(b"1")  # noqa: E731
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "get_file", short)
    with pytest.raises(UserError, match=r"cannot read memory://b/x: only 1 of its 3 bytes came \(for 0 s\)"):
        filesystem.local_copy("memory://b/x")
    [lock] = own_cache.glob("files/?*.lock")
    with locked_elsewhere(lock.with_suffix(""), fcntl.LOCK_EX):  # this process has let go of it
        assert cached(own_cache) == []


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.mark.parametrize(
    ("path", "error", "sentence"),
    [
        ("memory://b/nothing", None, "there is no memory://b/nothing"),
        ("memory://b/x", PermissionError("Forbidden"), "no permission to read memory://b/x: Forbidden"),
        ("memory://b/x", OSError("Broken\npipe"), "cannot read memory://b/x: Broken$"),
        ("nonsense://b/x", None, "Protocol not known: nonsense"),
    ],
)
def test_what_a_store_says_becomes_a_sentence(bucket, monkeypatch, path, error, sentence):
    bucket(x=b"")
    if error:
        monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", raising(error))
    with pytest.raises(UserError, match=sentence):
        filesystem.read_bytes(path)


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("x"), AttributeError("x"), AssertionError("x")])
def test_a_bug_stays_a_bug(bucket, monkeypatch, error):
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", raising(error))
    with pytest.raises(type(error)):
        filesystem.read_bytes("memory://b/x")
    with pytest.raises(type(error)), storage_errors("gs://b/run", "read"):
        raise error


def test_fsspec_is_configured_at_first_use():
    program = (
        "import copy, fsspec; before = copy.deepcopy(fsspec.config.conf)\n"
        "from vit_jax.storage import filesystem; assert filesystem.read_bytes and fsspec.config.conf == before\n"
        "filesystem.exists('memory://b/x'); assert fsspec.config.conf['gs'] == {'use_listings_cache': False}"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(("kind", "package"), [("gs", "gcsfs"), ("s3", "s3fs"), ("gcs", "gcsfs"), ("s3a", "s3fs")])
def test_a_missing_package_is_named(monkeypatch, kind, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, kind, raising=False)
    filesystem.open_store.cache_clear()
    with pytest.raises(UserError, match=rf"{kind}:// paths need .* pip install -e '\.\[{package[:-2]}\]'"):
        filesystem.read_bytes(f"{kind}://b/x")


@pytest.mark.flaky(reruns=1)  # it waits on the clock
def test_a_server_that_never_answers_is_told_within_the_limit(monkeypatch):
    monkeypatch.setattr(stores, "TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(UserError, match=r"did not answer within 0\.5 s"):
            filesystem.read_bytes(f"http://127.0.0.1:{silent.getsockname()[1]}/x")
        assert time.monotonic() - began < 3


@pytest.mark.flaky(reruns=1)  # it waits on the clock
def test_progress_prolongs_the_limit(monkeypatch):
    monkeypatch.setattr(stores, "TIMEOUT", 1.0)

    def slow(progress):  # longer than the limit, which is ten times the time between two reports, for busy machines
        for _ in range(12):
            time.sleep(0.1)
            progress.relative_update(1)
        return "done"

    assert stores.call_with_timeout("it", slow) == "done"


@pytest.mark.parametrize("place", ["http://host/run", "memory://b/run", "gs:/bucket/run", "gs://", "s3:///run"])
def test_workdirs_that_cannot_be_written(place):
    with pytest.raises(UserError, match="neither a local folder nor gs://BUCKET"):
        run_files.check_workdir(place)


def test_checkpoints_are_in_paths_that_are_utf8(tmp_path, monkeypatch):
    assert run_files.check_workdir("é") == "é"
    with pytest.raises(UserError, match="choose another folder"):
        run_files.check_workdir(os.fsdecode(b"run\xe9"))
    (tmp_path / os.fsdecode(b"\xe9")).mkdir()
    monkeypatch.chdir(tmp_path / os.fsdecode(b"\xe9"))
    with pytest.raises(UserError, match="choose another folder"):
        run_files.check_workdir("run")


def test_one_process_here_writes_to_a_remote_workdir(bucket, monkeypatch):
    bucket(train_log=b"said")
    first = run_files.RunFiles("memory://b", ("train.log",))
    assert (first.path / "train.log").read_bytes() == b"said"
    with pytest.raises(BlockingIOError), locked_elsewhere(first.path, fcntl.LOCK_EX):
        pass
    first.close()
    assert not first.path.exists()
    words = "another process on this machine already writes to memory://b"
    with locked_elsewhere(first.path, fcntl.LOCK_EX), pytest.raises(UserError, match=words):
        run_files.RunFiles("memory://b", ())
    monkeypatch.setattr(filesystem, "download", raising(UserError("no")))
    with pytest.raises(UserError, match="no"):
        run_files.RunFiles("memory://b", ())
    with locked_elsewhere(first.path, fcntl.LOCK_EX):  # files that could not be opened does not keep others out
        pass


def test_weights_are_uploaded_after_their_description(bucket, monkeypatch):
    run, sent = run_files.RunFiles("memory://b", ()), []
    monkeypatch.setattr(filesystem, "upload", lambda path, remote: sent.append(remote.removeprefix("memory://b/")))
    for name in ("model.npz", "z.txt", "model.json", "a/b.txt", "checkpoints/1/x", "x.partial"):
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).touch()
    run.flush()
    assert sent == ["a/b.txt", "model.json", "z.txt", "model.npz"]
    (run.path / "z.txt").write_text("changed")
    run.flush()
    assert sent[4:] == ["z.txt"]
    run.close()


def test_a_folder_that_orbax_removes_meanwhile_costs_no_upload(bucket, monkeypatch):
    run, listed = run_files.RunFiles("memory://b", ()), os.scandir
    (run.path / "checkpoints" / "2.tmp" / "d").mkdir(parents=True)
    (run.path / "train.log").touch()

    def scandir(path):
        if Path(path).name == "d":
            raise FileNotFoundError(path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    run.flush()
    monkeypatch.setattr(os, "scandir", listed)
    assert filesystem.exists("memory://b/train.log")
    run.close()


def test_nothing_is_sent_after_an_upload_that_was_given_up(bucket, monkeypatch):
    run, sent = run_files.RunFiles("memory://b", ()), []
    monkeypatch.setattr(run_files, "UPLOAD_INTERVAL", 0)

    def upload(path, remote):
        sent.append(remote)
        raise NoAnswer("no answer")

    monkeypatch.setattr(filesystem, "upload", upload)
    (run.path / "train.log").touch()
    run.push()
    for _ in range(2):
        with pytest.raises(UserError, match="no answer"):
            run.flush()
    run.push()
    run.close()
    assert sent == ["memory://b/train.log"]


def test_what_another_process_wrote_stays(bucket, tmp_path):
    store = fsspec.filesystem("memory")

    def there(*names):
        for name in names:
            store.pipe(f"memory://b/checkpoints/{name}", b"")

    there(f"1/{FINISHED}", f"2/{FINISHED}", "3/state/x", "4/state/x")
    ours, stage = CheckpointStore("memory://b", tmp_path), tmp_path / "checkpoints"
    there(f"4/{FINISHED}", f"7/{FINISHED}", "8/state/x")  # another process goes on writing
    (stage / "1" / FINISHED).unlink()
    (stage / "1").rmdir()
    (stage / "5").mkdir()
    (stage / "5" / FINISHED).touch()
    ours.open(Retention(2, 0, UNNAMED))
    ours.finish()
    assert sorted({name.split("/")[1] for name in filesystem.list_files("memory://b")}) == ["2", "4", "5", "7", "8"]


def test_a_full_disk_below_remote_checkpoints_is_told(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(CheckpointStore, "save", raising(OSError(28, "No space left on device")))
    checkpoints = manager.Checkpoints(configured("digits"), "memory://b", tmp_path)
    with pytest.raises(UserError, match=r"the checkpoints in memory://b/checkpoints cannot be written: .*No space"):
        checkpoints.save({}, 1, {})
    checkpoints.close()


def photo(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((6, 8, 3), value, np.uint8)).save(path)


def configured(source, **fields):
    from configs.base import get_config

    config = get_config()
    config.data.source = source
    config.data.update(fields)
    return config


def test_a_remote_folder_is_the_local_one(bucket, tmp_path):
    for number in range(12):
        photo(tmp_path / "train" / ("cat", "dog")[number % 2] / f"{number}.png", number)
        photo(tmp_path / "val" / "cat" / f"{number}.png", 20 + number)
    photo(tmp_path / "train" / ".hidden" / "1.png", 0)
    fsspec.filesystem("memory").put(str(tmp_path), "memory://b/photos", recursive=True)
    for split in ("train[:70%]", "val"):
        here = kinds.open_source(configured(f"folder:{tmp_path}"), split)
        there = kinds.open_source(configured("folder:memory://b/photos"), split)
        assert there.fingerprint == here.fingerprint and len(there) == len(here) > 5
        for index in range(len(here)):
            np.testing.assert_array_equal(there[index]["image"], here[index]["image"])
    with pytest.raises(UserError, match="there is no folder memory://b/nothing"):
        kinds.open_source(configured("folder:memory://b/nothing"), "train")
    with pytest.raises(UserError, match="memory://b/photos/val/cat contains images directly"):
        kinds.open_source(configured("folder:memory://b/photos/val/cat"), "train")
    filesystem.remove_files("memory://b/photos/val/cat", ["3.png"])
    there = kinds.open_source(configured("folder:memory://b/photos"), "val")
    filesystem.remove_files("memory://b/photos/val/cat", ["4.png"])
    with pytest.raises(UserError, match=r"there is no memory://b/photos/val/cat/4\.png"):  # not a bad image
        [there[index] for index in range(len(there))]
    pixels = data.load_image("memory://b/photos/val/cat/5.png", "resize(4)|value_range(0,1)")
    np.testing.assert_allclose(pixels, np.full((4, 4, 3), 25 / 255), atol=1e-6)


def test_remote_paths_stay_what_they_are(bucket, tmp_path):
    for number in range(4):
        photo(tmp_path / "cat" / f"{number}.png", number)
    fsspec.filesystem("memory").put(str(tmp_path / "cat"), "memory://b/cat", recursive=True)
    config = configured("folder:memory://b", data_dir="gs://bucket/tfds")
    config.evals.test.split = "train"
    completed, _ = data.complete_config(config)
    assert completed.data.source == "folder:memory://b" and completed.data.data_dir == "gs://bucket/tfds"


def test_tfds_on_a_bucket_is_copied_here(bucket, own_cache, tfds_folder, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE_GB", "0.001")
    memory = fsspec.filesystem("memory")
    memory.put(str(tfds_folder / "tiny" / "1.2.3"), "memory://b/tfds/tiny/1.2.3", recursive=True)
    bucket(tfds__tiny__1_0_0__dataset_info_json=b"{}")
    here = kinds.open_source(configured("tfds:tiny", data_dir=str(tfds_folder)), "train[2:]+test")
    there = kinds.open_source(configured("tfds:tiny", data_dir="memory://b/tfds"), "train[2:]+test")
    assert there.fingerprint == here.fingerprint and there.name == "tfds:tiny/1.2.3"
    for index in range(len(here)):
        np.testing.assert_array_equal(there[index]["image"], here[index]["image"])
    with pytest.raises(UserError, match="there is no TFDS dataset 'small' in memory://b/tfds"):
        kinds.open_source(configured("tfds:small", data_dir="memory://b/tfds"), "train")
    forget(own_cache)
    monkeypatch.setenv("VIT_JAX_CACHE_GB", "0.000001")
    memory.pipe("memory://b/tfds/tiny/1.2.3/more", b"changed")
    with pytest.raises(UserError, match=r"such as memory://b/tfds/tiny/1\.2\.3/tiny-train.* more than the 1e-06 GB"):
        kinds.open_source(configured("tfds:tiny", data_dir="memory://b/tfds"), "train")


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """A user with neither HOME nor an entry in /etc/passwd, as in a container; returns the temporary folder."""

    def absent(number):
        raise KeyError(number)

    for name in ("HOME", "VIT_JAX_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", absent)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_without_a_home_folder_caches_are_kept_in_a_temporary_folder_of_the_user(homeless, monkeypatch):
    own = homeless / f"vit_jax-{os.getuid()}"
    assert cache.root() == cache.root() == own and stat.S_IMODE(own.stat().st_mode) == 0o700
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    for make in (lambda path: path.symlink_to(own), lambda path: path.mkdir()):  # where the other user's would be
        make(place := homeless / f"vit_jax-{other}")
        with pytest.raises(UserError, match=rf"vit_jax-{other} is not a folder of this user; set VIT_JAX_CACHE to"):
            cache.root()
        place.rename(homeless / f"refused-{place.is_symlink()}")


def test_a_home_folder_in_which_nothing_can_be_written_is_as_none(homeless, monkeypatch):
    """Containers give their unknown users / as home."""
    monkeypatch.setenv("HOME", str(homeless / "home"))
    (homeless / "home").mkdir()
    assert cache.root() == homeless / "home/.cache/vit_jax"
    assert cache.root().is_dir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root
    assert cache.root() == homeless / f"vit_jax-{os.getuid()}"
    monkeypatch.setenv("VIT_JAX_CACHE", str(homeless / "given"))
    assert cache.root() == homeless / "given"


def test_a_user_without_a_home_folder_is_told_what_to_set(homeless, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", "~/cache")
    with pytest.raises(UserError, match=r"no home folder for ~/cache; set VIT_JAX_CACHE to a folder"):
        cache.root()
    write = functools.partial(layout_table.choose_target, layout=None)
    for use in (
        run_files.check_workdir,
        filesystem.absolute_path,
        vit_jax.load,
        notebook.upload,
        notebook.download,
        write,
    ):
        with pytest.raises(UserError, match=r"no home folder for ~/x\.npz; set HOME"):
            use("~/x.npz")
    assert filesystem.absolute_path("/x//y/") == "/x/y"


@pytest.mark.parametrize("name", [256 * "a", 128 * "é"])
def test_a_name_that_is_too_long_is_a_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_run = functools.partial(loaded_model.open_run, best=False, fsdp=1, source=None)
    recipe = ["main", f"--config={name}.py"]
    uses = [run_files.check_workdir, find_runs, vit_jax.load, loaded_model.is_run, open_run]
    uses += [functools.partial(layout_table.choose_target, layout=None), lambda _: parse_command_line(recipe)]
    for use in uses:
        with pytest.raises(UserError, match=r"names of at most 255 bytes, but .*\.\.\. has \d+\.$"):
            use(name)
    for path in (f"{name[:-2]}/{name[:-2]}", f"https://host/{name}", f"gs://bucket/{name}"):
        paths.check_names(path)
    assert paths.short_name("a,b=1") == "a,b=1"
    made = [paths.short_name(f"{name}{end}") for end in ("", "b")]
    assert made[0] != made[1] and all(len(one.encode()) < 225 for one in made)
