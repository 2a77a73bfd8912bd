"""--gpu, --env, --deploy and --allow: what may be written, and what is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_deploy.errors import DeployError
from dsv4_deploy.plan import asked
from dsv4_deploy.spec import Deployment


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(DeployError) as raised:
        call()
    assert raised.value.exit_code == 2
    return f"{raised.value.what} {raised.value.why} {raised.value.fix}"


def test_gpus() -> None:
    assert asked.gpu("mi300x") == ("mi300x", None)
    assert asked.gpu("MI325X:4") == ("mi325x", 4)
    for text in ("mi300x:", "mi300x:0", "mi300x:-1", "mi300x:many", "mi300x:99999"):
        assert "mi300x:8" in refused(lambda text=text: asked.gpu(text))
    assert "mi300x" in refused(lambda: asked.gpu("mi3000"))


def test_variables() -> None:
    assert asked.variables(["A=1", "B=x=y", "C="]) == {"A": "1", "B": "x=y", "C": ""}
    for setting in ("A", "=1", "A B=1", "1A=1", "A-B=1"):
        assert "--env NAME=VALUE" in refused(lambda setting=setting: asked.variables([setting]))
    assert "given twice" in refused(lambda: asked.variables(["A=1", "A=2"]))
    assert "several lines" in refused(lambda: asked.variables(["A=1\n2"]))


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "HF_TOKEN", "DB_PASSWORD", "my_secret"])
def test_secrets_are_not_for_the_command_line(name: str) -> None:
    message = refused(lambda: asked.variables([f"{name}=sesame"]))
    assert "secret" in message
    assert "sesame" not in message


def test_deployments() -> None:
    found = asked.deployment(
        ["replicas=2", "shm=32Gi", "memory-limit=1T", "service-links=false", "name=dsv4", "grace=90"]
    )
    assert found == Deployment(
        replicas=2,
        shm_bytes=32 * 2**30,
        memory_limit_bytes=10**12,
        service_links=False,
        name="dsv4",
        grace_s=90,
    )
    assert asked.deployment([]) == Deployment()
    assert asked.deployment(["shm=64MiB"]).shm_bytes == 64 * 2**20
    assert asked.deployment(["shm=1048576"]).shm_bytes == 1048576


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("replica=2", "Did you mean --deploy replicas=...?"),
        ("replicas", "--deploy"),
        ("replicas=many", "whole number"),
        ("shm=big", "32Gi"),
        ("service-links=maybe", "true or false"),
        ("name=", "has no value"),
    ],
)
def test_deployments_that_are_refused(setting: str, words: str) -> None:
    assert words in refused(lambda: asked.deployment([setting]))


def test_a_deployment_key_twice() -> None:
    assert "given twice" in refused(lambda: asked.deployment(["replicas=1", "replicas=2"]))


def test_allowed_names_are_those_of_rules_and_checks() -> None:
    assert asked.allowed(["block-size", "gpu-partition"]) == ("block-size", "gpu-partition")
    assert "Did you mean block-size?" in refused(lambda: asked.allowed(["block-sise"]))


@given(st.text())
def test_any_text_is_understood_or_refused_in_words(text: str) -> None:
    for read in (asked.gpu, lambda one: asked.variables([one]), lambda one: asked.deployment([one])):
        try:
            read(text)
        except DeployError as error:
            assert error.exit_code == 2
            assert error.why
            assert error.fix
