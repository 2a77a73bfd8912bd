"""The scheduler's messages, taken apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_deploy.k8s.unschedulable import explain


def test_reasons_are_sorted_and_have_remedies() -> None:
    message = (
        "0/9 nodes are available: 1 node(s) had untolerated taint {amd-dcm: up}, 3 Insufficient memory, 5 node(s) "
        "didn't match Pod's node affinity/selector. preemption: 0/9 nodes are available: 9 No preemption victims found."
    )
    found = explain(message)
    assert [reason.nodes for reason in found] == [5, 3, 1]
    assert "gpu.product" in found[0].fix
    assert "model.sizeGiB" in found[1].fix
    assert "never tolerate" in found[2].fix


@pytest.mark.parametrize(
    ("part", "fix"),
    [
        ("2 node(s) had untolerated taint {dedicated: ml, x: y}", "scheduling.tolerations"),
        ("1 Insufficient amd.com/gpu", "tensorParallelSize"),
        ("1 Insufficient cpu", "cpuPerGpu"),
        ("4 Insufficient amd.com/vnic", "GPUs"),
        ("1 node(s) had volume node affinity conflict", "all nodes reach"),
        ("3 cannot allocate all claims", "Too few free GPUs"),
        ("pod has unbound immediate PersistentVolumeClaims", "storage class"),
        ("1 node(s) were unschedulable", "uncordon"),
        ("2 node(s) didn't match pod topology spread constraints", "topologySpreadConstraints"),
    ],
)
def test_each_reason(part: str, fix: str) -> None:
    (reason,) = explain(f"0/5 nodes are available: {part}.")
    assert fix in reason.fix


def test_another_form_is_passed_on_whole() -> None:
    (reason,) = explain("running PreBind plugin failed: timed out")
    assert reason.text == "running PreBind plugin failed: timed out"
    assert reason.fix == ""


@given(st.text(max_size=300))
def test_whatever_it_says_nothing_breaks(text: str) -> None:
    assert all(reason.text for reason in explain(text))
