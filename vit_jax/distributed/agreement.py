"""Work that each host does by itself and that must succeed on all hosts: if it fails on one, all hosts stop."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from vit_jax import UserError

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

    def raise_later(self, error: Exception) -> None:
        """Makes the main thread raise an error that another thread has found."""


class SingleHost:
    """A `Coordinator` for a run on a single host."""

    host = 0
    hosts = 1

    def all_gather(self, topic: str, value: Json = None) -> list[Json]:
        """Returns [value]."""
        return [value]

    def raise_later(self, error: Exception) -> None:
        """Raises the error at once, in the calling thread."""
        raise error


SINGLE_HOST = SingleHost()


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
