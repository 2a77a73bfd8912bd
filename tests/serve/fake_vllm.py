"""A small real server that behaves like `vllm serve` towards its supervisor, for tests of the process's life.

It is started through DSV4_VLLM_COMMAND by the same code that starts vLLM. It writes log lines of vLLM's
form, starts an engine and one worker per rank as child processes, and answers /health, /v1/models, /metrics
and /v1/completions. FAKE_VLLM says how it misbehaves, as words separated by commas:

    hang            never listens
    slow            takes three seconds to load
    fail            ends while loading, with an engine error before the API server's
    usage           ends at once like argparse does
    die-answering   ends in the middle of the first answer
    deaf            the API server ignores SIGTERM
    deaf-engine     engine and workers ignore SIGTERM and do not notice that the API server has gone
    titled          engine and workers rename themselves with setproctitle, as vLLM's do
    busy=N          N requests are running, and move; once it drains, one less at each look at /metrics
    wrong-name      serves the model under another name
    no-engine       answers completions with HTTP status 500
    nan             its log-probabilities are no numbers
    one-token       says the same token over and over
    frozen          after the warm-up its engine neither answers nor moves
    full            after the warm-up it answers completions with HTTP status 503
    nan-metrics     has no numbers in its metrics
    key=KEY         wants that API key

Once a file of the name in FAKE_VLLM_KILLS exists, /health says 503 and it ends four seconds later, as vLLM
does when its engine has died.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

QUIRKS = os.environ.get("FAKE_VLLM", "").split(",")
OPTIONS = dict(quirk.split("=", 1) for quirk in QUIRKS if "=" in quirk)
TOKENS = ["In", " racks", " of", " silver"]
WARM_UP = 3


def log(process: str, level: str, text: str) -> None:
    stamp = time.strftime("%m-%d %H:%M:%S")
    print(f"({process} pid={os.getpid()}) {level} {stamp} [fake.py:1] {text}", flush=True)


def engine(role: str, parent: int) -> None:
    """The engine core or a worker: lives as long as its parent, unless it is deaf."""
    if "titled" in QUIRKS:
        import setproctitle

        setproctitle.setproctitle(f"VLLM::{role}")
    if "deaf-engine" in QUIRKS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while "deaf-engine" in QUIRKS or os.getppid() == parent:
        time.sleep(0.05)


def spawn(role: str) -> None:
    subprocess.Popen([sys.executable, __file__, f"--role={role}", f"--parent={os.getpid()}"])


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served_name = ""
    busy = int(OPTIONS.get("busy", "0"))
    completions = 0
    steps = 0

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(503 if engine_is_dead() else 200, "")
        elif self.path == "/v1/models":
            if self.authorized():
                model = {"id": self.served_name, "max_model_len": 4608}
                self.answer(200, json.dumps({"object": "list", "data": [model]}))
        elif self.path == "/metrics":
            if draining():
                Handler.busy = max(0, Handler.busy - 1)
            Handler.steps += Handler.busy > 0
            self.answer(200, metrics(Handler.busy, Handler.completions + Handler.steps))
        else:
            self.answer(404, "{}")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.authorized():
            return
        if self.path == "/tokenize":
            self.answer(200, json.dumps({"tokens": list(range(4000))}))
            return
        if draining():
            self.answer(503, json.dumps({"error": {"message": "This server is shutting down"}}))
            return
        if Handler.completions >= WARM_UP:
            while "frozen" in QUIRKS:
                time.sleep(0.1)
            if "full" in QUIRKS:
                self.answer(503, json.dumps({"error": {"message": "queue is full"}}))
                return
        Handler.completions += 1
        if "no-engine" in QUIRKS:
            self.answer(500, json.dumps({"error": {"message": "EngineCore encountered an issue"}}))
        elif request.get("stream"):
            self.stream()
        else:
            body = completion("".join(TOKENS), usage=True)
            if "logprobs" in request:
                body["choices"] = [{**body["choices"][0], "logprobs": logprobs(request["max_tokens"])}]
            self.answer(200, json.dumps(body, ensure_ascii=False))

    def authorized(self) -> bool:
        if "key" in OPTIONS and self.headers.get("Authorization") != f"Bearer {OPTIONS['key']}":
            self.answer(401, '{"error": "Unauthorized"}')
            return False
        return True

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for number, token in enumerate(TOKENS):
            if "die-answering" in QUIRKS and number == 2:
                log("EngineCore", "ERROR", "EngineCore encountered a fatal error: out of ideas")
                os._exit(1)
            self.event(completion(token, usage=False))
            time.sleep(0.02)
        self.event({**completion("", usage=True), "choices": []})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, body: dict[str, object]) -> None:
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.flush()

    def answer(self, status: int, body: str) -> None:
        content = body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def draining() -> bool:
    return pathlib.Path(os.environ.get("DSV4_DRAIN_FLAG", "/nowhere")).exists()


def engine_is_dead() -> bool:
    return pathlib.Path(os.environ.get("FAKE_VLLM_KILLS", "/nowhere")).exists()


def metrics(running: int, tokens: int) -> str:
    if "nan-metrics" in QUIRKS:
        return "vllm:num_requests_running NaN\nvllm:generation_tokens_total NaN\n<html>\x00 1e 5"
    labels = '{engine="0",model_name="fake"}'
    return (
        f"vllm:num_requests_running{labels} {float(running)}\n"
        f"vllm:num_requests_waiting{labels} 0.0\n"
        f"vllm:kv_cache_usage_perc{labels} 0.0\n"
        f"vllm:iteration_tokens_total_count{labels} {float(tokens)}\n"
        f"vllm:generation_tokens_total{labels} {float(tokens)}\n"
        f'dsv4_patch_info{{patch="fake",state="applied"}} 1.0\n'
    )


def logprobs(count: int) -> dict[str, object]:
    if "one-token" in QUIRKS:
        return {"tokens": ["!"] * count, "token_logprobs": [-0.1] * count}
    value = None if "nan" in QUIRKS else -0.5
    return {
        "tokens": [TOKENS[number % len(TOKENS)] for number in range(count)],
        "token_logprobs": [value] * count,
    }


def completion(text: str, *, usage: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": Handler.served_name,
        "choices": [{"index": 0, "text": text, "finish_reason": "length"}],
    }
    if usage:
        body["usage"] = {
            "prompt_tokens": 9,
            "completion_tokens": len(TOKENS),
            "total_tokens": 9 + len(TOKENS),
        }
    return body


def serve(arguments: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in QUIRKS else lambda *_: sys.exit(0))
    if "usage" in QUIRKS:
        print("usage: vllm serve [model_tag] [options]\nvllm: error: unrecognized arguments: --nonsense")
        sys.exit(2)
    log("APIServer", "INFO", "rocm_patches active in process 1 (fake: 0 operators)")
    log("APIServer", "INFO", f"argv {sys.argv[1:]}")
    spawn("EngineCore")
    for rank in range(arguments.tensor_parallel_size):
        spawn(f"Worker_TP{rank}")
    log("Worker_TP0", "INFO", f"Starting to load model {arguments.model}...")
    if "fail" in QUIRKS:
        log("Worker_TP0", "ERROR", "Worker failed with: no kernel for this tensor")
        log("Worker_TP0", "ERROR", "Traceback (most recent call last):")
        log("Worker_TP0", "ERROR", "ValueError: the true cause")
        log("APIServer", "ERROR", "RuntimeError: Engine core initialization failed. See root cause above.")
        sys.exit(1)
    while "hang" in QUIRKS:
        time.sleep(0.05)
    for done in range(3):
        time.sleep(1.0 if "slow" in QUIRKS else 0.01)
        print(
            f"Loading safetensors checkpoint shards: {done * 50:3}% Completed | {done}/2",
            end="\r",
            flush=True,
        )
    print(flush=True)
    log("Worker_TP0", "INFO", "Loading weights took 0.03 seconds")
    log(
        "EngineCore", "INFO", "CPU KV cache size: 51,500 tokens, Maximum concurrency for 4,608 tokens: 11.18x"
    )
    log("EngineCore", "INFO", "init engine (profile, create kv cache, warmup model) took 0.01 s")
    Handler.served_name = "other" if "wrong-name" in QUIRKS else arguments.served_model_name
    server = http.server.ThreadingHTTPServer((arguments.host, arguments.port), Handler)
    log("APIServer", "INFO", f"Starting vLLM server on http://{arguments.host}:{arguments.port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while not engine_is_dead():
        time.sleep(0.05)
    log("EngineCore", "ERROR", "EngineCore encountered a fatal error: out of ideas")
    time.sleep(4)
    log("APIServer", "ERROR", "EngineDeadError: EngineCore encountered an issue. See stack trace (above)")
    sys.exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role")
    parser.add_argument("--parent", type=int)
    parser.add_argument("command", nargs="?")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    arguments, _ = parser.parse_known_args()
    if arguments.role:
        engine(arguments.role, arguments.parent)
    else:
        serve(arguments)


if __name__ == "__main__":
    main()
