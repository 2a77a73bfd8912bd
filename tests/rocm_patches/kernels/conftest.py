"""These tests need triton and its interpreter, which vLLM's environment must not have: test_kernels.py beside this
folder runs them in a process of their own.

triton decides when a kernel is defined whether it is interpreted, so the variable is set before any is.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

HAVE_TRITON = importlib.util.find_spec("triton") is not None
# vLLM's environment has no triton (docs/architecture.md, "The CPU wheel"); `make test` runs this folder on its own.
collect_ignore_glob = [] if HAVE_TRITON else ["test_*.py"]

if HAVE_TRITON:
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.rocm_patches.kernels import interpreter

    interpreter.repair()


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if HAVE_TRITON else "kernels: no triton here; test_kernels.py runs them"
