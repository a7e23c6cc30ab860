"""The files of a run: it writes them to a local folder and, if its workdir is remote, uploads each of them whole."""

import contextlib
import hashlib
import logging
import os
import re
import shutil
import stat
import threading
import time
from pathlib import Path

import jax

from vit_jax import NoAnswer, UserError, encode_text
from vit_jax.storage import cache, filesystem
from vit_jax.storage.atomic import SUFFIX
from vit_jax.storage.paths import expand_home

WRITABLE = ("gs", "s3")  # protocols
UPLOAD_INTERVAL = 10.0  # seconds from one upload in the background to the next
GROWTH = 1 / 8  # share by which a file must have grown since its last upload to be uploaded again in the background
SMALL = 2**14  # a file of fewer bytes is uploaded however little it has grown
CHECKPOINTS = "checkpoints"  # the folder that `vit_jax.checkpoint` writes itself
AT_THE_END = "wandb"  # the folder of another program's working files
RELEASE = 60.0  # seconds that an earlier run of this process may take to finish
UPLOADED_LAST = "model.npz"  # a reader that finds the weights also finds `model.json`, which describes them


def check_workdir(workdir: str | Path) -> str:
    """Returns the path of a workdir as text, with `~` expanded and without a slash at the end.

    Raises:
        UserError: the workdir is neither a local folder nor gs://BUCKET/... nor s3://BUCKET/..., or see `check_utf8`.
    """
    location = str(workdir)
    check_utf8(filesystem.absolute_path(location))
    if re.match(r"\w+:/", location) and not re.match(rf"({'|'.join(WRITABLE)})://[^/]", location):
        raise UserError(f"the workdir {location} is neither a local folder nor gs://BUCKET/... nor s3://BUCKET/...")
    return location.rstrip("/") if filesystem.is_remote(location) else str(expand_home(location))


def check_utf8(path: str) -> None:
    """Raises UserError if a path is not UTF-8, which the library that writes and reads checkpoints needs."""
    if encode_text(path) != os.fsencode(path):
        raise UserError(f"{path} is not UTF-8, as the path of checkpoints must be; choose another folder.")


def check_init_from(source: str | None, location: str) -> None:
    """Raises UserError if `source` is the model or a checkpoint of the workdir `location`: the run would replace it."""
    own = filesystem.absolute_path(location).rstrip("/")
    path = filesystem.absolute_path(source).rstrip("/") if source else ""
    if path in (own, f"{own}/model.npz") or f"{path}/".startswith(f"{own}/{CHECKPOINTS}/"):
        raise UserError(
            f"init_from={source} is in the workdir {location}, where this run would replace it; choose another "
            "--workdir."
        )


def owner_of(location: str) -> str:
    """Returns the name of the local folder in which this host keeps its files of a remote workdir."""
    return hashlib.sha256(encode_text(f"{location} {jax.process_index()}")).hexdigest()[:16]


