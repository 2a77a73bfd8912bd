"""Running all checks: nothing is changed; findings come out as lines, pages and JSON; the operator can let one pass."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from dsv4_deploy.errors import DeployError
from dsv4_deploy.preflight import run
from dsv4_deploy.preflight.finding import fail, ok, warn
from tests import hosts
from tests.hosts import Host
from tests.preflight.conftest import Bench

FINE = ok("open-files", "unlimited")
SLOW = warn("numa-balancing", "kernel.numa_balancing is on", "It stalls.", "Turn it off", "W29")
DEAD = fail(
    "gpu-partition", "64 parts", "They are small.", "Reset it", "F17", "W30", link="https://example.org/1"
)


def tree(root: pathlib.Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(root.rglob("*"))
    }


@pytest.mark.parametrize(
    "host", [Host(), Host(card=None), Host(compute_partition="CPX", driver="6.3", module=True)]
)
def test_nothing_is_changed(bench: Bench, host: Host) -> None:
    case = bench.case(host, environ={"HF_HUB_OFFLINE": "1"})
    before = tree(bench.folder)
    assert run.run(case)
    assert tree(bench.folder) == before


def test_every_check_of_a_bad_host_speaks_once_and_for_people(bench: Bench) -> None:
    host = Host(
        card=hosts.MI300X_VF, compute_partition="CPX", driver="6.3", rocm="10.0.0", hypervisor=("QEMU", "q35"),
        open_files="1024", locked_memory="65536", numa_balancing=1, memory_max=str(2**30), used_bytes=2**37,
    )  # fmt: skip
    found = run.run(bench.case(host, environ={"HF_HUB_OFFLINE": "1"}, shm=2**26, tp=8))
    bad = {finding.check for finding in found if finding.level != "ok"}
    assert {
        "gpu-partition", "gpu-memory", "driver-window", "shared-memory", "open-files", "locked-memory",
        "numa-balancing", "memory", "download", "plan",
    } <= bad  # fmt: skip
    for finding in found:
        if finding.level != "ok":
            assert finding.why and finding.fix, finding
        assert finding.check in run.NAMES


def test_what_the_rules_of_the_plan_say_is_told_too(bench: Bench) -> None:
    found = bench.findings("planned", Host(card=hosts.UNKNOWN, hypervisor=("QEMU", "q35")), tp=8)
    named = {finding.check: finding for finding in found}
    assert named["unknown-card"].level == "warn" and "74ff" in named["unknown-card"].found
    assert "QEMU q35" in named["virtual-function-tp8"].found
    assert "F05" in named["virtual-function-tp8"].refs


def test_a_value_that_a_rule_changed_is_no_warning(bench: Bench) -> None:
    found = bench.findings("planned", overrides={"block-size": "16"})
    (changed,) = [finding for finding in found if finding.check == "block-size"]
    assert changed.level == "ok" and "256" in changed.found


def test_names_are_those_of_the_checks() -> None:
    assert {check.__name__.replace("_", "-") for check in run.CHECKS} - {"planned"} <= run.NAMES
    assert len({check.__name__ for check in run.CHECKS}) == len(run.CHECKS)


def test_the_no_gpu_mode_asks_nothing_about_gpus(bench: Bench) -> None:
    assert not {finding.check for finding in run.run(bench.case(device="cpu"))} & {
        "gpu-driver",
        "gpu-devices",
        "driver-window",
    }


def test_let_pass() -> None:
    findings = [FINE, SLOW, DEAD]
    assert run.let_pass(findings, ()) == findings
    assert run.let_pass(findings, ("numa-balancing",)) == [FINE, DEAD]
    passed = run.let_pass(findings, ("gpu-partition", "open-files"))
    assert [finding.level for finding in passed] == ["ok", "warn", "warn"]
    assert passed[2].fix.startswith("Allowed by --allow gpu-partition")
    assert run.passed(passed) and not run.passed(findings)


def test_lines() -> None:
    assert run.line(FINE) == "open-files: unlimited."
    assert run.line(SLOW) == (
        "numa-balancing: kernel.numa_balancing is on. It stalls. Turn it off (W29; silence: --allow numa-balancing)"
    )
    assert "\n" not in run.line(DEAD)
    assert "(F17, W30)" in run.line(DEAD)


def test_pages() -> None:
    assert run.block(FINE) == ["ok    open-files         unlimited"]
    lines = run.block(DEAD)
    assert lines[0].startswith("fail  gpu-partition      64 parts")
    assert [text.split(":")[0].strip() for text in lines[1:]] == ["why", "fix", "see"]
    assert "https://example.org/1" in lines[3]
    assert run.summary([FINE]) == "All 1 checks are fine."
    assert run.summary([FINE, SLOW, DEAD]) == "1 problem, 1 warning, 1 fine."


def test_json() -> None:
    content = json.loads(run.as_json([FINE, DEAD]))
    assert content["ok"] is False
    assert content["findings"][1] == {
        "check": "gpu-partition", "level": "fail", "found": "64 parts", "why": "They are small.", "fix": "Reset it",
        "refs": ["F17", "W30"], "link": "https://example.org/1",
    }  # fmt: skip


def test_insist_names_all_that_failed() -> None:
    run.insist([FINE, SLOW])
    with pytest.raises(DeployError) as raised:
        run.insist([DEAD, fail("port", "taken", "By somebody.", "Use another")])
    assert raised.value.exit_code == 1
    assert "64 parts" in raised.value.what and "F17" in raised.value.what
    assert "taken" in raised.value.detail


def deploy(tmp_path: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "DSV4_STATE_DIR": str(tmp_path / "state"),
        "DSV4_CACHE_DIR": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "dsv4_deploy", *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_the_command_on_this_machine(tmp_path: pathlib.Path) -> None:
    done = deploy(tmp_path, "preflight", "--device", "cpu", "--port", "18734")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "port               127.0.0.1 port 18734 is free" in done.stdout
    assert not (tmp_path / "cache").exists(), "preflight writes nothing"


def test_the_command_fails_where_a_check_fails(tmp_path: pathlib.Path) -> None:
    """This machine has no AMD GPU, which for --device rocm is a failure with a cause."""
    done = deploy(tmp_path, "preflight", "--device", "rocm", "--json")
    assert done.returncode == 1, done.stderr
    content = json.loads(done.stdout)
    assert content["ok"] is False
    assert {"gpu-driver", "download"} <= {f["check"] for f in content["findings"] if f["level"] == "fail"}


def test_the_page_lists_every_check() -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs/preflight.md").read_text()
    listed = [line.split("|")[1].strip(" `") for line in page.splitlines() if line.startswith("| `")]
    assert listed == [check.__name__.replace("_", "-") for check in run.CHECKS if check.__name__ != "planned"]
