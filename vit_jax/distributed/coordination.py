"""The group of a run's processes: they exchange values through the key-value store of JAX's coordination service.

No other module uses that service. A process is called a host here, because a TPU pod has one process on each host.
"""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
from jax._src import distributed  # JAX has no public name for its key-value store

from vit_jax import LostHosts, UserError

POLL_SECONDS = 0.02  # between the first two times that host 0 looks for the values of the other hosts
MAX_POLL_FRACTION = 0.1  # the largest part of host 0's time that looking for values may take
GATHER_WAIT_SECONDS = 2.0  # that one request of another host to the store may take, before it is repeated
GATHER_GRACE_SECONDS = 60.0  # beyond the limit, which other hosts give host 0 to say which hosts are missing
JOIN_TIMEOUT_SECONDS = 300  # for every host to arrive
# Without heartbeat for this long, JAX ends all processes. The watchdog acts earlier and says why.
JAX_HEARTBEAT_TIMEOUT_SECONDS = 180
NUMBERS = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
CALLS: Counter[str] = Counter()  # of this process, so that a second run in it does not find the values of the first

Json = Any


@runtime_checkable
class Coordinator(Protocol):
    """Exchanges values between the hosts of a run."""

    @property
    def host(self) -> int:
        """The number of this host, from 0."""

    @property
    def hosts(self) -> int:
        """The number of hosts."""

    def all_gather(self, topic: str, value: Json = None) -> list[Json]:
        """Waits until all hosts have called this with the same topic, and returns their values in the hosts' order."""


