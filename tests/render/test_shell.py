"""The shell script, read by shellcheck and run by a real shell."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess

import pytest
from hypothesis import given, settings

from dsv4_deploy.render import docker, env, shell
from tests.render import golden, readers, sources


@pytest.mark.parametrize("name", ["serve.sh", "docker.sh"])
@pytest.mark.parametrize("case", sources.CASES, ids=lambda case: case.name)
def test_shellcheck_has_nothing_to_say(case: sources.Named, name: str) -> None:
    readers.shellcheck((golden.FOLDER / case.name / name).read_text())


def test_shellcheck_of_the_no_gpu_mode() -> None:
    readers.shellcheck(shell.render(sources.no_gpu()))


@pytest.mark.parametrize("value", ["$(id)", "`id`", "~/x", "a\\", "it's $HOME", "plain"])
def test_shellcheck_of_values_that_a_shell_would_act_on(value: str) -> None:
    """It is told that they are meant as they are, where there are any and nowhere else."""
    script, container = shell.render(sources.hostile(value)), docker.render(sources.hostile(value))
    readers.shellcheck(script)
    readers.shellcheck(container)
    assert ("# shellcheck disable=SC1003" in script) == (value != "plain")
    assert value != "plain" or "# shellcheck disable=SC1003" not in container


@pytest.mark.parametrize("case", sources.CASES[:5], ids=lambda case: case.name)
def test_it_runs_vllm_as_planned(case: sources.Named) -> None:
    source = sources.source(case.spec)
    arguments, environment = readers.run_script(shell.render(source), "vllm")
    assert arguments == source.plan.argv
    assert source.plan.environment.items() <= environment.items()


@settings(max_examples=60, deadline=None)
@given(text=sources.HOSTILE)
def test_no_value_breaks_out(text: str) -> None:
    source = sources.hostile(text)
    arguments, environment = readers.run_script(shell.render(source), "vllm")
    assert arguments == source.plan.argv
    assert environment["DSV4_PROBE"] == text


def test_a_value_that_looks_like_a_flag() -> None:
    source = sources.hostile("--port=1")
    arguments, _ = readers.run_script(shell.render(source), "vllm")
    assert arguments[-1] == "--hf-overrides=--port=1"


def test_secrets_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"VLLM_API_KEY": "sk-secret", "HF_TOKEN": "hf_secret"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    source = sources.source(facts=dataclasses.replace(sources.ELSEWHERE, environ=environ))
    assert "secret" not in shell.render(source) + env.render(source)
    _, environment = readers.run_script(shell.render(source), "vllm", **environ)
    assert environment["VLLM_API_KEY"] == "sk-secret", "the script passes on what is exported"


def run(script: str, *arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", script, "serve.sh", *arguments], env={"PATH": path}, capture_output=True, text=True
    )


def test_without_vllm_it_says_so() -> None:
    done = run(shell.render(sources.source()), path="/usr/bin:/bin")
    assert done.returncode == 127
    assert "there is no vllm on the PATH" in done.stderr


def test_arguments_are_refused_and_not_ignored() -> None:
    done = run(shell.render(sources.source()), "--port", "9000", path="/usr/bin:/bin")
    assert done.returncode == 2
    assert "takes no arguments" in done.stderr


def test_the_tiny_checkpoint_is_made_when_it_is_not_there(tmp_path: pathlib.Path) -> None:
    model = tmp_path / "my tiny model"
    facts = dataclasses.replace(sources.ELSEWHERE, gpus=(), vllm_version="0.32.0", tiny_directory=model)
    source = sources.source(dataclasses.replace(sources.no_gpu().spec), facts)
    made = tmp_path / "made"
    (tmp_path / "dsv4-deploy").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {made}\n')
    (tmp_path / "dsv4-deploy").chmod(0o755)
    script = shell.render(source).replace("exec vllm", "true vllm")
    path = f"{tmp_path}:/usr/bin:/bin"
    (tmp_path / "vllm").write_text("")
    (tmp_path / "vllm").chmod(0o755)
    assert run(script, path=path).returncode == 0
    assert made.read_text().splitlines() == ["tiny", str(model)]
    made.unlink()
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert run(script, path=path).returncode == 0
    assert not made.exists()


@settings(max_examples=60, deadline=None)
@given(text=sources.HOSTILE)
def test_the_environment_file_read_by_a_shell(text: str) -> None:
    source = sources.hostile(text)
    script = f"set -a\n{env.render(source)}\nexec vllm"
    _, environment = readers.run_script(script, "vllm")
    assert environment["DSV4_PROBE"] == text
    assert source.plan.environment.items() <= environment.items()


def test_ordinary_values_have_no_quotes_so_that_docker_can_read_them() -> None:
    for line in env.render(sources.source()).splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            assert value == sources.source().plan.environment[name]
