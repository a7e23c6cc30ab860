"""A Google Cloud Storage of one process: the JSON API as far as gcsfs, TensorStore's driver and Google's own client use
it, with the conditional requests that TensorStore relies on (which the emulator on PyPI ignores).

python -m tests.storage.fake_gcs PORT BUCKET

It fails as it is told. POST /faults takes JSON, {"seed": 0, "faults": [...], "empty": [names of objects to add]},
in place of what was told before; GET /faults gives how often each was met, and how many requests there were. A fault is
{"kind": "latency", a status, or, in the middle of the content, "reset", "stall" or "short", "share": of the requests,
"count": how many at most, "path": a regular expression that theirs contains, "method": "GET", "seconds": of a stall, or
the least and the most of a latency, "retry_after": seconds}.
"""

import base64
import contextlib
import hashlib
import json
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

REWRITE = r"(?:/rewriteTo/b/([^/]+)/o/([^/]+))?"
PAGE = 1000  # entries of a listing, at most
OBJECT = re.compile(rf"(?:/download|/upload)?/storage/v1/b/([^/]+)(?:/o(?:/([^/]+))?)?{REWRITE}")


class Store:
    """Objects in memory: name -> (generation, content)."""

    def __init__(self, bucket):
        self.bucket, self.objects, self.uploads = bucket, {}, {}
        self.generation, self.lock = 1000, threading.Lock()
        self.told({})

    def told(self, words):
        self.random, self.faults = random.Random(words.get("seed", 0)), words.get("faults", [])
        self.met, self.requests = [0] * len(self.faults), 0
        self.objects |= dict.fromkeys(words.get("empty", []), (self.generation, b""))

    def fault(self, method, path):
        """The fault that a request meets, or None."""
        self.requests += 1
        for number, fault in enumerate(self.faults):
            if method != fault.get("method", method) or not re.search(fault.get("path", ""), unquote(path)):
                continue
            if self.met[number] < fault.get("count", 1e9) and self.random.random() < fault.get("share", 1):
                self.met[number] += 1
                return fault
        return None

    def info(self, name):
        generation, content = self.objects[name]
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": self.bucket,
            "generation": str(generation),
            "metageneration": "1",
            "size": str(len(content)),
            "etag": str(generation),
            "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
            "timeCreated": "2020-01-01T00:00:00.000Z",
            "updated": "2020-01-01T00:00:00.000Z",
            "storageClass": "STANDARD",
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet: else each answer waits for the client's acknowledgement
    store: Store

    def log_message(self, *args):
        pass

    def answer(self, code, body=b"", **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        kind, half = (self.fault or {}).get("kind"), len(body) // 2
        if kind in ("reset", "stall", "short"):
            self.wfile.write(body[:half])
            self.wfile.flush()
            self.close_connection = True
            if kind == "stall":
                self.store.lock.release()
                time.sleep(self.fault.get("seconds", 3600))
                self.store.lock.acquire()
            if kind == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        self.wfile.write(body)

    def control(self):
        """Takes and tells what fails."""
        self.fault, body = None, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.store.lock:
            if self.command == "POST":
                self.store.told(json.loads(body))
            self.answer(200, {"met": self.store.met, "requests": self.store.requests})

    def route(self):
        if self.path == "/faults":
            return self.control()
        with self.store.lock:
            self.fault = fault = self.store.fault(self.command, self.path)
        if fault and fault["kind"] == "latency":
            time.sleep(self.store.random.uniform(*fault["seconds"]))
        if fault and fault["kind"].isdecimal():
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            after = {"Retry_After": str(fault["retry_after"])} if "retry_after" in fault else {}
            return self.answer(int(fault["kind"]), {"error": {"code": int(fault["kind"]), "message": "busy"}}, **after)
        return self.serve()

    def serve(self):
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = OBJECT.fullmatch(parts.path)
        with self.store.lock:
            if not found or found[1] != self.store.bucket:
                self.answer(404, {"error": {"code": 404, "message": "The specified bucket does not exist."}})
            elif not found[2] and "/o" not in parts.path[-3:]:
                self.answer(200, {"kind": "storage#bucket", "name": self.store.bucket, "id": self.store.bucket})
            elif found[4]:
                self.copy(unquote(found[2]), unquote(found[4]))
            else:
                name = unquote(found[2]) if found[2] else query.get("name")
                getattr(self, self.command.lower())(name, query, body)

    do_GET = do_POST = do_PUT = do_DELETE = route  # noqa: N815

    def fails(self, name, query):
        """Answers a request whose condition on the generation does not hold."""
        now = str(self.store.objects[name][0]) if name in self.store.objects else "0"
        if query.get("ifGenerationMatch", now) != now:
            self.answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
        elif query.get("ifGenerationNotMatch") == now != "0":
            self.answer(304)
        else:
            return False
        return True

    def get(self, name, query, body):
        if name is None:
            return self.listing(query)
        if self.fails(name, query):
            return None
        if name not in self.store.objects:
            return self.answer(404, {"error": {"code": 404, "message": f"No such object: {name}"}})
        if query.get("alt") != "media":
            return self.answer(200, self.store.info(name))
        generation, content = self.store.objects[name]
        headers = {"x_goog_generation": str(generation), "Content_Type": "application/octet-stream"}
        if wanted := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            first, last = wanted.groups()
            start = int(first) if first else max(len(content) - int(last), 0)
            stop = min(int(last) + 1, len(content)) if first and last else len(content)
            if start >= len(content):
                return self.answer(416, **{"Content_Range": f"bytes */{len(content)}"})
            headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            return self.answer(206, content[start:stop], **headers)
        return self.answer(200, content, **headers)

    def listing(self, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        names, prefixes, more, last = [], set(), {}, ""
        after, most = query.get("pageToken", ""), min(int(query.get("maxResults", PAGE)), PAGE)
        for name in sorted(self.store.objects):
            if not name.startswith(prefix) or not query.get("startOffset", "") <= name or name <= after:
                continue
            if "endOffset" in query and name >= query["endOffset"]:
                continue
            rest = name[len(prefix) :]
            folder = prefix + rest.partition(delimiter)[0] + delimiter if delimiter and delimiter in rest else None
            if len(names) + len(prefixes) == most and folder not in prefixes:
                more = {"nextPageToken": last}
                break
            last = name
            if folder:
                prefixes.add(folder)
            else:
                names.append(name)
        items = [self.store.info(name) for name in names]
        self.answer(200, {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes), **more})

    def copy(self, name, new):
        if name not in self.store.objects:
            return self.answer(404, {"error": {"code": 404, "message": f"No such object: {name}"}})
        self.store.generation += 1
        self.store.objects[new] = (self.store.generation, self.store.objects[name][1])
        return self.answer(200, {"done": True, "resource": self.store.info(new)})

    def post(self, name, query, body):
        kind = query.get("uploadType")
        if kind == "multipart":
            boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
            _, about, media, _ = body.split(b"--" + boundary)
            split = rb"\r?\n\r?\n"
            name = json.loads(re.split(split, about, maxsplit=1)[1])["name"]
            body = re.split(split, media, maxsplit=1)[1].removesuffix(b"\n").removesuffix(b"\r")
        elif kind == "resumable" and "upload_id" not in query:
            name = name or json.loads(body)["name"]
            self.store.uploads[str(len(self.store.uploads))] = [name, b""]
            where = f"http://{self.headers['Host']}{self.path}&upload_id={len(self.store.uploads) - 1}"
            return self.answer(200, Location=where)
        elif kind == "resumable":
            upload = self.store.uploads[query["upload_id"]]
            upload[1] += body
            if self.headers.get("Content-Range", "").endswith("/*"):
                return self.answer(308, Range=f"bytes=0-{len(upload[1]) - 1}")
            name, body = upload
        if self.fails(name, query):
            return None
        self.store.generation += 1
        self.store.objects[name] = (self.store.generation, body)
        return self.answer(200, self.store.info(name))

    put = post

    def delete(self, name, query, body):
        if self.fails(name, query):
            return
        found = self.store.objects.pop(name, None)
        self.answer(204 if found else 404)


class Server(ThreadingHTTPServer):
    """Does not complain about clients that go away."""

    def handle_error(self, request, address):
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, address)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environment(port):
    """The variables that lead all clients to the server."""
    return {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{port}",
        "GOOGLE_CLOUD_PROJECT": "nothing",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it would ask Google, past the emulator, about the bucket
        "NO_GCE_CHECK": "true",
    }


def await_port(port, seconds=60):
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < deadline, port
            time.sleep(0.1)


@contextlib.contextmanager
def started(bucket):
    """Yields the port of a server in a process of its own."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "tests.storage.fake_gcs", str(port), bucket])
    try:
        await_port(port)
        yield port
    finally:
        process.kill()
        process.wait()


def tell(port, *faults, seed=0, empty=()):
    """Tells a server what fails from now on, and which empty objects it has, too."""
    words = json.dumps({"seed": seed, "faults": faults, "empty": empty}).encode()
    urllib.request.urlopen(f"http://127.0.0.1:{port}/faults", words).close()


def told(port):
    """Returns how often each fault was met, and how many requests there were, since `tell`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/faults") as answer:
        counts = json.load(answer)
    return counts["met"], counts["requests"]


if __name__ == "__main__":
    port, bucket = sys.argv[1:]
    Handler.store = Store(bucket)
    Server(("127.0.0.1", int(port)), Handler).serve_forever()
