"""What a start makes of the self-test's verdict. The program itself is in tests/rocm_patches/selftest."""

from __future__ import annotations

import json
import subprocess
import types
from typing import Any

import pytest

from dsv4_deploy import selftest
from dsv4_deploy.errors import DeployError
from dsv4_deploy.preflight import arithmetic
from dsv4_deploy.preflight.finding import Finding


def row(operator: str, ok: bool, skipped: bool = False, error: float | None = 0.5) -> dict[str, Any]:
    return {"operator": operator, "dialect": "fnuz", "ok": ok, "skipped": skipped, "error": error, "tolerance": 0.1,
            "problem": ""}  # fmt: skip


def answers(monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any]) -> list[list[str]]:
    """The program answers with these rows; returns the command lines it was started with."""
    started: list[list[str]] = []
    found = {"ok": True, "device": "MI300X", "seconds": 30.0, "rows": rows}

    def run(argv: list[str], **_: Any) -> Any:
        started.append(argv)
        return subprocess.CompletedProcess(argv, 0, f"noise\n{json.dumps(found)}\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    return started


def findings(environ: dict[str, str] | None = None) -> list[Finding]:
    return list(arithmetic.selftest(types.SimpleNamespace(environ=environ or {})))  # type: ignore[arg-type]


def test_all_right(monkeypatch: pytest.MonkeyPatch) -> None:
    started = answers(monkeypatch, row("attention", True))
    (found,) = findings()
    assert (found.level, found.found) == ("ok", "1 measurements on MI300X in 30 s")
    assert started[0][1:] == ["-m", "rocm_patches.selftest", "--device", "cuda", "--json"]


def test_wrong_stops_the_start_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, row("attention", False), row("mHC", True), row("router", False, error=None))
    (found,) = findings()
    assert found.level == "fail"
    assert (
        "2 of 3 measurements on MI300X are wrong: attention (fnuz): 0.5 where 0.1 is allowed" in found.found
    )
    assert selftest.SKIP in found.fix


def test_named_operators_pass_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    started = answers(monkeypatch, row("a, b", False, skipped=True))
    (found,) = findings({selftest.SKIP: "a, b; mHC"})
    assert found.level == "warn" and "a, b" in found.found
    assert started[0][5:9] == ["--skip", "a, b", "--skip", "mHC"]


def test_no_verdict_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: list[str], **_: Any) -> Any:
        return subprocess.CompletedProcess(argv, 1, "", "Traceback\nImportError: no torch\n")

    monkeypatch.setattr(subprocess, "run", run)
    (found,) = findings()
    assert (found.level, found.why) == ("fail", "ImportError: no torch")


def test_a_hang_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: list[str], **_: Any) -> Any:
        raise subprocess.TimeoutExpired(argv, 1)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(DeployError, match="did not end within"):
        selftest.judge({})
    assert findings()[0].level == "fail"
