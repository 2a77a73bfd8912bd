"""A small real HTTP server that behaves like the hub for one model: it lists files with their digests and serves them,
also from the middle. It can break off a transfer, or hand out other bytes than it lists."""

from __future__ import annotations

import hashlib
import http.server
import json
import pathlib
import re
import threading
from typing import Any


class Hub:
    """Serves the files of `directory` as repository `name` at `commit`.

    `cut` names files whose first transfer ends after half of it, `forged` those whose bytes are not the listed ones.
    `ranges` collects what was asked for from the middle, `tokens` the Authorization headers.
    """

    def __init__(self, directory: pathlib.Path, name: str, commit: str) -> None:
        self.directory, self.name, self.commit = directory, name, commit
        self.cut: set[str] = set()
        self.forged: set[str] = set()
        self.ranges: list[tuple[str, int]] = []
        self.tokens: set[str | None] = set()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def files(self) -> list[pathlib.Path]:
        return sorted(path for path in self.directory.rglob("*") if path.is_file())

    def describe(self, path: pathlib.Path) -> dict[str, Any]:
        data = path.read_bytes()
        entry: dict[str, Any] = {
            "type": "file",
            "path": path.relative_to(self.directory).as_posix(),
            "size": len(data),
        }
        entry["oid"] = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        if path.suffix == ".safetensors":
            digest = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
        return entry


def _handler(hub: Hub) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.respond(body=False)

        def do_GET(self) -> None:
            self.respond(body=True)

        def respond(self, *, body: bool) -> None:
            hub.tokens.add(self.headers.get("Authorization"))
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{hub.name}/tree/{hub.commit}"):
                self.json([hub.describe(file) for file in hub.files()])
            elif path.startswith(f"/api/models/{hub.name}"):
                siblings = [{"rfilename": file.relative_to(hub.directory).as_posix()} for file in hub.files()]
                self.json({"id": hub.name, "modelId": hub.name, "sha": hub.commit, "siblings": siblings})
            elif match := re.fullmatch(rf"/{hub.name}/resolve/{hub.commit}/(.+)", path):
                self.file(hub.directory / match[1], match[1], body=body)
            else:
                self.json({"error": "Repository not found"}, status=404, code="RepoNotFound")

        def json(self, content: Any, status: int = 200, code: str = "") -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if code:
                self.send_header("X-Error-Code", code)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def file(self, path: pathlib.Path, name: str, *, body: bool) -> None:
            data, entry = path.read_bytes(), hub.describe(path)
            if name in hub.forged:
                data = bytes(byte ^ 1 for byte in data)
            begin = int(re.sub(r"\D", "", self.headers.get("Range", "0").partition("-")[0]) or 0)
            if begin:
                hub.ranges.append((name, begin))
            self.send_response(206 if begin else 200)
            self.send_header("ETag", f'"{entry.get("lfs", entry)["oid"]}"')
            self.send_header("X-Repo-Commit", hub.commit)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(data) - begin))
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if not body:
                return
            if name in hub.cut:
                hub.cut.discard(name)
                self.wfile.write(data[begin : begin + (len(data) - begin) // 2])
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)
                return
            self.wfile.write(data[begin:])

        def log_message(self, *_: object) -> None:
            pass

    return Handler
