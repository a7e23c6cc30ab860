"""Watches over a run while its main thread works: SIGTERM, hosts that fail, vanish or hang, and the time to save.

All hosts run the same programs on the devices in the same order, and count them. What must happen on all at the same
place, the end of a preempted run say, is agreed on in rounds that the first host opens: every host stops counting and
tells its count, and it happens at the largest of them plus one. Two threads watch: one has only the clock and the
signals, the other speaks with the hosts, so that nothing hangs with a host that does not answer.
"""

import faulthandler
import json
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from vit_jax import LostHosts, Preempted, exit_code
from vit_jax.distributed.coordination import ProcessGroup, join_cluster

PERIOD = 1.0  # seconds between two looks at the other hosts
MANY = 128  # hosts; more of them look less often
LOST = 60.0  # seconds of silence after which a host counts as lost
PARTING = 10.0  # seconds that the last words of a run may take
SOON = 15.0  # seconds of waiting for the other hosts to start after which that is told
STUCK = exit_code(LostHosts())
STARTUP = "preempted before the first step of this start; nothing is lost: the same command goes on."
PREEMPTED = "preempted; nothing was left to be saved: the same command goes on."
OWN_FAULT = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")  # of a program, whatever became of other hosts


class Guard:
    """Watches, while it is entered; outside of a `with` it only counts.

    Attributes:
        pod: the hosts.
        limit: seconds without progress on this host after which the run is ended.
        save_every: seconds between two saves, or None.
    """

    limit = 1800.0
    save_every: float | None = None

    def __init__(self) -> None:
        """Counts for the processes that JAX knows of."""
        self.pod = ProcessGroup()
        self._changed = threading.Condition()  # of the counts, and of what is agreed
        self._held = False  # no count goes on while hosts agree
        self._ticks = self._moves = 0
        self._phase, self._since, self._patient = "starting", time.monotonic(), False
        self._saved = time.monotonic()
        self._wishes: set[str] = set()  # of this host, not yet told
        self._stop: int | None = None  # the count at which all end
        self._saves: list[int] = []  # the counts at which all save
        self._round = 0
        self._error: Exception | None = None
        self._seen: dict[str, tuple[str, float]] = {}  # host -> its last sign of life, and since when
        self._watching, self._joined = False, True
        self._over = threading.Event()

    def __enter__(self) -> "Guard":
        """Begins to watch; in the main thread."""
        faulthandler.enable(sys.__stderr__ or 2)  # what JAX itself aborts, for a lost host say, shows where it was
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        # The signal is answered by a thread: the main one may be compiling, or waiting for other hosts.
        self._handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
        self._watching = True
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def join(self) -> None:
        """Connects to the other hosts.

        Raises:
            UserError: see `coordination.join_cluster`.
        """
        self._joined = False
        self.at("waiting for every host to start")
        self.pod = join_cluster()
        self._joined = True
        self.at("starting")
        if self.pod.hosts > 1:
            threading.Thread(target=self._listen, daemon=True).start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Ends, and lets the other hosts know how."""
        try:
            if self.pod.hosts > 1:
                self._tell_end(error)
        finally:
            self._watching = False
            self._over.set()
            signal.signal(signal.SIGTERM, self._handler)
            signal.set_wakeup_fd(self._before)

    def at(self, phase: str, patient: bool = False) -> None:
        """Says what the main thread begins: progress. All hosts say the same in the same order.

        Args:
            phase: in words.
            patient: it may take longer than `limit` where no other host waits for it: a download, say.
        """
        self._phase, self._since, self._patient = phase, time.monotonic(), patient
        self._moves += 1

    def tick(self) -> None:
        """Counts a program that all hosts have begun on their devices.

        Raises:
            Preempted: the hosts have agreed to end here.
            Exception: what was handed to `fail`.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._held)
            self._ticks += 1
            ends = self._stop is not None and self._ticks >= self._stop
        self.at(self._phase)
        error, self._error = self._error, None
        if error:
            raise error
        if ends:
            raise Preempted(PREEMPTED)

    def save_due(self) -> bool:
        """Returns whether it is time to save, `save_every` after the last save, on all hosts; says so once."""
        if not self._watching and self.pod.hosts == 1 and self._late():
            return True
        with self._changed:
            due = [count for count in self._saves if count <= self._ticks]
            self._saves = [count for count in self._saves if count > self._ticks]
        return bool(due)

    def saved(self) -> None:
        """Lets the time until the next save count from here."""
        self._saved = time.monotonic()

    def share(self, topic: str, value: str = "") -> list[str]:
        """Returns every host's value, in the hosts' order.

        Raises:
            LostHosts: see `Pod.share`.
        """
        self.at(f"waiting for the other hosts at {topic!r}")
        self.pod.limit = 2 * self.limit  # the watching thread, which shows where all are, comes first
        values = self.pod.share(topic, value)
        self.at(f"after {topic!r}")
        return values

    def fail(self, error: Exception) -> None:
        """Lets the main thread raise an error that another one has found, when it counts next."""
        self._error = error

    def _late(self) -> bool:
        return self.save_every is not None and time.monotonic() - self._saved > self.save_every

    def _watch(self) -> None:
        """Looks at the clock and at signals; speaks with nobody."""
        last = time.monotonic()
        told = False
        while not self._over.is_set():
            readable, _, _ = select.select([self._pipe[0]], [], [], PERIOD / 2)
            if readable and signal.SIGTERM in os.read(self._pipe[0], 4096):
                self._wishes.add("stop")
            now = time.monotonic()
            if now - last > LOST / 2:  # this process stood still itself: it has seen nothing
                self._since, self._seen = now, {host: (sign, now) for host, (sign, _) in self._seen.items()}
            last = now
            if self.pod.host == 0 and self._ticks and self._late():
                self.saved()
                self._wishes.add("save")
            if not self._joined:
                if not told and now - self._since > SOON:
                    print("vit_jax: waiting for the other hosts; was this started on all?", file=sys.stderr, flush=True)
                    told = True
                if "stop" in self._wishes and now - self._since > SOON:
                    self._leave(STARTUP, exit_code(Preempted()))
                continue
            if self.pod.hosts == 1:
                for wish in list(self._wishes):
                    self._wishes.remove(wish)
                    self._settle(wish, self._ticks)
            silent = [host for host, (_, since) in self._seen.items() if now - since > LOST]
            if self._over.is_set():
                return
            if silent:
                self._hang(f"host {', '.join(silent)} has not been heard of for {LOST:g} s")
            if now - self._since > self.limit and not (self._patient and self.pod.hosts == 1):
                self._hang(f"no progress for {self.limit:g} s; --config.stall_limit allows more")

    def _listen(self) -> None:
        """Speaks with the other hosts; what fails is tried again."""
        period, beats, waiting = PERIOD * max(1.0, self.pod.hosts / MANY), 0, False
        while not self._over.wait(period / 10 if waiting else period):
            beats += 1
            try:
                self._look(beats)
                waiting = self._agree()
            except jax.errors.JaxRuntimeError:  # JAX ends the process itself when the coordinating host is gone
                continue

    def _look(self, beats: int) -> None:
        """Shows the other hosts that this one lives, sees which of them do, and hears of the end."""
        pod, own, now = self.pod, str(self.pod.host), time.monotonic()
        pod.tell(f"alive/{own}", json.dumps([beats, self._moves, round(now - self._since), self._phase]), replace=True)
        gone = pod.told("bye")
        for host, sign in pod.told("alive").items():
            if host != own and self._seen.get(host, ("", 0.0))[0] != sign:
                self._seen[host] = sign, now
        for host in gone:
            self._seen.pop(host, None)
        if (end := pod.told("end")) and not self._over.is_set():
            told = json.loads(end["end"])
            if told["host"] != pod.host:
                self._follow(told)

    def _agree(self) -> bool:
        """Takes a step in the round that is open, if one is; returns whether it waits for other hosts' counts."""
        pod = self.pod
        if "stop" in self._wishes:
            pod.tell("ask/stop", str(pod.host))
            self._wishes.discard("stop")
        rounds = pod.told("round")
        if str(self._round) not in rounds:
            wished = ["stop"] if "stop" in pod.told("ask") and "stop" not in rounds.values() else []
            wished += ["save"] if "save" in self._wishes else []
            if pod.host == 0 and wished:
                pod.tell(f"round/{self._round}", wished[0])
                self._wishes.discard(wished[0])
            return bool(wished)
        with self._changed:
            self._held = True
        pod.tell(f"count/{self._round}/{pod.host}", str(self._ticks))
        counts = pod.told(f"count/{self._round}")
        if len(counts) < pod.hosts:
            return True
        self._round += 1
        self._settle(rounds[str(self._round - 1)], max(map(int, counts.values())))
        return False

    def _settle(self, what: str, count: int) -> None:
        """Lets something happen on all hosts when they have counted one more than any has."""
        with self._changed:
            if what == "save":
                self._saves.append(count + 1)
            elif self._stop is None:
                self._stop = count + 1
            self._held = False
            self._changed.notify_all()
        if what == "stop" and not count:
            self._leave(STARTUP, exit_code(Preempted()))

    def _follow(self, told: dict[str, Any]) -> NoReturn:
        """Ends as another host has told."""
        if told["code"] == STUCK:
            self._abort(told["sentence"])
        self._leave(f"host {told['host']} ended the run: {told['sentence']}", told["code"])

    def _hang(self, sentence: str) -> NoReturn:
        """Ends the run, and all hosts, since one of them hangs; says which is where."""
        now = time.monotonic()
        signs = {self.pod.host: (self._moves, now - self._since, self._phase)}
        for host, (sign, since) in self._seen.items():
            _, moves, seconds, phase = json.loads(sign)
            signs[int(host)] = moves, seconds + now - since, phase
        places = {host: f"host {host} {phase!r} for {seconds:.0f} s" for host, (_, seconds, phase) in signs.items()}
        first = min(moves for moves, _, _ in signs.values())
        behind = [host for host, (moves, _, _) in sorted(signs.items()) if moves == first]
        if len(behind) < len(signs):
            sentence += f"; behind the others: {', '.join(places.pop(host) for host in behind)}"
        sentence += f"; at {', '.join(places[host] for host in sorted(places))}."
        if self.pod.hosts > 1:
            self._try(lambda: self._tell(STUCK, sentence))
        self._abort(sentence)

    def _abort(self, sentence: str) -> NoReturn:
        """Ends this process as one that a signal ended, all threads' stacks shown."""
        print(f"vit_jax: {sentence} The threads of host {self.pod.host}:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        self._leave("the run is ended; the same command goes on from what was saved last.", STUCK)

    def _leave(self, sentence: str, code: int) -> NoReturn:
        """Ends this process from another thread than the main one, which may not come back."""
        print(f"vit_jax: {sentence}", file=sys.stderr, flush=True)
        if self.pod.hosts > 1:
            self._try(self._part)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(code)

    def _tell_end(self, error: BaseException | None) -> None:
        """Leaves together with the others, or tells them why this host leaves them."""
        if error is None or isinstance(error, Preempted):
            self.share("the end")
        elif isinstance(error, jax.errors.JaxRuntimeError) and not any(word in str(error) for word in OWN_FAULT):
            # So it looks when another host is gone: then the watching thread ends this process.
            print(f"vit_jax: {str(error).splitlines()[0]}; is a host lost?", file=sys.stderr, flush=True)
            time.sleep(LOST + 3 * PARTING)
        if error is not None and not isinstance(error, Preempted):
            code, text = exit_code(error), str(error)
            known = code != 1 or type(error).__module__.startswith("vit_jax")
            self._try(lambda: self._tell(code, text if known else f"{type(error).__name__}: {text}"))
        self._over.set()
        self._try(self._part)

    def _tell(self, code: int, sentence: str) -> None:
        self.pod.tell("end/end", json.dumps({"host": self.pod.host, "code": code, "sentence": sentence}))

    def _part(self) -> None:
        """Lets all hear of the end before the host that coordinates is gone."""
        self.pod.tell(f"bye/{self.pod.host}", "")
        while self.pod.host == 0 and len(self.pod.told("bye")) < self.pod.hosts:
            time.sleep(0.05)

    def _try(self, call: Callable[[], None]) -> None:
        """Calls what may not return, when the coordinating host hangs, for some time."""

        def run() -> None:
            try:
                call()
            except jax.errors.JaxRuntimeError as error:
                print(f"vit_jax: the other hosts were not told: {error}", file=sys.stderr, flush=True)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(PARTING)
