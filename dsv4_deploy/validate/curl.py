"""The requests of `calls` as lines for a shell, ready to paste.

In: the server's URL and model. Out: lines with a comment each, quoted so that no shell makes anything else of
them. The API key stays a variable, so that it is written nowhere.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from dsv4_deploy.validate.calls import Call, calls

_KEY = '-H "Authorization: Bearer $VLLM_API_KEY"'


def line(url: str, body: dict[str, Any] | None = None, *, with_key: bool, streams: bool = False) -> str:
    """One curl command. `url` is the whole address; without a body it is a GET."""
    words = ["curl", "-sSN" if streams else "-sS", shlex.quote(url)]
    if body is not None:
        words += ["-H", shlex.quote("Content-Type: application/json")]
    if with_key:
        words.append(_KEY)
    if body is not None:
        words += ["-d", shlex.quote(json.dumps(body, ensure_ascii=False))]
    return " ".join(words)


def lines(url: str, model: str | None, *, with_key: bool) -> list[str]:
    """All of them, each with a comment above it."""
    shown = []
    for call in calls(model):
        if call.kind != "refusal":
            shown += [f"# {call.name}: {call.purpose}", _line(url, call, with_key=with_key), ""]
    return shown[:-1]


def _line(url: str, call: Call, *, with_key: bool) -> str:
    # /health and /metrics ask for no key; sending one there would only spread it.
    needs_key = with_key and call.path.startswith("/v1/")
    return line(f"{url}{call.path}", call.body, with_key=needs_key, streams=call.streams)
