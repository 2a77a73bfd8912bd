"""The side port: /startupz, /readyz, /livez and /metrics, answered from memory.

In: functions that give the answers now. Out: an HTTP server in the running event loop. Nothing here waits for
vLLM, so an answer takes a millisecond however busy vLLM is. uvicorn is what vLLM's own server runs on; there
is no framework on top of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dsv4_deploy.errors import DeployError
from dsv4_deploy.serve import procs
from dsv4_deploy.serve.exporter import CONTENT_TYPE
from dsv4_deploy.serve.health import Verdict

Message = dict[str, Any]
_START_S = 10.0
MOST_CONNECTIONS = 100
"""Probes and scrapes need a handful."""


def application(
    verdicts: Mapping[str, Callable[[], Verdict]], metrics: Callable[[], bytes]
) -> Callable[[Message, Any, Callable[[Message], Awaitable[None]]], Awaitable[None]]:
    """The ASGI application: one path per verdict, and /metrics."""

    async def app(scope: Message, _receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        path, kind = scope["path"], "application/json"
        if scope["method"] not in ("GET", "HEAD"):
            status, body = 405, b'{"error": "GET only"}\n'
        elif path in verdicts:
            verdict = verdicts[path]()
            status = 200 if verdict.ok else 503
            body = json.dumps({"ok": verdict.ok, "reason": verdict.reason}).encode() + b"\n"
        elif path == "/metrics":
            status, body, kind = 200, metrics(), CONTENT_TYPE
        else:
            paths = ", ".join([*verdicts, "/metrics"])
            status, body = 404, json.dumps({"error": f"no such path; there are {paths}"}).encode() + b"\n"
        headers = [
            (b"content-type", kind.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return app


def bind(host: str, port: int) -> socket.socket:
    """A listening socket for the side port. Raises DeployError that says who has the port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise DeployError(
            f"cannot listen on {host} for health probes", why=str(error), fix="Use another --health-host."
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        holder = f"in use by {procs.listener_on(port)}" if error.errno == errno.EADDRINUSE else error.strerror
        raise DeployError(
            f"cannot listen on {host} port {port} for health probes: {holder}",
            why="The supervisor answers /startupz, /readyz, /livez and /metrics there.",
            fix="Use another port: --health-port N.",
        ) from error
    return listener


class _Protocol(H11Protocol):
    """uvicorn's, which waits for ever for the rest of a request. Connections that say nothing would take every
    file descriptor and with them the probes; so the oldest one goes when there are too many."""

    _open: ClassVar[dict[_Protocol, None]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._open[self] = None
        if len(self._open) > MOST_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.pop(self, None)
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the supervisor has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: Any, listener: socket.socket) -> Any:
    """Serve the application on that socket inside the block."""
    config = uvicorn.Config(
        app, http=_Protocol, ws="none", lifespan="off", log_config=None, log_level="critical",
        access_log=False, server_header=False, timeout_keep_alive=60, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(_START_S):
            while not server.started and not task.done():
                await asyncio.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        await task
        listener.close()
