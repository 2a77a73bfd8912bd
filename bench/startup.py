"""Times what a newcomer meets: `dsv4-deploy --help`, the wait for a server that answers, its memory, its
decode speed; and the same three of plain `vllm serve` with a tiny ordinary model, as the yardstick for what
vLLM itself costs on this machine. In: the programs beside this Python. Out: a table, or JSON. Both servers
are started as a user starts them, one after the other, and stopped by their process group.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

BIN = Path(sys.executable).parent
PROMPT = "Write me a poem about AMD and Deepseek"
# What `dsv4-deploy up` gives vLLM on the CPU, so that the yardstick runs under the same conditions.
CPU_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_PLUGINS": "",
}


@dataclass(frozen=True)
class Server:
    """One server's figures: seconds from the start of its command to the first 200 of /health; Pss of
    all its processes in MiB, after the runs; seconds to the first token, and tokens per second after it,
    as the medians of the runs."""

    name: str
    health_s: float
    first_token_s: float
    memory_mib: float
    processes: int
    decode_tokens_per_s: float


class BenchError(Exception):
    """A measured program failed; the text says which and how."""


def time_help(runs: int) -> list[float]:
    """Seconds that each of `runs` calls of `dsv4-deploy --help` took."""
    taken = []
    for _ in range(runs):
        begin = time.perf_counter()
        subprocess.run([str(BIN / "dsv4-deploy"), "--help"], check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - begin)
    return taken


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_llama(directory: Path) -> None:
    """Writes an ordinary two-layer Llama of about a million random parameters, with a tokenizer of
    single bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    letters = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    logging.disable_progress_bar()
    marks = {"bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


@contextmanager
def started(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command in its own process group and ends the whole group afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for sign, patience in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 5.0)):
            if not group_alive(process):
                break
            os.killpg(process.pid, sign)
            deadline = time.monotonic() + patience
            while group_alive(process) and time.monotonic() < deadline:
                time.sleep(0.1)


def group_alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # reaps the leader, whose entry would keep the group alive
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_health(
    url: str, process: subprocess.Popen[bytes], log: Path, timeout: float, *, may_end: bool
) -> float:
    """Waits for the first 200 of /health; returns the clock's reading then. `may_end`: the command may
    finish, with 0, while its server goes on. Raises BenchError with the end of the log."""
    deadline = time.monotonic() + timeout
    with httpx.Client(timeout=2) as client:
        while time.monotonic() < deadline:
            ended = process.poll()
            if ended is not None and (ended or not may_end):
                break
            try:
                if client.get(f"{url}/health").status_code == 200:
                    return time.monotonic()
            except httpx.TransportError:
                pass
            time.sleep(0.1)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise BenchError(
        f"{process.args!r} did not become healthy (status {process.poll()}). Its last lines:\n{tail}"
    )


def complete(url: str, model: str, tokens: int) -> tuple[float, float]:
    """Streams one greedy completion of `tokens` tokens; returns seconds to the first token and tokens
    per second after."""
    body: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    begin = time.perf_counter()
    first = last = 0.0
    made = 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as response:
        if response.status_code != 200:
            raise BenchError(
                f"{url} answered {response.status_code}: {response.read().decode(errors='replace')}"
            )
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["choices"]:
                last = time.perf_counter()
                first = first or last
            if event.get("usage"):
                made = event["usage"]["completion_tokens"]
    if made != tokens:
        raise BenchError(f"{url} made {made} tokens instead of {tokens}")
    return first - begin, (made - 1) / (last - first)


def memory(pid: int) -> tuple[float, int]:
    """Pss in MiB, and the number, of a process and all its descendants."""
    leader = psutil.Process(pid)
    family = [leader, *leader.children(recursive=True)]
    return sum(one.memory_full_info().pss for one in family) / 2**20, len(family)


def figures(name: str, url: str, pid: int, health_s: float, options: argparse.Namespace) -> Server:
    """Measures a healthy server. The first completion warms it up and does not count."""
    model = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
    complete(url, model, 8)
    runs = [complete(url, model, options.tokens) for _ in range(options.runs)]
    mib, processes = memory(pid)
    return Server(
        name=name,
        health_s=health_s,
        first_token_s=statistics.median(first for first, _ in runs),
        memory_mib=mib,
        processes=processes,
        decode_tokens_per_s=statistics.median(speed for _, speed in runs),
    )


