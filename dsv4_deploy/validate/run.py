"""Sends the calls to a server, one after the other, and reports on each; never waits longer than promised.

In: the server's URL. Out: a `Report`. Each call has one deadline for everything from the connection to the
last byte, so a server that hangs, or sends a byte a minute, costs that much and no more; after a deadline or a
broken connection the calls that generate are skipped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any, Literal

from dsv4_deploy.serve.probe import auth_headers
from dsv4_deploy.validate.calls import Call, calls
from dsv4_deploy.validate.check import Judgement, Reply, json_object, judge, served_models
from dsv4_deploy.validate.stream import Stream

if TYPE_CHECKING:
    import httpx

SCHEMA = 1
MOST_BYTES = 8 << 20
"""Of one answer; no call asks for a tenth of that."""
QUICK_S = 10.0
"""For a call that generates nothing."""
_QUICK = ("health", "models", "metrics")


@dataclasses.dataclass(frozen=True)
class Result:
    """One call's outcome; `seconds` from the request to the last byte, None when it was not sent."""

    name: str
    purpose: str
    status: Literal["pass", "fail", "skip"]
    seconds: float | None
    problems: tuple[str, ...] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of all calls."""

    url: str
    model: str | None
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        return all(result.status == "pass" for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return {"schema": SCHEMA, "passed": self.passed, **dataclasses.asdict(self)}

    def lines(self) -> list[str]:
        """For people: a row per call, and its problems below it."""
        width = max(len(result.name) for result in self.results)
        rows = []
        for result in self.results:
            seconds = "" if result.seconds is None else f"{result.seconds:.2f} s"
            detail = result.note or ("" if result.problems else result.purpose)
            rows.append(f"{result.status.upper()}  {result.name:<{width}}  {seconds:>9}  {detail}".rstrip())
            rows += [f"      {problem}" for problem in result.problems]
        return rows


class _TooLongError(Exception):
    """The answer is longer than any right one."""


def validate(url: str, *, model: str | None, timeout_s: float) -> Report:
    """Send everything. `model` is the name that has to be served, None for the first one; `timeout_s` bounds
    each call. Never raises for what a server does."""
    return asyncio.run(_validate(url, model, timeout_s))


async def _validate(url: str, model: str | None, timeout_s: float) -> Report:
    import httpx

    results: list[Result] = []
    name = model
    # The whole of a call is bounded by asyncio; httpx's own limit only bounds each silence. Certificates take
    # a while to load, and plain HTTP has none to check.
    tls = url.startswith("https:")
    async with httpx.AsyncClient(trust_env=False, timeout=timeout_s, verify=tls) as client:
        stopped = ""
        for position in range(len(calls())):
            # Made anew, since the answer to the second call says which model the others are about.
            call = calls(name)[position]
            if stopped:
                results.append(Result(call.name, call.purpose, "skip", None, note=stopped))
                continue
            limit = min(timeout_s, QUICK_S) if call.kind in _QUICK else timeout_s
            result, reply = await _one(client, url, call, limit, model)
            results.append(result)
            if call.kind == "models" and reply and name is None:
                name = next(iter(served_models(json_object(reply.body) or {})), None)
            if reply is None and (call.kind not in _QUICK or call.kind == "health"):
                stopped = "not sent, because the server did not answer the one before"
    return Report(url, name, tuple(results))


async def _one(
    client: httpx.AsyncClient, url: str, call: Call, limit_s: float, model: str | None
) -> tuple[Result, Reply | None]:
    """One call. The reply is None when there is no whole one."""
    import httpx

    begun = time.monotonic()
    reply = None
    try:
        reply = await asyncio.wait_for(_send(client, url, call), limit_s)
        judgement = judge(call, reply, model)
    except (TimeoutError, httpx.TimeoutException):
        judgement = Judgement((f"no whole answer within {limit_s:.0f} s",))
    except httpx.ConnectError as error:
        judgement = Judgement((f"nothing answers there: {error}",))
    except _TooLongError:
        judgement = Judgement((f"the answer is longer than {MOST_BYTES >> 20} MiB",))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        judgement = Judgement((f"the answer broke off: {type(error).__name__}: {error}",))
    status: Literal["pass", "fail"] = "fail" if judgement.problems else "pass"
    seconds = time.monotonic() - begun
    return Result(call.name, call.purpose, status, seconds, judgement.problems, judgement.note), reply


async def _send(client: httpx.AsyncClient, url: str, call: Call) -> Reply:
    method = "GET" if call.body is None else "POST"
    headers = {"Accept-Encoding": "identity", **(auth_headers() if call.path.startswith("/v1/") else {})}
    async with client.stream(method, f"{url}{call.path}", json=call.body, headers=headers) as response:
        body = bytearray()
        # As sent: what was not asked for, such as compression, is not undone.
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > MOST_BYTES:
                raise _TooLongError
        text = body.decode("utf-8", errors="replace")
        kind = response.headers.get("content-type", "")
        if not call.streams or response.status_code != 200:
            return Reply(response.status_code, kind, text)
    stream = Stream(chat=call.kind == "chat")
    # Not splitlines: a model may write other line separators into its text.
    for line in text.split("\n"):
        stream.feed(line.rstrip("\r"))
    answer = stream.answer()
    return Reply(response.status_code, kind, text, answer, tuple(stream.problems))
