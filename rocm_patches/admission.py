"""ASGI middleware for vLLM's API server (`--middleware rocm_patches.admission.Admission`): the door of a drain.

vLLM 0.32.0 keeps its port open and /health at 200 while it drains, and answers new requests with HTTP 500
("cannot schedule new futures after shutdown"), also one that was just on its way in. This stands in front: once
the file named by DSV4_DRAIN_FLAG exists, every new POST (and WebSocket) gets a 503 that a load balancer retries
elsewhere, and vLLM is only told to stop when nobody is inside any more. Out, as metrics on vLLM's own /metrics:
exactly how many requests are between their headers and the last byte of their answer, which vLLM's gauges cannot
say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import Counter, Gauge

FLAG = "DSV4_DRAIN_FLAG"
IN_FLIGHT = Gauge(
    "dsv4_requests_in_flight",
    "Requests whose answer is not complete, from headers to last byte.",
    multiprocess_mode="livesum",
)
ACCEPTED = Counter("dsv4_requests_accepted", "Requests that were let in.")
REFUSED = Counter("dsv4_requests_refused", "Requests that were refused because the server drains.")

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Callable[[], Awaitable[Message]], Send], Awaitable[None]]

_BODY = json.dumps(
    {
        "error": {
            "message": "This server is shutting down and takes no new requests. Send it again: another one answers.",
            "type": "service_unavailable",
            "param": None,
            "code": 503,
        }
    }
).encode()
_HEADERS = [
    (b"content-type", b"application/json"),
    (b"content-length", str(len(_BODY)).encode()),
    (b"retry-after", b"1"),
    # A client that keeps its connection would come back here instead of to a server that lives on.
    (b"connection", b"close"),
]


class Admission:
    """Counts requests, and refuses new ones from the moment that the flag exists."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._flag = os.environ.get(FLAG)

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["method"] != "POST"):
            await self._app(scope, receive, send)
            return
        # Nothing is awaited between the look at the flag and the count: whoever raises the flag and then reads
        # zero knows that nobody is on the way in.
        if self._flag is not None and os.path.exists(self._flag):  # noqa: PTH110 (a Path per request costs more)
            REFUSED.inc()
            await _refuse(scope, receive, send)
            return
        ACCEPTED.inc()
        with IN_FLIGHT.track_inprogress():
            await self._app(scope, receive, send)


async def _refuse(scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1012})  # "service restart"
        return
    await send({"type": "http.response.start", "status": 503, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": _BODY})
