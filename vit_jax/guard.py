"""Watches over a run while its main thread works: SIGTERM, hosts that fail, vanish or hang, and the time to save.

All hosts run the same programs on the devices in the same order, and count them. Whatever must happen on all at the
same place, the end of a preempted run say, is agreed on between their watching threads: each holds its main thread
before its next program, they tell their counts, and it happens at the largest of them plus one.
"""

import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
from typing import Any, NoReturn

import jax

from vit_jax import LostHosts, NonFiniteLoss, Preempted, UserError
from vit_jax.pod import Pod, join

PERIOD = 1.0  # seconds between two looks at the other hosts
MANY = 128  # hosts; more of them look less often
LOST = 30.0  # seconds of silence after which a host counts as lost
PARTING = 5.0  # seconds that the last words of a run may take
STUCK = 128 + signal.SIGABRT  # exit code: infrastructure, not the program's fault
STARTUP = "preempted before the first step of this start; nothing is lost: the same command goes on."


class Guard:
    """Watches, while it is entered; outside of a `with` it only counts.

    Attributes:
        pod: the hosts.
        limit: seconds without progress on this host after which the run is ended.
        save_every: seconds between two saves, or None.
    """

    save_every: float | None = None

    def __init__(self) -> None:
        """Watches over the processes that JAX knows of."""
        self.pod = Pod()
        self._lock = threading.Lock()  # no program is begun while hosts agree
        self._ticks = self._moves = 0
        self._phase, self._since = "starting", time.monotonic()
        self._saved = time.monotonic()
        self._due: dict[str, int] = {}  # what was agreed on -> the count at which it happens
        self._asked: set[str] = set()
        self._saves = 0
        self._error: Exception | None = None
        self._seen: dict[str, tuple[str, float]] = {}  # host -> its last sign of life, and since when
        self._over = threading.Event()

    @property
    def limit(self) -> float:
        """Seconds without progress that are too many."""
        return self.pod.limit

    @limit.setter
    def limit(self, seconds: float) -> None:
        self.pod.limit = seconds

    def __enter__(self) -> "Guard":
        """Begins to watch; in the main thread."""
        faulthandler.enable(sys.__stderr__ or 2)  # what JAX itself aborts, for a lost host say, shows where it was
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        # The signal is answered by a thread: the main one may be compiling, or waiting for other hosts.
        self._handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def join(self) -> None:
        """Connects to the other hosts.

        Raises:
            UserError: see `pod.join`.
        """
        limit = self.limit
        self.at("waiting for every host to start")
        self.pod = join()
        self.limit = limit
        self.at("starting")
        if self.pod.hosts > 1:
            threading.Thread(target=self._listen, daemon=True).start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Ends, and lets the other hosts know how."""
        try:
            if self.pod.hosts > 1:
                self._tell_end(error)
        finally:
            self._over.set()
            signal.signal(signal.SIGTERM, self._handler)
            signal.set_wakeup_fd(self._before)

    def at(self, phase: str) -> None:
        """Says what the main thread begins: progress. All hosts say the same in the same order."""
        self._phase, self._since = phase, time.monotonic()
        self._moves += 1

    def tick(self) -> None:
        """Counts a program that all hosts have begun on their devices.

        Raises:
            Preempted: the hosts have agreed to end here.
            Exception: what was handed to `fail`.
        """
        with self._lock:
            self._ticks += 1
            due = self._ticks >= self._due.get("stop", sys.maxsize)
        self.at(self._phase)
        if self._error:
            raise self._error
        if due:
            raise Preempted

    def save_due(self) -> bool:
        """Returns whether the hosts have agreed to save, `save_every` after the last save; says so once."""
        with self._lock:
            if self._ticks < self._due.get("save", sys.maxsize):
                return False
            del self._due["save"]
        return True

    def saved(self) -> None:
        """Lets the time until the next save count from here."""
        self._saved = time.monotonic()

    def share(self, topic: str, value: str = "") -> list[str]:
        """Returns every host's value, in the hosts' order.

        Raises:
            LostHosts: see `Pod.share`.
        """
        self.at(f"waiting for the other hosts at {topic!r}")
        values = self.pod.share(topic, value)
        self.at(topic)
        return values

    def fail(self, error: Exception) -> None:
        """Lets the main thread raise an error that another one has found, when it counts next."""
        self._error = error

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over.is_set():
            readable, _, _ = select.select([self._pipe[0]], [], [], PERIOD / 2)
            if readable and signal.SIGTERM in os.read(self._pipe[0], 4096):
                self._ask("stop")
            now = time.monotonic()
            if now - last > LOST / 2:  # this process stood still itself: it has seen nothing
                self._since, self._seen = now, {host: (sign, now) for host, (sign, _) in self._seen.items()}
            last = now
            if self.save_every and self.pod.host == 0 and now - self._saved > self.save_every and self._ticks:
                self._saved = now
                self._saves += 1
                self._ask(f"save {self._saves}")
            lost = [host for host, (_, since) in self._seen.items() if now - since > LOST]
            if self._over.is_set():
                return
            if lost:
                self._hang(f"host {', '.join(lost)} has not been heard of for {LOST:g} s")
            if now - self._since > self.limit:
                self._hang(f"no progress for {self.limit:g} s; --config.stall_limit allows more")

    def _ask(self, what: str) -> None:
        """Proposes to all hosts that something happen."""
        if self.pod.hosts > 1:
            self.pod.tell(f"ask/{what}", str(self.pod.host))
        else:
            self._agree(what)

    def _agree(self, what: str) -> None:
        """Agrees with all hosts when something happens that one of them has asked for."""
        name = what.partition(" ")[0]
        with self._lock:
            count = max(int(ticks) for ticks in self.pod.share(f"agree/{what}", str(self._ticks)))
            self._due.setdefault(name, count + 1)
        if name == "stop" and not count:
            self._leave(STARTUP, 42)

    def _listen(self) -> None:
        """Looks at the other hosts, and shows them that this one lives."""
        pod, own = self.pod, str(self.pod.host)
        beats, period = 0, PERIOD * max(1.0, self.pod.hosts / MANY)
        while not self._over.wait(period):
            try:
                beats += 1
                where = [beats, self._moves, round(time.monotonic() - self._since), self._phase]
                pod.tell(f"alive/{own}", json.dumps(where), replace=True)
                now = time.monotonic()
                for host, sign in pod.told("alive").items():
                    if host != own and self._seen.get(host, ("", 0.0))[0] != sign:
                        self._seen[host] = sign, now
                for what in sorted(pod.told("ask").keys() - self._asked):
                    self._asked.add(what)
                    threading.Thread(target=self._agree, args=[what], daemon=True).start()
                end = pod.told("end")
            except jax.errors.JaxRuntimeError:  # JAX ends the process itself when the coordinating host is gone
                continue
            if end and not self._over.is_set():
                told = json.loads(end["end"])
                if told["host"] != pod.host:
                    self._follow(told)

    def _follow(self, told: dict[str, Any]) -> NoReturn:
        """Ends as another host has told."""
        if told["code"] is None:
            self._abort(told["sentence"])
        self._leave(f"host {told['host']} ended the run: {told['sentence']}", told["code"])

    def _hang(self, sentence: str) -> NoReturn:
        """Ends the run, and all hosts, since one of them hangs; says which is where."""
        signs = {int(host): json.loads(sign) for host, (sign, _) in self._seen.items()}
        signs[self.pod.host] = [0, self._moves, round(time.monotonic() - self._since), self._phase]
        places = {
            host: f"host {host} {phase!r} for {seconds} s" for host, (_, _, seconds, phase) in sorted(signs.items())
        }
        first = min(moves for _, moves, _, _ in signs.values())
        behind = [host for host, (_, moves, _, _) in signs.items() if moves == first]
        if len(behind) < len(signs):
            sentence += f"; behind the others: {', '.join(places.pop(host) for host in sorted(behind))}"
        sentence += f"; at {', '.join(places.values())}."
        if self.pod.hosts > 1:
            self._try(lambda: self._tell({"host": self.pod.host, "code": None, "sentence": sentence}))
        self._abort(sentence)

    def _abort(self, sentence: str) -> NoReturn:
        """Ends this process as one that a signal ended, all threads' stacks shown."""
        print(f"vit_jax: {sentence} The threads of host {self.pod.host}:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        self._try(self._part)
        os._exit(STUCK)

    def _leave(self, sentence: str, code: int) -> NoReturn:
        """Ends this process from another thread than the main one, which may not come back."""
        print(f"vit_jax: {sentence}", file=sys.stderr, flush=True)
        self._try(self._part)
        os._exit(code)

    def _tell_end(self, error: BaseException | None) -> None:
        """Leaves together with the others, or tells them why this host leaves them."""
        if error is None:
            self.share("the end")
            return
        if isinstance(error, jax.errors.JaxRuntimeError | LostHosts):
            # So it looks when another host is gone: then the watching thread ends this process.
            print(f"vit_jax: {str(error).splitlines()[0]}; is a host lost?", file=sys.stderr, flush=True)
            time.sleep(LOST + 2 * PERIOD)
        if not isinstance(error, Preempted):
            code = 2 if isinstance(error, UserError) else 130 if isinstance(error, KeyboardInterrupt) else 1
            known = isinstance(error, UserError | NonFiniteLoss)
            sentence = str(error) if known else f"{type(error).__name__}: {error}"
            self._try(lambda: self._tell({"host": self.pod.host, "code": code, "sentence": sentence}))
        self._over.set()
        self._try(self._part)

    def _tell(self, end: dict[str, Any]) -> None:
        self.pod.tell("end/end", json.dumps(end))

    def _part(self) -> None:
        """Lets all hear of the end before the host that coordinates is gone."""
        if self.pod.hosts > 1:
            self.pod.tell(f"bye/{self.pod.host}", "")
            while self.pod.host == 0 and len(self.pod.told("bye")) < self.pod.hosts:
                time.sleep(0.05)

    def _try(self, call: Any) -> None:
        """Calls what may not return, when the coordinating host hangs, for some time."""

        def run() -> None:
            try:
                call()
            except jax.errors.JaxRuntimeError as error:
                print(f"vit_jax: the other hosts were not told: {error}", file=sys.stderr, flush=True)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(PARTING)
