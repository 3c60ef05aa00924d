"""A stand-in for the Hub's HTTP API, as much of it as downloading, reading headers and uploading needs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories as {id: {file name: bytes}}; ``log`` holds (method, path, bytes sent) of every answer."""

    def __init__(self):
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.log: list[tuple[str, str, int]] = []
        self.drops = 0  # so many answers with a file's content break off in the middle
        self.url = ""


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status: int, body: bytes = b"", headers: dict | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        sent = body if self.command != "HEAD" else b""
        if self.hub.drops and len(sent) > 10_000:
            self.hub.drops -= 1
            sent = sent[: len(sent) // 2]
            self.close_connection = True
        self.wfile.write(sent)
        self.hub.log.append((self.command, self.path, len(sent)))

    def answer_json(self, value, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def missing(self, code: str) -> None:
        self.answer(404, b"{}", {"X-Error-Code": code, "X-Error-Message": f"{code} for {self.path}"})

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        resolve = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path)
        tree = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path)
        found = resolve or tree or info
        repository = self.hub.repositories.get(found.group(1)) if found else None
        if repository is None:
            self.missing("RepoNotFound")
        elif found.lastindex and found.lastindex > 1 and found.group(2) not in ("main", COMMIT):
            self.missing("RevisionNotFound")
        elif resolve:
            self.file(repository, resolve.group(3))
        elif tree:
            files = [
                {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                for n, d in repository.items()
            ]
            self.answer_json(files)
        else:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in repository.items()]
            self.answer_json({"id": found.group(1), "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})

    do_HEAD = do_GET

    def file(self, repository: dict[str, bytes], name: str) -> None:
        if name not in repository:
            return self.missing("EntryNotFound")
        data = repository[name]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return self.answer(200, data, headers)
        first, last = int(wanted.group(1)), min(int(wanted.group(2) or len(data) - 1), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return self.answer(206, data[first : last + 1], headers)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urlsplit(self.path).path
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            status = 409 if name in self.hub.repositories else 200
            self.hub.repositories.setdefault(name, {})
            self.hub.private[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
            self.answer_json({"url": f"{self.hub.url}/{name}"}, status)
        elif path == "/api/validate-yaml":
            self.answer_json({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            files = json.loads(body)["files"]
            self.answer_json(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            for line in body.splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    value = item["value"]
                    self.hub.repositories[match.group(1)][value["path"]] = base64.b64decode(value["content"])
            address = f"{self.hub.url}/{match.group(1)}/commit/{COMMIT}"
            self.answer_json({"commitUrl": address, "commitOid": COMMIT})
        else:
            self.missing("EntryNotFound")


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
