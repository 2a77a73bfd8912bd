"""The side port over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import httpx
import pytest

from dsv4_deploy.errors import DeployError
from dsv4_deploy.serve import endpoints
from dsv4_deploy.serve.health import Verdict

SERVING = Verdict(True, "serving")


def ask(*requests: tuple[str, str], verdict: Verdict = SERVING) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        listener = endpoints.bind("127.0.0.1", 0)
        port = listener.getsockname()[1]
        app = endpoints.application({"/readyz": lambda: verdict}, lambda: b"a_metric 1.0\n")
        async with (
            endpoints.serving(app, listener),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
        ):
            return [await client.request(method, path) for method, path in requests]

    return asyncio.run(run())


def test_good_and_bad_verdicts() -> None:
    (good,) = ask(("GET", "/readyz"))
    assert (good.status_code, good.json()) == (200, {"ok": True, "reason": "serving"})
    (bad,) = ask(("GET", "/readyz"), verdict=Verdict(False, 'draining: "x"'))
    assert (bad.status_code, bad.json()) == (503, {"ok": False, "reason": 'draining: "x"'})


def test_metrics_and_what_is_not_there() -> None:
    metrics, nothing, head, post = ask(
        ("GET", "/metrics"), ("GET", "/health"), ("HEAD", "/readyz"), ("POST", "/readyz")
    )
    assert metrics.text == "a_metric 1.0\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert nothing.status_code == 404
    assert "/readyz, /metrics" in nothing.json()["error"]
    assert (head.status_code, head.content) == (200, b"")
    assert post.status_code == 405


def test_rubbish_does_not_stop_it() -> None:
    async def run() -> int:
        listener = endpoints.bind("127.0.0.1", 0)
        port = listener.getsockname()[1]
        app: Any = endpoints.application({"/livez": lambda: Verdict(True, "")}, lambda: b"")
        async with endpoints.serving(app, listener):
            for rubbish in (b"\x00\xff\r\n\r\n", b"GET /" + b"a" * 200_000, b"GET / HTTP/9\r\n\r\n", b""):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(rubbish)
                writer.write_eof()
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                writer.close()
            async with httpx.AsyncClient(trust_env=False) as client:
                return (await client.get(f"http://127.0.0.1:{port}/livez")).status_code

    assert asyncio.run(run()) == 200


def test_connections_that_never_ask_do_not_keep_a_probe_waiting() -> None:
    """Half a request on each of many more connections than the server keeps."""

    async def run() -> tuple[int, int]:
        listener = endpoints.bind("127.0.0.1", 0)
        port = listener.getsockname()[1]
        app: Any = endpoints.application({"/livez": lambda: Verdict(True, "")}, lambda: b"")
        async with endpoints.serving(app, listener):
            silent = []
            for _ in range(2 * endpoints.MOST_CONNECTIONS):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /livez HTTP/1.1\r\nX: ")
                silent.append((reader, writer))
            async with httpx.AsyncClient(trust_env=False) as client:
                status = (await client.get(f"http://127.0.0.1:{port}/livez")).status_code
            closed = 0
            for reader, _ in silent[: endpoints.MOST_CONNECTIONS]:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                closed += 1
            for _, writer in silent:
                writer.close()
        return status, closed

    assert asyncio.run(asyncio.wait_for(run(), 60)) == (200, endpoints.MOST_CONNECTIONS)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(DeployError, match="in use by") as raised:
            endpoints.bind("127.0.0.1", other.getsockname()[1])
        assert "--health-port" in raised.value.fix
    with pytest.raises(DeployError):
        endpoints.bind("192.0.2.77", 0)