class RunFiles:
    """The files of a run but its checkpoints.

    Attributes:
        path: the workdir itself if it is local, else the local folder from which files are uploaded.
    """

    def __init__(self, location: str, names: tuple[str, ...]):
        """Opens a workdir. For a remote one, empties the local folder, and downloads the files `names` if they exist.

        Raises:
            UserError: the workdir is remote, and another process on this machine writes to it, an earlier run of this
                process has not released it after `RELEASE` seconds, or the store refuses or does not answer.
        """
        self._location, self._is_remote = location, filesystem.is_remote(location)
        self._thread: threading.Thread | None = None
        self._unanswered: NoAnswer | None = None
        self._last = time.monotonic()
        if not self._is_remote:
            self.path = Path(location)
            return
        self.path = cache.root() / "runs" / owner_of(location)  # if this run is killed, the next start empties it
        end = time.monotonic() + RELEASE
        while cache.is_locked_here(self.path):
            if time.monotonic() > end:
                raise UserError(f"an earlier training in this process still uploads to {location}; try again later.")
            time.sleep(0.05)
        if not cache.try_lock_folder(self.path):
            advice = "stop that process, or choose another --workdir"
            raise UserError(f"another process on this machine already writes to {location}; {advice}.")
        with contextlib.ExitStack() as undone:
            undone.callback(self.close)
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir()
            filesystem.download(location, set(names) & set(filesystem.list_files(location)), self.path)
            undone.pop_all()
        self._sent = self._files(is_final=False)

    def push(self) -> None:
        """Uploads changed files in the background. An error is logged; if the store does not answer, `flush` raises it.

        Uploads nothing while an upload is running, for `UPLOAD_INTERVAL` seconds after the last one, and once the store
        has not answered. A file that has grown by less than an eighth since its last upload waits, unless it is small:
        so all uploads of a growing file add up to at most about nine times its size.
        """
        if (
            not self._is_remote
            or self._unanswered
            or time.monotonic() - self._last < UPLOAD_INTERVAL
            or (self._thread and self._thread.is_alive())
        ):
            return
        self._thread = threading.Thread(target=self._try_upload, daemon=True)
        self._thread.start()

    def flush(self, is_final: bool = False) -> None:
        """Uploads all changed files and waits until they have arrived.

        Args:
            is_final: whether this is the last upload of the run, in which the files of `AT_THE_END` are uploaded too.

        Raises:
            UserError: the store refuses or does not answer, or has not answered an upload in the background.
        """
        if self._thread is not None:
            self._thread.join()
        if self._unanswered:
            raise self._unanswered
        if self._is_remote:
            self._upload(self._files(is_final))

    def exists(self, name: str) -> bool:
        """Returns whether a file exists in the workdir.

        Raises:
            UserError: the store refuses or does not answer.
        """
        return filesystem.exists(filesystem.join_path(self._location, name))

    def unlink(self, name: str) -> None:
        """Removes a file, if it exists, from the workdir and the local folder.

        Raises:
            UserError: the store refuses or does not answer.
        """
        (self.path / name).unlink(missing_ok=True)
        if self._is_remote:
            filesystem.remove_files(self._location, [name])

    def close(self) -> None:
        """Removes the local folder of a remote workdir and unlocks it. Uploads nothing."""
        if not self._is_remote:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        cache.unlock_folder(self.path)

    def _files(self, is_final: bool) -> dict[str, tuple[int, int]]:
        """Returns name -> (bytes, time of modification in ns) of the local files, in the order of their upload.

        Files of `CHECKPOINTS` are left out, and files of `AT_THE_END` too unless `is_final`.
        """
        files = {}
        for folder, folders, names in os.walk(self.path):  # `os.walk` passes over folders that vanish
            if Path(folder) == self.path:
                folders[:] = [name for name in folders if name != CHECKPOINTS and (is_final or name != AT_THE_END)]
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    about = path.stat(follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode) and path.suffix != SUFFIX:
                        files[path.relative_to(self.path).as_posix()] = (about.st_size, about.st_mtime_ns)
        return dict(sorted(files.items(), key=lambda entry: (entry[0] == UPLOADED_LAST, entry[0])))

    def _upload(self, files: dict[str, tuple[int, int]]) -> None:
        for name, state in files.items():
            if self._sent.get(name) != state:
                try:
                    filesystem.upload(self.path / name, filesystem.join_path(self._location, name))
                except UserError as error:
                    if isinstance(error, NoAnswer) or (self.path / name).exists():
                        raise
                    continue  # it has vanished
                self._sent[name] = state
        self._last = time.monotonic()

    def _has_grown_enough(self, name: str, size: int) -> bool:
        before, _ = self._sent.get(name, (0, 0))
        return size < SMALL or not before < size < before * (1 + GROWTH)

    def _try_upload(self) -> None:
        try:
            files = self._files(is_final=False)
            self._upload({name: state for name, state in files.items() if self._has_grown_enough(name, state[0])})
        except NoAnswer as error:  # this upload may still arrive, and must not replace a newer one: it was the last
            self._unanswered = error
        except UserError as error:  # a later upload may succeed; before a checkpoint it must
            self._last = time.monotonic()
            logging.getLogger(__name__).warning("the upload of the logs failed and is tried again later: %s", error)
