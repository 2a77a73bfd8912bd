"""The support matrix: what is refused before anything is started, what is changed, and what is warned about.

One function per rule, in the module of its subject. To add one: write the function under a `@rule` line,
put it into RULES, add its test (tests/plan/rules), and run `make docs-rules` for docs/rules.md. The
operator's own value wins unless a rule refuses or changes it; `--allow RULE` overrides any of them by name.
"""

from __future__ import annotations

from dsv4_deploy.plan.rules import capacity, deployment, engine, environment, hardware
from dsv4_deploy.plan.rules.base import Case, Change, Found, Notice, Rule, refuse, settle, warn
from dsv4_deploy.plan.rules.environment import PLUGIN
from dsv4_deploy.plan.rules.hardware import legal_tp

__all__ = [
    "BY_ID",
    "PLUGIN",
    "RULES",
    "Case",
    "Change",
    "Found",
    "Notice",
    "Rule",
    "legal_tp",
    "refuse",
    "settle",
    "warn",
]

# Refusals are told in this order: what is furthest from working comes first.
RULES: tuple[Rule, ...] = (
    hardware.cpu_is_for_small_models,
    hardware.gpu_architecture,
    hardware.tp_divides_the_model,
    hardware.rocm_needs_gpus,
    hardware.vllm_too_old,
    hardware.aiter_mhc_race,
    hardware.length_is_possible,
    environment.plugin_is_allowed,
    environment.visibility_conflict,
    environment.service_links,
    environment.gone_variables,
    engine.kv_cache_dtype,
    engine.moe_backend,
    engine.moe_aiter_version,
    engine.moe_aiter_parallel,
    engine.nvfp4,
    engine.parsers_match,
    engine.indexer_dtype,
    engine.monokernel,
    engine.expert_parallel_pro,
    engine.dspark_in_checkpoint,
    engine.dspark_rocm,
    engine.dspark_tokens,
    engine.mtp_in_checkpoint,
    deployment.image_cuda,
    deployment.gpu_resource,
    deployment.runtime_class,
    deployment.cluster_gpus,
    deployment.weights_reachable,
    deployment.startup_budget,
    deployment.memory_limit,
    capacity.weights_fit,
    capacity.data_parallel_pro,
    capacity.cache_fits,
    # changes
    engine.quantization_fp8,
    engine.block_size,
    engine.kv_cache_dtype_auto,
    engine.tokenizer_mode,
    engine.reasoning_parser,
    engine.tool_call_parser,
    engine.graphs_v41,
    engine.kv_offloading,
    capacity.memory_utilization,
    capacity.batched_tokens_long_context,
    capacity.max_num_seqs,
    environment.aiter_on,
    environment.aiter_fp4bmm_off,
    environment.aiter_fp8bmm_off,
    environment.scratch_reclaim,
    environment.breakable_graphs,
    environment.aiter_vskip,
    environment.ready_timeout,
    environment.caches_writable,
    deployment.shared_memory,
    deployment.rollout_surge,
    deployment.liveness_timeout,
    deployment.termination_grace,
    deployment.service_name,
    # warnings
    hardware.gpu_not_target,
    hardware.unknown_card,
    hardware.virtual_function_tp8,
    hardware.vllm_outside_window,
    hardware.no_tuned_table,
    capacity.expert_padding,
    engine.moe_aiter_used,
    engine.quantization_named,
    engine.enforce_eager,
    engine.expert_parallel,
    engine.served_model_name,
    engine.fp8_experts,
    engine.mtp_reuses_layer,
    engine.speculation_gfx942,
    environment.aiter_jit_dir,
    environment.visibility,
    environment.gfx_override,
    environment.dev_mode,
    deployment.image_tag,
    deployment.memory_limit_tight,
)

BY_ID = {one.id: one for one in RULES}
