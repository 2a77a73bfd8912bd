"""Every known failure, planted in the middle of a long log of eight workers, is found with its line."""

from __future__ import annotations

import io
import pathlib
import re
from collections.abc import Sequence

import pytest

from dsv4_deploy.triage import Diagnosis, diagnose_stream
from dsv4_deploy.triage.rules import Rule, book
from tests.triage import logs

# The rows that the public failure log marks for triage. F06 is F01 in a disguise, F20 is never the answer, F61
# shares its words with F40: each of them has a test of its own below.
TRIAGE_ROWS = [
    "F01",
    "F02",
    "F03",
    "F04",
    "F05",
    "F06",
    "F07",
    "F08",
    "F11",
    "F13",
    "F15",
    "F16",
    "F19",
    "F20",
    "F23",
    "F26",
    "F27",
    "F28",
    "F35",
    "F36",
    "F40",
    "F49",
    "F54",
    "F61",
    "F64",
    "F77",
]
RULES = {rule.about.id: rule for rule in book().rules}
QUIET_S = 1200.0


def ask(data: bytes, exit_code: int | None = None, quiet_s: float = 0.0) -> Diagnosis:
    return diagnose_stream(io.BytesIO(data), "vllm.log", exit_code, quiet_s)


def planted(rule: Rule) -> logs.Planted:
    """The rule's example where it would stand in a real log."""
    before = [*logs.start(), *logs.chatter(20), *logs.tuned_config(0 if rule.kind == "hint" else 300)]
    fails_while_loading = rule.about.id in ("F10", "F11", "F13", "F15", "D09")
    if not fails_while_loading:
        before += logs.loaded()
    ends_silently = rule.kind == "hint" or rule.quiet_s or rule.example_exit is not None
    if rule.kind == "hint" or rule.about.id == "D11":
        before += logs.listening()
    after = logs.chatter(10) if rule.kind == "hint" else [] if ends_silently else [*logs.aftermath()]
    return logs.plant(rule.example, rule.example_line, before=before, after=after)


def test_every_row_marked_for_triage_has_a_rule_or_a_test_here() -> None:
    assert set(TRIAGE_ROWS) - set(RULES) == {"F06"}


@pytest.mark.parametrize(
    "number", [n for n, rule in RULES.items() if rule.kind not in ("consequence", "reference")]
)
def test_an_example_in_the_middle_of_a_long_log(number: str) -> None:
    rule = RULES[number]
    log = planted(rule)
    assert log.data.count(b"\n") > 150
    answer = ask(log.data, rule.example_exit, QUIET_S if rule.quiet_s else 0.0)
    assert (answer.id, answer.verdict) == (number, "known")
    assert answer.line is not None
    assert answer.line.number == log.line
    named = log.data.split(b"\n")[log.line - 1].decode()
    assert re.sub(r"\x1b\[[0-9;]*m", "", named).rstrip()[-40:] in answer.line.text
    text = answer.text()
    assert rule.about.cause in text
    assert rule.about.fix in text
    for link in rule.about.links:
        assert link in text


def test_f06_a_stopped_progress_bar_hides_f01() -> None:
    rule = RULES["F01"]
    example = [line.replace("Worker_TP3_EP3 pid=4123", "Worker_DP7_EP7 pid=107") for line in rule.example]
    log = logs.plant(example, rule.example_line, before=logs.start(), after=logs.aftermath())
    assert b"91% Completed | 58/64" in log.data
    answer = ask(log.data)
    assert answer.id == "F01"
    assert answer.line is not None
    assert answer.line.number == log.line
    assert "memory" not in answer.summary


def test_f61_is_named_among_the_causes_of_a_fault_with_the_question_that_decides() -> None:
    answer = ask(planted(RULES["F40"]).data)
    assert answer.id == "F40"
    assert [cause.id for cause in answer.possible] == ["F61", "F41", "F44"]
    assert RULES["F61"].about.fix in answer.text()
    assert any("How many tokens" in note for note in answer.notes)


def worker_errors(error: str, workers: Sequence[int]) -> list[str]:
    """The same traceback of several workers, line by line in turn."""
    texts = (
        "WorkerProc hit an exception.",
        "Traceback (most recent call last):",
        '  File "/app/x.py", line 3, in run',
        "    compute()",
    )
    return [
        logs.record(f"Worker_TP{n}", 100 + n, "ERROR", "multiproc_executor.py:1063", text.replace("RANK", str(n)))
        for text in (*texts, error)
        for n in workers
    ]  # fmt: skip


