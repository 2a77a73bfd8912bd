"""The gate's rules fire, each on figures made up for it. The compilation itself: tests/rocm_patches/test_kernels.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parents[3] / "tools" / "gfx942_gate.py"


@pytest.fixture(scope="module")
def gate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gfx942_gate", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gfx942_gate"] = module
    spec.loader.exec_module(module)
    return module


GOOD: dict[str, Any] = {
    "vgpr": 100, "sgpr": 40, "spills": 0, "scratch": 0, "lds": 1024, "waves_per_simd": 4,
    "mfma": {"16x16x32_fp8_fp8": 8}, "published": True, "byte_loads": 0, "code_bytes": 1000,
}  # fmt: skip
NAME = "output Flash T1: product_kernel"


def test_a_good_kernel_has_no_fault(gate: ModuleType) -> None:
    assert list(gate.faults(NAME, GOOD)) == []
    assert list(gate.regressions({NAME: GOOD}, {NAME: GOOD})) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scratch": 4}, "bytes of scratch"),
        ({"spills": 1}, "spilled registers"),
        ({"lds": 65537}, "bytes of LDS"),
        ({"published": False}, "without a wait of every wavefront"),
        ({"mfma": {}}, "FP8 matrix instructions"),
        ({"mfma": {"16x16x16_bf16": 8}}, "FP8 matrix instructions"),
    ],
)
def test_faults(gate: ModuleType, change: dict[str, Any], words: str) -> None:
    (fault,) = gate.faults(NAME, GOOD | change)
    assert words in fault


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vgpr": 109}, "vgpr 109"),
        ({"lds": 1025}, "lds 1025"),
        ({"byte_loads": 1}, "byte_loads"),
        ({"waves_per_simd": 3}, "3 waves"),
    ],
)
def test_regressions(gate: ModuleType, change: dict[str, Any], words: str) -> None:
    (found,) = gate.regressions({NAME: GOOD | change}, {NAME: GOOD})
    assert words in found


def test_a_kernel_that_came_or_went_is_a_regression(gate: ModuleType) -> None:
    assert list(gate.regressions({NAME: GOOD}, {})) == [f"{NAME}: not in the table"]
    assert "no launcher makes it" in next(iter(gate.regressions({}, {NAME: GOOD})))


PUBLISHED = """
	buffer_store_dwordx4 v[2:5], v6, s[8:11], 0 offen
	s_waitcnt vmcnt(0)
	v_mov_b32 v2, v2
	s_barrier
	s_and_saveexec_b64 s[10:11], s[8:9]
	buffer_wbl2 sc1
	s_waitcnt vmcnt(0)
	global_atomic_add v3, v3, v4, s[6:7] sc0
"""


def test_publishing_needs_the_wait_before_the_barrier(gate: ModuleType) -> None:
    assert gate.publishes(PUBLISHED)
    assert gate.publishes("no atomic here")
    before, after = PUBLISHED.split("	s_waitcnt vmcnt(0)\n", 1)
    assert not gate.publishes(before + after)


def test_the_table_lists_every_launcher(gate: ModuleType) -> None:
    """Without compiling: the names that the launchers make are the table's."""
    import json

    from rocm_patches.kernels.launch import recording

    names = set()
    for name, call in gate.cases():
        with recording() as launches:
            call()
        names |= {f"{name}: {made.name}" for made in launches}
    assert names == set(json.loads(gate.TABLE.read_text())["kernels"])
