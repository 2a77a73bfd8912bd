"""What vLLM's own code decides around the model on a simulated gfx942: which kernels run the experts, side streams, and
KV blocks that come back from the CPU. `RELEASE stock|patched`, in a process of its own; the judgement is
test_serving_on_gfx942.py's.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from tests.rocm_patches import gfx942

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


# --- experts ----------------------------------------------------------------------------------------


def expert_config(**changes: Any) -> Any:
    """What vLLM's oracle asks of a layer's configuration: V4-Flash at TP4 unless changed."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType

    parallel = types.SimpleNamespace(
        use_batched_activation_format=False, use_ep=False, ep_size=1, enable_eplb=False, dp_size=1, tp_size=4,
        use_all2all_kernels=False, use_deepep_ht_kernels=False, use_deepep_ll_kernels=False,
        use_fi_nvl_two_sided_kernels=False, use_fi_nvl_one_sided_kernels=False, all2all_backend="",
    )  # fmt: skip
    vars(parallel).update(changes.pop("parallel", {}))
    fields: dict[str, Any] = {
        "moe_parallel_config": parallel,
        "moe_backend": "auto",
        "routing_method": RoutingMethodType.DeepseekV4,
        "is_act_and_mul": True,
        "activation": MoEActivation.SILU,
        "has_hash_routing": False,
        "router_logits_dtype": None,
        "hidden_dim": 4096,
        "intermediate_size_per_partition": 512,
        "is_lora_enabled": False,
        "require_decomposed_backend": False,
        "num_experts": 256,
        "experts_per_token": 6,
    }
    return types.SimpleNamespace(**fields | changes)


# AITER's functions as far as vLLM knows them: names of parameters, newest first. Written as text because only their
# signatures matter.
_COMMON = (
    "*tensors, gather_indx=None, scatter_indx=None, gammas=None, alpha=1.0, swizzle_mx_scale=None, apply_swiglu=False, "
    "limit=None, swiglu_add_residual=True, unpadded_N=None, unpadded_K=None, backend=None"
)
_ROUTE = (
    "score_mode=None, bias=None, renorm=None, routed_scaling_factor=1.0, use_grouped_topk=False, "
    "num_expert_group=None, topk_group=None"
)


def function(parameters: str) -> Any:
    """A function with these parameters that does nothing but note the clamp it is asked for."""
    made: dict[str, Any] = {"note": note}
    exec(f"def made({parameters}): return note(locals())", made)  # noqa: S102 (the text above)
    return made["made"]


def note(given: dict[str, Any]) -> Any:
    if "limit" in given:
        asked.append(given["limit"])
        return given["tensors"][0]
    return types.SimpleNamespace(gate_scal=None, topk_ids=None), None, None


NEW_GEMM, GEMM_OF_AUGUST = f"{_COMMON}, expert_map=None, gate_valid=None", _COMMON


asked: list[Any] = []


def aiter(gemm: str | None = NEW_GEMM, **routing: str | None) -> None:
    """Put an AITER into this process whose MoE has functions with these parameters; None: has no such function."""
    from vllm._aiter_ops import rocm_aiter_ops

    rocm_aiter_ops.is_enabled = staticmethod(lambda: True)
    for name in [name for name in sys.modules if name.startswith("aiter.ops.triton")]:
        del sys.modules[name]
    place = "aiter.ops.triton.moe"
    gfx942.package(f"{place}.moe_op_gemm_a16w4", **({"moe_gemm_a16w4": function(gemm)} if gemm else {}))
    functions = {
        "routing": f"logits, topk, sm_first=False, *, {_ROUTE}",
        "routing_from_hash": f"logits, table, ids, topk, block_m, {_ROUTE}",
    }
    made = {name: function(text) for name, text in (functions | routing).items() if text}
    gfx942.package(f"{place}.moe_routing.routing", **made)


