"""What is checked in is what is rendered. After a wanted change: `python -m tests.render.golden`, and look at it."""

from __future__ import annotations

import pathlib

import pytest
import yaml

from dsv4_deploy import render
from tests.render import golden, sources


@pytest.mark.parametrize("target", golden.NAMES)
@pytest.mark.parametrize("case", sources.CASES, ids=lambda case: case.name)
def test_as_checked_in(case: sources.Named, target: str) -> None:
    expected = (golden.FOLDER / case.name / golden.NAMES[target]).read_text(encoding="utf-8")
    assert golden.text(case, target) == expected


def test_nothing_else_is_checked_in() -> None:
    expected = {f"{case.name}/{name}" for case in sources.CASES for name in golden.NAMES.values()}
    found = {str(path.relative_to(golden.FOLDER)) for path in golden.FOLDER.rglob("*") if path.is_file()}
    assert found == expected


@pytest.mark.parametrize("target", golden.NAMES)
def test_the_same_input_gives_the_same_text(target: str) -> None:
    assert render.renderer(target)(sources.source()) == render.renderer(target)(sources.source())


@pytest.mark.parametrize("target", ["shell", "docker", "compose", "quadlet", "env"])
@pytest.mark.parametrize("case", sources.CASES[:3], ids=lambda case: case.name)
def test_every_value_is_there_with_its_reason(case: sources.Named, target: str) -> None:
    source = sources.source(case.spec)
    text = render.renderer(target)(source)
    comments = " ".join(line.strip().removeprefix("#").strip() for line in text.splitlines() if "#" in line)
    settings = source.plan.env if target == "env" else (*source.plan.env, *source.plan.flags)
    for setting in settings:
        if setting.name in ("host", "port"):  # the container's own
            continue
        assert setting.name in text or setting.name in ("tensor-parallel-size",), setting.name
        assert " ".join(setting.reason.split()) in comments, setting.reason


def test_targets_and_golden_files_are_the_same_list() -> None:
    assert set(golden.NAMES) | {"kubernetes"} == set(render.TARGETS)


@pytest.mark.parametrize(
    "path", sorted(golden.FOLDER.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_yaml_is_yaml(path: pathlib.Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)
