"""Public files by address, kept below the cache until somebody removes them.

Unlike the copies in `cache`, which are of a user's own data and bounded in size, these never change and are few.
"""

import base64
import contextlib
import hashlib
import http.client
import re
import string
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from tqdm import tqdm

from vit_jax import UserError, shown, storage
from vit_jax.storage import cache

GOOGLE = "storage.googleapis.com"
HERE = ("localhost", "127.0.0.1")  # where nobody listens in
PART = 2**20  # bytes
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
ABANDONED = 24 * 3600  # seconds after which nobody goes on writing an unfinished file
QUOTED = 200  # characters of what a server says


def download(address: str, size: str | None = None) -> Path:
    """Returns where a file lies here, downloaded if it is not here yet.

    Args:
        address: `https://HOST/PATH`, or `gs://BUCKET/NAME` of a public file.
        size: as a catalogue lists it, `393.69 MiB`: the file may differ by one of the last digit.

    Raises:
        UserError: it cannot be reached, is not what it should be, or cannot be written.
    """
    address = _https(address)
    path = cache.root() / "published" / _place(address)
    with _told(path.parent):
        if path.is_file() and _fits(path.stat().st_size, size):
            return path
    with _opened(address, path) as answer, _told(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        # A name of its own, so that others may do the same meanwhile.
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
            partial = Path(file.name)
            try:
                for part in _checked(address, size, answer):
                    file.write(part)
                file.flush()
                if urlsplit(address).path.endswith(".npz") and not _is_zip(partial):
                    raise UserError("what the address answered is no npz file; open it in a browser to see what it is.")
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
    return path


def _https(address: str, local: bool = True) -> str:
    """Returns the address to ask; `local` says whether it may be without encryption on this machine.

    Raises:
        UserError: it is of no kind that can be asked safely.
    """
    with contextlib.suppress(ValueError):
        if address.startswith("gs://"):
            address = f"https://{GOOGLE}/{quote(address.removeprefix('gs://'))}"
        address = quote(address, safe=string.punctuation)  # spaces, and letters beyond ASCII
        parts = urlsplit(address)
        host = parts.hostname or ""
        host.encode("idna")  # fails where asking would: of parts that are empty or too long
        safe = parts.scheme == "https" or (local and parts.scheme == "http" and host in HERE)
        if host and safe and parts.port != 0 and "@" not in parts.netloc:
            return address
    # What stands before an @ may be a password, also where the rest cannot be parsed.
    told = "this address, which may hold a password" if "@" in address else shown(address, QUOTED)
    raise UserError(f"cannot download {told}: give https://HOST/PATH or gs://BUCKET/NAME.")


def _place(address: str) -> Path:
    """Returns the path relative to our folder, host first, which never leaves it.

    Raises:
        UserError: the address would.
    """
    parts = urlsplit(address)
    names = [unquote(name) for name in (parts.netloc, *parts.path.removeprefix("/").split("/"))]
    if parts.query:
        names[-1] += f"?{parts.query}"
    if {"", ".", ".."} & set(names):
        told = shown(address, QUOTED)
        raise UserError(f"cannot download {told}: its path must name a file, without empty parts and without '..'.")
    return Path(*(quote(name, safe="+") for name in names))


class _Redirect(urllib.request.HTTPRedirectHandler):
    """Is sent on only to where one may ask; to this machine only from itself."""

    def redirect_request(self, request, answer, code, message, headers, address):
        address = _https(address, local=request.origin_req_host in HERE)  # of the first request
        return super().redirect_request(request, answer, code, message, headers, address)


@contextlib.contextmanager
def _opened(address: str, path: Path) -> Iterator[Any]:
    """Asks for a file; a proxy is taken from the environment.

    Raises:
        UserError: nobody answers, or not with the file.
    """
    otherwise = f"download it elsewhere and put it at {path}."
    try:
        answer = urllib.request.build_opener(_Redirect).open(address, timeout=storage.TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            status = f"HTTP status {error.code} {_reason(error)}"
        if error.code == 404:
            raise UserError(f"there is no {address} ({status}).") from error
        if error.code in (401, 403):
            raise UserError(f"no permission to read {address} ({status}).") from error
        raise UserError(f"cannot read {address} ({status}); try again later, or {otherwise}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: where it is sent on to
        raise UserError(f"cannot reach {address}: {_reason(error)}; {otherwise}") from error
    with answer:
        yield answer


def _checked(address: str, size: str | None, answer: Any) -> Iterator[bytes]:
    """Yields the parts of an answer as they come, and tells their progress.

    Raises:
        UserError: the server falls silent, or what came is not what it or the catalogue said.
    """
    said = re.search(r"\bmd5=([\w+/]+=*)", ", ".join(answer.headers.get_all("x-goog-hash", [])))
    digest = hashlib.md5(usedforsecurity=False)
    came = 0
    total = _length(answer)
    if total is not None and not _fits(total, size):
        raise UserError(f"it holds {total} bytes, not the {size} that are listed: it is another file by now.")
    name = shown(unquote(address.rpartition("/")[2]), QUOTED)
    # Once a second: where it is not drawn over, as in a log file, each update is a line.
    scale = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    with tqdm(desc=name, total=total, mininterval=1, dynamic_ncols=True, **scale) as bar:
        while part := _read(answer):
            digest.update(part)
            came += len(part)
            bar.update(len(part))
            yield part
    if total is not None and came != total:
        raise UserError(f"it was cut short: {came} of {total} bytes came; try again.")
    if not _fits(came, size):
        raise UserError(f"it holds {came} bytes, not the {size} that are listed: it is another file by now.")
    if said and said[1] != base64.b64encode(digest.digest()).decode():
        raise UserError("it was damaged on its way: its MD5 is not what the server says; try again.")


def _length(answer: Any) -> int | None:
    """Returns the bytes that a server announces, if it does.

    Raises:
        UserError: it announces something else.
    """
    said = answer.headers.get("Content-Length")
    if said is not None and not re.fullmatch(r"[0-9]{1,18}", said.strip()):
        raise UserError(f"its server announces a length of '{shown(said, QUOTED)}', which is none; try again later.")
    return None if said is None else int(said)


def _read(answer: Any) -> bytes:
    try:
        return answer.read1(PART)  # what is there: a limit for silence, not for a whole part
    except TimeoutError as error:
        raise UserError(f"its server sent nothing for {storage.TIMEOUT:g} s; try again.") from error
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"it was cut short: {_reason(error)}; try again.") from error


def _fits(came: int, size: str | None) -> bool:
    """Returns whether so many bytes may be a listed size, which is rounded or cut to its last digit."""
    if not size:
        return True
    number, unit = size.split()
    step = 10.0 ** -len(number.partition(".")[2])
    return abs(came - float(number) * UNITS[unit]) <= step * UNITS[unit] * (unit != "B")


def _is_zip(path: Path) -> bool:
    with contextlib.suppress(zipfile.BadZipFile):  # one of several disks
        return zipfile.is_zipfile(path)
    return False


def _sweep(folder: Path) -> None:
    """Removes what killed processes left."""
    for partial in folder.glob("*.partial"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - partial.stat().st_mtime > ABANDONED:
                partial.unlink()


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot write to {folder}: {reason}; VIT_JAX_CACHE may name another folder.") from error


def _reason(error: Exception) -> str:
    """Returns what went wrong, without Python's wrapping."""
    inner = getattr(error, "reason", error)
    said = str(getattr(inner, "strerror", None) or inner).partition("\n")[0]
    return shown(said or type(inner).__name__, QUOTED)
