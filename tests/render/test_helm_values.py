"""Helm values: what the chart's schema and real helm say about them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import example, given, settings

from dsv4_deploy.errors import DeployError
from dsv4_deploy.render import helm_values, kubernetes
from dsv4_deploy.spec import Deployment, ServingSpec
from tests import small_checkpoint
from tests.render import golden, readers, sources

SCHEMA = json.loads((readers.ROOT / "helm/dsv4/values.schema.json").read_text())


def read(source: Any) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(helm_values.render(source))
    return values


@pytest.mark.parametrize("case", sources.CASES, ids=lambda case: case.name)
def test_the_schema_accepts_what_is_checked_in(case: sources.Named) -> None:
    values = yaml.safe_load((golden.FOLDER / case.name / "values.yaml").read_text())
    jsonschema.validate(values, SCHEMA)
    assert values["tensorParallelSize"] == case.spec.tp
    assert values["gpu"] == {"product": "MI300X"}
    assert values["model"]["sizeGiB"] == (149 if "flash" in case.name else 806)


def test_what_the_plan_decides_and_what_was_asked_for() -> None:
    source = sources.source(
        profile="throughput",
        overrides={"max-num-seqs": "64", "enable-prefix-caching": False, "shutdown-timeout": "45"},
        env={"NCCL_DEBUG": "INFO"},
        allow=("no-tuned-table",),
        max_model_len=32768,
        image=f"registry.example:5000/a/dsv4@sha256:{'0' * 64}",
        deployment=Deployment(replicas=2, shm_bytes=48 * 2**30, max_unavailable=2),
    )
    values = read(source)
    jsonschema.validate(values, SCHEMA)
    assert values["settings"] == {"max-num-seqs": "64", "enable-prefix-caching": False}
    assert values["drain"] == {"preStopSeconds": 15, "timeoutSeconds": 45, "shutdownSeconds": 45}
    assert values["env"] == {"NCCL_DEBUG": "INFO"}
    assert values["allowRules"] == ["no-tuned-table"]
    assert (values["maxModelLen"], values["planProfile"], values["replicas"]) == (32768, "throughput", 2)
    assert values["image"] == {
        "repository": "registry.example:5000/a/dsv4",
        "tag": "",
        "digest": f"sha256:{'0' * 64}",
    }
    assert values["resources"] == {"shmGiB": 48}
    assert values["rollout"] == {"maxUnavailable": 2}
    assert values["model"]["source"] == {"type": "claim", "claim": "deepseek-v4-flash"}
    assert values["probes"]["startup"]["budgetSeconds"] >= source.plan.ready_timeout_s


def test_the_no_gpu_mode() -> None:
    values = read(sources.no_gpu())
    jsonschema.validate(values, SCHEMA)
    assert values["gpu"] == {"product": "none"}
    assert values["model"] == {"name": "tiny", "sizeGiB": 0, "source": {"type": "tiny"}}


def test_a_directory_of_the_nodes(tmp_path: pathlib.Path) -> None:
    from dsv4_deploy import catalog
    from dsv4_deploy.facts import checkpoint

    sizes = dataclasses.asdict(catalog.models()["deepseek-v4-flash"].dims)
    directory = small_checkpoint.write(tmp_path / "My_V4", **sizes)
    values = read(sources.with_checkpoint(directory, checkpoint.read(directory)))
    jsonschema.validate(values, SCHEMA)
    assert values["model"]["name"] == "my-v4"
    assert values["model"]["source"] == {"type": "hostPath", "hostPath": str(directory)}


def test_a_card_that_the_chart_does_not_place() -> None:
    with pytest.raises(DeployError) as raised:
        helm_values.render(sources.source(gpu="mi355x"))
    assert "mi355x" in raised.value.what and raised.value.exit_code == 2


@settings(max_examples=100, deadline=None)
@given(text=sources.HOSTILE)
@example("{{ .Values.apiKey }}")
def test_no_value_breaks_out(text: str) -> None:
    made = sources.hostile(text)
    spec = dataclasses.replace(
        made.spec, overrides={"hf-overrides": text}, env={"DSV4_PROBE": text}, allow=(text,)
    )
    values = read(dataclasses.replace(made, spec=spec))
    assert values["settings"] == {"hf-overrides": text}
    assert values["env"] == {"DSV4_PROBE": text}
    assert values["allowRules"] == [text]


@pytest.fixture(scope="module")
def helm() -> str:
    spec = importlib.util.spec_from_file_location("kube_tools", readers.ROOT / "tools" / "kube_tools.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["kube_tools"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return str(module.fetch()["helm-4.3.1"])


def test_kubernetes_objects_by_real_helm(
    helm: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("DSV4_HELM", helm)
    for name in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    source = sources.source(deployment=Deployment(name="flash"))
    objects = [one for one in yaml.safe_load_all(kubernetes.render(source)) if one]
    (server,) = [one for one in objects if one["kind"] == "Deployment"]
    box = server["spec"]["template"]["spec"]["containers"][0]
    assert box["args"][:1] == ["serve"]
    assert box["args"][box["args"].index("--tp") + 1] == "4"
    assert str(box["resources"]["limits"]["amd.com/gpu"]) == "4"
    assert server["metadata"]["name"].startswith("flash")


def test_values_that_the_chart_refuses(helm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_HELM", helm)
    with pytest.raises(DeployError) as raised:
        kubernetes.render(sources.source(deployment=Deployment(runtime_class="kata containers")))
    assert "helm does not accept" in raised.value.what
    assert "runtimeClassName" in raised.value.detail


def test_without_helm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSV4_HELM", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DeployError, match="no helm on the PATH"):
        kubernetes.render(sources.source())


def test_without_a_chart(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("DSV4_HELM", "/bin/true")
    monkeypatch.setenv("DSV4_CHART", str(tmp_path))
    with pytest.raises(DeployError, match="no chart in"):
        kubernetes.render(sources.source())


def test_a_helm_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_HELM", "/no/such/helm")
    with pytest.raises(DeployError, match="cannot be run"):
        kubernetes.render(sources.source())


def test_a_spec_is_not_changed() -> None:
    spec = ServingSpec(
        model="deepseek-v4-flash", tp=4, device="rocm", gpu="mi300x", overrides={"shutdown-timeout": "9"}
    )
    helm_values.render(sources.source(spec))
    assert spec.overrides == {"shutdown-timeout": "9"}
