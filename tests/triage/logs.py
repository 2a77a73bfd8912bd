"""Makes logs as vLLM writes them: several processes at once, colours, progress bars, and what follows a failure.

In: the lines that matter. Out: the bytes of a log with them in the middle, and the number of the line that is
to be named. Deterministic: the same lines give the same log.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

COLOUR, PLAIN = "\x1b[1;36m", "\x1b[0;0m"
WORKERS = 8


@dataclasses.dataclass(frozen=True)
class Planted:
    """A log, and the number (from 1, counting newlines) of the line that was marked."""

    data: bytes
    line: int


def record(process: str, pid: int, level: str, place: str, text: str) -> str:
    return f"({process} pid={pid}) {level} 11-30 22:00:{pid % 60:02} [{place}] {text}"


def start() -> list[str]:
    """What 0.32.0 writes until the weights load; the warning quotes a failure on purpose."""
    return [
        "W1130 21:59:27.488000 23248 torch/_library/triton.py:53] Triton not available, find_triton_kernels = []",
        record("APIServer", 1, "INFO", "api_utils.py:347", " ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0"),
        record("APIServer", 1, "INFO", "api_utils.py:286", "non-default args: {'model': '/models/flash', 'api_key': ['sk-1234567890abcdef']}"),
        record("APIServer", 1, "WARNING", "system_utils.py:255", "Found ulimit of 20000. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`."),
        record("EngineCore", 90, "INFO", "core.py:133", "Initializing a V1 LLM engine (v0.32.0) with config: model='/models/flash'"),
        *(record(f"Worker_TP{n}", 100 + n, "INFO", "parallel_state.py:1906", f"world_size=8 rank={n} backend=nccl") for n in range(WORKERS)),
        *(record(f"Worker_TP{n}", 100 + n, "INFO", "gpu_model_runner.py:5100", "Starting to load model /models/flash...") for n in range(WORKERS)),
        "\r".join(
            f"Loading safetensors checkpoint shards: {done * 100 // 46:3}% Completed | {done}/46 [00:{done:02}<01:00,  1.10it/s]"
            for done in range(47)
        ),
    ]  # fmt: skip


def loaded() -> list[str]:
    return [
        *(record(f"Worker_TP{n}", 100 + n, "INFO", "default_loader.py:501", "Loading weights took 51.20 seconds") for n in range(WORKERS)),
        *chatter(3),
    ]  # fmt: skip


def chatter(rounds: int) -> list[str]:
    """Noise that a server makes while all is well, and hints that stop nothing."""
    lines = []
    for number in range(rounds):
        for n in range(WORKERS):
            lines.append(
                f"(Worker_TP{n} pid={100 + n}) [aiter] import [module_moe_sorting] under /root/.aiter/jit/module_moe_sorting.so"
            )
        lines.append(
            record(
                "APIServer",
                1,
                "INFO",
                "loggers.py:335",
                f"Engine 000: Avg prompt throughput: {number}.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.3%",
            )
        )
        lines.append(f'INFO:     10.0.0.{number % 250}:40000 - "POST /v1/chat/completions HTTP/1.1" 200 OK')
        lines.append(
            record(
                "EngineCore",
                90,
                "DEBUG",
                "utils.py:485",
                "Waiting for 1 local, 0 remote core engine proc(s) to start.",
            )
        )
    return lines  # fmt: skip


def tuned_config(count: int) -> list[str]:
    return [
        f"(Worker_TP{n % WORKERS} pid={100 + n % WORKERS}) [aiter] shape is M:{n}, N:512, K:7168, not found tuned config in /tmp/aiter_configs/a.csv, will use default config!"
        for n in range(count)
    ]  # fmt: skip


def listening() -> list[str]:
    return [
        record("EngineCore", 90, "INFO", "core.py:402", "init engine (profile, create kv cache, warmup model) took 40.10 s"),
        record("APIServer", 1, "INFO", "entry.py:140", "Starting vLLM server on http://0.0.0.0:8000"),
        "INFO:     Started server process [1]",
        "INFO:     Application startup complete.",
    ]  # fmt: skip


def aftermath() -> list[str]:
    """The long end of every failed start: each process reports that another one failed."""

    def traceback(process: str, pid: int, place: str, head: str, error: str) -> list[str]:
        frames = [
            line
            for depth in range(12)
            for line in (
                f'  File "/app/vllm/v1/engine/core.py", line {depth}, in step',
                "    return self.run(depth)",
            )
        ]
        return [
            record(process, pid, "ERROR", place, text)
            for text in (head, "Traceback (most recent call last):", *frames, error)
        ]

    failed = "Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause."
    raw = [
        "Traceback (most recent call last):",
        '  File "/app/vllm/v1/engine/core.py", line 1482, in run_engine_core',
        "    raise e",
    ]
    return [
        *traceback("EngineCore", 90, "core.py:1510", "EngineCore failed to start.", failed),
        record("EngineCore", 90, "ERROR", "multiproc_executor.py:315", "Worker proc VllmWorker-5 died unexpectedly (exit code: 0), shutting down executor."),
        "(EngineCore pid=90) Process EngineCore:",
        *(f"(EngineCore pid=90) {line}" for line in [*raw, failed]),
        record("APIServer", 1, "INFO", "utils.py:628", "[shutdown] Process manager: send sigterm to process EngineCore"),
        *(f"(APIServer pid=1) {line}" for line in raw),
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked shared_memory objects to clean up at shutdown",
        "  warnings.warn('resource_tracker: There appear to be %d '",
    ]  # fmt: skip


def interleave(lines: Sequence[str], noise: Sequence[str]) -> list[str]:
    """A line of noise after every line, as when the other workers go on meanwhile."""
    pairs = itertools.zip_longest(lines, noise[: len(lines)])
    return [line for pair in pairs for line in pair if line is not None]


def plant(
    example: Sequence[str],
    marked: int,
    *,
    before: Sequence[str],
    after: Sequence[str],
    unfinished_bar: bool = True,
) -> Planted:
    """Put an example between what comes before and after. Prefixes get vLLM's colours, and with
    `unfinished_bar` the first line of the example stands behind a progress bar that never got its newline."""
    bar = "Loading safetensors checkpoint shards:  91% Completed | 58/64 [02:11<00:13,  2.26s/it]\r"
    noise = chatter(len(example) // 10 + 2)
    middle = interleave(example, noise)
    if unfinished_bar and middle[0].startswith("("):
        middle[0] = bar.rstrip("\r") + middle[0]
    lines = [*before, *middle, *after]
    number = len(before) + 2 * marked + 1
    text = "\n".join(_coloured(line) for line in lines) + "\n"
    return Planted(text.encode("utf-8"), number)


def _coloured(line: str) -> str:
    if not line.startswith("(") or "pid=" not in line:
        return line
    process, _, rest = line.partition(") ")
    return f"{COLOUR}{process}){PLAIN} {rest}"
