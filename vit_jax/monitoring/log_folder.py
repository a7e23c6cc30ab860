"""Files of a run that grow record by record, and that the disk may refuse for a while."""

import collections
import logging
import os
from pathlib import Path

from vit_jax import reason

MOST_KEPT = 2**24  # bytes of records that wait for the disk


class LogFolder:
    """Appends records to files, each record whole or not at all.

    Records that cannot be written, perhaps since the disk is full, wait in memory until they can: no run ends for its
    logs. If more than `MOST_KEPT` bytes wait, the oldest records are lost.
    """

    def __init__(self, path: Path):
        """Writes to files in the folder."""
        self._path = path
        self._waiting: collections.deque[tuple[str, bytes]] = collections.deque()
        self._lengths: dict[str, int] = {}  # file that may end in a part of a record -> its length without that part
        self._told, self._lost = False, 0

    def append(self, name: str, record: bytes) -> None:
        """Appends a record to a file."""
        self._waiting.append((name, record))
        self.flush()

    def flush(self) -> None:
        """Writes the records that wait, as far as the disk takes them."""
        try:
            while self._waiting:
                self._write(*self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            self._tell_refused(error)
        else:
            self._tell_written()

    def close(self) -> None:
        """Writes the records that wait, and logs a warning if the disk still refuses them: they are lost."""
        self.flush()
        if self._waiting:
            lost = self._lost + len(self._waiting)
            logging.getLogger(__name__).warning("%d records of the logs in %s are lost", lost, self._path)

    def _write(self, name: str, record: bytes) -> None:
        with (self._path / name).open("ab", buffering=0) as file:
            length = file.seek(0, os.SEEK_END)
            if name in self._lengths:
                length = file.truncate(min(length, self._lengths[name]))
            self._lengths[name] = length
            while record:
                record = record[file.write(record) :]
        del self._lengths[name]  # once it is closed: on some disks, that is when they refuse

    def _tell_refused(self, error: OSError) -> None:
        while sum(len(record) for _, record in self._waiting) > MOST_KEPT:
            self._waiting.popleft()
            self._lost += 1
        if not self._told:
            message = "the logs in %s cannot be written (%s); training goes on, and they are written when possible"
            logging.getLogger(__name__).warning(message, self._path, reason(error))
        self._told = True

    def _tell_written(self) -> None:
        if self._told:
            message = "the logs in %s can be written again; %d of their records are lost"
            logging.getLogger(__name__).warning(message, self._path, self._lost)
        self._told, self._lost = False, 0
