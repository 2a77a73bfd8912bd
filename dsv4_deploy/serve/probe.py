"""Questions to a running server over HTTP: is it up, which models does it serve, how busy is it.

In: its base URL. Out: plain values; a server that does not answer is an answer too.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.parse

from dsv4_deploy.errors import DeployError

TIMEOUT_S = 2.0
_IN_FLIGHT = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.eE+]+)$", re.MULTILINE)


def auth_headers() -> dict[str, str]:
    """The header that the server wants when VLLM_API_KEY is set (vLLM reads the same variable)."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def is_healthy(url: str) -> bool:
    """True when /health answers 200: the engine is loaded and its process lives."""
    return _get(f"{url}/health")[0] == 200


def served_models(url: str) -> list[str] | None:
    """The names under /v1/models; None when it does not answer, or not with such a list.

    Raises DeployError when the server wants another API key.
    """
    status, body = _get(f"{url}/v1/models", auth_headers())
    if status in (401, 403):
        raise key_refused(status)
    try:
        return [str(model["id"]) for model in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        return None


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


def _get(url: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Status and body of the answer; (0, "") when there is none.

    Plain http.client: it is asked several times a second, and no proxy from the environment may come in
    between.
    """
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", parts.path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()
