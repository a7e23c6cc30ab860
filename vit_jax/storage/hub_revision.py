"""The revisions of data sets on the Hugging Face hub: `hf://datasets/OWNER/NAME@REVISION/path`."""

import re

from vit_jax.storage import filesystem

DATASET = re.compile(r"hf://datasets/(?P<name>[^/@,+*]+/[^/@,+*]+)(?:@(?P<revision>[^/,+*]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")


def pin_revision(path: str) -> str:
    """Returns a path or a source in which the revision of a data set on the hub is replaced by its commit.

    Where no revision is stated, the commit of main is inserted. A path that is not on the hub is returned as it is.

    Raises:
        UserError: there is no such data set or revision, or the hub does not answer.
    """

    def pin(match: re.Match) -> str:
        name, revision = match["name"], match["revision"]
        commit = revision if COMMIT.fullmatch(revision or "") else filesystem.hub_commit(name, revision)
        return f"hf://datasets/{name}@{commit}"

    return DATASET.sub(pin, path)


def unpin_revision(path: str) -> str:
    """Returns a path or a source without the commit that it states. A revision that is not a commit stays."""
    return DATASET.sub(
        lambda match: f"hf://datasets/{match['name']}" if COMMIT.fullmatch(match["revision"] or "") else match[0], path
    )
