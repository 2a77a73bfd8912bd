"""Statements about vLLM's source as a whole, for both supported releases, that docs/patches.md rests on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocm_patches.patches import PATCHES
from rocm_patches.patches.not_needed import NOT_NEEDED
from tests import vllm_sources

RELEASES = pytest.mark.parametrize("release", ["0.32.0", "0.33.0"])
MODEL = "models/deepseek_v4"


def trees(release: str, *places: str) -> Iterator[tuple[str, ast.Module]]:
    """(path below vllm/, syntax tree) of files, and of all files of folders."""
    root = vllm_sources.fetch(release) / "vllm"
    for place in places:
        paths = [root / place] if place.endswith(".py") else sorted((root / place).rglob("*.py"))
        assert paths
        for path in paths:
            yield str(path.relative_to(root)), ast.parse(path.read_text())


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name:
            yield node


@RELEASES
def test_every_gather_names_its_dialect(release: str) -> None:
    """The compressed cache is OCP everywhere; the sliding window follows the platform."""
    found: dict[str, set[str]] = {}
    for _, tree in trees(release, f"{MODEL}/amd"):
        for call in calls(tree, "dequantize_and_gather_k_cache"):
            cache = ast.unparse(call.args[1])
            dialect = {ast.unparse(k.value) for k in call.keywords if k.arg == "use_fnuz"}
            found.setdefault("window" if "swa" in cache else "compressed", set()).update(
                dialect or {"missing"}
            )
    assert found == {"compressed": {"False"}, "window": {"current_platform.is_fp8_fnuz()"}}


# Files that DeepSeek-V4 runs through on gfx942, and why each comparison with e4m3fn in them is right.
EQUALITY = {
    f"{MODEL}/amd/model.py": {"_prepare_native_fp8_shared_expert": "heterogeneous experts: gfx950 only"},
    f"{MODEL}/compressor.py": {
        "forward": "plain-row cache: the ROCm cache is uint8",
        "_compress_norm_rope_store": "the same, in 0.33.0",
    },
    "v1/attention/ops/rocm_aiter_mla_sparse.py": {
        "_rocm_sparse_attn_decode_ragged_triton": "MXFP8 epilogue: asserts gfx950 first"
    },
    "v1/attention/backends/mla/sparse_swa.py": {"__init__": "accepts uint8, the ROCm cache, as well"},
    "model_executor/layers/quantization/utils/fp8_utils.py": {
        "is_fp8": "accepts both dialects",
        "deepgemm_post_process_fp8_weight_block": "DeepGEMM: CUDA only",
        "process_fp8_weight_tensor_strategy": "converts from OCP",
        "process_fp8_weight_channel_strategy": "converts from OCP",
        "process_fp8_weight_block_strategy": "converts from OCP",
        "requant_weight_ue8m0_inplace": "DeepGEMM: CUDA only",
    },
    "model_executor/layers/quantization/utils/w8a8_utils.py": {
        "normalize_e4m3fn_to_e4m3fnuz": "converts from OCP"
    },
    "model_executor/layers/quantization/fp8.py": {},
    "model_executor/layers/quantization/mxfp4.py": {},
    "model_executor/layers/sparse_attn_indexer.py": {},
    "model_executor/kernels/linear/scaled_mm/aiter.py": {},
    "model_executor/kernels/linear/scaled_mm/BlockScaledMMLinearKernel.py": {},
    f"{MODEL}/attention.py": {},
    f"{MODEL}/amd/rocm.py": {},
    f"{MODEL}/amd/mtp.py": {},
    f"{MODEL}/amd/dspark.py": {},
    f"{MODEL}/common/ops/cache_utils.py": {},
    f"{MODEL}/common/ops/fused_indexer_q.py": {},
    f"{MODEL}/common/ops/fused_compress_quant_cache.py": {},
}


def comparisons(tree: ast.Module) -> set[str]:
    """Names of the functions that compare something with torch.float8_e4m3fn."""
    found = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Compare) and "torch.float8_e4m3fn" in {
                    name for part in (node.left, *node.comparators) for name in parts(part)
                }:
                    found.add(function.name)
    return found


def parts(node: ast.AST) -> list[str]:
    return [ast.unparse(one) for one in ([*node.elts] if isinstance(node, ast.Tuple) else [node])]


@RELEASES
def test_every_e4m3fn_equality_test_is_accounted_for(release: str) -> None:
    """Such a test is false for FNUZ tensors. A new one on the path makes this fail, so that somebody looks."""
    found = {path: comparisons(tree) for path, tree in trees(release, *EQUALITY)}
    new = {
        path: sorted(names - set(EQUALITY[path]))
        for path, names in found.items()
        if names - set(EQUALITY[path])
    }
    assert new == {}
    assert sum(map(len, found.values())) > 5


@RELEASES
def test_no_rotation_of_deepseek_v4_is_dropped(release: str) -> None:
    """A rotary embedding returns its results on ROCm: a call as a bare statement would lose them."""
    dropped, seen = [], 0
    for path, tree in trees(release, MODEL):
        for node in ast.walk(tree):
            called = node.value if isinstance(node, ast.Expr | ast.Assign | ast.Return) else None
            if isinstance(called, ast.Call) and "rotary_emb" in ast.unparse(called.func).split(".")[-1]:
                seen += 1
                if isinstance(node, ast.Expr):
                    dropped.append(f"{path}:{node.lineno}")
    assert dropped == []
    # The same search finds the one that patch indexer-rope-results is about.
    ((_, v2),) = trees(release, "model_executor/models/deepseek_v2.py")
    assert any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "rotary_emb"
        for node in ast.walk(v2)
    )


@RELEASES
def test_no_patched_function_is_imported_under_another_name(release: str) -> None:
    """The registry finds importers by the name; `import ... as` of a target would escape it if it came first."""
    wanted = {(t.module, t.symbol) for p in PATCHES for t in p.targets if t.replace and "." not in t.symbol}
    renamed, by_value = [], 0
    root = vllm_sources.fetch(release)
    for path in sorted((root / "vllm").rglob("*.py")):
        text = path.read_text()
        if not any(symbol in text for _, symbol in wanted):
            continue
        package = path.relative_to(root).with_suffix("").parts
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ImportFrom):
                continue
            base = list(package[: len(package) - node.level]) if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                if (module, alias.name) in wanted:
                    by_value += 1
                    if alias.asname not in (None, alias.name):
                        renamed.append(f"{path}:{node.lineno}")
    assert renamed == [] and by_value > 5


def test_proofs_name_tests_that_exist() -> None:
    tests = [file.read_text() for file in Path(__file__).parents[2].rglob("test_*.py")]
    assert sum("::test_" in entry.proof for entry in NOT_NEEDED) > 5
    for entry in NOT_NEEDED:
        for name in re.findall(r"::(test_\w+)", entry.proof):
            assert any(f"def {name}(" in text for text in tests), f"{entry.id}: {name}"


@RELEASES
def test_the_native_offload_waits_for_the_computing_stream(release: str) -> None:
    """Both directions go through one function, which waits before it copies."""
    ((_, tree),) = trees(release, "v1/kv_offload/cpu/gpu_worker.py")
    waits = [ast.unparse(call.args[0]) for call in calls(tree, "wait_stream")]
    assert waits == ["current_platform.current_stream()"]
    (owner,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(calls(node, "wait_stream"))
        and any(calls(node, "record"))
    )
    assert "self.gpu_to_cpu" in ast.unparse(owner), "it serves loads and stores"
