"""Who writes to a workdir: one run at a time, wherever it runs."""

import contextlib
import json
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vit_jax import UserError
from vit_jax.storage import filesystem

NAME = "owner.json"
KEYS = {"run", "machine", "host", "pid", "started"}
BEAT = 2.5  # seconds between two signs of life


class WorkdirLock:
    """The file `<workdir>/owner.json`, which its run rewrites every few seconds as long as it lives.

    Attributes:
        remote: the workdir is not on a disk of this machine.
    """

    def __init__(self, place: str, lost: Callable[[UserError], None]):
        """Takes nothing yet.

        Args:
            place: the workdir, local or remote.
            lost: called from another thread when another run has taken the workdir.
        """
        self._place, self._path, self._lost = place, filesystem.join_path(place, NAME), lost
        self.remote = filesystem.is_remote(place)
        self._id = {"run": uuid.uuid4().hex, "machine": _machine(), "host": socket.gethostname(), "pid": os.getpid()}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> str:
        """Takes the workdir, and returns nothing to tell.

        Raises:
            UserError: another run lives there, or nothing can be written there.
        """
        found = self._read()
        if found and self._lives(found):
            raise self._taken(found)
        self._write(0)
        found = self._read()
        if found and found["run"] != self._id["run"]:  # both began at once
            raise self._taken(found)
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        return ""

    def release(self) -> None:
        """Lets go of the workdir, if it is held."""
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        with contextlib.suppress(UserError, OSError):
            found = self._read()
            if found and found["run"] == self._id["run"]:
                self._remove()

    def _lives(self, found: dict[str, Any]) -> bool:
        if found["machine"] == self._id["machine"] and found["started"]:
            return _started(found["pid"]) == found["started"]
        end = time.monotonic() + 3 * BEAT  # its clock is not ours: look whether it goes on
        while time.monotonic() < end:
            time.sleep(BEAT / 5)
            now = self._read()
            if now is None:
                return False
            if now != found:
                return True
        return False

    def _taken(self, found: dict[str, Any]) -> UserError:
        who = f"process {found['pid']} on {found['host']}"
        return UserError(f"{self._place} is in use by another run, {who}; stop that one or choose another --workdir.")

    def _beat(self) -> None:
        beats = 0
        while not self._over.wait(BEAT):
            beats += 1
            with contextlib.suppress(UserError):  # of the store: whether it takes what matters is told when it is saved
                found = self._read()
                if found and found["run"] != self._id["run"]:
                    return self._lost(self._taken(found))
                self._write(beats)

    def _read(self) -> dict[str, Any] | None:
        try:
            if self.remote:
                text = filesystem.read_bytes(self._path) if filesystem.exists(self._path) else b""
            else:
                text = Path(self._path).read_bytes()
            found = json.loads(text)
        except (ValueError, OSError):  # none, or one that was cut short
            return None
        return found if isinstance(found, dict) and found.keys() >= KEYS else None

    def _write(self, beats: int) -> None:
        text = json.dumps(self._id | {"started": _started(os.getpid()), "beats": beats})
        folder = Path(tempfile.gettempdir() if self.remote else self._place)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f".{NAME}.{self._id['run']}"
            partial.write_text(text)
            if self.remote:
                filesystem.upload(partial, self._path)
                partial.unlink()
            else:
                partial.replace(self._path)
        except OSError as error:
            raise UserError(f"cannot write to the workdir {self._place}: {error.strerror or error}.") from error

    def _remove(self) -> None:
        if self.remote:
            filesystem.remove_files(self._place, [NAME])
        else:
            Path(self._path).unlink()
            Path(self._place).rmdir()  # if there is nothing else in it


def _machine() -> str:
    """Returns what tells this machine, and the process numbers valid here, from others."""
    told = [socket.gethostname()]
    with contextlib.suppress(OSError):
        told += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(told)


def _started(pid: int) -> str:
    """Returns when a process of this machine was started, as the kernel counts; nothing if it is no more, or if that
    cannot be known here.
    """
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    return ""