@case
def expert_backends() -> dict[str, str]:
    """The back end per configuration, chosen by what the quantisation method calls."""
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
    from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as oracle
    from vllm.model_executor.layers.quantization import mxfp4

    gpt_oss_triton_kernels_moe.has_triton_kernels = lambda: True
    oracle.get_cdna_version = lambda: 3
    results = {}

    def chosen(**changes: Any) -> str:
        try:
            backend, _ = mxfp4.select_deepseek_v4_mxfp4_moe_backend(expert_config(**changes))
        except (ValueError, NotImplementedError) as error:
            return type(error).__name__
        return str(backend.value)

    aiter()
    results["flash tp4"] = chosen()
    results["hash routed"] = chosen(has_hash_routing=True)
    results["pro tp8"] = chosen(hidden_dim=7168, intermediate_size_per_partition=384)
    results["pro tp4"] = chosen(hidden_dim=7168, intermediate_size_per_partition=768)
    results["expert parallel"] = chosen(parallel={"use_ep": True, "ep_size": 4})
    results["data parallel"] = chosen(parallel={"dp_size": 2})
    results["asked for"] = chosen(moe_backend="triton_unfused")
    results["another model"] = chosen(routing_method=RoutingMethodType.Renormalize)
    results["without AITER"] = without(chosen)
    return results


def without(chosen: Callable[[], str]) -> str:
    from vllm._aiter_ops import rocm_aiter_ops

    rocm_aiter_ops.is_enabled = staticmethod(lambda: False)
    return chosen()


@case
def what_aiter_lacks() -> dict[str, str | None]:
    """The check of the installed AITER against the call in vLLM's text."""
    from vllm.model_executor.layers.fused_moe.experts import aiter_mxfp4_w4a16_moe as experts

    from rocm_patches.patches.mxfp4_oracle import aiter_lacks

    forward = experts.aiter_triton_kernel_w4a16_moe_forward
    results = {}
    aiter()
    results["new"] = aiter_lacks(forward)
    aiter(GEMM_OF_AUGUST)
    results["August 2026"] = aiter_lacks(forward)
    aiter(None)
    results["no kernel"] = aiter_lacks(forward)
    aiter(routing="logits, topk, sm_first=False")
    results["old routing"] = aiter_lacks(forward)
    aiter(routing_from_hash=None)
    results["no hash routing"] = aiter_lacks(forward)
    aiter("*tensors, **options")
    results["takes anything"] = aiter_lacks(forward)
    return results


@case
def swiglu_limit() -> dict[str, Any]:
    """Not patched: the clamp of 10 on its way to each kernel of the experts, and in the shared expert."""
    import torch
    from vllm.model_executor.layers.activation import SiluAndMulWithClamp
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.experts import aiter_mxfp4_w4a16_moe as aiter_experts
    from vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe import (
        UnfusedOAITritonExperts,
    )
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

    from tests.rocm_patches.independent import randn

    results: dict[str, Any] = {}
    layer = types.SimpleNamespace(swiglu_limit=10.0, w13_weight_scale=None, w2_weight_scale=None)
    for name in ("TRITON_UNFUSED", "AITER_TRITON_MXFP4_BF16"):
        precision = types.SimpleNamespace(
            weight_scale=types.SimpleNamespace(storage=types.SimpleNamespace(data=None)),
            b_mx_scale=types.SimpleNamespace(storage=types.SimpleNamespace(data=None)),
        )
        method = types.SimpleNamespace(
            mxfp4_backend=Mxfp4MoeBackend[name], w13_precision_config=precision, w2_precision_config=precision
        )
        config = Mxfp4MoEMethod.get_fused_moe_quant_config(method, layer)
        results[f"{name} is told"] = config.gemm1_clamp_limit
    config = types.SimpleNamespace(
        w1_precision=precision,
        w2_precision=precision,
        gemm1_alpha=None,
        gemm1_clamp_limit=10.0,
        w1_bias=None,
        w2_bias=None,
    )
    aiter()
    asked.clear()
    weight = types.SimpleNamespace(storage=types.SimpleNamespace(data=None))
    aiter_experts.aiter_triton_kernel_w4a16_moe_forward(
        torch.zeros(2, 64), weight, weight, torch.zeros(2, 8), 6, True, MoEActivation.SILU, config,
        score_mode="sqrtsoftplus",
    )  # fmt: skip
    results["AITER's first GEMM is asked for"] = asked[0]

    x = (randn(64, 512, seed=21) * 12).bfloat16()
    gate, up = x[:, :256].double(), x[:, 256:].double()
    truth = gate.clamp(max=10) * gate.clamp(max=10).sigmoid() * up.clamp(-10, 10)
    unclamped = gate * gate.sigmoid() * up
    out = torch.empty(64, 256, dtype=torch.bfloat16)
    quant = types.SimpleNamespace(gemm1_clamp_limit=10.0)
    assert FUSED_MOE_UNQUANTIZED_CONFIG is not None
    UnfusedOAITritonExperts.activation(types.SimpleNamespace(quant_config=quant), MoEActivation.SILU, out, x)
    shared = SiluAndMulWithClamp.forward_native(
        types.SimpleNamespace(swiglu_limit=10.0, alpha=1.0, beta=0.0), x
    )

    def error(got: Any) -> float:
        return float((got.double() - truth).abs().max() / truth.abs().max())

    results["routed error"], results["shared error"] = error(out), error(shared)
    results["error without a clamp"] = error(unclamped)
    return results


