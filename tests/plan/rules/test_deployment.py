"""Rules about image, container and pod: values as people had them in charts and manifests."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4_deploy.plan import asked
from dsv4_deploy.plan.plan import Plan
from dsv4_deploy.spec import Deployment
from tests.plan.cases import notice, plan, refusal, rules_of, text

GIB = 2**30
PRO = "deepseek-v4-pro"


def deployed(*settings: str, **spec: Any) -> Plan:
    return plan(deployment=_fields(asked.deployment(settings)), **spec)


def turned_down(*settings: str, **spec: Any) -> str:
    return text(refusal(deployment=_fields(asked.deployment(settings)), **spec))


def _fields(deployment: Deployment) -> dict[str, Any]:
    return {name: value for name, value in vars(deployment).items() if value is not None}


def test_the_defaults_are_decided_and_no_rule_minds_them() -> None:
    made = plan(gpu="mi308x", gpu_count=8)
    surroundings = made.deployment
    assert rules_of(made) == set()
    assert surroundings.gpu_resource == "amd.com/gpu"
    assert surroundings.shm_bytes == 32 * GIB
    assert (surroundings.max_surge, surroundings.max_unavailable) == (0, 1)
    assert surroundings.startup_budget_s == 3600 == made.ready_timeout_s
    assert surroundings.grace_s == 15 + 90 + 20
    assert surroundings.liveness_timeout_s == 15
    assert surroundings.service_links is False
    assert surroundings.memory_request_bytes is not None
    assert surroundings.memory_request_bytes > 1.1 * made.weight_bytes


def test_w21_a_cuda_image() -> None:
    for image in (
        "vllm/vllm-openai:v0.33.0",
        "docker.io/vllm/vllm-openai:latest",
        "vllm/vllm-openai@sha256:" + "0" * 64,
    ):
        found = text(refusal(image=image))
        assert "built for CUDA" in found
        assert "vllm-openai-rocm:" in found
        assert "W21" in found


@pytest.mark.parametrize(
    "image", ["rocm/vllm:latest", "vllm/vllm-openai-rocm:nightly", "localhost:5000/mine"]
)
def test_w22_an_image_that_may_change(image: str) -> None:
    found = notice(plan(image=image, vllm="0.33.0"), "image-tag")
    assert image in found.what
    assert "@sha256" in found.fix
    pinned = f"vllm/vllm-openai-rocm:v0.33.0@sha256:{'0' * 64}"
    assert "image-tag" not in rules_of(plan(image=pinned))
    assert plan(image=pinned).image == pinned


@pytest.mark.parametrize("size", ["64Mi", "8Gi"])
def test_w24_w25_shared_memory(size: str) -> None:
    made = deployed(f"shm={size}")
    assert made.deployment.shm_bytes == 32 * GIB
    assert {"W24", "W25"} <= set(notice(made, "shared-memory").rows)
    assert deployed("shm=16Gi").deployment.shm_bytes == 16 * GIB


def test_w35_nvidia_gpus() -> None:
    found = turned_down("gpu-resource=nvidia.com/gpu")
    assert "nvidia.com/gpu" in found
    assert "Use amd.com/gpu." in found
    assert deployed("gpu-resource=amd.com/spx_nps1").deployment.gpu_resource == "amd.com/spx_nps1"


def test_w36_runtime_class() -> None:
    assert "Remove it." in turned_down("runtime-class=nvidia")


def test_w37_more_gpus_than_free() -> None:
    found = turned_down("replicas=3", "free-gpus=8", tp=4)
    assert "3 replica(s) of 4 GPUs need 12, and 8 are free" in found
    assert "Use 2 replica(s)." in found
    assert deployed("replicas=2", "free-gpus=8", tp=4).deployment.replicas == 2


def test_w38_f33_surge() -> None:
    made = deployed("max-surge=1")
    assert (made.deployment.max_surge, made.deployment.max_unavailable) == (0, 1)
    assert "F33" in notice(made, "rollout-surge").rows
    spare = deployed("max-surge=1", "free-gpus=8", tp=4)
    assert spare.deployment.max_surge == 1


def test_w39_no_way_to_the_weights() -> None:
    assert "offline and not cached" in turned_down("egress=false", "cached=false")
    assert deployed("egress=false", "cached=true").deployment.egress is False


def test_w40_f56_liveness_timeout() -> None:
    made = deployed("liveness-timeout=1")
    assert made.deployment.liveness_timeout_s == 15
    assert "1 s -> 15 s" in notice(made, "liveness-timeout").what


def test_w41_f13_startup_budget() -> None:
    found = turned_down("startup-budget=600")
    assert "600 s" in found
    assert "3600 s" in found
    assert "KeyboardInterrupt: terminated" in found
    assert "10800 s" in turned_down("startup-budget=7200", model=PRO)


def test_w42_f58_f48_grace() -> None:
    made = deployed("grace=30")
    assert made.deployment.grace_s == 125
    assert "30 -> 125" in notice(made, "termination-grace").what
    longer = plan("shutdown-timeout=300", deployment={"grace_s": 200})
    assert longer.deployment.grace_s == 15 + 300 + 20


def test_w43_f11_memory_limit() -> None:
    found = turned_down("memory-limit=64Gi")
    assert "64 GiB" in found
    assert "OOMKilled" in found
    tight = deployed("memory-limit=150Gi")
    assert "F11" in notice(tight, "memory-limit-tight").rows
    assert "memory-limit-tight" not in rules_of(deployed("memory-limit=200Gi"))


def test_w44_f35_a_release_named_vllm() -> None:
    for name in ("vllm", "vllm-dsv4"):
        made = deployed(f"name={name}", "service-links=true")
        assert made.deployment.service_links is False
        assert "W44" in notice(made, "service-name").rows
    assert "service-name" not in rules_of(deployed("name=dsv4"))


@pytest.mark.parametrize(
    ("image", "instead"),
    [
        (
            "registry.example:5000/vllm/vllm-openai:v0.33.0",
            "registry.example:5000/vllm/vllm-openai-rocm:v0.33.0,",
        ),
        ("mirror.example/hub/vllm-openai:v0.33.0", "mirror.example/hub/vllm-openai-rocm:v0.33.0,"),
        ("vllm-openai", "vllm/vllm-openai-rocm:v0.33.0,"),
        ("vllm/vllm-openai-cpu:v0.32.0", "vllm/vllm-openai-rocm:v0.32.0,"),
    ],
)
def test_w21_an_image_without_rocm_from_anywhere(image: str, instead: str) -> None:
    assert f"Use {instead}" in refusal(image=image).fix


def test_w36_every_runtime_class_of_nvidia() -> None:
    assert "nvidia-legacy" in refusal(deployment={"runtime_class": "nvidia-legacy"}).what


def test_w37_pipeline_stages_need_gpus_too() -> None:
    error = refusal("pipeline-parallel-size=2", tp=4, deployment={"free_gpus": 4})
    assert "1 replica(s) of 8 GPUs" in error.what


def test_w38_a_rollout_that_may_replace_nothing() -> None:
    made = plan(deployment={"max_unavailable": 0})
    assert made.deployment.max_unavailable == 1
    assert notice(made, "rollout-surge").what == "maxUnavailable 0 -> 1"
    assert plan(deployment={"max_unavailable": 0, "max_surge": 1, "free_gpus": 8}).deployment.max_surge == 1
