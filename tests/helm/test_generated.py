"""What `make chart` writes is fresh, and the defaults of values.yaml are the plan's."""

from __future__ import annotations

import subprocess
import sys

import yaml

from tests.helm.chart import CHART, ROOT


def test_generated_files_are_fresh() -> None:
    command = [sys.executable, str(ROOT / "tools" / "chart.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_value_is_documented_and_closed() -> None:
    """A key that nobody documented would be missing in the schema, and the defaults themselves would be refused."""
    import json

    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(path: str, part: dict, described: dict) -> None:
        assert described["additionalProperties"] is False, path
        assert set(part) == set(described["properties"]) - {"global"}, path
        for key, value in part.items():
            child = described["properties"][key]
            if isinstance(value, dict) and "properties" in child:
                compare(f"{path}.{key}", value, child)
            else:
                assert child["description"], f"{path}.{key}"

    compare("", values, schema)
