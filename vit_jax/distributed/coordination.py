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

POLL = 0.02  # seconds between two looks for the values of other hosts, at first
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
        folder = f"gather/{topic}/{self._calls[f'{self.host} {topic}']}"
        self.put(f"{folder}/{self.host}", value, once=True)
        end, pause = time.monotonic() + limit, POLL
        while len(values := self.get(folder)) < self.hosts:
            if time.monotonic() > end:
                missing = ", ".join(str(host) for host in range(self.hosts) if str(host) not in values)
                raise LostHosts(
                    f"hosts that did not reach {topic!r} within {limit:g} s: {missing}; the log of each shows where it "
                    "stopped."
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return [values[str(host)] for host in range(self.hosts)]

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
        found = self._store.key_value_dir_get(f"vit_jax/{folder}/")
        return {key.rpartition("/")[2]: json.loads(value) for key, value in found}


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
    found = {name: os.environ[name] for name in names if os.environ.get(name)}
    if not found:
        return
    declared = ", ".join(f"{name}={value}" for name, value in found.items())
    try:
        complete = 0 <= int(found[names[2]]) < int(found[names[1]])
    except (KeyError, ValueError):
        complete = False
    if not complete:
        missing = ", ".join(name for name in names if name not in found) or "a slice ID below the number of slices"
        raise UserError(
            f"the multi-slice settings are incomplete: {declared}; set {missing} too, or unset all MEGASCALE variables."
        )
