"""The alerts: real promtool checks and tests them, each with a case in which it fires and one in which it must not, and
every metric in them exists."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess

import promql_parser
import pytest
import yaml

from tests.helm import chart

CASES = pathlib.Path(__file__).with_name("rules")
RUNBOOKS = chart.ROOT / "docs" / "runbooks"
DASHBOARD = chart.CHART / "files" / "dashboards" / "dsv4.json"
NAMES = sorted(path.stem for path in (chart.CHART / "files" / "rules").glob("*.yaml"))
# AMD's exporter: https://github.com/ROCm/device-metrics-exporter/blob/main/docs/configuration/metricslist.md
EXPORTER = {
    "gpu_ecc_correct_total",
    "gpu_ecc_uncorrect_total",
    "gpu_gfx_activity",
    "gpu_health",
    "gpu_junction_temperature",
    "gpu_package_power",
    "gpu_total_vram",
    "gpu_used_vram",
}
# Prometheus makes it for every target: https://prometheus.io/docs/concepts/jobs_instances/
OF_PROMETHEUS = {"up"}


def groups(values: dict | None = None) -> dict:
    """The rendered rules, as a file for Prometheus."""
    monitoring = {"prometheusRule": {"enabled": True, **(values or {})}}
    rule = chart.one(chart.template(values={"monitoring": monitoring}), "PrometheusRule")
    return {"groups": rule["spec"]["groups"]}


def promtool(*arguments: str, cwd: pathlib.Path) -> str:
    done = subprocess.run(
        [str(chart.tools()["promtool"]), *arguments], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_takes_the_rules(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rules.yaml").write_text(json.dumps(groups()))
    assert f"{len(NAMES)} rules found" in promtool("check", "rules", "rules.yaml", cwd=tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_fires_when_it_should_and_only_then(name: str, tmp_path: pathlib.Path) -> None:
    """With its own rule alone: promtool would evaluate all of them for each case, and looks at one."""
    (group,) = groups()["groups"]
    own = [rule for rule in group["rules"] if rule["alert"] == name]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{**group, "rules": own}]}))
    (tmp_path / "case.yaml").write_text((CASES / f"{name}.yaml").read_text())
    promtool("test", "rules", "case.yaml", cwd=tmp_path)


def test_no_case_without_an_alert() -> None:
    assert sorted(path.stem for path in CASES.glob("*.yaml")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_has_a_case_of_each_kind(name: str) -> None:
    """promtool passes on a file without cases, so they are counted."""
    content = yaml.safe_load((CASES / f"{name}.yaml").read_text())
    assert content["rule_files"] == ["rules.yaml"]
    fires = [
        bool(case["exp_alerts"])
        for test in content["tests"]
        for case in test["alert_rule_test"]
        if case["alertname"] == name
    ]
    assert True in fires, "no case in which it fires"
    assert False in fires, "no case in which it must stay silent"


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_is_said_well_and_has_a_runbook(name: str) -> None:
    alert = yaml.safe_load((chart.CHART / "files" / "rules" / f"{name}.yaml").read_text())
    assert alert["alert"] == name
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert len(alert["annotations"]["summary"]) < 60
    assert "$labels" in alert["annotations"]["description"]
    runbook = (RUNBOOKS / f"{name}.md").read_text()
    assert runbook.startswith(f"# {name}\n")
    for heading in ("## What it means", "## Look", "## Do"):
        assert heading in runbook, f"docs/runbooks/{name}.md has no section {heading!r}"


def test_no_runbook_without_an_alert() -> None:
    pages = {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}
    assert pages == set(NAMES)
    index = (RUNBOOKS / "README.md").read_text()
    for name in NAMES:
        assert f"({name}.md)" in index


def test_links_labels_and_switches() -> None:
    values = {
        "runbookUrl": "https://runbooks.example.com/dsv4/",
        "alertLabels": {"team": "x"},
        "disabled": ["DSV4GPUHot"],
        "thresholds": {"timeToFirstTokenSeconds": 0.5, "interTokenSeconds": 1, "waitingRequests": 7},
    }
    alerts = {rule["alert"]: rule for rule in groups(values)["groups"][0]["rules"]}
    assert set(alerts) == set(NAMES) - {"DSV4GPUHot"}
    slow = alerts["DSV4FirstTokenSlow"]
    assert slow["annotations"]["runbook_url"] == "https://runbooks.example.com/dsv4/DSV4FirstTokenSlow.md"
    assert slow["labels"] == {"severity": "warning", "team": "x"}
    assert 'le=~"0[.]5"' in slow["expr"]
    assert 'le=~"1([.]0)?"' in alerts["DSV4TokensSlow"]["expr"]
    assert "> 7" in alerts["DSV4QueueGrowing"]["expr"]
    assert "<" not in "".join(re.findall(r"<[a-z_]+>", json.dumps(alerts)))


def threshold_schema() -> dict:
    """The schema of the thresholds, by name."""
    node = json.loads((chart.CHART / "values.schema.json").read_text())
    for name in ("monitoring", "prometheusRule", "thresholds"):
        node = node["properties"][name]
    properties: dict = node["properties"]
    return properties


def expressions() -> dict[str, str]:
    """Every PromQL expression of alerts and dashboard, by where it is."""
    found = {rule["alert"]: rule["expr"] for rule in groups()["groups"][0]["rules"]}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            found[f"panel {panel['title']}, {target['refId']}"] = target["expr"].replace("<prefix>", "")
    return found


def metrics_of(expression: str) -> set[str]:
    """The metric names in an expression, by a real parser."""
    plain = re.sub(r"\$__(rate_)?interval", "5m", expression)
    plain = re.sub(r"\$[a-z_]+", "x", plain)
    promql_parser.parse(plain)
    return set(re.findall(r"\b((?:vllm:|dsv4_|gpu_|pcie_)[a-z_]+|up)(?=\{)", plain))


def test_the_dashboard_parses_and_shows_what_alerts_are_about() -> None:
    found = expressions()
    shown = set().union(*(metrics_of(text) for where, text in found.items() if where.startswith("panel ")))
    alarmed = set().union(
        *(metrics_of(text) for where, text in found.items() if not where.startswith("panel "))
    )
    without = {re.sub(r"_(created|bucket|count|sum)$", "", name) for name in alarmed - OF_PROMETHEUS}
    seen = {re.sub(r"_(created|bucket|count|sum)$", "", name) for name in shown}
    # How often vLLM was started again is shown by the counter that the alert counts as well.
    assert without - {"dsv4_restarts"} <= seen


def test_gpu_metrics_are_those_of_amds_exporter() -> None:
    for where, text in expressions().items():
        names = {name for name in metrics_of(text) if name.startswith(("gpu_", "pcie_"))}
        assert names <= EXPORTER, where


def test_the_exporters_prefix() -> None:
    monitoring = {
        "prometheusRule": {"enabled": True},
        "dashboard": {"enabled": True},
        "gpuMetricsPrefix": "amd_",
    }
    objects = chart.template(values={"monitoring": monitoring})
    text = json.dumps(chart.one(objects, "PrometheusRule")) + json.dumps(chart.one(objects, "ConfigMap"))
    assert "amd_gpu_health" in text
    assert "<prefix>" not in text
    assert not re.search(r"(?<!amd_)\bgpu_(health|junction|ecc)", text)