def test_f20_the_first_error_of_the_earliest_worker_is_named_and_equal_ones_are_merged() -> None:
    errors = worker_errors("ValueError: rank RANK has no such tensor at 0x7fRANK", range(8))
    before = [*logs.start(), *logs.loaded()]
    data = "\n".join([*before, *errors, *logs.aftermath()]).encode()
    answer = ask(data)
    assert (answer.id, answer.verdict, answer.cause) == ("unknown", "unknown", None)
    assert answer.line is not None
    assert answer.line.number == len(before) + 4 * 8 + 1
    assert answer.line.text == "(Worker_TP0 pid=100) ValueError: rank 0 has no such tensor at 0x7f0"
    assert answer.speakers == tuple(f"Worker_TP{n} pid={100 + n}" for n in range(8))
    assert "and 4 more" in answer.text()
    assert "See root cause above" not in answer.text()


def test_f20_alone_says_that_the_cause_is_not_in_this_log() -> None:
    answer = ask("\n".join(logs.aftermath()[-8:]).encode())
    assert (answer.id, answer.line) == ("unknown", None)
    assert [cause.id for cause in answer.possible] == ["F20"]
    assert "from the first line on" in answer.text()


def test_f54_never_is_the_cause_of_a_crash_and_100_216_lines_are_one() -> None:
    lines = [*logs.start(), *logs.tuned_config(100_216), *logs.loaded()]
    crash = [*lines, *worker_errors("ValueError: something new", [3]), *logs.aftermath()]
    answer = ask("\n".join(crash).encode())
    assert answer.id == "unknown"
    assert answer.line is not None
    assert "something new" in answer.line.text
    (note,) = [note for note in answer.notes if "F54" in note]
    assert f"100216 lines, first {len(logs.start()) + 1}" in note
    assert answer.text().count("not found tuned config") == 0

    healthy = [*logs.start(), *logs.tuned_config(1000), *logs.loaded(), *logs.listening()]
    alone = ask("\n".join(healthy).encode())
    assert (alone.id, alone.verdict) == ("F54", "known")
    assert any("1000 lines say so" in note for note in alone.notes)


def test_f28_building_is_not_hanging() -> None:
    rule = RULES["F28"]
    log = planted(rule)
    building = ask(log.data, quiet_s=599)
    assert building.id == "unknown"
    assert any("has not ended (silent for 599 of 600 s)" in note for note in building.notes)
    finished = log.data + b"(Worker_TP0 pid=205) [aiter] finish build [module_moe_sorting], cost 225.31s\n"
    assert ask(finished, quiet_s=QUIET_S).id == "unknown"


def test_f11_needs_the_kill_or_the_exit_code() -> None:
    log = planted(RULES["F11"])
    assert ask(log.data).id == "unknown"
    assert ask(log.data, exit_code=1).id == "unknown"
    for code in (137, -9):
        assert ask(log.data, exit_code=code).id == "F11"
    loaded = log.data + "\n".join(logs.loaded()).encode()
    after_loading = ask(loaded, exit_code=137)
    assert after_loading.id == "unknown"
    assert any("SIGKILL" in note for note in after_loading.notes)


def test_f05_knows_virtual_gpus_from_this_machine_where_the_log_names_none(tmp_path: pathlib.Path) -> None:
    died = "(EngineCore pid=90) ERROR 11-30 22:00:01 [multiproc_executor.py:315] Worker proc VllmWorker-2 died unexpectedly (exit code: -6), shutting down executor."
    data = "\n".join([*logs.start(), *logs.loaded(), died]).encode()
    device = tmp_path / "sys/bus/pci/devices/0000:05:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x1002\n")
    (device / "class").write_text("0x120000\n")
    for device_id, number in (("0x74a1", "D10"), ("0x74b5", "F05")):
        (device / "device").write_text(f"{device_id}\n")
        assert diagnose_stream(io.BytesIO(data), "vllm.log", root=tmp_path).id == number


def test_f64_is_about_the_capture_only() -> None:
    crash = "(EngineCore pid=90) ERROR 11-30 22:00:01 [multiproc_executor.py:315] Worker proc VllmWorker-4 died unexpectedly (exit code: -11), shutting down executor."
    capture = "Capturing CUDA graphs (decode, FULL):   4%|▍         | 2/51 [00:03<01:11,  1.46s/it]"
    done = logs.record(
        "Worker_TP0",
        100,
        "INFO",
        "gpu_model_runner.py:6582",
        "Graph capturing finished in 9 secs, took 1.20 GiB",
    )
    before = [*logs.start(), *logs.loaded()]
    assert ask("\n".join([*before, capture, crash]).encode()).id == "F64"
    later = ask("\n".join([*before, capture, done, crash]).encode())
    assert later.id == "D10"
    assert any("Exit code -11 is SIGSEGV" in note for note in later.notes)
