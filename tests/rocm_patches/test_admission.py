"""The door of a drain, as an ASGI application; with a real server in tests/e2e/test_supervisor.py."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rocm_patches import admission


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "draining"
    monkeypatch.setenv(admission.FLAG, str(path))
    return path


async def inner(scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/broken":
        raise RuntimeError("in the middle of an answer")
    await send({"type": "http.response.body", "body": b"ok"})


async def nothing() -> Any:
    return {"type": "http.request", "body": b"", "more_body": False}


def ask(app: Any, method: str = "POST", path: str = "/v1/completions", kind: str = "http") -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app({"type": kind, "method": method, "path": path}, nothing, send))
    return sent


def value(metric: Any) -> float:
    number: float = metric._value.get()
    return number


def test_requests_pass_and_are_counted(flag: Path) -> None:
    app = admission.Admission(inner)
    before = value(admission.ACCEPTED)
    assert ask(app)[0]["status"] == 200
    assert ask(app, "GET", "/health")[0]["status"] == 200
    assert value(admission.ACCEPTED) == before + 1
    assert value(admission.IN_FLIGHT) == 0


def test_a_request_is_in_flight_until_its_last_byte(flag: Path) -> None:
    seen: list[float] = []

    async def streaming(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            seen.append(value(admission.IN_FLIGHT))
            await send({"type": "http.response.body", "body": b"token", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    ask(admission.Admission(streaming))
    assert seen == [1, 1, 1]
    assert value(admission.IN_FLIGHT) == 0


def test_a_broken_answer_is_not_in_flight_for_ever(flag: Path) -> None:
    with pytest.raises(RuntimeError):
        ask(admission.Admission(inner), path="/broken")
    assert value(admission.IN_FLIGHT) == 0


def test_the_flag_shuts_the_door_for_new_requests_only(flag: Path) -> None:
    app = admission.Admission(inner)

    async def until_drained(_scope: Any, _receive: Any, send: Any) -> None:
        flag.touch()  # the drain begins while this one runs
        await inner({"path": "/"}, None, send)

    assert ask(admission.Admission(until_drained))[0]["status"] == 200
    refused = value(admission.REFUSED)
    start, body = ask(app)
    assert start["status"] == 503
    assert (b"connection", b"close") in start["headers"]
    assert dict(start["headers"])[b"retry-after"] == b"1"
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert json.loads(body["body"])["error"]["code"] == 503
    assert value(admission.REFUSED) == refused + 1
    for path in ("/health", "/metrics", "/v1/models"):
        assert ask(app, "GET", path)[0]["status"] == 200
    assert ask(app, kind="websocket") == [{"type": "websocket.close", "code": 1012}]
    flag.unlink()
    assert ask(app)[0]["status"] == 200


def test_without_a_supervisor_the_door_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(admission.FLAG, raising=False)
    assert ask(admission.Admission(inner))[0]["status"] == 200
