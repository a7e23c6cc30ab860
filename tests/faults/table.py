"""Breaks real training runs in every way that the documents promise to survive, and prints what happened as a table.

python -m tests.faults.table --kills=20 --write=docs/reliability.md

Runs of several processes on this machine (CPU devices, gloo), which are killed, stopped, starved and lied to. A line
whose promise was not kept says BROKEN, and the exit code is then 1.
"""

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from docs.pages import replace_section
from tests.faults import store_faults
from tests.faults.hosts import QUICK, Hosts, metrics, saved
from tests.faults.preemptions import LAUNCHERS
from tests.faults.trials import Broken, Outcome, check, distance, finish, same

LOSSES = 1e-5  # relative, on another mesh
WORKERS = "--config.data.workers=1"
MANY = 1024  # hosts, which agree as slowly as so many exchange messages
INTERVAL = 10  # steps between two saves
LOST = 15  # seconds of silence after which a host counts as lost here; a run waits for LOST_AFTER_SECONDS
STALLED = 20  # seconds without progress after which a run here counts as stuck
SPLIT = "--config.mesh.fsdp=2"
PIPE = ["--config.evals.test.preprocess=resize(16)|value_range(-1,1)"]


def write_photos(folder: Path) -> Path:
    """Writes noise as PNG: 240 images to train and 24 to test of two classes."""
    random = np.random.default_rng(0)
    for split, count in (("train", 240), ("test", 24)):
        for number in range(count):
            path = folder / split / "ab"[number % 2] / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (20, 20, 3), np.uint8)).save(path)
    return folder


