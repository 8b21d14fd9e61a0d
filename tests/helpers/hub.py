"""A Hugging Face hub on loopback that serves one folder as one model, to the hub's real client."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """What the server does, and what it was asked for."""

    folder: Path
    hub_id: str = "org/name"
    gated: bool = False
    cut_at: int | None = None  # bytes of model.safetensors after which the line goes dead, once
    down: bool = False
    endpoint: str = ""
    fetched: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)


@contextmanager
def fake_hub(folder: Path, **settings: object) -> Iterator[FakeHub]:
    hub = FakeHub(folder, **settings)  # type: ignore[arg-type]
    with serve(hub, _Handler):
        yield hub


@contextmanager
def serve(hub: Any, handler: type[BaseHTTPRequestHandler]) -> Iterator[None]:
    """Answer on a free loopback port by ``handler``, which knows ``hub``; sets its ``endpoint``."""
    bound = type("Handler", (handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), bound)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlparse(self.path).path)
        self.hub.tokens.add(self.headers.get("Authorization", "none"))
        model = f"/api/models/{self.hub.hub_id}"
        if self.hub.down:
            self._send(403, b"{}", {})
        elif path.startswith(f"{model}/tree/"):
            self._tree()
        elif path == model or path.startswith(f"{model}/revision/"):
            self._model(path)
        elif path.startswith(f"/{self.hub.hub_id}/resolve/{COMMIT}/"):
            self._file(path.rsplit("/", 1)[-1], with_body=with_body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _model(self, path: str) -> None:
        if self.hub.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        if "/revision/" in path and path.rsplit("/", 1)[-1] not in ("main", "v1", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        names = sorted(p.name for p in self.hub.folder.iterdir())
        facts = {
            "id": self.hub.hub_id,
            "sha": COMMIT,
            "siblings": [{"rfilename": name} for name in names],
        }
        self._send(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})

    def _tree(self) -> None:
        files = [
            {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40}
            for p in sorted(self.hub.folder.iterdir())
        ]
        self._send(200, json.dumps(files).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, *, with_body: bool) -> None:
        content = (self.hub.folder / name).read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if not with_body:
            self._send(200, b"", headers | {"Content-Length": str(len(content))})
            return
        self.hub.fetched.append(name)
        body = content
        headers["Content-Length"] = str(len(body))
        if self.hub.cut_at is not None and name == "model.safetensors":
            body, self.hub.cut_at = body[: self.hub.cut_at], None
            self._send(200, body, headers)
            self.hub.down = True
            self.close_connection = True
            return
        self._send(200, body, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
