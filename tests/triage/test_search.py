"""How the lines of a log are weighed: what wins over what, and what is left unnamed."""

from __future__ import annotations

import io
import random

import pytest

from dsv4_deploy.triage import Diagnosis, diagnose_stream
from tests.triage import logs
from tests.triage.logs import record

F01 = record("Worker_TP0", 100, "ERROR", "m.py:1", "NotImplementedError: \"mul_cuda\" not implemented for 'Float8_e8m0fnu'")  # fmt: skip
DEAD = record("APIServer", 1, "ERROR", "async_llm.py:906", "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.")  # fmt: skip


def ask(*lines: str, exit_code: int | None = None) -> Diagnosis:
    return diagnose_stream(io.BytesIO("\n".join(lines).encode()), "vllm.log", exit_code)


def failure(process: str, pid: int, error: str, place: str = "core.py:1510") -> list[str]:
    texts = (
        "It failed.",
        "Traceback (most recent call last):",
        '  File "/a.py", line 1, in f',
        "    g()",
        error,
    )
    return [record(process, pid, "ERROR", place, text) for text in texts]


def raw(*errors: str, link: str = "") -> list[str]:
    lines: list[str] = []
    for error in errors:
        if lines:
            lines += ["", link, ""]
        lines += [
            "Traceback (most recent call last):",
            '  File "/a.py", line 1, in f',
            "    g()",
            "    ^^^",
            error,
        ]
    return lines


def test_a_known_cause_wins_over_an_earlier_unknown_error_which_is_mentioned() -> None:
    answer = ask(*logs.start(), *failure("Worker_TP1", 101, "ValueError: odd"), F01)
    assert answer.id == "F01"
    (note,) = [note for note in answer.notes if "stands before it" in note]
    assert "ValueError: odd" in note


def test_of_two_known_causes_the_first_wins_and_the_other_is_mentioned() -> None:
    late = record("Worker_TP1", 101, "ERROR", "m.py:1", "OSError: [Errno 24] Too many open files")
    answer = ask(*logs.start(), F01, late)
    assert answer.id == "F01"
    assert any("F19" in note for note in answer.notes)


def test_what_a_stop_leaves_behind_is_no_cause() -> None:
    up = [*logs.start(), *logs.loaded(), *logs.listening()]
    stop = record("APIServer", 1, "INFO", "launcher.py:254", "[shutdown] API server: shutdown triggered")
    answer = ask(*up, stop, *failure("APIServer", 1, "RuntimeError: cancelled"), DEAD, F01)
    assert (answer.id, answer.verdict) == ("unknown", "healthy")
    assert "told to end" in answer.summary


def test_a_traceback_of_a_request_is_not_why_the_engine_died() -> None:
    up = [*logs.start(), *logs.loaded(), *logs.listening()]
    request = failure("APIServer", 1, "ValueError: bad request", place="serving.py:310")
    engine = failure("EngineCore", 90, "IndexError: out of slots")
    answer = ask(*up, *request, *logs.chatter(5), *engine, DEAD)
    assert answer.line is not None
    assert "IndexError: out of slots" in answer.line.text


def test_a_plain_error_record_does_not_hide_how_it_ended() -> None:
    died = record("EngineCore", 90, "ERROR", "multiproc_executor.py:315", "Worker proc VllmWorker-2 died unexpectedly (exit code: -9), shutting down executor.")  # fmt: skip
    answer = ask(*logs.start(), record("Worker_TP1", 101, "ERROR", "x.py:1", "no such cache, going on"), died)
    assert answer.id == "F11"
    assert any("no such cache" in note for note in answer.notes)


def test_the_start_of_an_explicit_chain_is_the_cause_and_the_end_of_an_implicit_one() -> None:
    caused = "The above exception was the direct cause of the following exception:"
    meanwhile = "During handling of the above exception, another exception occurred:"
    errors = ("KeyError: 'first'", "RuntimeError: second")
    first = ask(*logs.start(), *raw(*errors, link=caused))
    second = ask(*logs.start(), *raw(*errors, link=meanwhile))
    assert first.line is not None and second.line is not None
    assert "first" in first.line.text
    assert "second" in second.line.text


def test_a_raw_traceback_is_followed_through_the_lines_of_others() -> None:
    lines = logs.interleave(
        [f"(EngineCore pid=90) {line}" for line in raw("ValueError: lost")], logs.chatter(3)
    )
    answer = ask(*logs.start(), *lines)
    assert answer.line is not None
    assert answer.line.text == "(EngineCore pid=90) ValueError: lost"
    assert answer.line.number == len(logs.start()) + 2 * 4 + 1


def test_a_file_with_several_starts_is_judged_by_the_last() -> None:
    broken = [*logs.start(), F01, *logs.aftermath()]
    other = [*logs.start(), *failure("EngineCore", 90, "ValueError: new"), *logs.aftermath()]
    healthy = [*logs.start(), *logs.loaded(), *logs.listening()]
    twice = ask(*broken, *other)
    assert twice.line is not None and "ValueError: new" in twice.line.text
    assert any("several starts" in note for note in twice.notes)
    assert ask(*broken, *healthy).verdict == "healthy"
    going_on = ask(*broken, *logs.start())
    assert going_on.id == "F01"
    assert any("later start" in note for note in going_on.notes)
    assert (
        ask(*broken, *broken, *broken, *broken, *other).line
        == ask(*broken, *broken, *broken, *broken, *other).line
    )


