"""A small real HTTP server that answers like vLLM, or badly in one of the ways that servers do.

In: a quirk. Out: a context with its URL; every request's path and headers are kept in `seen`. It answers as
right as `validate` demands, so each quirk is the only thing wrong.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

MODEL = "tiny"


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    quirk = ""
    key = ""
    stopping = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gives up is what these tests are about."""


@contextlib.contextmanager
def serve(quirk: str = "", key: str = "") -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.quirk, server.key = quirk, key
    server.stopping = threading.Event()
    server.seen: list[tuple[str, dict[str, str]]] = []  # type: ignore[attr-defined, misc]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.begin()
        if self.path == "/health":
            self.answer(503 if self.quirk == "unhealthy" else 200, "")
        elif self.path == "/metrics":
            name = "other" if self.quirk == "no-metrics" else "vllm:num_requests_running"
            self.answer(200, f'# HELP x\n{name}{{engine="0",model_name="tiny"}} 0.0\n', kind="text/plain")
        elif not self.refused():
            self.json({"object": "list", "data": [] if self.quirk == "no-models" else [{"id": MODEL}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.begin()
        if self.refused():
            return
        chat = self.path == "/v1/chat/completions"
        if body["max_tokens"] < 1 and self.quirk != "takes-anything":
            self.json({"error": {"message": "max_tokens must be at least 1"}}, 400)
        elif self.quirk == "http-500":
            self.json({"error": {"message": "EngineCore encountered an issue.", "code": 500}}, 500)
        elif self.quirk == "no-template" and chat:
            message = "As of transformers v4.44, default chat template is no longer allowed"
            self.json({"error": {"message": message}}, 400)
        elif self.quirk == "hang":
            self.server.stopping.wait(60)
        elif self.quirk == "drip":
            self.drip()
        elif self.quirk == "garbage-http":
            self.wfile.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            self.close_connection = True
        elif self.quirk == "endless":
            self.endless()
        elif body.get("stream"):
            self.stream(chat, answer(body, chat, self.quirk))
        elif self.quirk == "not-json":
            self.answer(200, "<html>welcome</html>")
        elif self.quirk == "closes-early":
            self.head(200, "application/json", 1000)
            self.wfile.write(b'{"object": "text_comp')
            self.close_connection = True
        else:
            self.json(answer(body, chat, self.quirk))

    def begin(self) -> None:
        self.quirk = self.server.quirk
        self.server.seen.append((self.path, dict(self.headers)))  # type: ignore[attr-defined]
        if self.quirk == "hang-always":
            self.server.stopping.wait(60)

    def refused(self) -> bool:
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.json({"error": "Unauthorized"}, 401)
            return True
        return False

    def stream(self, chat: bool, whole: dict[str, Any]) -> None:
        kind = "application/json" if self.quirk == "stream-type" else "text/event-stream; charset=utf-8"
        self.head(200, kind, None)
        events = [json.dumps(event, ensure_ascii=False) for event in pieces(whole, chat)]
        if self.quirk == "stream-garbage":
            events.insert(1, '{"choices": [')
        if self.quirk == "stream-error":
            events.insert(1, '{"error": {"message": "EngineDeadError"}}')
        if self.quirk == "stream-twice":
            events.insert(-1, events[-2])
        for event in events if self.quirk != "stream-cut" else events[:1]:
            self.chunk(f"data: {event}\n\n")
        if self.quirk == "stream-aborts":
            self.close_connection = True
            return  # without the last chunk
        if self.quirk != "stream-cut":
            self.chunk("data: [DONE]\n\n")
        if self.quirk == "stream-after-done":
            self.chunk('data: {"choices": []}\n\n')
        self.chunk("")

    def chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def drip(self) -> None:
        """A byte now and then, for ever: no pause is long, the whole is."""
        self.head(200, "application/json", 100_000)
        while not self.server.stopping.wait(0.05):
            self.wfile.write(b" ")
            self.wfile.flush()

    def endless(self) -> None:
        self.head(200, "application/json", None)
        deadline = time.monotonic() + 20
        while not self.server.stopping.is_set() and time.monotonic() < deadline:
            self.chunk("x" * 1_000_000)

    def head(self, status: int, kind: str, length: int | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if length is None:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def json(self, body: dict[str, Any], status: int = 200) -> None:
        self.answer(status, json.dumps(body, ensure_ascii=False), kind="application/json")

    def answer(self, status: int, text: str, kind: str = "text/html") -> None:
        data = text.encode()
        self.head(status, kind, len(data))
        self.wfile.write(data)


def answer(request: dict[str, Any], chat: bool, quirk: str) -> dict[str, Any]:
    """A right answer, apart from the quirk."""
    tokens = min(4, request["max_tokens"])
    prob = {"nan": math.nan, "inf": -math.inf, "positive": 0.5, "null": None}.get(quirk, -0.5)
    usage = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}
    if quirk == "usage":
        usage["total_tokens"] += 1
    choice: dict[str, Any] = {"index": 0, "finish_reason": "abort" if quirk == "abort" else "length"}
    if chat:
        choice["message"] = message(request, quirk)
        if request.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": "x", "logprob": prob}] * tokens}
        if choice["message"]["tool_calls"]:
            choice["finish_reason"] = "tool_calls"
    else:
        choice["text"] = "" if quirk == "empty" else "In racks of silver\u2028light"
        choice["logprobs"] = {"token_logprobs": [prob] * (tokens - (quirk == "few-logprobs"))}
    kind = "chat.completion" if chat else "text_completion"
    return {"object": kind, "model": MODEL, "choices": [choice], "usage": usage}


def message(request: dict[str, Any], quirk: str) -> dict[str, Any]:
    content, reasoning, calls = "42", None, []
    thinks = request["chat_template_kwargs"]["thinking"]
    if "tools" in request:
        arguments = {"bad-arguments": '{"city": ', "wrong-city": '{"city": "Rome"}', "no-city": "{}"}
        text = arguments.get(quirk, '{"city": "Berlin"}')
        calls = [{"type": "function", "function": {"name": "get_weather", "arguments": text}}]
        content = ""
        if quirk == "markup":
            content, calls = "<｜DSML｜invoke name=get_weather>", []
    elif thinks:
        content, reasoning = ("", "17 and 25") if quirk == "budget" else ("42", "17 and 25")
    if quirk == "leaks-thoughts":
        reasoning = "hm"
    if quirk == "no-thoughts":
        reasoning = None
    if quirk == "empty":
        content = ""
    return {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": calls}


def pieces(whole: dict[str, Any], chat: bool) -> Iterator[dict[str, Any]]:
    """The events of a stream: the text in two parts, the end, the usage."""
    choice = whole["choices"][0]
    if chat:
        full = choice["message"]
        calls = [{"index": number, **call} for number, call in enumerate(full["tool_calls"])]
        parts = [
            {"role": "assistant", "content": ""},
            {"reasoning": full["reasoning"]} if full["reasoning"] else {},
            {"content": full["content"]},
        ]
        for call in calls:
            text = call["function"]["arguments"]
            first = {**call["function"], "arguments": text[: len(text) // 2]}
            rest = {"arguments": text[len(text) // 2 :]}
            parts.append({"tool_calls": [{**call, "function": first}]})
            parts.append({"tool_calls": [{"index": call["index"], "function": rest}]})
        for part in parts:
            yield {"choices": [{"index": 0, "delta": part, "finish_reason": None}]}
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    else:
        probs, end = choice["logprobs"]["token_logprobs"], choice["finish_reason"]
        for text, own in ((choice["text"][:5], probs[:2]), (choice["text"][5:], probs[2:])):
            part = {"index": 0, "text": text, "logprobs": {"token_logprobs": own}, "finish_reason": None}
            yield {"choices": [part]}
        yield {"choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": end}]}
    yield {"choices": [], "usage": whole["usage"]}
