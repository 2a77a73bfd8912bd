"""Patches of vllm/model_executor/layers/fused_moe/oracle/mxfp4.py: which kernels run the FP4 experts."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from rocm_patches.registry import Patch, Target

MODULE = "vllm.model_executor.layers.fused_moe.oracle.mxfp4"
EXPERTS = "vllm.model_executor.layers.fused_moe.experts.aiter_mxfp4_w4a16_moe"

# What vLLM passes by name, in each release that has `forward` below; the second line only with hash routing.
_GEMM = {"gather_indx", "scatter_indx", "gammas", "swizzle_mx_scale", "apply_swiglu", "alpha", "limit",
         "swiglu_add_residual", "unpadded_N", "unpadded_K", "backend"}  # fmt: skip
_GEMM_WITH_HASH = {"expert_map", "gate_valid"}
_ROUTING = {"score_mode", "bias", "renorm", "routed_scaling_factor", "use_grouped_topk"}
_HASH_ROUTING = {"score_mode", "renorm", "routed_scaling_factor"}


def _aiter(name: str) -> Any:
    """A module of AITER's MoE kernels, at its newer or its older place; None where it is not."""
    for package in ("aiter.ops.triton.moe", "aiter.ops.triton"):
        with contextlib.suppress(Exception):  # whatever AITER's import raises, the kernel is not there
            return importlib.import_module(f"{package}.{name}")
    return None


def aiter_lacks(forward: Callable[..., Any]) -> str | None:
    """What vLLM's `forward` would ask of the installed AITER that it does not have, or None. Imports AITER."""
    hashed = "hash_indices_table" in inspect.signature(forward).parameters
    routing = _aiter("moe_routing.routing")
    functions = {
        "moe_gemm_a16w4": (_aiter("moe_op_gemm_a16w4"), _GEMM | (_GEMM_WITH_HASH if hashed else set())),
        "routing": (routing, _ROUTING),
        **({"routing_from_hash": (routing, _HASH_ROUTING)} if hashed else {}),
    }
    for name, (module, wanted) in functions.items():
        function = getattr(module, name, None)
        if function is None:
            return f"AITER has no {name}"
        parameters = inspect.signature(inspect.unwrap(function)).parameters
        takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        if not takes_all and (missing := sorted(wanted - set(parameters))):
            return f"AITER's {name} has no {', '.join(missing)}"
    return None


def _w4a16_first(original: Callable[[Any], tuple[Any, Any]]) -> Callable[[Any], tuple[Any, Any]]:
    """For each layer: AITER's Triton kernel where it takes the layer and pads no more, else as vLLM chooses."""

    @functools.cache
    def lacks() -> str | None:
        from vllm.model_executor.layers.fused_moe.experts import aiter_mxfp4_w4a16_moe

        return aiter_lacks(aiter_mxfp4_w4a16_moe.aiter_triton_kernel_w4a16_moe_forward)

    def why_not(config: Any) -> tuple[Any, str]:
        """(experts class, "" or why it is not taken)"""
        from vllm.model_executor.layers.fused_moe.oracle import mxfp4

        wanted, usual = mxfp4.Mxfp4MoeBackend.AITER_TRITON_MXFP4_BF16, mxfp4.Mxfp4MoeBackend.TRITON_UNFUSED
        (experts,) = mxfp4.backend_to_kernel_cls(wanted)
        batched = config.moe_parallel_config.use_batched_activation_format
        formats = mxfp4.mk.FusedMoEActivationFormat
        taken, reason = experts.is_supported_config(
            experts,
            config,
            mxfp4.kMxfp4Static,
            mxfp4._backend_activation_key(wanted),
            formats.BatchedExperts if batched else formats.Standard,
        )
        if not taken:
            return experts, str(reason)
        inner = config.intermediate_size_per_partition
        padded, least = (
            mxfp4.mxfp4_round_up_hidden_size_and_intermediate_size(
                one, config.hidden_dim, inner, activation=config.activation
            )[1]
            for one in (wanted, usual)
        )
        if padded > least:
            return experts, f"it pads {inner} columns an expert to {padded}, not {least}"
        return experts, lacks() or ""

    @functools.wraps(original)
    def select_deepseek_v4_mxfp4_moe_backend(config: Any) -> tuple[Any, Any]:
        from vllm.logger import init_logger
        from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
        from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend

        if config.moe_backend != "auto" or config.routing_method != RoutingMethodType.DeepseekV4:
            return original(config)
        experts, reason = why_not(config)
        logger = init_logger("vllm.rocm_patches")
        if reason:
            logger.info_once("FP4 experts not on AITER's Triton kernel: %s", reason, scope="local")
            return original(config)
        logger.info_once("FP4 experts on AITER's Triton kernel (AITER_TRITON_MXFP4_BF16)", scope="local")
        return Mxfp4MoeBackend.AITER_TRITON_MXFP4_BF16, experts

    return select_deepseek_v4_mxfp4_moe_backend


PATCHES = (
    Patch(
        id="moe-backend",
        title="FP4 experts run on AITER's Triton kernel where it takes them",
        symptom="decode at half the possible speed: 22.4 instead of 46.5 tokens/s with V4-Pro, TP4, one request on "
        "MI325X, as reported",
        cause="`auto` tries AITER_MXFP4_BF16, which gfx942 cannot run, and TRITON_UNFUSED; not "
        "AITER_TRITON_MXFP4_BF16, whose class accepts gfx942",
        remedy="ask that class first, layer by layer: hash-routed layers (0.32.0), expert parallelism and shards "
        "that it would pad stay with TRITON_UNFUSED, and so does everything where AITER's functions lack a parameter "
        "that vLLM passes",
        upstream="https://github.com/vllm-project/vllm/pull/57079",
        upstream_state="the reported speed; 0.33.0's own list is unchanged",
        drop_when="vLLM's list for DeepSeek-V4 on ROCm has AITER_TRITON_MXFP4_BF16",
        platforms=("gfx942",),
        targets=(
            Target(MODULE, "select_deepseek_v4_mxfp4_moe_backend", _w4a16_first),
            Target(MODULE, "mxfp4_round_up_hidden_size_and_intermediate_size"),
            Target(MODULE, "backend_to_kernel_cls"),
            Target(MODULE, "_backend_activation_key"),
            Target(EXPERTS, "aiter_triton_kernel_w4a16_moe_forward"),
            Target(EXPERTS, "AiterW4A16ExpertsMonolithic"),
        ),
    ),
)
