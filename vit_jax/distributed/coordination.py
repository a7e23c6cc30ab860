"""The processes of a run as one group: what one puts, all can get. The only user of JAX's coordination service.

A process is called a host here, as on a TPU pod, where there is one on each.
"""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax
from jax._src import distributed  # JAX has no public name for its key-value store

from vit_jax import LostHosts, UserError

POLL = 0.02  # seconds between two looks of host 0 for the values of the others, at first
SHARE = 0.1  # of host 0's time, at most, that these looks may take
WAIT = 2.0  # seconds for which another host asks for what host 0 has gathered, before it asks again
LATE = 60.0  # seconds that it gives host 0 beyond the limit, to say who did not come
JOINING = 300  # seconds for every host to arrive
SILENCE = 180  # seconds after which JAX itself ends all processes; the watchdog, which tells who is lost, comes first
NUMBERS = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
CALLS: Counter[str] = Counter()  # of this process: a second run in it must not find the values of the first

Json = Any


@runtime_checkable
class KeyValueStore(Protocol):
    """What JAX's coordination service offers."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False, /) -> None:
        """Writes a value.

        Raises:
            JaxRuntimeError: ALREADY_EXISTS, if there is one and `allow_overwrite` is False.
        """

    def key_value_dir_get(self, folder: str, /) -> list[tuple[str, str]]:
        """Returns the keys that begin with `folder`, and their values."""

    def blocking_key_value_get(self, key: str, milliseconds: int, /) -> str:
        """Returns a value as soon as there is one.

        Raises:
            JaxRuntimeError: DEADLINE_EXCEEDED, if there is none in time.
        """


class ProcessGroup:
    """The hosts of this run.

    Attributes:
        host: number of this one.
        hosts: how many there are.
    """

    def __init__(
        self, store: KeyValueStore | None = None, host: int = 0, hosts: int = 1, calls: Counter[str] = CALLS
    ) -> None:
        """Makes a group of hosts that share a store; without one, this host is alone.

        Args:
            store: what they exchange values through.
            host: number of this one.
            hosts: how many there are.
            calls: counts the gatherings of each topic so far.
        """
        self._store, self.host, self.hosts, self._calls = store, host, hosts, calls

    def all_gather(self, topic: str, value: Json = None, limit: float = 1800.0) -> list[Json]:
        """Returns every host's value, in the hosts' order, once all have come here.

        Host 0 collects them, and the others get all of them from it at once, equal ones in one copy: so the work for
        the store, which host 0 serves, grows as the number of hosts.

        Args:
            topic: what the value is about; the same on all hosts.
            value: of this host, as JSON.
            limit: seconds to wait for the others.

        Raises:
            LostHosts: some did not come in time.
        """
        if self.hosts == 1:
            return [value]
        self._calls[f"{self.host} {topic}"] += 1
        call = self._calls[f"{self.host} {topic}"]
        self.put(f"gather/{topic}/{call}/{self.host}", value, once=True)
        gathered = f"gathered/{topic}/{call}"
        if self.host == 0:
            self.put(gathered, self._collect(f"gather/{topic}/{call}", limit), once=True)
        collected = self._wait(gathered, limit + LATE)
        if collected is None or collected["missing"]:
            missing = ", ".join(map(str, collected["missing"])) if collected else "0"
            raise LostHosts(
                f"hosts that did not reach {topic!r} within {limit:g} s: {missing}; the log of each shows where it "
                "stopped."
            )
        return [json.loads(collected["texts"][number]) for number in collected["numbers"]]

    def _collect(self, folder: str, limit: float) -> Json:
        """Returns, on host 0, the different values in a folder and which is that of each host, or who is missing."""
        end, pause = time.monotonic() + limit, POLL
        while True:
            start = time.monotonic()
            values = self.get(folder)
            if len(values) == self.hosts:
                break
            if start > end:
                return {"missing": [host for host in range(self.hosts) if str(host) not in values]}
            time.sleep(max(pause, (time.monotonic() - start) / SHARE))
            pause = min(2 * pause, 0.25)
        texts = [json.dumps(values[str(host)]) for host in range(self.hosts)]
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        return {"missing": [], "texts": list(numbers), "numbers": [numbers[text] for text in texts]}

    def _wait(self, key: str, limit: float) -> Json:
        """Returns a value once there is one; None if there is none in time."""
        assert self._store
        end = time.monotonic() + limit
        while time.monotonic() < end:
            try:
                return json.loads(self._store.blocking_key_value_get(f"vit_jax/{key}", int(1000 * WAIT)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        return None

    def put(self, key: str, value: Json, replace: bool = False, once: bool = False) -> None:
        """Writes a value where all hosts can get it.

        Args:
            key: of the value.
            value: as JSON.
            replace: whether it replaces a value that is there; else that stays.
            once: that there is one is an error.

        Raises:
            JaxRuntimeError: the store cannot be reached, or there is a value although it must be the first.
        """
        assert self._store
        try:
            self._store.key_value_set(f"vit_jax/{key}", json.dumps(value), replace)
        except jax.errors.JaxRuntimeError as error:
            if once or "ALREADY_EXISTS" not in str(error):
                raise

    def get(self, folder: str) -> dict[str, Json]:
        """Returns the values that were put in a folder, by the last part of their keys."""
        assert self._store
        entries = self._store.key_value_dir_get(f"vit_jax/{folder}/")
        return {key.rpartition("/")[2]: json.loads(value) for key, value in entries}


def current_group() -> ProcessGroup:
    """Returns the group that JAX has connected this process to; a group of one, if it has not."""
    state = distributed.global_state
    return ProcessGroup(state.client, state.process_id, state.num_processes)


def join_cluster() -> ProcessGroup:
    """Connects this process to the others of its cluster, if it is in one, and returns the group.

    The environment tells: Cloud TPU, GKE, Slurm and Open MPI by variables of their own, which JAX reads; any other
    cluster by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Raises:
        UserError: the environment contradicts itself, or does not tell all that is needed.
    """
    _check_slices()
    # JAX's service would swallow a SIGTERM until the next step; `Supervisor` answers it at once.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        numbers = {name: int(os.environ[variable]) for name, variable in NUMBERS.items() if variable in os.environ}
        with _without_proxies():
            jax.distributed.initialize(initialization_timeout=JOINING, heartbeat_timeout_seconds=SILENCE, **numbers)
    except ValueError as error:
        # Without any sign of a cluster this process is alone.
        if not str(error).startswith("coordinator_address") or set(NUMBERS.values()) & set(os.environ):
            raise UserError(f"cannot join the other processes: {error}") from error
    return current_group()


@contextlib.contextmanager
def _without_proxies() -> Iterator[None]:
    """Hides the variables that name proxies: hosts connect directly, and through a proxy they would wait in vain."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.lower() in PROXIES}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _check_slices() -> None:
    """Raises UserError if several TPU slices are declared incompletely: JAX would wait for ever."""
    names = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")
    settings = {name: os.environ[name] for name in names if os.environ.get(name)}
    if not settings:
        return
    declared = ", ".join(f"{name}={value}" for name, value in settings.items())
    try:
        complete = 0 <= int(settings[names[2]]) < int(settings[names[1]])
    except (KeyError, ValueError):
        complete = False
    if not complete:
        missing = ", ".join(name for name in names if name not in settings) or "a slice ID below the number of slices"
        raise UserError(
            f"the multi-slice settings are incomplete: {declared}; set {missing} too, or unset all MEGASCALE variables."
        )
