"""The six main cases, rendered whole and checked in, so that a review sees what a change of a template does.

After a change that is meant: DSV4_WRITE_GOLDEN=1 pytest tests/helm/test_golden.py
"""

from __future__ import annotations

import os
import pathlib

import pytest
import yaml

from tests.helm import chart

GOLDEN = pathlib.Path(__file__).with_name("golden")
CI, PROFILES = chart.CHART / "ci", chart.CHART / "profiles"
CASES = {
    "flash-tp4-mi300x": [PROFILES / "mi300x" / "flash-tp4.yaml"],
    "flash-tp8-mi308x": [PROFILES / "mi308x" / "flash-tp8.yaml", CI / "download-values.yaml"],
    "pro-tp8-mi325x": [PROFILES / "mi325x" / "pro-tp8.yaml", CI / "api-key-values.yaml"],
    "no-gpu": [CI / "no-gpu-values.yaml"],
    "two-nodes": [CI / "two-nodes-values.yaml"],
    "everything-watched": [
        CI / "gateway-values.yaml",
        CI / "keda-values.yaml",
        CI / "monitoring-values.yaml",
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    rendered = yaml.safe_dump_all(chart.template(*CASES[name]), width=120)
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("DSV4_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(rendered)
    assert path.read_text() == rendered


def test_nothing_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)
