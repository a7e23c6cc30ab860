"""Trials of a bucket that fails or changes while two hosts train on shards that they stream from it."""

import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.hosts import Hosts, saved
from tests.faults.trials import Outcome, check, finish, same
from tests.storage import fake_gcs

BUCKET = "gs://bkt/digits"
WORDS = ["--config.mesh.fsdp=2", "--config.data.order=stream", "--config.data.readers=4", "--config.data.window=2"]
WORDS += ["--config.evals.test.source=digits", "--config.evals.test.split=test"]
REMOTE = [*WORDS, f"--config.data.source=array_record:{BUCKET}"]
SHARDS, KEPT = 24, 16  # and how many of them the disk of a host holds
# Latency is met last: what fails, fails at once. A sixth of all answers fail.
FAULTS = [{"kind": kind, "share": 0.04} for kind in ("reset", "short", "429", "503")]
FAULTS += [{"kind": "503", "share": 0.02, "retry_after": 1}, {"kind": "stall", "count": 1, "path": "alt=media"}]
FAULTS += [{"kind": "latency", "seconds": [0.005, 0.5]}]


def pack(folder: Path) -> None:
    """Writes the training images of the digits in shards."""
    command = [sys.executable, "-m", "vit_jax.pack", "digits", str(folder), "--splits=train", f"--shards={SHARDS}"]
    subprocess.run(command, check=True, capture_output=True)


def send(port: int, path: Path) -> None:
    """Puts a file into the bucket, in place of any of its name."""
    address = f"http://127.0.0.1:{port}/upload/storage/v1/b/bkt/o?uploadType=media&name=digits/{path.name}"
    urllib.request.urlopen(address, path.read_bytes()).close()


def remove(port: int, path: Path) -> None:
    """Removes a file of that name from the bucket."""
    address = f"http://127.0.0.1:{port}/storage/v1/b/bkt/o/digits%2F{path.name}"
    urllib.request.urlopen(urllib.request.Request(address, method="DELETE")).close()


@contextlib.contextmanager
def served(packed: Path, caches: Path) -> Iterator[tuple[int, Callable[[int], dict[str, str]]]]:
    """Yields the port of a bucket with the shards, and the environment of each host, whose disk holds some of them."""
    largest = max(path.stat().st_size for path in packed.iterdir())

    def variables(host: int) -> dict[str, str]:
        room = {"VIT_JAX_CACHE": f"{caches}{host}", "VIT_JAX_CACHE_GB": str(KEPT * largest / 1e9)}
        return fake_gcs.environment(port) | room

    with fake_gcs.started("bkt") as port:
        for path in packed.iterdir():
            send(port, path)
        yield port, variables


def misbehaves(folder: Path, packed: Path, whole: Path) -> Outcome:
    """A store of which a sixth of the answers fail, and all others are late."""
    workdir = folder / "misbehaves"
    with served(packed, folder / "misbehaves-cache") as (port, variables):
        fake_gcs.tell(port, *FAULTS)
        finish(workdir, 2, 2, *REMOTE, variables=variables)
        met, requests = fake_gcs.told(port)
    text = "".join(workdir.with_name(f"{workdir.name}.{host}.log").read_text() for host in (0, 1))
    check(all(met) and "failed at first" in text and "Traceback" not in text, f"met {met}: {text[-2000:]}")
    check(same(workdir, whole), "the run differs")
    failed = sum(met[:-1])
    return 1, f"{failed} of {requests} requests failed, {text.count('failed at first')} warnings; equal bit by bit"


def changes(folder: Path, packed: Path, whole: Path) -> Outcome:
    """Shards that are replaced, and shards that are deleted, while a run goes on."""
    shards = sorted(packed.glob("*.array_record"))
    for name, change, words in (
        ("replaced", send, "was replaced after this run had listed it"),
        ("deleted", remove, f"there is no {BUCKET}/"),
    ):
        workdir = folder / name
        with served(packed, folder / f"{name}-cache") as (port, variables):
            with Hosts(workdir, 2, 2, *REMOTE, slow=0.1, variables=variables) as run:
                run.await_step(3)
                for path in shards:
                    change(port, path)
                codes = run.wait()
            check(codes == [2, 2], f"exit codes {codes}: {run.output()[-2000:]}")
            step = saved(workdir)[-1]
            told = (
                f"{BUCKET}/train-" in run.output() and words in run.output() and f"step {step} is saved" in run.output()
            )
            check(told and "Traceback" not in run.output(), run.output()[-2000:])
            for path in shards:
                send(port, path)
            finish(workdir, 2, 2, *REMOTE, variables=variables)
        check(same(workdir, whole), f"the resumed run differs: {name}")
    return 2, "exit code 2 on all, a shard named, the last step saved; with the shards of before resumed bit by bit"
