"""Questions to a running deployment over HTTP: what its supervisor says of its health, how busy vLLM is.

In: a base URL. Out: plain values; a server that does not answer is an answer too. Standard library only:
`dsv4-deploy probe` is run every few seconds.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import urllib.parse

from dsv4_deploy.errors import DeployError, refused

TIMEOUT_S = 2.0
"""For the whole answer."""
_MOST_BYTES = 16 << 20
"""Of an answer: vLLM's metrics have some hundred kilobytes."""
_IN_FLIGHT = re.compile(
    r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\d+(?:\.\d+)?(?:[eE]\+?\d{1,2})?)$", re.MULTILINE
)


def auth_headers() -> dict[str, str]:
    """The header that the server wants when VLLM_API_KEY is set (vLLM reads the same variable). Raises DeployError
    for a key that no header can carry; it is not quoted."""
    key = os.environ.get("VLLM_API_KEY")
    if key and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise refused(
            "VLLM_API_KEY holds something else than printable ASCII, or begins or ends with a space",
            why="It is sent in a header of HTTP, which cannot carry that; often it is the newline of a file.",
            fix="Set it again without, for example VLLM_API_KEY=$(cat FILE).",
        )
    return {"Authorization": f"Bearer {key}"} if key else {}


PATHS = {"startup": "/startupz", "ready": "/readyz", "live": "/livez"}


def verdict(health_url: str, name: str, timeout_s: float = TIMEOUT_S) -> tuple[bool, str]:
    """What the supervisor answers to a probe ("startup", "ready" or "live"): good or not, and the reason."""
    status, body = _get(f"{health_url}{PATHS[name]}", timeout_s=timeout_s)
    if not status:
        return False, f"nothing answers on {health_url}"
    try:
        reason = str(json.loads(body)["reason"])
    except (ValueError, KeyError, TypeError, RecursionError):
        reason = f"HTTP status {status}"
    return status == 200, reason


def requests_in_flight(url: str) -> int | None:
    """Running plus waiting requests from /metrics; None when that cannot be known."""
    values = _IN_FLIGHT.findall(_get(f"{url}/metrics")[1])
    return int(sum(float(value) for value in values)) if values else None


def key_refused(status: int) -> DeployError:
    """The error for a server that answers 401 or 403."""
    return DeployError(
        "the server refuses the request: wrong or missing API key",
        why=f"It answered {status}. It was started with another VLLM_API_KEY than is set here.",
        fix="Export the VLLM_API_KEY of the server, then run `dsv4-deploy up` again.",
    )


def _get(url: str, timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """Status and body of the answer; (0, "") when there is none.

    HTTP/1.0 over a bare socket: http.client would take as long to import as everything else that a probe does,
    and no proxy from the environment may come in between.
    """
    parts = urllib.parse.urlsplit(url)
    request = f"GET {parts.path} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n"
    deadline = time.monotonic() + timeout_s
    answer = bytearray()
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout_s) as connection:
            connection.sendall(request.encode())
            while block := connection.recv(64 * 1024):
                answer += block
                left = deadline - time.monotonic()
                if left <= 0 or len(answer) > _MOST_BYTES:
                    return 0, ""
                connection.settimeout(left)
    except OSError:
        return 0, ""
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    words = head.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        return 0, ""
    return int(words[1]), body.decode("utf-8", errors="replace")
