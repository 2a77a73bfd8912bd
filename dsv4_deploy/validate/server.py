"""Where a server is: checks an address that a person typed. In: text. Out: a base URL to append paths to."""

from __future__ import annotations

import urllib.parse

from dsv4_deploy.errors import refused


def base_url(text: str) -> str:
    """The address without a trailing slash or /v1. Raises DeployError (exit code 2) for what is none."""
    example = "For example http://127.0.0.1:8000 or https://llm.example.org."
    given = text if "//" in text else f"http://{text}"
    if any(ord(char) <= 32 or ord(char) == 127 for char in given):
        raise refused(f"{text!r} is not a URL", why="It holds spaces or control characters.", fix=example)
    try:
        parts = urllib.parse.urlsplit(given)
        port = parts.port
    except ValueError as error:
        raise refused(f"{text!r} is not a URL", why=str(error), fix=example) from error
    if parts.username is not None or parts.password is not None:
        raise refused(
            "a URL with a user name or password is not taken",
            why="Other users of this machine can read command lines.",
            fix="Put the API key into the variable VLLM_API_KEY.",
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise refused(f"{text!r} is not a URL", why="It needs http:// or https:// and a host.", fix=example)
    if parts.query or parts.fragment:
        raise refused(f"{text!r} has a query", why="Paths are appended to the address.", fix=example)
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"
