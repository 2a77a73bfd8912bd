"""Questions to servers that do not behave: whatever sits on the port, an answer comes in time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from dsv4_deploy.errors import REFUSED, DeployError, render
from dsv4_deploy.serve import canary, probe

Reply = Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"


async def drops(writer: asyncio.StreamWriter) -> None:
    """An answer that never ends, a byte at a time."""
    writer.write(HEAD)
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def flood(writer: asyncio.StreamWriter) -> None:
    """The same as fast as it goes."""
    writer.write(HEAD)
    while True:
        writer.write(b" " * (1 << 20))
        await writer.drain()


async def nested(writer: asyncio.StreamWriter) -> None:
    """JSON that no parser gets to the end of."""
    writer.write(HEAD + b"[" * 200_000)


async def infinite(writer: asyncio.StreamWriter) -> None:
    """A number that is no integer."""
    writer.write(
        HEAD + b'{"choices": [{"finish_reason": "length"}], "usage": {"completion_tokens": Infinity}}'
    )


async def ask(reply: Reply, question: Callable[[str], Coroutine[Any, Any, Any]]) -> Any:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            await reply(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        return await question(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


@pytest.mark.parametrize("reply", [drops, flood, nested])
def test_a_probe_has_an_answer_in_time(reply: Reply) -> None:
    async def question(url: str) -> tuple[bool, str]:
        return await asyncio.to_thread(probe.verdict, url, "live", 0.5)

    began = time.monotonic()
    _, reason = asyncio.run(ask(reply, question))
    assert reason.startswith(("nothing answers", "HTTP status 200"))
    # The limit is half a second; a busy machine gets the rest.
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("key", ["schlüssel", "key\n", " key", "a\r\nX-Other: b"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(DeployError) as raised:
        probe.auth_headers()
    assert raised.value.exit_code == REFUSED
    assert key not in render(raised.value)
    monkeypatch.setenv("VLLM_API_KEY", "a-key")
    assert probe.auth_headers() == {"Authorization": "Bearer a-key"}


@pytest.mark.parametrize("reply", [drops, nested, infinite])
def test_a_canary_never_raises_and_never_waits_for_ever(reply: Reply) -> None:
    async def question(url: str) -> canary.Outcome:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            return await canary.send(client, "m", 1.0, priority_allowed=False)

    outcome = asyncio.run(ask(reply, question))
    assert outcome.result == "failed" and outcome.reason
