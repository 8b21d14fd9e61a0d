"""A Hugging Face hub on loopback that takes commits from the hub's real client."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.helpers.hub import serve


@dataclass
class UploadHub:
    """What arrived."""

    endpoint: str = ""
    refuses: bool = False
    created: list[dict[str, Any]] = field(default_factory=list)
    branches: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)


@contextmanager
def upload_hub(**settings: Any) -> Iterator[UploadHub]:
    hub = UploadHub(**settings)
    with serve(hub, _Handler):
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: UploadHub

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        body = self._body()
        self.hub.tokens.add(self.headers.get("Authorization", "none"))
        if self.hub.refuses:
            self._send(403, {"error": "You don't have the rights"})
        elif self.path.endswith("/repos/create"):
            self.hub.created.append(json.loads(body))
            self._send(200, {"url": f"{self.hub.endpoint}/me/mine"})
        elif self.path.endswith("/validate-yaml"):
            self._send(200, {"errors": [], "warnings": []})
        elif "/branch/" in self.path:
            self.hub.branches.append(self.path.rsplit("/", 1)[-1])
            self._send(200, {})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            facts = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            self._send(200, {"files": facts})
        elif "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    value = entry["value"]
                    self.hub.files[value["path"]] = base64.b64decode(value["content"])
            url = f"{self.hub.endpoint}/me/mine/commit/abc"
            self._send(200, {"commitUrl": url, "commitOid": "abc", "success": True})
        else:
            self._send(404, {})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