@case
def expert_map() -> dict[str, str]:
    """Not patched: with AITER switched on, the map is that of the kernel which the layer really uses."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    results = {}
    for name, wants in (("AITER's fused kernel", True), ("another kernel", False)):
        kernel = types.SimpleNamespace(fused_experts=types.SimpleNamespace(consumes_expert_mask=wants))
        layer = types.SimpleNamespace(
            quant_method=types.SimpleNamespace(moe_kernel=kernel), expert_mask="mask", _expert_map="map",
            rocm_aiter_fmoe_enabled=True,
        )  # fmt: skip
        results[name] = RoutedExperts.expert_map.fget(layer)
    from vllm.model_executor.layers.fused_moe.experts.aiter_mxfp4_w4a16_moe import AiterW4A16ExpertsMonolithic
    from vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe import (
        UnfusedOAITritonExperts,
    )

    for cls in (AiterW4A16ExpertsMonolithic, UnfusedOAITritonExperts):
        results[cls.__name__] = "mask" if cls.consumes_expert_mask else "map"
    return results


@case
def padded_lanes() -> dict[str, int]:
    """Not patched: vLLM's routing kernel for 6 of 256 experts. Its last 64 lanes of 256 hold the next block's pairs."""
    import ast
    import inspect
    import linecache
    import textwrap

    import numpy as np
    import torch
    import triton
    import triton.language as tl
    from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as module

    outer = inspect.getsource(module._patch_make_bitmatrix_metadata)
    tree = ast.parse(textwrap.dedent(outer))
    (node,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_stage2_pow2")
    lines = textwrap.dedent(outer).splitlines()[node.lineno - 2 : node.end_lineno]
    # `_keyed_add` is triton_kernels': add runs of equal keys (the upper 16 bits).
    text = (
        "import triton, triton.language as tl\n\n@triton.jit\ndef _keyed_add(x, y):\n"
        "    key = 0xFFFF0000\n    return tl.where((x & key) == (y & key), x + y - (x & key), y)\n\n"
        + textwrap.dedent("\n".join(lines))
    )
    file = "<vLLM's _stage2_pow2>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    made: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": "routing_kernel"}
    exec(compile(text, file, "exec"), made)  # noqa: S102 (vLLM's own text)
    kernel = made["_stage2_pow2"]

    results = {}
    for tokens in (5, 32, 33, 97, 200):
        for holes in (False, True):
            rng = np.random.default_rng(tokens)
            chosen = np.stack([rng.choice(256, 6, replace=False) for _ in range(tokens)]).astype(np.int16)
            if holes:
                chosen[rng.random(chosen.shape) < 0.1] = -1
            flat = chosen.reshape(-1)
            blocks = -(-tokens // 32)
            counts = np.zeros((blocks, 256), dtype=np.int32)
            for block in range(blocks):
                part = flat[block * 192 : (block + 1) * 192]
                np.add.at(counts[block], part[part >= 0], 1)
            starts = np.cumsum(counts, 0) - counts
            total = counts.sum(0)
            offsets = (np.cumsum(total) - total).astype(np.int32)
            order = np.array([i for i in np.argsort(flat, kind="stable") if flat[i] >= 0], dtype=np.int32)
            by_column, by_row = (torch.full((flat.size,), -1, dtype=torch.int32) for _ in range(2))
            partial = torch.from_numpy(starts.astype(np.int32))
            kernel[(blocks,)](
                by_column, by_row, torch.from_numpy(flat.copy()), tokens, partial, partial.stride(0), partial.stride(1),
                torch.from_numpy(offsets), TOKS_PER_ROW=6, BLOCK_PER_TOK=32, BLOCK_SIZE_PADDED=256,
            )  # fmt: skip
            rank = np.full(flat.size, -1)
            rank[order] = np.arange(order.size)
            wrong = int((by_column.numpy()[: order.size] != order).sum() + (by_row.numpy() != rank).sum())
            results[f"{tokens} tokens{', holes' if holes else ''}"] = wrong
    return results


# --- side streams -----------------------------------------------------------------------------------


def where_it_forks() -> list[str]:
    """Steps in which the attention forks side streams, by its own forward."""
    import torch
    from vllm.models.deepseek_v4.amd import rocm

    forked = []
    for name, capturing, metadata, streams in (
        ("captured", True, {}, [object()]),
        ("eager step", False, {}, [object()]),
        ("profiling run", False, None, [object()]),
        ("no streams", True, None, None),
    ):
        torch.cuda.is_current_stream_capturing = lambda capturing=capturing: capturing
        ran: list[str] = []
        layer = types.SimpleNamespace(
            aux_stream_list=streams,
            padded_heads=1,
            head_dim=2,
            n_local_heads=1,
            _o_proj=lambda o, positions: o,
            _prepare_and_attn_fn=lambda *_, ran=ran: ran.append("forked"),
            _run_sequential_pipeline=lambda *_, ran=ran: ran.append("one"),
        )
        rocm.get_forward_context = lambda metadata=metadata: types.SimpleNamespace(attn_metadata=metadata)
        rocm.DeepseekV4ROCMAiterMLAAttention.forward(layer, torch.zeros(1), torch.zeros(1, 4))
        forked += [name] if ran == ["forked"] else []
    return forked


@case
def side_streams() -> dict[str, Any]:
    """Where the attention forks, with each value of the switch; and the streams that MTP gets."""
    import inspect
    import os

    from vllm.models.deepseek_v4.amd import mtp
    from vllm.platforms import current_platform

    from rocm_patches.patches import platforms_rocm

    text = inspect.getsource(mtp.DeepSeekV4MultiTokenPredictor.__init__)
    results: dict[str, Any] = {
        "as started": where_it_forks(),
        "MTP has none on ROCm": "None\n            if current_platform.is_rocm()" in text,
    }
    platform = type(current_platform)
    now = vars(platform)["enable_multi_stream_overlap"].__func__
    for switch in ("off", "captured", "AUTO"):
        os.environ[platforms_rocm.SWITCH] = switch
        platform.enable_multi_stream_overlap = classmethod(
            platforms_rocm._switchable(getattr(now, "__wrapped__", now))
        )
        results[switch] = where_it_forks()
    return results


# --- KV offload -------------------------------------------------------------------------------------


@case
def kv_loads() -> dict[str, Any]:
    """In which order a load is put behind what computes: what the copying thread is told to wait for."""
    import queue

    import torch
    from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

    class Event:
        """Stands in for a GPU's event."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.recorded_on: Any = None

        def record(self, stream: Any) -> None:
            self.recorded_on = stream

    torch.Event = Event  # type: ignore[misc]
    torch.cuda.current_stream = lambda: "compute"
    backend = DmaCopyBackend()
    backend._queue, backend._load_params, backend._store_params = queue.SimpleQueue(), object(), object()
    worker = types.SimpleNamespace(
        _backend=backend, _load_events=[], _store_events=[], _store_compute_done=None,
        _connector_metadata=types.SimpleNamespace(
            load_cpu_blocks=[1],
            load_gpu_blocks=[2],
            load_event=0,
            store_gpu_blocks=[3],
            store_cpu_blocks=[4],
            store_event=1,
        ),
    )  # fmt: skip
    results = {}
    for name, call in (
        ("load", SimpleCPUOffloadWorker.start_load_kv),
        ("store", SimpleCPUOffloadWorker.wait_for_save),
    ):
        call(worker)
        event = backend._queue.get()[-1]
        results[name] = event and event.recorded_on
    return results


def main() -> None:
    release, state, names = sys.argv[1], sys.argv[2], sys.argv[3:]
    gfx942.simulate(release=release, patched=state == "patched")
    gfx942.answer_cases(CASES, names)


if __name__ == "__main__":
    main()