def measure_plain(scratch: Path, options: argparse.Namespace) -> Server:
    model, log, port = scratch / "llama", scratch / "plain.log", free_port()
    write_llama(model)
    command = [str(BIN / "vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "4096", "--max-num-seqs", "8", "--enforce-eager"]
    begin = time.monotonic()
    with started(command, os.environ | CPU_ENVIRONMENT, log) as process:
        url = f"http://127.0.0.1:{port}"
        healthy = wait_health(url, process, log, options.timeout, may_end=False)
        return figures("vllm serve, ordinary 2-layer model", url, process.pid, healthy - begin, options)


def measure_ours(scratch: Path, options: argparse.Namespace) -> tuple[Server, dict[str, float]]:
    """The figures of `dsv4-deploy up` with the tiny model, and what else it took: seconds to write the
    checkpoint (part of a first start, so it is done before this one) and seconds until `up` had printed
    its answer."""
    program, log, port = str(BIN / "dsv4-deploy"), scratch / "ours.log", free_port()
    tiny = scratch / "tiny"
    begin = time.monotonic()
    subprocess.run([program, "tiny", str(tiny)], check=True, capture_output=True)
    written = time.monotonic() - begin
    environment = os.environ | {"DSV4_STATE_DIR": str(scratch / "state")}
    command = [program, "up", "--device", "cpu", "--model", str(tiny), "--port", str(port)]
    begin = time.monotonic()
    try:
        with started(command, environment, log) as process:
            url = f"http://127.0.0.1:{port}"
            healthy = wait_health(url, process, log, options.timeout, may_end=True) - begin
            if status := process.wait(timeout=options.timeout):
                text = log.read_text(errors="replace")[-2000:]
                raise BenchError(f"dsv4-deploy up ended with {status}:\n{text}")
            answered = time.monotonic() - begin
        rows = json.loads(subprocess.check_output([program, "status", "--json"], env=environment))
        server = figures("dsv4-deploy up, tiny DeepSeek-V4", url, rows[0]["pid"], healthy, options)
        return server, {"write_checkpoint_s": written, "up_with_answer_s": answered}
    finally:
        subprocess.run(
            [program, "down", "--port", str(port)], env=environment, check=False, capture_output=True
        )


def machine() -> dict[str, Any]:
    """What a reader needs to compare figures of two machines."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def show(report: dict[str, Any]) -> None:
    """Prints the report as text, without what was not measured."""
    here = report["machine"]
    print(
        f"{here['cpu']}, {here['cores']} cores, load {here['load']:.1f} at the start, Python {here['python']}"
    )
    if taken := report.get("help"):
        print(f"dsv4-deploy --help: {taken['min_s']:.3f} s at best, {taken['median_s']:.3f} s median")
    if servers := report.get("servers"):
        print(f"{'':36}{'to /health':>12}{'first token':>13}{'decode':>13}{'memory (Pss)':>26}")
        for one in servers:
            memory_text = f"{one['memory_mib']:,.0f} MiB in {one['processes']} processes"
            print(
                f"{one['name']:36}{one['health_s']:>10.1f} s{one['first_token_s']:>11.2f} s"
                f"{one['decode_tokens_per_s']:>9.1f} t/s{memory_text:>26}"
            )
    if extra := report.get("up"):
        print(
            f"dsv4-deploy up until its answer was printed: {extra['up_with_answer_s']:.1f} s;"
            f" writing the checkpoint before it: {extra['write_checkpoint_s']:.1f} s"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=("help", "plain", "ours"), action="append", help="measure this only (repeatable)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - for stdout instead of the table"
    )
    parser.add_argument("--runs", type=int, default=3, help="completions per server (default: 3)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per completion (default: 64)")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds that a start may take (default: 600)"
    )
    options = parser.parse_args()
    if options.runs < 1 or options.tokens < 2:
        parser.error("--runs takes 1 or more, --tokens 2 or more")
    wanted = options.only or ["help", "plain", "ours"]
    for program in ("dsv4-deploy", "vllm"):
        if not (BIN / program).exists():
            print(
                f"error: {BIN} has no {program}.\n  Run it in the no-GPU environment: make bench",
                file=sys.stderr,
            )
            return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report: dict[str, Any] = {"machine": machine()}
    try:
        with tempfile.TemporaryDirectory(prefix="dsv4-bench-") as name:
            scratch, servers = Path(name), []
            if "help" in wanted:
                taken = time_help(21)
                report["help"] = {
                    "min_s": min(taken),
                    "median_s": statistics.median(taken),
                    "runs": len(taken),
                }
            if "plain" in wanted:
                print("Starting plain vLLM with an ordinary model; a minute or two.", file=sys.stderr)
                servers.append(asdict(measure_plain(scratch, options)))
            if "ours" in wanted:
                print("Starting dsv4-deploy up; a minute or two.", file=sys.stderr)
                server, report["up"] = measure_ours(scratch, options)
                servers.append(asdict(server))
            if servers:
                report["servers"] = servers
    except (BenchError, subprocess.SubprocessError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.json != "-":
        show(report)
    if options.json:
        text = json.dumps(report, indent=2) + "\n"
        if options.json == "-":
            print(text, end="")
        else:
            Path(options.json).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
