"""The revision of a data set on the Hugging Face hub: `hf://datasets/OWNER/NAME@REVISION/path`."""

import re

from vit_jax.storage import filesystem

DATASET = re.compile(r"hf://datasets/(?P<name>[^/@,]+/[^/@,]+)(?P<at>@(?P<revision>[^/,]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")


def pin_revision(path: str) -> str:
    """Returns a path or a source on the hub with the commit of its revision, by default of main; others as they are.

    Raises:
        UserError: there is no such data set or revision, or the hub does not answer.
    """
    match = DATASET.search(path)
    if not match or COMMIT.fullmatch(match["revision"] or ""):
        return path
    commit = filesystem.hub_commit(match["name"], match["revision"])
    return f"{path[: match.end('name')]}@{commit}{path[match.end() :]}"


def unpin_revision(path: str) -> str:
    """Returns a path or a source without the commit that it states, if it states one."""
    match = DATASET.search(path)
    if not match or not COMMIT.fullmatch(match["revision"] or ""):
        return path
    return path[: match.end("name")] + path[match.end() :]
