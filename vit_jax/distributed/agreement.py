"""Work that several hosts each do for themselves and must agree on: none goes on while another fails."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from vit_jax import UserError

Json = Any


@runtime_checkable
class Coordinator(Protocol):
    """How the hosts of a run agree."""

    @property
    def host(self) -> int:
        """Number of this host."""

    @property
    def hosts(self) -> int:
        """How many hosts there are."""

    def all_gather(self, topic: str, value: Json = None) -> list[Json]:
        """Returns every host's value, in the hosts' order, once all have called it with this topic."""

    def raise_later(self, error: Exception) -> None:
        """Has the main thread raise an error that another thread has found."""


class SingleHost:
    """A host that is alone, as a `Coordinator`."""

    host = 0
    hosts = 1

    def all_gather(self, topic: str, value: Json = None) -> list[Json]:
        """Returns the value alone."""
        return [value]

    def raise_later(self, error: Exception) -> None:
        """Raises the error at once: there is no other thread."""
        raise error


SINGLE_HOST = SingleHost()


def run_on_all(coordinator: Coordinator, topic: str, work: Callable[[], Json]) -> list[Json]:
    """Returns what `work` returns on every host, as JSON and in the hosts' order, once it is over on all.

    Raises:
        UserError: `work` raised one on some host; on this host its own comes first.
        RuntimeError: `work` failed on another host for a reason that is not the user's.
    """
    failed: Exception | None = None
    value = None
    try:
        value = work()
    except Exception as error:  # bugs too: the others must not wait for this host
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
