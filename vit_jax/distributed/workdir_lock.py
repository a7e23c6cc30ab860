"""The lock of a workdir, so that only one run at a time writes there, even from different machines."""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vit_jax import UserError, user_errors
from vit_jax.storage import filesystem

FILE = "owner.json"
KEYS = {"run", "machine", "host", "pid", "started"}
HEARTBEAT_SECONDS = 2.5  # between two times that the holder rewrites the file


class WorkdirLock:
    """The lock of a workdir: the file `<workdir>/owner.json`, which the holder rewrites every few seconds.

    Attributes:
        remote: whether the workdir is in a store such as gs:// and not on a disk.
    """

    def __init__(self, location: str, lost: Callable[[UserError], None]):
        """Prepares the lock; `acquire` takes it.

        Args:
            location: the workdir, local or remote.
            lost: called from another thread when another run has taken the workdir.
        """
        self._location, self._path, self._lost = location, filesystem.join_path(location, FILE), lost
        self.remote = filesystem.is_remote(location)
        self._id = {"run": uuid.uuid4().hex, "machine": _machine(), "host": socket.gethostname(), "pid": os.getpid()}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Takes the lock, and starts the thread that rewrites the file.

        It may take some seconds to see whether a holder on another machine still writes.

        Raises:
            UserError: another run holds the lock, or the file cannot be written.
        """
        holder = self._read()
        if holder and self._is_alive(holder):
            raise self._taken(holder)
        self._write(0)
        holder = self._read()
        if holder and holder["run"] != self._id["run"]:  # another run took the lock at the same time
            raise self._taken(holder)
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Releases the lock, if this run holds it."""
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        with contextlib.suppress(UserError, OSError):
            holder = self._read()
            if holder and holder["run"] == self._id["run"]:
                self._remove()

    def _is_alive(self, holder: dict[str, Any]) -> bool:
        if holder["machine"] == self._id["machine"] and holder["started"]:
            return _started(holder["pid"]) == holder["started"]
        # The clocks of machines differ, so the file is watched for changes.
        before = self._state()
        end = time.monotonic() + 3 * HEARTBEAT_SECONDS
        while time.monotonic() < end:
            time.sleep(HEARTBEAT_SECONDS / 5)
            now = self._state()
            if now[0] is None:
                return False
            if now != before:
                return True
        return False

    def _state(self) -> tuple[dict[str, Any] | None, int]:
        """Returns the content of the file, and when a local one was modified: both change while a holder is alive."""
        with contextlib.suppress(OSError):
            return self._read(), 0 if self.remote else os.stat(self._path).st_mtime_ns
        return None, 0

    def _taken(self, holder: dict[str, Any]) -> UserError:
        who = f"process {holder['pid']} on {holder['host']}"
        return UserError(
            f"{self._location} is in use by another run, {who}; stop that run or choose another --workdir."
        )

    def _beat(self) -> None:
        beats = 0
        while not self._over.wait(HEARTBEAT_SECONDS):
            beats += 1
            holder = None
            with contextlib.suppress(UserError):  # a store that refuses is reported when a checkpoint is saved
                holder = self._read()
                if not holder or holder["run"] == self._id["run"]:
                    self._beat_once(beats)
            if holder and holder["run"] != self._id["run"]:
                return self._lost(self._taken(holder))

    def _beat_once(self, beats: int) -> None:
        try:
            self._write(beats)
        except UserError:
            if self.remote:
                raise
            with contextlib.suppress(OSError):
                os.utime(self._path)  # which a full disk accepts

    def _read(self) -> dict[str, Any] | None:
        try:
            if self.remote:
                text = filesystem.read_bytes(self._path) if filesystem.exists(self._path) else b""
            else:
                text = Path(self._path).read_bytes()
            holder = json.loads(text)
        except (ValueError, OSError):  # there is no file, or it is cut short
            return None
        return holder if isinstance(holder, dict) and holder.keys() >= KEYS else None

    def _write(self, beats: int) -> None:
        text = json.dumps(self._id | {"started": _started(os.getpid()), "beats": beats})
        if not self.remote:
            with user_errors(f"cannot write to the workdir {self._location}"):
                Path(self._location).mkdir(parents=True, exist_ok=True)
        filesystem.write_bytes(self._path, text.encode())

    def _remove(self) -> None:
        if self.remote:
            filesystem.remove_files(self._location, [FILE])
        else:
            Path(self._path).unlink()
            Path(self._location).rmdir()  # fails, silently, if the folder has other files


def _machine() -> str:
    """Returns a text that identifies this machine since its last boot, and its namespace of process numbers."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _started(pid: int) -> str:
    """Returns when a process of this machine was started, in clock ticks since boot.

    Returns an empty text if the process has ended or cannot be seen.
    """
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    return ""
