"""Facts for a plan: this host's, or none of it when the plan is for other hardware."""

from __future__ import annotations

import pathlib

import pytest

from dsv4_deploy.errors import DeployError
from dsv4_deploy.plan.gather import gather, unwritable_caches
from dsv4_deploy.plan.plan import make_plan
from dsv4_deploy.plan.rules.base import count
from dsv4_deploy.spec import ServingSpec
from tests import small_checkpoint

NO_GPU_HERE = not pathlib.Path("/sys/class/kfd").exists()


def environ(tmp_path: pathlib.Path, **variables: str) -> dict[str, str]:
    return {"DSV4_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path), **variables}


def test_other_hardware_takes_nothing_from_this_host(tmp_path: pathlib.Path) -> None:
    found = gather(ServingSpec(gpu="mi300x", gpu_count=8), environ(tmp_path), dry_run=True)
    assert (found.gpus, found.host, found.vllm_version, found.aiter_version) == (None, None, None, None)
    assert make_plan(ServingSpec(gpu="mi300x", gpu_count=8), found).vllm == "0.33.0"


@pytest.mark.skipif(not NO_GPU_HERE, reason="this host has AMD GPUs")
def test_a_dry_run_for_amd_without_gpus_is_a_plan_for_elsewhere(tmp_path: pathlib.Path) -> None:
    spec = ServingSpec(device="rocm")
    assert gather(spec, environ(tmp_path), dry_run=True).gpus is None
    real = gather(spec, environ(tmp_path), dry_run=False)
    assert real.gpus == ()
    assert real.host is not None
    with pytest.raises(DeployError, match="no AMD GPU is visible"):
        make_plan(spec, real)


def test_a_directory_and_a_name_and_a_repository(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = small_checkpoint.write(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for name in ("model", "./model", str(directory)):
        found = gather(ServingSpec(model=name), environ(tmp_path), dry_run=True).checkpoint
        assert found is not None
        assert found.directory == directory
    assert gather(ServingSpec(model="tiny"), environ(tmp_path), dry_run=True).checkpoint is None
    spec = ServingSpec(model="deepseek-ai/DeepSeek-V4-Pro", gpu="mi300x", gpu_count=8)
    made = make_plan(spec, gather(spec, environ(tmp_path), dry_run=True))
    assert (made.tp, made.served_name) == (8, "deepseek-v4-pro")
    with pytest.raises(DeployError, match="is not a directory"):
        gather(ServingSpec(model="/no/such/dir"), environ(tmp_path), dry_run=True)


def test_caches_that_can_be_written_are_left_alone(tmp_path: pathlib.Path) -> None:
    assert unwritable_caches(environ(tmp_path, HF_HOME=str(tmp_path / "not" / "yet" / "there"))) == {}
    (tmp_path / "file").write_text("")
    moved = unwritable_caches(
        environ(tmp_path, VLLM_CACHE_ROOT=str(tmp_path / "file" / "x"), XDG_CACHE_HOME="/c")
    )
    assert moved == {"VLLM_CACHE_ROOT": "/c/vllm"}


@pytest.mark.parametrize(
    ("text", "number"),
    # As vLLM's own human_readable_int reads them.
    [
        ("8192", 8192),
        ("8k", 8000),
        ("8K", 8192),
        ("26g", 26 * 10**9),
        ("25.6k", 25_600),
        ("1M", 2**20),
        ("0", 0),
    ],
)
def test_counts(text: str, number: int) -> None:
    assert count(text) == number


@pytest.mark.parametrize("text", ["", "many", "-1", "1.5", "1.5K", "8kk", "８", "1e6"])
def test_counts_that_are_none(text: str) -> None:
    assert count(text) is None
