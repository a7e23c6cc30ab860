"""What several hosts do each for itself and must agree on: none goes on while another fails."""

import json
from collections.abc import Callable

from vit_jax import UserError

# (topic, text of this host) -> the texts of all hosts in their order, once all have called it.
Share = Callable[[str, str], list[str]]


def alone(topic: str, value: str) -> list[str]:
    """Shares among one host."""
    return [value]


def run_on_all(share: Share, topic: str, work: Callable[[], str]) -> list[str]:
    """Returns what `work` gives on every host, in their order, once it is over on all.

    Raises:
        UserError: it did so on one of them: here what was raised here, else what was on another.
        RuntimeError: it ended so on another one, for no fault of the user's.
    """
    failed: Exception | None = None
    value = ""
    try:
        value = work()
    except Exception as error:  # a bug too: the others are not to wait for this host
        failed = error
    told = [value, str(failed) if failed else None, isinstance(failed, UserError)]
    answers = [json.loads(text) for text in share(topic, json.dumps(told))]
    if failed:
        raise failed
    for host, (_, elsewhere, users) in enumerate(answers):
        if elsewhere is not None:
            raise (UserError if users else RuntimeError)(f"on host {host}: {elsewhere}")
    return [value for value, _, _ in answers]
