"""Times `triage` on 200 MB: what a server writes in weeks with one failure in the middle, colours, lines of binary
noise, and nothing but errors. In: a size. Out: seconds and memory of each, as a table or JSON. The promise is under
5 s and 100 MB for each; exit code 1 when it is broken.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path

MOST_SECONDS, MOST_MEGABYTES = 5.0, 100.0
CHUNK = 1000

# Runs in a process of its own, whose memory is then that of one triage.
MEASURE = """
import json, pathlib, resource, sys, time
from dsv4_deploy.triage import diagnose
begin = time.perf_counter(), time.process_time()
found = diagnose(pathlib.Path(sys.argv[1]))
spent = time.perf_counter() - begin[0], time.process_time() - begin[1]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([found.id, found.line and found.line.number, *spent, peak]))
"""


@dataclass(frozen=True)
class Figure:
    """One log: its size, the answer, seconds on the clock and of the processor, peak memory of the process."""

    name: str
    megabytes: float
    answer: str
    line: int | None
    seconds: float
    cpu_seconds: float
    peak_megabytes: float


def access(number: int) -> str:
    return f'INFO:     10.0.{number % 250}.7:{40000 + number % 20000} - "POST /v1/chat/completions HTTP/1.1" 200 OK'


def stats(number: int) -> str:
    clock = f"{number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}"
    return (
        f"(APIServer pid=1) INFO 11-30 {clock} [loggers.py:335] Engine 000: Avg prompt throughput: "
        f"{number % 999}.5 tokens/s, Avg generation throughput: 31.2 tokens/s, Running: 4 reqs, "
        "Waiting: 0 reqs, GPU KV cache usage: 11.3%, Prefix cache hit rate: 40.0%"
    )


def serving(number: int) -> str:
    return stats(number) if number % 4 == 0 else access(number)


def coloured(number: int) -> str:
    return "\x1b[1;36m(APIServer pid=1)\x1b[0;0m " + stats(number).partition(") ")[2]


def tuned(number: int) -> str:
    return (
        f"(Worker_TP{number % 8} pid={100 + number % 8}) [aiter] shape is M:{number}, N:512, K:7168, not found "
        "tuned config in /tmp/aiter_configs/a8w8_blockscale_tuned_gemm.csv, will use default config!"
    )


def errors(number: int) -> str:
    return (
        f"(Worker_TP{number % 8} pid={100 + number % 8}) ERROR 11-30 22:00:00 [x.py:{number % 500}] request {number} "
        "failed in a way that no rule knows"
    )


def lines(line: Callable[[int], str]) -> Iterator[bytes]:
    numbers = count()
    while True:
        yield ("\n".join(line(number) for number in islice(numbers, CHUNK)) + "\n").encode()


def noise() -> Iterator[bytes]:
    source = random.Random(1)  # noqa: S311 (noise, not a secret)
    while True:
        yield source.randbytes(1 << 20)


KINDS: dict[str, Callable[[], Iterator[bytes]]] = {
    "serving": lambda: lines(serving),
    "coloured": lambda: lines(coloured),
    "untuned shapes": lambda: lines(tuned),
    "errors only": lambda: lines(errors),
    "binary noise": noise,
}
CAUSE = (
    b"\n(EngineCore pid=90) ERROR 11-30 22:00:01 [core.py:1512] EngineCore encountered a fatal error.\n"
    b"(EngineCore pid=90) ERROR 11-30 22:00:01 [core.py:1512] Traceback (most recent call last):\n"
    b"(EngineCore pid=90) ERROR 11-30 22:00:01 [core.py:1512] "
    b"RuntimeError: MXFP4 quantization is not supported on gfx942\n"
)


def write(path: Path, pieces: Iterator[bytes], megabytes: int) -> None:
    """The log: half of it, the cause, the other half."""
    half = megabytes * 500_000
    with path.open("wb") as file:
        while file.tell() < half:
            file.write(next(pieces))
        file.write(CAUSE)
        while file.tell() < 2 * half:
            file.write(next(pieces))


def measure(name: str, megabytes: int, directory: Path) -> Figure:
    path = directory / "vllm.log"
    write(path, KINDS[name](), megabytes)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], check=True, capture_output=True, text=True
    )
    answer, line, seconds, cpu, peak = json.loads(done.stdout)
    return Figure(name, path.stat().st_size / 1e6, answer, line, seconds, cpu, peak / 1e6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    figures = []
    print(f"{'log':<16}{'MB':>6}{'answer':>9}{'line':>10}{'s':>8}{'CPU s':>8}{'peak MB':>9}")
    with tempfile.TemporaryDirectory() as directory:
        for name in KINDS:
            figure = measure(name, arguments.megabytes, Path(directory))
            figures.append(figure)
            print(
                f"{figure.name:<16}{figure.megabytes:>6.0f}{figure.answer:>9}{figure.line or '-':>10}"
                f"{figure.seconds:>8.2f}{figure.cpu_seconds:>8.2f}{figure.peak_megabytes:>9.0f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")
    # The clock of a machine that does other things as well says little; its processor time is what is promised.
    kept = all(one.cpu_seconds < MOST_SECONDS and one.peak_megabytes < MOST_MEGABYTES for one in figures)
    found = all(figure.answer == "F26" for figure in figures)
    if not found:
        print("error: the cause was not found in every log", file=sys.stderr)
    if not kept:
        print(f"error: more than {MOST_SECONDS} s or {MOST_MEGABYTES} MB", file=sys.stderr)
    return 0 if kept and found else 1


if __name__ == "__main__":
    sys.exit(main())
