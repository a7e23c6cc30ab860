"""The processes of a run as one group: who they are, and what each tells the others beside the devices' own traffic.

A process is called a host here, as on a TPU pod, where there is one on each. The only user of JAX's coordination
service.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
from jax._src import distributed  # its key-value store has no public name

from vit_jax import LostHosts, UserError

POLL = 0.02  # seconds
JOINING = 300  # seconds for every host to arrive
NUMBERS = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


class ProcessGroup:
    """The hosts of this run.

    Attributes:
        host: number of this one.
        hosts: how many there are.
        limit: seconds to wait for the others, at most.
    """

    limit = 1800.0
    _topics: ClassVar[Counter[str]] = (
        Counter()
    )  # of this process: a second run in it must not find the first one's answers

    def __init__(self) -> None:
        """Finds out what JAX knows."""
        self._client: Any = distributed.global_state.client
        self.host, self.hosts = distributed.global_state.process_id, distributed.global_state.num_processes

    def share(self, topic: str, value: str = "") -> list[str]:
        """Returns every host's value, in the hosts' order, once all have come here.

        Args:
            topic: that the value is about; the same on all hosts.
            value: of this host.

        Raises:
            LostHosts: some did not come within `limit`.
        """
        if self.hosts == 1:
            return [value]
        self._topics[f"{self.host} {topic}"] += 1
        folder = f"share/{topic}/{self._topics[f'{self.host} {topic}']}"
        self._client.key_value_set(f"vit_jax/{folder}/{self.host}", value)
        end, pause = time.monotonic() + self.limit, POLL
        while len(values := self.told(folder)) < self.hosts:
            if time.monotonic() > end:
                missing = ", ".join(str(host) for host in range(self.hosts) if str(host) not in values)
                raise LostHosts(f"waited {self.limit:g} s at {topic!r} for host {missing}; its log says where it is.")
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return [values[str(host)] for host in range(self.hosts)]

    def tell(self, key: str, value: str, replace: bool = False) -> None:
        """Writes a value where all hosts find it, unless there is one and `replace` is False."""
        try:
            self._client.key_value_set(f"vit_jax/{key}", value, replace)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise

    def told(self, folder: str) -> dict[str, str]:
        """Returns what was told in a folder, by the last part of the key."""
        return {key.rpartition("/")[2]: value for key, value in self._client.key_value_dir_get(f"vit_jax/{folder}/")}


def join_cluster() -> ProcessGroup:
    """Connects this process to the others of its cluster, if it is in one, and returns the group.

    The environment tells of it: Cloud TPU, GKE, Slurm and Open MPI in their own words, which JAX reads, any other by
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Raises:
        UserError: the environment contradicts itself, or does not tell all that is needed.
    """
    _check_slices()
    # JAX's service would swallow a SIGTERM until the next step; `guard` answers it at once.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        numbers = {name: int(os.environ[variable]) for name, variable in NUMBERS.items() if variable in os.environ}
        with _without_proxies():
            jax.distributed.initialize(initialization_timeout=JOINING, **numbers)
    except ValueError as error:
        # Without any sign of a cluster this process is alone.
        if not str(error).startswith("coordinator_address") or set(NUMBERS.values()) & set(os.environ):
            raise UserError(f"cannot join the other processes: {error}") from error
    return ProcessGroup()


@contextlib.contextmanager
def _without_proxies() -> Iterator[None]:
    """Hides the variables of proxies: hosts speak directly, and through one they would wait for each other in vain."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.lower() in PROXIES}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _check_slices() -> None:
    """Raises UserError if what tells of several TPU slices is not whole: JAX would wait for ever."""
    names = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")
    found = {name: os.environ[name] for name in names if os.environ.get(name)}
    if not found:
        return
    told = ", ".join(f"{name}={value}" for name, value in found.items())
    try:
        whole = 0 <= int(found[names[2]]) < int(found[names[1]])
    except (KeyError, ValueError):
        whole = False
    if not whole:
        lacking = ", ".join(name for name in names if name not in found) or "a slice's number below that of slices"
        raise UserError(f"several TPU slices are half declared: {told}; set {lacking} too, or unset them all.")
