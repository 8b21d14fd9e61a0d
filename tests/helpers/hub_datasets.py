"""A Hugging Face hub on loopback that serves a folder as one data set, to its real clients."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

from tests.helpers.hub import COMMIT, serve


@dataclass
class DatasetHub:
    """What the server holds."""

    folder: Path
    hub_id: str = "owner/name"
    endpoint: str = ""


@contextmanager
def dataset_hub(folder: Path) -> Iterator[DatasetHub]:
    hub = DatasetHub(folder)
    with serve(hub, _Handler):
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: DatasetHub

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        api, name = f"/api/datasets/{self.hub.hub_id}", self.hub.hub_id
        if path == api or path.startswith(f"{api}/revision/"):
            self._send_json({"id": name, "sha": COMMIT, "siblings": []})
        elif found := re.fullmatch(rf"{api}/tree/[^/]+/?(.*)", path):
            recursive = parse_qs(urlparse(self.path).query).get("recursive", [""])[0]
            self._tree(found[1], recursive=recursive.lower() == "true")
        elif found := re.fullmatch(rf"/datasets/{name}/resolve/[^/]+/(.+)", path):
            self._file(self.hub.folder / found[1])
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        wanted = parse_qs(body)["paths"] if "=" in body else json.loads(body)["paths"]
        there = [self.hub.folder / path for path in wanted]
        self._send_json([self._entry(path) for path in there if path.exists()])

    def _tree(self, inside: str, *, recursive: bool) -> None:
        folder = self.hub.folder / inside
        if not folder.is_dir():
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        paths = folder.rglob("*") if recursive else folder.iterdir()
        self._send_json([self._entry(path) for path in sorted(paths)])

    def _entry(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.hub.folder).as_posix()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40}
        content = path.read_bytes()
        digest = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": name, "size": len(content), "oid": digest}

    def _file(self, file: Path) -> None:
        if not file.is_file():
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        content = file.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        status = 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(asked[1]), int(asked[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        self._send(status, content, headers)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, text in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
