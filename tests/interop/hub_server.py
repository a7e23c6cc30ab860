"""A stand-in for the server of the Hugging Face hub, with one repository, owner/name, that may be absent at first.

It answers what `huggingface_hub` asks to download a repository, and to create, write and tag one with LFS.
"""

import base64
import hashlib
import http.server
import json
import socket
import threading
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ATTRIBUTES = b"*.safetensors filter=lfs\n"  # what the hub writes into a new repository
TOKEN = "hf_right"
REPOSITORY = "/owner/name"


def git_digest(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does.

    `server.files` are the files of the repository by name, None: it is absent; `server.objects` the files that were
    uploaded, by digest. `server.fails` maps a part of METHOD PATH to the statuses of the next answers; a status of 0
    ends the connection. `server.asked` are the paths that were asked for, with the method of all but GET and HEAD.
    """

    def do_HEAD(self):
        self.answer()

    do_GET = do_POST = do_PUT = do_HEAD  # noqa: N815

    def log_message(self, *args):
        pass

    def answer(self):
        server, path = self.server, unquote(urlsplit(self.path).path)
        is_read = self.command in ("GET", "HEAD")
        server.asked.append(path if is_read else f"{self.command} {path}")
        for part, statuses in server.fails.items():
            if part in f"{self.command} {path}" and statuses:
                if status := statuses.pop(0):
                    self.read()
                    return self.reply({"error": "refused"}, status)
                self.rfile.read(min(100, int(self.headers.get("Content-Length", 0))))
                return self.connection.shutdown(socket.SHUT_RDWR)
        body = self.read()
        if not is_read:
            return self.write(path, body)
        if not path.startswith((f"{REPOSITORY}/", f"/api/models{REPOSITORY}")) or server.files is None:
            return self.refuse("GatedRepo" if "gated" in path else "RepoNotFound", 404 if self.knows() else 401)
        inside = path.removeprefix("/api/models").removeprefix(REPOSITORY).removeprefix("/")
        kind, revision, name = [*inside.split("/", 2), "", ""][:3]
        if kind == "refs":
            tags = [{"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": at} for tag, at in server.tags.items()]
            return self.reply({"branches": [], "converts": [], "tags": tags})
        if kind and revision not in ("main", "v2", server.commit):
            return self.refuse("RevisionNotFound", 404)
        if kind in ("", "revision"):
            siblings = [self.describe(one, content) for one, content in server.files.items()]
            described = {"id": "owner/name", "sha": server.commit, "private": server.private, "siblings": siblings}
            return self.reply(described)
        if kind == "tree":
            listed = [{"type": "file", "path": one, "size": len(server.files[one]), "oid": "0"} for one in server.files]
            return self.reply(listed)
        if name not in server.files:
            return self.refuse("EntryNotFound", 404)
        self.reply(server.files[name], ETag=f'"{hash(server.files[name])}"', **{"X-Repo-Commit": server.commit})

    def write(self, path, body):
        server = self.server
        if path.startswith("/objects/"):
            server.objects[path.removeprefix("/objects/")] = body
            return self.reply({})
        if not self.knows():
            return self.reply({"error": "Invalid username or password."}, 401)
        asked = json.loads(body) if body[:1] == b"{" and b"\n{" not in body else {}
        if path == "/api/repos/create":
            if asked["organization"] != "owner":
                return self.reply({"error": "you may not create a repository there"}, 403)
            if server.files is not None:
                return self.reply({"error": "You already created this model repo"}, 409)
            server.files, server.private = {".gitattributes": ATTRIBUTES}, asked.get("visibility") == "private"
            return self.reply({"url": f"{server.address}{REPOSITORY}"})
        if path == "/api/validate-yaml":
            bad = "license: wrong" in asked["content"]
            errors = [{"message": '"license" must be one of these'}] if bad else []
            return self.reply({"errors": errors, "warnings": []}, 400 if bad else 200)
        if "/preupload/" in path:
            modes = [self.mode(one["path"]) | {"path": one["path"], "shouldIgnore": False} for one in asked["files"]]
            return self.reply({"files": modes})
        if path.endswith("/info/lfs/objects/batch"):
            href = f"{server.address}/objects"
            upload = {one["oid"]: {"upload": {"href": f"{href}/{one['oid']}"}} for one in asked["objects"]}
            objects = [
                one if one["oid"] in server.objects else one | {"actions": upload[one["oid"]]}
                for one in asked["objects"]
            ]
            return self.reply({"objects": objects})
        if "/commit/" in path:
            header, *operations = map(json.loads, body.splitlines())
            if header["value"].get("parentCommit", server.commit) != server.commit:
                return self.reply({"error": "the branch has moved"}, 412)
            for operation in operations:
                value = operation["value"]
                if operation["key"] == "deletedFile":
                    del server.files[value["path"]]
                elif operation["key"] == "lfsFile":
                    server.files[value["path"]] = server.objects[value["oid"]]
                else:
                    server.files[value["path"]] = base64.b64decode(value["content"])
            server.commit = hashlib.sha1(body).hexdigest()
            return self.reply({"commitUrl": f"{server.address}{REPOSITORY}", "commitOid": server.commit})
        if "/tag/" in path:
            if asked["tag"] in server.tags:
                return self.reply({"error": "Tag exists"}, 409)
            server.tags[asked["tag"]] = path.rpartition("/")[2]
            return self.reply({})
        raise AssertionError(path)

    def mode(self, name):
        content = self.server.files.get(name)
        known = {} if content is None else {"oid": self.describe(name, content)["blobId"]}
        return {"uploadMode": "lfs" if name.endswith(".safetensors") else "regular"} | known

    def describe(self, name, content):
        digest = hashlib.sha256(content).hexdigest()
        lfs = {"lfs": {"sha256": digest, "size": len(content), "pointerSize": 134}} if ".safetensors" in name else {}
        return {"rfilename": name, "size": len(content), "blobId": git_digest(content)} | lfs

    def knows(self):
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def read(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def refuse(self, code, status):
        self.reply(b"", status, **{"X-Error-Code": code})

    def reply(self, content, status=200, **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serve(files):
    """Yields a running server whose repository has these files; None: there is none."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.address = f"http://127.0.0.1:{server.server_port}"
        server.asked, server.fails, server.objects, server.tags = [], {}, {}, {}
        server.files, server.private, server.commit = files, False, COMMIT
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def use(server, monkeypatch, folder):
    """Lets `huggingface_hub` ask the server and keep its cache in `folder`: its settings are those of its import."""
    template = "{repo_id}/resolve/{revision}/{filename}"
    settings = {"ENDPOINT": server.address, "HUGGINGFACE_CO_URL_TEMPLATE": f"{server.address}/{template}"}
    settings |= {"HF_HUB_CACHE": str(folder), "HF_HUB_DISABLE_XET": True}
    for name, value in settings.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setenv("no_proxy", "*")
