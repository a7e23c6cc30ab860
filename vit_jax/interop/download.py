"""Downloads public files, which are kept below the cache folder until somebody removes them.

These files are few, so their total size is not limited. The copies of a user's own data lie in `storage.cache`.

The standard library downloads them, not fsspec's HTTP as it does a user's data. That follows every redirect, does not
show the headers of the response that it copies (the MD5 and the version of the file), ignores the proxies of the
environment, and needs aiohttp, which an installation without extras lacks.
"""

import base64
import contextlib
import hashlib
import http.client
import re
import string
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from tqdm import tqdm

from vit_jax import UserError, printable, reason, tell, user_errors, without_queries
from vit_jax.storage import TIMEOUT, atomic_write, cache, short_name

GOOGLE_STORAGE = "storage.googleapis.com"
LOCAL_HOSTS = ("localhost", "127.0.0.1")  # connections to them need no encryption
CHUNK = 2**20  # bytes
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MAX_QUOTED = 200  # characters of a server's text in a message


def download_file(address: str, size: str | None = None, seconds: float = TIMEOUT, *, may_change: bool = False) -> Path:
    """Returns the local path of a file, downloaded if it is not there yet.

    Args:
        address: `https://HOST/PATH`, or `gs://BUCKET/NAME` of a public file.
        size: the file's size as a catalog lists it, `393.69 MiB`. The file may differ by one in the last digit.
        seconds: the time limit for a silent server.
        may_change: whether to ask the server for another version although the file is here. If the server cannot be
            reached, the file that is here is used, and a line says so.

    Raises:
        UserError: the address cannot be reached, has another file than expected, or the file cannot be written.
    """
    address = https_address(address)
    path = cache.root() / "published" / relative_path(address)
    with cache.write_errors(path.parent):
        is_here = path.is_file() and _matches_size(path.stat().st_size, size)
    if is_here and not may_change:
        return path
    with contextlib.ExitStack() as opened:
        try:
            response = opened.enter_context(_open_address(address, path, seconds))
        except UserError as error:
            if not is_here or isinstance(error.__cause__, urllib.error.HTTPError):
                raise
            tell(f"vit_jax: cannot reach {address}; the file that was downloaded before is used.")
            return path
        noted, version = path.with_name(f"{path.name}.version"), _version(response.headers)
        is_same = False
        with contextlib.suppress(OSError):
            is_same = bool(version) and noted.read_text() == version
        if not is_here or not is_same:
            _write_file(address, path, size, response, seconds)
            if may_change:
                with cache.write_errors(path.parent), atomic_write(noted) as temporary:
                    temporary.write_text(version)
    return path


def https_address(address: str, local: bool = True) -> str:
    """Returns the address in a form that can be requested: https://, or http:// of this machine if `local`.

    Raises:
        UserError: the address cannot be requested safely.
    """
    if address.endswith("?..."):
        words, missing = printable(address, MAX_QUOTED), "what follows '?' is missing, as it may grant access"
        raise UserError(f"cannot download from {words}: {missing} and is not stored; give the whole address again.")
    with contextlib.suppress(ValueError):
        if address.startswith("gs://"):
            address = f"https://{GOOGLE_STORAGE}/{quote(address.removeprefix('gs://'))}"
        address = quote(address, safe=string.punctuation)  # spaces, and letters beyond ASCII
        parts = urlsplit(address)
        host = parts.hostname or ""
        host.encode("idna")  # fails, as the request would, for labels that are empty or too long
        safe = parts.scheme == "https" or (local and parts.scheme == "http" and host in LOCAL_HOSTS)
        if host and safe and parts.port != 0 and "@" not in parts.netloc:
            return address
    # The text before an @ may be a password, even where the rest cannot be parsed.
    hidden = "this address (not shown: it may contain a password)"
    words = hidden if "@" in address else printable(without_queries(address), MAX_QUOTED)
    raise UserError(f"cannot download from {words}; use https://HOST/PATH or gs://BUCKET/NAME.")


def relative_path(address: str) -> Path:
    """Returns the path, relative to the folder of downloads, for the file at an address. Its first part is the host.

    The path never leads out of the folder. What follows a question mark may be long and grant access to the file, so
    the path has only its digest.

    Raises:
        UserError: the address has an empty part, `.` or `..`.
    """
    parts = urlsplit(address)
    names = [unquote(name) for name in (parts.netloc, *parts.path.removeprefix("/").split("/"))]
    if parts.query:
        names[-1] += f"?{hashlib.sha256(parts.query.encode()).hexdigest()[:16]}"
    if {"", ".", ".."} & set(names):
        words = printable(without_queries(address), MAX_QUOTED)
        raise UserError(
            f"cannot download from {words}; its path must name a file, without empty parts and without '..'."
        )
    return Path(*(short_name(quote(name, safe="+")) for name in names))


class SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects only to addresses that can be requested safely.

    A redirect to this machine is followed only if the first request went to this machine.
    """

    def redirect_request(self, request, response, code, message, headers, address):
        """Returns the next request; see `HTTPRedirectHandler`."""
        address = https_address(address, local=request.origin_req_host in LOCAL_HOSTS)  # of the first request
        return super().redirect_request(request, response, code, message, headers, address)


def _write_file(address: str, path: Path, size: str | None, response: http.client.HTTPResponse, seconds: float) -> None:
    """Writes the content of a response to `path`.

    Raises:
        UserError: the content is not the expected file, or the file cannot be written.
    """
    with cache.write_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            with temporary.open("wb") as file:
                for chunk in _checked_chunks(address, size, response, seconds):
                    file.write(chunk)
            if urlsplit(address).path.endswith(".npz") and not _is_zip(temporary):
                raise UserError("the server's answer is not an .npz file; open the address in a browser to see it.")


def _version(headers: Message) -> str:
    """Returns what a server's headers say of the version of a file; empty if they say nothing."""
    told = [headers.get(name) for name in ("ETag", "x-goog-generation", "Last-Modified")]
    return " ".join([*filter(None, told), headers.get("Content-Length") or ""]) if any(told) else ""


@contextlib.contextmanager
def _open_address(address: str, path: Path, seconds: float) -> Iterator[http.client.HTTPResponse]:
    """Yields the response to the request for a file. The environment may name a proxy.

    Error messages advise the user to save the file as `path`.

    Raises:
        UserError: no server answers, or the server answers with an error.
    """
    advice = f"download it elsewhere and save it as {path}."
    shown = without_queries(address)
    try:
        response = urllib.request.build_opener(SafeRedirects).open(address, timeout=seconds)
    except urllib.error.HTTPError as error:
        with error:
            status = f"HTTP status {error.code} {_server_reason(error)}"
        if error.code == 404:
            raise UserError(f"{shown} was not found ({status}).") from error
        if error.code in (401, 403):
            raise UserError(f"no permission to read {shown} ({status}).") from error
        raise UserError(f"cannot read {shown} ({status}); try again later, or {advice}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: the target of a redirect
        raise UserError(f"cannot reach {shown}: {_server_reason(error)}; {advice}") from error
    with response:
        yield response


def _checked_chunks(
    address: str, size: str | None, response: http.client.HTTPResponse, seconds: float
) -> Iterator[bytes]:
    """Yields the content of a response as it arrives, and shows the progress.

    Raises:
        UserError: the server stops sending, or the content is not what the server or the catalog announced.
    """
    announced_md5 = re.search(r"\bmd5=([\w+/]+=*)", ", ".join(response.headers.get_all("x-goog-hash", [])))
    md5 = hashlib.md5(usedforsecurity=False)
    received = 0
    total = _announced_length(response)
    if total is not None:
        _check_size(total, size)
    name = printable(unquote(urlsplit(address).path.rpartition("/")[2]), MAX_QUOTED)
    scale = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    # One update a second: in a log file, where nothing is drawn over, each update is a line.
    with tqdm(desc=name, total=total, mininterval=1, dynamic_ncols=True, **scale) as bar:
        while chunk := _read_chunk(response, seconds):
            md5.update(chunk)
            received += len(chunk)
            bar.update(len(chunk))
            yield chunk
    if total is not None and received != total:
        raise UserError(f"the download was cut short: {received} of {total} bytes arrived; try again.")
    _check_size(received, size)
    if announced_md5 and announced_md5[1] != base64.b64encode(md5.digest()).decode():
        raise UserError("the download is damaged: its MD5 is not the one that the server sent; try again.")


def _announced_length(response: http.client.HTTPResponse) -> int | None:
    """Returns the number of bytes that a server announces; None if it announces none.

    Raises:
        UserError: the announced length is not a number.
    """
    text = response.headers.get("Content-Length")
    if text is not None and not re.fullmatch(r"[0-9]{1,18}", text.strip()):
        words = printable(text, MAX_QUOTED)
        raise UserError(f"the server sent the length '{words}', which is not a number; try again later.")
    return None if text is None else int(text)


def _read_chunk(response: http.client.HTTPResponse, seconds: float) -> bytes:
    advice = "try again."
    with (
        user_errors("the download was cut short", OSError, http.client.HTTPException, advice=advice),
        user_errors(f"the server sent nothing for {seconds:g} s", TimeoutError, advice=advice),
    ):
        return response.read1(CHUNK)  # what has arrived: the time limit is for silence, not for a whole chunk


def _check_size(length: int, size: str | None) -> None:
    if not _matches_size(length, size):
        raise UserError(f"the file has {length} bytes, not the {size} of the catalog: it was replaced by another file.")


def _matches_size(length: int, size: str | None) -> bool:
    """Returns whether a number of bytes agrees with a listed size, which is rounded or truncated to its last digit.

    Any number agrees if no size is listed.
    """
    if not size:
        return True
    number, unit = size.split()
    step = 10.0 ** -len(number.partition(".")[2])
    return abs(length - float(number) * UNITS[unit]) <= step * UNITS[unit] * (unit != "B")


def _is_zip(path: Path) -> bool:
    with contextlib.suppress(zipfile.BadZipFile):  # an archive in several parts
        return zipfile.is_zipfile(path)
    return False


def _server_reason(error: Exception) -> str:
    """Returns the reason of an error without the text that urllib puts around it."""
    inner = getattr(error, "reason", error)
    return printable(reason(inner) if isinstance(inner, BaseException) else inner.partition("\n")[0], MAX_QUOTED)