def fill(path: Path) -> None:
    """Writes a file until its disk has no byte left."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


class Faults:
    """The trials, in a folder of their own; each returns how often it tried and what happened."""

    def __init__(self, folder: Path, kills: int):
        folder.mkdir()
        self.folder, self.kills = folder, kills
        self.random = random.Random(0)
        self.making = threading.Lock()

    def whole(self) -> Path:
        """Returns the workdir of a run of 2 x 2 that nobody disturbed."""
        with self.making:
            if not (self.folder / "whole").exists():
                finish(self.folder / "whole", 2, 2, SPLIT)
        return self.folder / "whole"

    def stopped(self) -> Path:
        """Returns the workdir of a run that was preempted on its way."""
        workdir = self.folder / "stopped"
        with self.making:
            if not workdir.exists():
                with Hosts(workdir, 2, 2, SPLIT) as run:
                    run.await_step(12)
                    run.send(signal.SIGTERM, 1)
                    codes = run.wait()
                check(codes == [42, 42], f"exit codes {codes}")
        return workdir

    def copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.stopped(), self.folder / name))

    def resume_bitwise(self) -> Outcome:
        for hosts, devices in ((2, 2), (4, 1)):
            workdir = self.copy(f"bitwise{hosts}")
            finish(workdir, hosts, devices, SPLIT)
            check(same(workdir, self.whole()), f"{hosts} x {devices} differs")
        return 2, "every metric and weight equal bit by bit, on 2 x 2 and on 4 x 1"

    def resume_elsewhere(self) -> Outcome:
        meshes = [
            ("4 x 2", 4, 2, [SPLIT]),
            ("1 x 4", 1, 4, [SPLIT]),
            ("1 x 1", 1, 1, []),
            ("2 x 2, tensor=2", 2, 2, ["--config.mesh.tensor=2"]),
        ]
        [start] = saved(self.stopped())[-1:]
        found = {}
        for number, (name, hosts, devices, words) in enumerate(meshes):
            workdir = self.copy(f"elsewhere{number}")
            finish(workdir, hosts, devices, *words)
            found[name] = distance(workdir, self.whole(), start)
            check(found[name] <= LOSSES, f"losses differ by {found[name]:.1e} on {name}")
        return len(meshes), "losses of the next 10 steps: " + ", ".join(f"{n} {d:.1e}" for n, d in found.items())

    def preempted(self, text: str, hosts: tuple[int, ...], name: str, fault: str = "slow_steps:0") -> Outcome:
        """SIGTERM as soon as a host has printed a text."""
        began = self.folder / f"term-{name}"
        with Hosts(began, 2, 2, SPLIT, faults={0: fault, 1: fault}) as run:
            run.await_text(text)
            sent = time.monotonic()
            run.send(signal.SIGTERM, *hosts)
            codes = run.wait()
            took = time.monotonic() - sent
        check(codes == [42, 42], f"exit codes {codes}: {run.output()[-2000:]}")
        steps = saved(began)
        told = f"all left with 42 after {took:.1f} s"
        if text.startswith("step"):
            lines = {
                re.findall(r"preempted; the state after step (\d+) is saved", run.output(host))[0] for host in (0, 1)
            }
            check(lines == {str(steps[-1])}, f"hosts say {lines}, saved is {steps}")
            told += f", step {steps[-1]} saved"
        finish(began, 2, 2, SPLIT)
        check(same(began, self.whole()), "the resumed run differs")
        return 1, f"{told}; resumed and equal bit by bit"

    def term_step(self) -> Outcome:
        return self.preempted("step 12/", (1,), "step")

    def term_evaluation(self) -> Outcome:
        outcome = self.preempted("step 20/40  loss", (0,), "evaluation", "slow_evaluation:2")
        first = self.folder.joinpath("term-evaluation.0.log").read_text().partition("preempted")[0]
        check("step 20/40  test" not in first, "the evaluation was over before")
        return outcome

    def term_startup(self) -> Outcome:
        return self.preempted("Workdir:", (1,), "startup")

    def term_job(self) -> Outcome:
        """SIGTERM to all processes of a job, as a scheduler sends it; the hosts agree as slowly as many do."""
        workdir = self.folder / "term-job"
        seldom = dict.fromkeys((0, 1), f"many_hosts:{MANY}")
        with Hosts(workdir, 2, 2, SPLIT, WORKERS, faults=seldom, slow=0.4) as run:
            run.await_step(5)
            check(all(run.workers(host) for host in (0, 1)), "no workers")
            sent = time.monotonic()
            run.send_to_group(signal.SIGTERM)
            codes = run.wait()
            took = time.monotonic() - sent
        check(codes == [42, 42], f"exit codes {codes}: {run.output()[-2000:]}")
        step = saved(workdir)[-1]
        finish(workdir, 2, 2, SPLIT)
        check(same(workdir, self.whole()), "the resumed run differs")
        return 1, f"all left with 42 after {took:.1f} s, step {step} saved; resumed and equal bit by bit"

    def kill_worker(self) -> Outcome:
        workdir = self.folder / "worker"
        seldom = dict.fromkeys((0, 1), f"many_hosts:{MANY}")
        with Hosts(workdir, 2, 2, SPLIT, WORKERS, faults=seldom) as run:
            run.await_step(12)
            os.kill(run.workers(1)[0], signal.SIGKILL)
            codes = run.wait()
        check(codes == [2, 2], f"exit codes {codes}: {run.output()[-2000:]}")
        step = saved(workdir)[-1]
        for host in (0, 1):
            found = re.search(rf"ended by SIGKILL, .*; step {step} is saved", run.output(host))
            check(found is not None and "Traceback" not in run.output(host), run.output(host)[-2000:])
        finish(workdir, 2, 2, SPLIT)
        check(same(workdir, self.whole()), "the resumed run differs")
        return 1, f"exit code 2 on all, SIGKILL and a likely cause named, step {step} saved; resumed bit by bit"

    @contextlib.contextmanager
    def small_disk(self, name: str) -> Iterator[Path]:
        """Yields a workdir on a disk of its own."""
        disk = self.folder / name
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", disk], check=True, capture_output=True)
        try:
            yield disk
        finally:
            subprocess.run(["umount", "--lazy", disk], check=True)

    def full_disk(self) -> Outcome:
        """A disk without a free byte: for some steps, and until the next save."""
        try:
            for name, codes in (("full-while", [0, 0]), ("full", [2, 2])):
                with self.small_disk(name) as workdir:
                    with Hosts(workdir, 2, 2, SPLIT, slow=0.4) as run:
                        run.await_step(12)
                        fill(workdir / "other")
                        run.await_text("the logs in")
                        if codes == [0, 0]:
                            (workdir / "other").unlink()
                        ends = run.wait()
                    check(ends == codes, f"exit codes {ends}: {run.output()[-2000:]}")
                    check("Traceback" not in run.output(), run.output()[-2000:])
                    if codes == [2, 2]:
                        check("No space left on device; the last good checkpoint is 10" in run.output(), run.output())
                        (workdir / "other").unlink()
                        finish(workdir, 2, 2, SPLIT)
                    check(same(workdir, self.whole()), "the metrics or weights differ")
        except subprocess.CalledProcessError:
            return 0, "not tried: no disk may be mounted here"
        told = "no line of metrics is missing; exit code 2 at the next save, step 10 named"
        return 2, f"full for a while: warned once, {told}; all runs equal bit by bit"

    def closed_terminal(self) -> Outcome:
        workdir = self.folder / "closed"
        with Hosts(workdir, 2, 2, SPLIT, lines=32) as run:
            codes = run.wait()
        check(codes == [0, 0], f"exit codes {codes}")
        check(len(run.output(0).splitlines()) == 32, run.output(0))
        check(same(workdir, self.whole()), "the run differs")
        return 1, "the run came to its end, bit by bit"

    def kill_all(self) -> Outcome:
        """SIGKILL to all hosts, again and again: at random moments and, every second time, while a step is saved."""
        killed = saving = lost = ends = 0
        workdir = self.folder / "kill0"
        while killed < self.kills:
            with Hosts(workdir, 2, 2, SPLIT) as run:
                before = len(metrics(workdir))
                while len(metrics(workdir)) <= before and run.processes[0].poll() is None:
                    time.sleep(0.005)
                until = time.monotonic() + self.random.uniform(0, 1.5)
                while time.monotonic() < until or (killed % 2 and run.processes[0].poll() is None):
                    if killed % 2 and any((workdir / "checkpoints").glob("*tmp*")):
                        break
                    time.sleep(0.001)
                alive = run.processes[0].poll() is None
                run.send(signal.SIGKILL)
                run.wait()
            if not alive:
                check(run.processes[0].returncode == 0, run.output()[-2000:])
                ends += 1
                check(same(workdir, self.whole()), "the run that came to its end differs")
                workdir = self.folder / f"kill{ends}"
                continue
            killed += 1
            saving += any((workdir / "checkpoints").glob("*tmp*"))
            reached = max((line["step"] for line in metrics(workdir)), default=0)
            lost = max(lost, reached - max(saved(workdir), default=0))
        finish(workdir, 2, 2, SPLIT)
        check(same(workdir, self.whole()), "the run that came to its end differs")
        check(lost <= 2 * INTERVAL, f"{lost} steps lost")
        told = f"always resumed, {ends + 1} runs ended equal bit by bit; at most {lost} steps done again"
        return killed, f"{told} (saved every {INTERVAL}); {saving} kills came while saving"

    def gone(self, host: int, kind: signal.Signals) -> Outcome:
        workdir = self.folder / f"gone{host}{kind.name}"
        with Hosts(workdir, 2, 2, SPLIT, faults=dict.fromkeys((0, 1), f"lost_after:{LOST}")) as run:
            run.await_step(12)
            began = time.monotonic()
            run.send(kind, host)
            other = run.processes[1 - host]
            code = other.wait(120)
            took = time.monotonic() - began
        text = run.output(1 - host)
        check(code in (134, -signal.SIGABRT), f"exit code {code}")
        check("most recent call first" in text, "no stacks")
        named = f"nothing was heard from host {host}" in text or (host == 0 and "leader task" in text)
        check(named, f"the lost host is not named: {text[-2000:]}")
        finish(workdir, 2, 2, SPLIT)
        check(same(workdir, self.whole()), "the resumed run differs")
        told = f"ended after {took:.0f} s by a signal, host {host} named, stacks shown; resumed bit by bit"
        return 1, f"limit {LOST} s: {told}"

    def kill_one(self) -> Outcome:
        return self.gone(1, signal.SIGKILL)

    def kill_coordinator(self) -> Outcome:
        return self.gone(0, signal.SIGKILL)

    def stop_one(self) -> Outcome:
        return self.gone(1, signal.SIGSTOP)

    def stuck(self, fault: str, phase: str) -> Outcome:
        name = fault.partition(":")[0]
        workdir = self.copy(name)
        with Hosts(workdir, 2, 2, SPLIT, f"--config.stall_limit={STALLED}", faults={1: fault}) as run:
            began = time.monotonic()
            codes = run.wait(180)
            took = time.monotonic() - began
        text = run.output()
        check(codes == [134, 134], f"exit codes {codes}")
        check(re.search(rf"behind the others: host 1 in '{phase}", text) is not None, text[-3000:])
        for host in (0, 1):
            check("most recent call first" in run.output(host), f"no stacks of host {host}")
        return 1, f"limit {STALLED} s: all ended by a signal {took:.0f} s after the start, host 1 and {phase!r} named"

    def stuck_loader(self) -> Outcome:
        return self.stuck("stuck_loader:6", "data of step")

    def slow_restore(self) -> Outcome:
        return self.stuck("slow_restore:", "restoring")

    def differ(self) -> Outcome:
        workdir = self.folder / "differ"
        with Hosts(workdir, 2, 2, SPLIT, each={1: ["--config.base_lr=0.5"]}) as run:
            began = time.monotonic()
            codes = run.wait()
            took = time.monotonic() - began
        check(codes == [2, 2], f"exit codes {codes}")
        text = run.output(0)
        check("--config.base_lr is 0.002 on host 0, 0.5 on host 1" in text, text)
        return 1, f"exit code 2 on all after {took:.0f} s, start of Python included; field, values and hosts named"

    def private(self) -> Outcome:
        workdir = self.folder / "private"
        each = {host: [f"--workdir={self.folder}/private{host}"] for host in (0, 1)}
        with Hosts(workdir, 2, 2, SPLIT, each=each) as run:
            codes = run.wait()
        check(codes == [2, 2], f"exit codes {codes}")
        check("--workdir is" in run.output(0), run.output(0))
        return 1, "exit code 2 on all, the folders named"

    def two_runs(self) -> Outcome:
        workdir = self.folder / "two"
        with Hosts(workdir, 2, 2, SPLIT) as first:
            first.await_step(5)
            with Hosts(workdir, 2, 2, SPLIT) as second:
                codes = second.wait()
            check(codes == [2, 2], f"exit codes {codes}")
            check("is in use by another run, process" in second.output(0), second.output(0))
            check(first.wait() == [0, 0], first.output())
        check(same(workdir, self.whole()), "the first run was disturbed")
        return 1, "the second left with 2 and named the first, which went on undisturbed"

    def not_a_number(self) -> Outcome:
        workdir = self.folder / "nan"
        with Hosts(workdir, 2, 2, SPLIT, "--config.optim.max_nonfinite_skips=1", faults={0: "nan:23-24"}) as run:
            codes = run.wait()
        check(codes == [1, 1], f"exit codes {codes}")
        check("at step 24 (batch 23 of seed 0)" in run.output(0), run.output(0))
        check(saved(workdir) == [10, 20], f"saved: {saved(workdir)}")
        finish(workdir, 2, 2, SPLIT)
        check(same(workdir, self.whole()), "the resumed run differs")
        return 1, "one step skipped, at the second exit code 1 with step and batch; resumed from step 20 bit by bit"

    def damaged(self) -> Outcome:
        workdir = self.copy("damaged")
        newest, before = saved(workdir)[-1], saved(workdir)[-2]
        files = [path for path in (workdir / "checkpoints" / str(newest) / "state").rglob("*") if path.is_file()]
        for path in files:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        with Hosts(workdir, 2, 2, SPLIT) as run:
            check(run.wait() == [0, 0], run.output()[-2000:])
        text = run.output(0)
        check(f"Resuming {workdir} after step {before}" in text, text)
        check(same(workdir, self.whole()), "the resumed run differs")
        return 1, f"step {newest} set aside, loudly; resumed from step {before}, bit by bit"

    def refused_evaluation(self) -> Outcome:
        """Evaluations that can be seen never to work: the pipe of one, and an image of another."""
        photos = write_photos(self.folder / "cut-header")
        first = next((photos / "test").rglob("*.png"))
        first.write_bytes(first.read_bytes()[:20])
        trials = {
            "a crop of 16 x 16 pixels": [
                "--config.evals.test.preprocess=resize_small(15)|central_crop(16)|value_range(-1,1)"
            ],
            str(first): [f"--config.data.source=folder:{photos}", *PIPE],
        }
        for sentence, words in trials.items():
            workdir = self.folder / "refused"
            with Hosts(workdir, 2, 2, SPLIT, *words) as run:
                codes = run.wait()
            check(codes == [2, 2], f"exit codes {codes}: {run.output()[-2000:]}")
            check(sentence in run.output(), run.output()[-2000:])
            check(not metrics(workdir), "steps were made before")
        return len(trials), "exit code 2 on all before the first step, the pipe's crop and the image named"

    def unreadable_evaluation(self) -> Outcome:
        """An image of an evaluation of which only a full decode shows that it is damaged."""
        photos = write_photos(self.folder / "photos")
        words = [SPLIT, f"--config.data.source=folder:{photos}", *PIPE]
        finish(self.folder / "intact", 2, 2, *words)
        bad = max((photos / "test").rglob("*.png"))
        intact = bad.read_bytes()
        bad.write_bytes(intact[: len(intact) // 2])
        workdir = self.folder / "unreadable"
        for _ in range(2):
            self.ends_after(20, workdir, bad.name, *words)
        bad.write_bytes(intact)
        finish(workdir, 2, 2, *words)
        check(same(workdir, self.folder / "intact"), "the run that went on differs")
        return (
            2,
            "exit code 2 on all after step 20, which is saved, the image named; mended, the run went on bit by bit",
        )

    def large_evaluation(self) -> Outcome:
        """An evaluation for which the devices' memory does not do."""
        workdir = self.folder / "large"
        self.ends_after(20, workdir, "lower --config.batch_eval", SPLIT, fault="large_evaluation:")
        finish(workdir, 2, 2, SPLIT)
        check(same(workdir, self.whole()), "the run that went on differs")
        return 1, "exit code 2 on all after step 20, which is saved; with memory enough the run went on bit by bit"

    def ends_after(self, step: int, workdir: Path, sentence: str, *words: str, fault: str | None = None) -> None:
        """Runs until an evaluation fails after a step."""
        faults = dict.fromkeys((0, 1), fault) if fault else None
        with Hosts(workdir, 2, 2, *words, faults=faults) as run:
            codes = run.wait(300)
        check(codes == [2, 2], f"exit codes {codes}: {run.output()[-2000:]}")
        told = f"step {step} is saved; run the same command again to continue from that step."
        check(sentence in run.output() and told in run.output(), run.output()[-2000:])
        check(saved(workdir)[-1] == step, f"saved: {saved(workdir)}")

    def cleaned(self) -> Outcome:
        """Workdirs from which the checkpoints were removed to save disk, and one that was killed before its first."""
        for keep in ("model.npz", "metrics.jsonl"):
            workdir = Path(shutil.copytree(self.whole(), self.folder / f"cleaned {keep}"))
            shutil.rmtree(workdir / "checkpoints")
            if keep != "model.npz":
                (workdir / "model.npz").unlink()
            before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
            for words in ((SPLIT,), (SPLIT, "--config.model.depth=2")):
                with Hosts(workdir, 2, 2, *words) as run:
                    codes = run.wait()
                check(codes == [2, 2], f"exit codes {codes}: {run.output()[-2000:]}")
            after = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
            check(after == before, "the folder was changed")
        workdir = self.folder / "early"
        with Hosts(workdir, 2, 2, SPLIT) as run:
            run.await_step(3)
            run.send(signal.SIGKILL)
            run.wait()
        check(not saved(workdir), f"saved: {saved(workdir)}")
        finish(workdir, 2, 2, SPLIT)
        check(same(workdir, self.whole()), "the run that was started again differs")
        return 5, "refused with exit code 2, every file as it was; killed at step 3, a run starts anew"

    def streamed(self) -> tuple[Path, Path]:
        """Returns packed images, and the workdir of a run that has streamed them from here, undisturbed."""
        packed, workdir = self.folder / "packed", self.folder / "streamed"
        with self.making:
            if not workdir.exists():
                store_faults.pack(packed)
                finish(workdir, 2, 2, *store_faults.WORDS, f"--config.data.source=array_record:{packed}")
        return packed, workdir

    def store_misbehaves(self) -> Outcome:
        return store_faults.misbehaves(self.folder, *self.streamed())

    def store_changes(self) -> Outcome:
        return store_faults.changes(self.folder, *self.streamed())

    def preemptions(self) -> Outcome:
        """A launcher and stand-ins for what it asks: a hundred preemptions with all restarts' faults among them, and
        one fault more.
        """
        restarts = 10
        for name, (launch, preempted) in LAUNCHERS.items():
            ends = (["134"] + preempted * 5) * restarts
            run = launch(self.folder / f"preempted {name}", [*ends, "0"], restarts)
            check((run.code, run.starts) == (0, len(ends) + 1), f"{name}: {run.starts} starts, then {run.code}")
            ends = ["134", *preempted] * restarts + ["134"]
            run = launch(self.folder / f"faulty {name}", [*ends, "0"], restarts)
            check((run.code, run.starts) == (134, len(ends)), f"{name}: {run.starts} starts, then {run.code}")
        told = f"with {restarts} faults among them the run came to its end, the next fault ended it"
        return 100 * len(LAUNCHERS), f"{' and '.join(LAUNCHERS)}: {told}"