@runtime_checkable
class KeyValueStore(Protocol):
    """The methods of the client of JAX's coordination service that are used here."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False, /) -> None:
        """Writes a value.

        Raises:
            JaxRuntimeError: ALREADY_EXISTS, if the key has a value and `allow_overwrite` is False.
        """

    def key_value_dir_get(self, folder: str, /) -> list[tuple[str, str]]:
        """Returns (key, value) for all keys that begin with `folder`."""

    def blocking_key_value_get(self, key: str, milliseconds: int, /) -> str:
        """Waits until a key has a value, and returns the value.

        Raises:
            JaxRuntimeError: DEADLINE_EXCEEDED, if the key has no value after `milliseconds`.
        """


class ProcessGroup:
    """The hosts of this run. A `Coordinator`.

    Attributes:
        host: the number of this host, from 0.
        hosts: the number of hosts.
    """

    def __init__(
        self, store: KeyValueStore | None = None, host: int = 0, hosts: int = 1, calls: Counter[str] = CALLS
    ) -> None:
        """Makes a group of hosts that share a store.

        Args:
            store: the store through which the hosts exchange values; None if there is a single host.
            host: the number of this host.
            hosts: the number of hosts.
            calls: counts how often each host has gathered each topic; changed in place.
        """
        self._store, self.host, self.hosts, self._calls = store, host, hosts, calls

    def all_gather(self, topic: str, value: Json = None, limit: float = 1800.0) -> list[Json]:
        """Waits until all hosts have called this, and returns their values in the hosts' order.

        Host 0 collects the values and writes them to the store under one key, equal values only once. Every other host
        reads that key. The work of the store, which runs on host 0, thus grows linearly with the number of hosts.

        Args:
            topic: names the value; the same on all hosts.
            value: the value of this host, as JSON.
            limit: seconds to wait for the other hosts.

        Raises:
            LostHosts: some hosts did not call this within `limit`.
        """
        if self.hosts == 1:
            return [value]
        self._calls[f"{self.host} {topic}"] += 1
        call = self._calls[f"{self.host} {topic}"]
        self.put(f"gather/{topic}/{call}/{self.host}", value, once=True)
        gathered = f"gathered/{topic}/{call}"
        if self.host == 0:
            self.put(gathered, self._collect(f"gather/{topic}/{call}", limit), once=True)
        collected = self._wait(gathered, limit + GATHER_GRACE_SECONDS)
        if collected is None or collected["missing"]:
            missing = ", ".join(map(str, collected["missing"])) if collected else "0"
            raise LostHosts(
                f"these hosts did not reach {topic!r} within {limit:g} s: {missing}; the log of each host shows where "
                "it stopped."
            )
        return [json.loads(collected["texts"][number]) for number in collected["numbers"]]

    def _collect(self, folder: str, limit: float) -> Json:
        """Returns, on host 0, the values that all hosts have put in a folder.

        The result has `missing`, the numbers of the hosts without a value after `limit` seconds. If none is missing, it
        also has `texts`, the different values as JSON texts, and `numbers`, for each host the index of its value in
        `texts`.
        """
        end, pause = time.monotonic() + limit, POLL_SECONDS
        while True:
            start = time.monotonic()
            values = self.get(folder)
            if len(values) == self.hosts:
                break
            if start > end:
                return {"missing": [host for host in range(self.hosts) if str(host) not in values]}
            time.sleep(max(pause, (time.monotonic() - start) / MAX_POLL_FRACTION))
            pause = min(2 * pause, 0.25)
        texts = [json.dumps(values[str(host)]) for host in range(self.hosts)]
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        return {"missing": [], "texts": list(numbers), "numbers": [numbers[text] for text in texts]}

    def _wait(self, key: str, limit: float) -> Json:
        """Waits until a key has a value, and returns the value; None if there is none after `limit` seconds."""
        assert self._store
        end = time.monotonic() + limit
        while time.monotonic() < end:
            try:
                return json.loads(self._store.blocking_key_value_get(f"vit_jax/{key}", int(1000 * GATHER_WAIT_SECONDS)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        return None

    def put(self, key: str, value: Json, replace: bool = False, once: bool = False) -> None:
        """Writes a value to the store, where all hosts can get it.

        Args:
            key: the key of the value.
            value: the value, as JSON.
            replace: whether an existing value is replaced; if not, it stays as it is.
            once: whether an existing value is an error.

        Raises:
            JaxRuntimeError: the store cannot be reached, or `once` is set and the key has a value.
        """
        assert self._store
        try:
            self._store.key_value_set(f"vit_jax/{key}", json.dumps(value), replace)
        except jax.errors.JaxRuntimeError as error:
            if once or "ALREADY_EXISTS" not in str(error):
                raise

    def get(self, folder: str) -> dict[str, Json]:
        """Returns last part of a key -> value, for the values that were put in a folder."""
        assert self._store
        entries = self._store.key_value_dir_get(f"vit_jax/{folder}/")
        return {key.rpartition("/")[2]: json.loads(value) for key, value in entries}


SINGLE_HOST = ProcessGroup()


def run_on_all(coordinator: Coordinator, topic: str, work: Callable[[], Json]) -> list[Json]:
    """Calls `work()` on every host, waits for all, and returns the results of all hosts in the hosts' order.

    All hosts must call it with the same topic. If `work` raises an exception on this host, that exception is raised
    again after all hosts have finished.

    Args:
        coordinator: exchanges the results.
        topic: names the work.
        work: the work of this host; its result must be JSON.

    Raises:
        UserError: `work` raised a UserError on another host.
        RuntimeError: `work` raised another exception on another host.
    """
    failed: Exception | None = None
    value = None
    try:
        value = work()
    except Exception as error:  # bugs too, as the other hosts must not wait for this one
        failed = error
    own = {"value": value, "error": failed and str(failed), "is_user_error": isinstance(failed, UserError)}
    answers = coordinator.all_gather(topic, own)
    if failed:
        raise failed
    for host, answer in enumerate(answers):
        if answer["error"] is not None:
            kind = UserError if answer["is_user_error"] else RuntimeError
            raise kind(f"on host {host}: {answer['error']}")
    return [answer["value"] for answer in answers]


def current_group() -> ProcessGroup:
    """Returns the group that JAX has connected this process to, or a group of one host if it has not."""
    state = distributed.global_state
    return ProcessGroup(state.client, state.process_id, state.num_processes)


def join_cluster() -> ProcessGroup:
    """Connects this process to the other processes of its cluster and returns the group; alone, a group of one host.

    The environment tells whether there is a cluster. JAX recognises Cloud TPU, GKE, Slurm and Open MPI by variables of
    their own. On any other cluster JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID must be set.

    Raises:
        UserError: the environment is contradictory or incomplete.
    """
    _check_slices()
    # JAX's own handler would hold a SIGTERM back until the next step, while `Supervisor` reacts at once.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        numbers = {name: int(os.environ[variable]) for name, variable in NUMBERS.items() if variable in os.environ}
        with _without_proxies():
            jax.distributed.initialize(
                initialization_timeout=JOIN_TIMEOUT_SECONDS,
                heartbeat_timeout_seconds=JAX_HEARTBEAT_TIMEOUT_SECONDS,
                **numbers,
            )
    except ValueError as error:
        # If nothing in the environment indicates a cluster, this process is alone.
        if not str(error).startswith("coordinator_address") or set(NUMBERS.values()) & set(os.environ):
            raise UserError(f"cannot join the other processes: {error}") from error
    return current_group()


@contextlib.contextmanager
def _without_proxies() -> Iterator[None]:
    """Hides the environment variables of proxies inside the block, as hosts cannot reach each other through a proxy."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.lower() in PROXIES}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _check_slices() -> None:
    """Raises UserError if the variables of a multi-slice run are incomplete; JAX would wait for ever."""
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
            f"the environment variables for several slices are incomplete or wrong ({declared}); set {missing}, or "
            "unset all variables MEGASCALE_*."
        )
