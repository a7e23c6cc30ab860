"""Versions of remote files: what a store states of a file that changes when another file replaces it."""

import os
import uuid
from typing import Any, NamedTuple

# The fields of a listing that differ between versions of an object; stores know some of them.
FIELDS = (
    *("etag", "ETag", "generation", "mtime", "LastModified", "created"),
    *("last_modified", "Last-Modified", "modified", "modify", "updated", "blob_id", "sha", "Content-MD5"),
)
PROCESSES = "VIT_JAX_PROCESSES"  # the variable by which a process and its workers know each other


class Version(NamedTuple):
    """The version of a remote file; it can be sent to other processes.

    Attributes:
        size: the size in bytes; None: the store does not state it.
        field: the name of the field that identifies the version, one of FIELDS; empty: the store states none of them.
        value: the value of `field`. Without a field, a text that is unique to this process and its workers.
    """

    size: int | None
    field: str
    value: str

    @property
    def text(self) -> str:
        """A short text that differs between a file and another that replaces it."""
        return f"{self.size} {self.value}"

    @property
    def is_known(self) -> bool:
        """Whether the store states the size and a field that changes when another file replaces this one."""
        return bool(self.field) and self.size is not None

    def is_replaced(self, info: dict[str, Any]) -> bool:
        """Returns whether a store's later entry is of another file; False if the entry does not state `field`."""
        return bool(self.field) and str(info.get(self.field, self.value)) != self.value


def version_of(info: dict[str, Any]) -> Version:
    """Returns the version that a store's entry states."""
    field = next((field for field in FIELDS if info.get(field)), "")
    return Version(
        info["size"], field, str(info[field]) if field else os.environ.setdefault(PROCESSES, uuid.uuid4().hex)
    )
