"""The local side of a workdir: what a run writes lies here first, and that of a remote workdir is uploaded, whole."""

import hashlib
import logging
import re
import shutil
import threading
import time
from pathlib import Path

import jax

from vit_jax import UserError, cache, files

WRITABLE = ("gs", "s3")
PAUSE = 10.0  # seconds between two uploads, unless one is due
OTHERS = "checkpoints"  # a folder that is not mirrored


def check_place(workdir: str | Path) -> str:
    """Returns a workdir's path as text.

    Raises:
        UserError: nothing can be written there.
    """
    place = str(workdir)
    kind, colon, _ = place.partition(":/")
    if colon and re.fullmatch(r"\w+", kind) and (kind not in WRITABLE or not files.is_remote(place)):
        raise UserError(f"the workdir {place} is neither a local folder nor gs://BUCKET/... nor s3://BUCKET/...")
    return place.rstrip("/") if files.is_remote(place) else str(Path(place).expanduser())


class Mirror:
    """A local workdir itself, or a folder here whose files are kept in a remote one.

    Attributes:
        path: the folder here.
    """

    def __init__(self, place: str, names: tuple[str, ...]):
        """Begins with copies of those of `names` that a remote workdir holds."""
        self._place, self._remote = place, files.is_remote(place)
        self._sent: dict[str, tuple[int, int]] = {}
        self._thread: threading.Thread | None = None
        self._last = time.monotonic()
        if not self._remote:
            self.path = Path(place)
            return
        owner = hashlib.sha256(f"{place} {jax.process_index()}".encode()).hexdigest()[:16]
        self.path = cache.root() / "runs" / owner  # found, and emptied, by the same run after it was killed
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        files.download(place, set(names) & set(files.find(place)), self.path)
        self._sent = self._files()

    def push(self) -> None:
        """Uploads in the background what has changed, if the last upload is over and some time ago."""
        if not self._remote or time.monotonic() - self._last < PAUSE or (self._thread and self._thread.is_alive()):
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
        if self._remote:
            self._upload()

    def unlink(self, name: str) -> None:
        """Removes a file here and there."""
        (self.path / name).unlink(missing_ok=True)
        if self._remote and name in files.find(self._place):
            files.remove(self._place, [name])

    def close(self) -> None:
        """Uploads the rest; of a remote workdir nothing stays here."""
        self.flush()
        if self._remote:
            shutil.rmtree(self.path, ignore_errors=True)

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
                files.upload(self.path / name, files.join(self._place, name))
                self._sent[name] = state
        self._last = time.monotonic()

    def _try_upload(self) -> None:
        try:
            self._upload()
        except UserError as error:  # the next one may succeed; at a checkpoint it must
            self._last = time.monotonic()
            logging.getLogger(__name__).warning("logs not uploaded: %s", error)