def table(folder: Path, kills: int, only: str) -> Iterator[tuple[str, str, bool]]:
    """Yields the beginning of each line of the table, the rest if it was tried, and whether the promise was kept.

    The trials wait on the clock: one that fails is repeated, and named, once.
    """
    trials: list[tuple[str, str, Callable[[Faults], Outcome]]] = [
        ("Exact resume", "SIGTERM to one of 2 x 2, resumed on 2 x 2 and on 4 x 1", Faults.resume_bitwise),
        ("Another mesh: losses to 1e-5", "the same, on other meshes", Faults.resume_elsewhere),
        ("Preemption saves", "SIGTERM to one host during a step", Faults.term_step),
        ("Preemption saves", "SIGTERM to one host as an evaluation begins", Faults.term_evaluation),
        (
            "Preemption saves",
            f"SIGTERM to all processes, loader workers too; as slow as {MANY:,} hosts",
            Faults.term_job,
        ),
        ("Preemption loses nothing", "SIGTERM to one host before the first step", Faults.term_startup),
        ("Preemptions are not counted", "a hundred preemptions (simulated launcher)", Faults.preemptions),
        (
            "What cannot work is refused first",
            "an evaluation with an impossible pipe; an unreadable image",
            Faults.refused_evaluation,
        ),
        (
            "A failing evaluation costs no training",
            "an image that only its decoding shows to be cut",
            Faults.unreadable_evaluation,
        ),
        ("A failing evaluation costs no training", "an evaluation step that does not fit", Faults.large_evaluation),
        (
            "A dead worker costs no training",
            f"SIGKILL to one host's worker; as slow as {MANY:,} hosts",
            Faults.kill_worker,
        ),
        ("Logs cost no training", "a disk that is full for a while; until the next save", Faults.full_disk),
        ("Logs cost no training", "terminals that are closed after 32 lines", Faults.closed_terminal),
        (
            "A finished run is never overwritten",
            "another run, and the same, in a workdir less its checkpoints",
            Faults.cleaned,
        ),
        ("A killed run loses an interval at most", "SIGKILL to all hosts, at random or while saving", Faults.kill_all),
        ("A lost host ends the run", "SIGKILL to one host", Faults.kill_one),
        ("A lost host ends the run", "SIGKILL to the coordinating host", Faults.kill_coordinator),
        ("A stuck host ends the run", "SIGSTOP to one host", Faults.stop_one),
        ("A stuck host ends the run", "a loader that gives nothing", Faults.stuck_loader),
        ("A stuck host ends the run", "a restore that takes for ever on one host", Faults.slow_restore),
        ("Hosts that differ do not start", "another learning rate on one host", Faults.differ),
        ("Hosts share the workdir", "a folder of its own for each host", Faults.private),
        ("One run writes to a workdir", "a second run in the same workdir", Faults.two_runs),
        (
            "A store that misbehaves costs time alone",
            "latency of 5 to 500 ms, resets, short reads, 429, 503, a stall, while 2 x 2 stream shards",
            Faults.store_misbehaves,
        ),
        (
            "Data that changes ends the run",
            "shards replaced, shards deleted, while they are streamed",
            Faults.store_changes,
        ),
        ("NaN never spreads", "NaN images in two steps, one skip allowed", Faults.not_a_number),
        ("Damage is noticed", "a flipped bit in each file of the newest checkpoint's state", Faults.damaged),
    ]

    first, second = Faults(folder / "first", kills), Faults(folder / "second", kills)
    seconds: dict[str, float] = {}

    def attempt(promise: str, fault: str, trial: Callable[[Faults], Outcome]) -> tuple[str, str, bool]:
        beginning = f"| {promise} | {fault} |"
        if not re.search(only, f"{promise} {fault} {trial.__name__}"):
            return beginning, "", True
        for faults in (first, second):
            began = time.monotonic()
            try:
                times, happened = trial(faults)
                kept = True
            except (Broken, TimeoutError, subprocess.TimeoutExpired) as error:
                times, happened, kept = 1, f"**BROKEN**: {str(error)[-1500:]}", False
            seconds[trial.__name__] = time.monotonic() - began
            print(f"{trial.__name__}: {happened} ({seconds[trial.__name__]:.0f} s)", file=sys.stderr, flush=True)
            if kept:
                break
            if faults is first:
                print(f"RERUN tests.faults.table --only={trial.__name__}", flush=True)
        return beginning, f" {times} | {happened} |", kept

    with ThreadPoolExecutor(3) as pool:  # many of them wait for a minute
        yield from pool.map(lambda row: attempt(*row), trials)
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:10]
    print("slowest: " + ", ".join(f"{name} {seconds[name]:.0f} s" for name in slowest), file=sys.stderr)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how often to kill at random [20]")
    parser.add_argument("--only", default="", help="regular expression: which trials")
    parser.add_argument("--write", type=Path, help="Markdown file whose table to replace, as far as it was tried")
    args = parser.parse_args(argv[1:])
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"
    with tempfile.TemporaryDirectory() as folder:
        rows = list(table(Path(folder), args.kills, args.only))
    header = ["| promise | fault | tried | what happened |", "|---|---|---|---|"]
    print("\n".join([*header, *(beginning + end for beginning, end, _ in rows if end)]))
    if args.write:
        before = args.write.read_text().splitlines()
        known = {beginning: line for beginning, _, _ in rows for line in before if line.startswith(beginning)}
        lines = [beginning + end if end else known.get(beginning) for beginning, end, _ in rows]
        replace_section(args.write, "faults", "\n".join([*header, *filter(None, lines)]) + "\n")
    return 0 if all(kept for _, _, kept in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
