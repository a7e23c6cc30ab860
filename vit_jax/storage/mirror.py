"""The local side of a workdir: what a run writes lies here first, and that of a remote workdir is uploaded, whole."""

import contextlib
import hashlib
import logging
import re
import shutil
import threading
import time
from pathlib import Path

import jax

from vit_jax import NoAnswer, UserError
from vit_jax.storage import cache, filesystem

WRITABLE = ("gs", "s3")
PAUSE = 10.0  # seconds between two uploads, unless one is due
OTHERS = "checkpoints"  # a folder that is not mirrored


def check_workdir(workdir: str | Path) -> str:
    """Returns a workdir's path as text.

    Raises:
        UserError: nothing can be written there.
    """
    place = str(workdir)
    if re.match(r"\w+:/", place) and not re.match(rf"({'|'.join(WRITABLE)})://[^/]", place):
        raise UserError(f"the workdir {place} is neither a local folder nor gs://BUCKET/... nor s3://BUCKET/...")
    return place.rstrip("/") if filesystem.is_remote(place) else str(Path(place).expanduser())


def check_init_from(source: str | None, place: str) -> None:
    """Raises UserError if what a run starts from is what it would replace: its own workdir's model or checkpoints."""
    own = filesystem.absolute_path(place).rstrip("/")
    path = filesystem.absolute_path(source).rstrip("/") if source else ""
    if path in (own, f"{own}/model.npz") or f"{path}/".startswith(f"{own}/{OTHERS}/"):
        raise UserError(
            f"init_from={source} lies in the workdir {place}, where this run would replace it; "
            "choose another --workdir."
        )


def open_mirror(place: str, names: tuple[str, ...]) -> "Here | Mirror":
    """Opens the local side of a workdir; see `Here` and `Mirror`."""
    return Mirror(place, names) if filesystem.is_remote(place) else Here(Path(place))


class Here:
    """A local workdir, which is its own local side: as `Mirror`, with nothing to do."""

    def __init__(self, path: Path):
        """Takes the folder."""
        self.path = path

    def push(self) -> None:
        """Does nothing."""

    def flush(self) -> None:
        """Does nothing."""

    def exists(self, name: str) -> bool:
        """Returns whether there is a file."""
        return (self.path / name).exists()

    def unlink(self, name: str) -> None:
        """Removes a file that exists."""
        (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Does nothing."""


class Mirror:
    """A folder here whose files are kept in a remote workdir.

    Attributes:
        path: the folder here.
    """

    def __init__(self, place: str, names: tuple[str, ...]):
        """Begins with copies of those of `names` that the workdir holds.

        Raises:
            UserError: another process here writes to the workdir, or the store refuses or does not answer.
        """
        self._place = place
        self._thread: threading.Thread | None = None
        self._silent: NoAnswer | None = None
        self._last = time.monotonic()
        owner = hashlib.sha256(f"{place} {jax.process_index()}".encode()).hexdigest()[:16]
        self.path = cache.root() / "runs" / owner  # found, and emptied, by the same run after it was killed
        if not cache.lock_folder(self.path):
            raise UserError(f"another process on this machine writes to {place} already.")
        with contextlib.ExitStack() as undone:
            undone.callback(self.close)
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir()
            filesystem.download(place, set(names) & set(filesystem.list_files(place)), self.path)
            undone.pop_all()
        self._sent = self._files()

    def push(self) -> None:
        """Uploads in the background what has changed, if the last upload is over and some time ago."""
        if self._silent or time.monotonic() - self._last < PAUSE or (self._thread and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._try_upload, daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Uploads what has changed, now.

        Raises:
            UserError: the store refuses or does not answer.
        """
        if self._thread is not None:
            self._thread.join()
        if self._silent:
            raise self._silent
        self._upload()

    def exists(self, name: str) -> bool:
        """Returns whether there is a file in the remote workdir.

        Raises:
            UserError: the store refuses or does not answer.
        """
        return filesystem.exists(filesystem.join_path(self._place, name))

    def unlink(self, name: str) -> None:
        """Removes a file that exists in the remote workdir.

        Raises:
            UserError: the store refuses or does not answer.
        """
        (self.path / name).unlink(missing_ok=True)
        filesystem.remove_files(self._place, [name])

    def close(self) -> None:
        """Removes what is here."""
        shutil.rmtree(self.path, ignore_errors=True)
        cache.unlock_folder(self.path)

    def _files(self) -> dict[str, tuple[int, int]]:
        """Returns what lies here: name -> size and time of change."""
        found = {}
        for path in sorted(self.path.rglob("*")):
            name = path.relative_to(self.path).as_posix()
            if path.is_file() and path.suffix != ".partial" and not name.startswith(f"{OTHERS}/"):
                found[name] = (path.stat().st_size, path.stat().st_mtime_ns)
        return found

    def _upload(self) -> None:
        for name, state in self._files().items():  # sorted: model.json is there before model.npz
            if self._sent.get(name) != state:
                filesystem.upload(self.path / name, filesystem.join_path(self._place, name))
                self._sent[name] = state
        self._last = time.monotonic()

    def _try_upload(self) -> None:
        try:
            self._upload()
        except NoAnswer as error:  # what may still arrive must not replace what is newer: nothing is sent again
            self._silent = error
        except UserError as error:  # the next one may succeed; at a checkpoint it must
            self._last = time.monotonic()
            logging.getLogger(__name__).warning("logs not uploaded: %s", error)