def test_an_exit_code_is_put_into_words() -> None:
    for code, name in (
        (-11, "SIGSEGV"),
        (139, "SIGSEGV"),
        (-9, "SIGKILL"),
        (137, "SIGKILL"),
        (135, "SIGBUS"),
    ):
        answer = ask(*logs.start(), *logs.loaded(), exit_code=code)
        assert any(f"Exit code {code} is {name}" in note for note in answer.notes)
    for code in (0, 1, 128, 255, None):
        assert not any("Exit code" in note for note in ask(*logs.start(), exit_code=code).notes)


def test_a_healthy_log_of_a_process_that_died_is_not_called_healthy() -> None:
    lines = [*logs.start(), *logs.loaded(), *logs.listening()]
    assert ask(*lines, exit_code=0).verdict == "healthy"
    killed = ask(*lines, exit_code=-9)
    assert (killed.verdict, killed.id) == ("unknown", "unknown")
    assert "exit code -9" in killed.summary


def test_how_far_it_came_is_said() -> None:
    answer = ask(*logs.start(), *logs.loaded())
    assert "It came as far as: weights loaded." in answer.notes
    assert "ends before the server was listening" in answer.summary
    assert answer.excerpt[-1].number == len([*logs.start(), *logs.loaded()])


FOREIGN = {
    "nginx": '10.0.0.1 - - [30/Nov/2026:21:00:00 +0000] "GET /vllm/v1/models HTTP/1.1" 502 157 "-" "curl"\n'
    "2026/11/30 21:00:00 [error] 31#31: *1 connect() failed (111: Connection refused) while connecting to upstream\n" * 40,
    "kernel": "[    0.000000] Linux version 6.1.0\n[   12.3] amdgpu 0000:05:00.0: amdgpu: Fatal error during GPU init\n" * 40,
    "unittest": "test_one (tests.T) ... FAIL\n" + "\n".join(raw("PermissionError: [Errno 13] Permission denied: '/.config'")) + "\nFAILED (errors=1)\n",
    "postgres": "2026-11-30 21:00:00.123 UTC [71] FATAL:  password authentication failed for user \"x\"\n" * 5,
    "empty": "",
    "blank": "\n\n\n",
    "prose": "Address already in use, said the Walrus; too many open files, sighed the Carpenter.\n",
}  # fmt: skip


@pytest.mark.parametrize("name", list(FOREIGN))
def test_foreign_logs_are_unknown(name: str) -> None:
    answer = ask(FOREIGN[name])
    assert (answer.id, answer.verdict, answer.cause) == ("unknown", "unknown", None)
    assert answer.text().startswith("unknown: ")
    if name in ("unittest", "postgres"):
        assert answer.line is not None, "the best line is shown all the same"


def test_a_log_of_another_engine_is_named_as_such() -> None:
    lines = "\n".join(raw("ValueError: odd")).replace("/a.py", "/sglang/srt/managers/scheduler.py")
    answer = ask(lines)
    assert answer.id == "unknown"
    assert any("SGLang" in note for note in answer.notes)


def test_binary_noise_around_the_cause() -> None:
    noise = random.Random(4)  # noqa: S311 (noise, not a secret)
    data = (
        noise.randbytes(300_000)
        + b"\n"
        + "\n".join([*logs.start(), F01]).encode()
        + b"\n"
        + noise.randbytes(300_000)
    )
    answer = diagnose_stream(io.BytesIO(data), "noise")
    assert answer.id == "F01"
    assert answer.text().isprintable() or all(char.isprintable() or char == "\n" for char in answer.text())


def test_text_after_noise_on_the_same_line_is_read() -> None:
    """A copied and truncated log begins with a hole of zeros."""
    start = "\n".join(logs.start()).encode() + b"\n"
    data = start + b"\0" * 2_000_000 + F01.encode() + b"\n"
    answer = diagnose_stream(io.BytesIO(data), "hole")
    assert answer.id == "F01"
    assert answer.line is not None and answer.line.number == start.count(b"\n") + 1


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9, 0.999])
def test_a_truncated_log_gives_an_answer(keep: float) -> None:
    data = "\n".join([*logs.start(), F01, *logs.aftermath()]).encode()
    for piece in (data[: int(len(data) * keep)], data[int(len(data) * (1 - keep)) :]):
        answer = diagnose_stream(io.BytesIO(piece), "cut")
        assert answer.id in ("F01", "unknown")
        assert answer.text()


def test_a_log_that_ends_inside_a_traceback_says_so() -> None:
    answer = ask(*logs.start(), *failure("Worker_TP0", 100, "ValueError: x")[:3])
    assert answer.line is not None and answer.line.text == "(Worker_TP0 pid=100) It failed."
    assert any("ends inside this traceback" in note for note in answer.notes)


def test_thousands_of_failures_do_not_fill_the_memory() -> None:
    import tracemalloc

    one = "\n".join(failure("Worker_TP0", 100, "ValueError: x", place="a.py:1")).encode() + b"\n"

    class Endless(io.RawIOBase):
        left = 100

        def read(self, _: int = -1) -> bytes:
            self.left -= 1
            return one.replace(b"a.py:1", b"a.py:%d" % self.left) * 30 if self.left > 0 else b""

    tracemalloc.start()
    answer = diagnose_stream(Endless(), "endless")  # type: ignore[arg-type]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.line is not None and answer.line.number == 5
    assert peak < 8_000_000
