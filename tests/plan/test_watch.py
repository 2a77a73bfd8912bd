"""The numbers by which a server is watched, and that docs/health.md has the same."""

from __future__ import annotations

import dataclasses
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_deploy.plan import recipes
from dsv4_deploy.plan.watch import REASONS, STOP_MARGIN_S, Watch, health_port, make_watch, probes

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "health.md"
CPU: Any = SimpleNamespace(
    device="cpu", host="127.0.0.1", port=8000, shutdown_timeout_s=recipes.CPU_SHUTDOWN_TIMEOUT_S
)
ROCM: Any = SimpleNamespace(
    device="rocm", host="127.0.0.1", port=8000, shutdown_timeout_s=recipes.ROCM_SHUTDOWN_TIMEOUT_S
)


def test_the_side_port_is_as_far_away_for_every_port() -> None:
    assert health_port(8000) == 8081
    assert health_port(9000) == 9081
    assert health_port(65535) == 65535 - 81


def test_what_the_operator_wants_wins() -> None:
    watch = make_watch(CPU, {"port": 9, "stall_s": 5.0, "drain_s": 0.0, "passthrough": False, "host": None})
    assert (watch.port, watch.stall_s, watch.drain_s, watch.passthrough) == (9, 5.0, 0.0, False)
    assert watch.host == "127.0.0.1"


def test_a_watch_survives_the_state_file() -> None:
    watch = make_watch(ROCM)
    assert Watch(**watch.to_dict()) == watch


def test_every_number_has_its_reason() -> None:
    own = {"host", "port", "passthrough"}
    assert set(REASONS) == {field.name for field in dataclasses.fields(Watch)} - own


@pytest.mark.parametrize("plan", [CPU, ROCM])
def test_the_numbers_fit_together(plan: Any) -> None:
    watch = make_watch(plan)
    assert watch.poll_s < watch.canary_period_s < watch.ready_window_s < watch.stall_s
    table = probes(watch, 3600)
    assert table["startup"].budget_s >= 3600 * 1.25
    assert all(probe.timeout_s <= probe.period_s for probe in table.values())


def test_the_docs_have_these_numbers() -> None:
    text = DOCS.read_text()
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (line.split("|") for line in text.splitlines() if line.startswith("|"))
    }
    columns = [
        (make_watch(CPU), recipes.CPU_READY_TIMEOUT_S, recipes.CPU_SHUTDOWN_TIMEOUT_S),
        (make_watch(ROCM), recipes.ROCM_READY_TIMEOUT_S, recipes.ROCM_SHUTDOWN_TIMEOUT_S),
        (make_watch(ROCM), recipes.ROCM_READY_TIMEOUT_LARGE_S, recipes.ROCM_SHUTDOWN_TIMEOUT_S),
    ]

    def row(values: list[float]) -> list[str]:
        return [f"{value:.0f} s" for value in values]

    assert rows["startup budget"] == row([probes(w, ready)["startup"].budget_s for w, ready, _ in columns])
    for name, field in (
        ("ready window (`--ready-window`)", "ready_window_s"),
        ("stall timeout (`--stall-timeout`)", "stall_s"),
        ("canary period (`--canary-period`)", "canary_period_s"),
        ("drain (`--drain-timeout`)", "drain_s"),
    ):
        assert rows[name] == row([getattr(watch, field) for watch, _, _ in columns]), name
    hang = "a hang of an idle server turns `/livez` to 503 within"
    assert rows[hang] == row([watch.hang_bound_s for watch, _, _ in columns])
    assert rows["vLLM's own shutdown after it"] == row([shutdown for *_, shutdown in columns])
    grace = "`terminationGracePeriodSeconds`, beside preStop, at least"
    assert rows[grace] == row([watch.stop_bound_s(shutdown) for watch, _, shutdown in columns])
    for name, probe in probes(make_watch(ROCM), 3600).items():
        failures = "budget ÷ 15" if name == "startup" else str(probe.failures)
        assert rows[f"`{probe.path}`"][1] == f"{probe.period_s} s, {probe.timeout_s} s, {failures}"
    assert STOP_MARGIN_S == 20
