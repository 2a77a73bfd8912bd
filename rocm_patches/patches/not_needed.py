"""What this bundle does not patch although others do, or although we expected to have to: each with what was
found in vLLM 0.32.0 and 0.33.0 and where that is shown. docs/patches.md prints it.
"""

from __future__ import annotations

from rocm_patches.registry import NotNeeded

_CASES = "tests/rocm_patches/patches/test_on_gfx942.py"
_SERVING = "tests/rocm_patches/patches/test_serving_on_gfx942.py"

NOT_NEEDED = (
    NotNeeded(
        id="compressed-cache-dialect",
        claim="the compressed caches (ratio 4 and 128) are written in one FP8 dialect and read in another",
        finding="Both writers encode OCP e4m3 on every platform; the prefill gather passes use_fnuz=False and the "
        "decode kernel IS_FNUZ_EXTRA=False. Slower than FNUZ on gfx942, but right.",
        proof=f"{_CASES}::test_not_needed_caches_agree_on_their_dialects "
        "runs writer and gather; ::test_decode_writes_in_place_where_it_can runs decode on both caches "
        "against float64",
    ),
    NotNeeded(
        id="window-cache-dialect",
        claim="the sliding-window cache is read as OCP although gfx942 writes FNUZ",
        finding="The compiled writer chooses FNUZ at compile time for gfx942; gather (use_fnuz=is_fp8_fnuz()) and "
        "decode (IS_FNUZ_MAIN) follow the platform. The writer itself is compiled and could not be run "
        "here.",
        proof=f"{_CASES}::test_not_needed_caches_agree_on_their_dialects, "
        "::test_decode_writes_in_place_where_it_can",
    ),
    NotNeeded(
        id="dequantisation-helpers",
        claim="the helpers that dequantise a cache assume OCP",
        finding="dequantize_and_gather_k_cache takes the dialect as an argument, and its four callers in the AMD "
        "model (main and DSpark) pass the right one.",
        proof="tests/rocm_patches/patches/test_sources.py::test_every_gather_names_its_dialect",
    ),
    NotNeeded(
        id="e8m0-arithmetic",
        claim="doubling ue8m0 scales raises `\"mul_cuda\" not implemented for 'Float8_e8m0fnu'` (F01)",
        finding="Fixed by https://github.com/vllm-project/vllm/pull/45681: the exponent byte is incremented. Only "
        "the check for codes without a twin is missing, which is patch checkpoint-fp8-codes.",
        proof=f"{_CASES}::test_whole_weights_load_unchanged",
    ),
    NotNeeded(
        id="e4m3fn-equality-tests",
        claim="tests such as `weight.dtype == torch.float8_e4m3fn` take the wrong branch once weights are FNUZ",
        finding="Of those on the path, every one either converts from OCP (and must see OCP), or lies on a branch "
        "that gfx942 cannot reach: plain-row caches (FlashInfer), the MXFP8 epilogue and heterogeneous "
        "experts (gfx950).",
        proof="tests/rocm_patches/patches/test_sources.py::test_every_e4m3fn_equality_test_is_accounted_for",
    ),
    NotNeeded(
        id="offsets-64-bit",
        claim="cache offsets overflow 32 bits once a pool exceeds 2 GiB",
        finding="Both compressed writers, the indexer's writer, both gathers, the paged logits and sparse decode "
        "widen the block number before they multiply. AITER's gluon pa_mqa_logits, which does not, is off "
        "the path since 0.32.0.",
        proof=f"{_CASES}::test_not_needed_offsets_have_64_bits runs each "
        "beyond 2^31 bytes, and one with the widening taken out, which is noticed",
    ),
    NotNeeded(
        id="indexer-prefill-budget",
        claim="the indexer's prefill workspace counts tokens instead of compressed rows",
        finding="Layer and metadata builder divide by the compress ratio.",
        proof=f"{_CASES}::test_not_needed_the_prefill_budget_counts_compressed_rows",
    ),
    NotNeeded(
        id="tilelang-mhc",
        claim="TileLang's mHC kernels, wrong on gfx942, are chosen when the package is installed (F66)",
        finding="_has_tilelang_mhc returns False on gfx942. The function is fingerprinted by patch mhc-backend, "
        "so a change of it stops the start.",
        proof=f"{_CASES}::test_not_needed_tilelang_is_off_for_mhc",
    ),
    NotNeeded(
        id="rope-results-v4",
        claim="DeepSeek-V4's indexer drops the results of its RoPE, as the V2 indexer did (the original review)",
        finding="V4 rotates inside its Triton kernels, and every call of a rotary embedding in its models uses "
        "the result. For V3.2-type models the fix was incomplete: patch indexer-rope-results.",
        proof="tests/rocm_patches/patches/test_sources.py::test_no_rotation_of_deepseek_v4_is_dropped",
    ),
    NotNeeded(
        id="preshuffled-indexer-writer",
        claim="indexer keys must be written in AITER's 16x16 layout",
        finding="Needed up to 0.29.0. Since 0.32.0 the readers of ratio-4 pages expect the flat layout, so that a "
        "preshuffling writer would break them.",
        proof=f"{_CASES}::test_indexer_keys_are_scored_right: the flat pages of vLLM's writer are read right",
    ),
    NotNeeded(
        id="c128-boundary-skip",
        claim="the skip of C128 steps without a block boundary is CUDA-only and costs gfx942 a launch per layer",
        finding="True, but decode runs in full graphs, where the skip is impossible on any platform (its own "
        "condition), and in an eager step it saves one launch whose programs all return at once. Not "
        "worth a patch.",
        proof="the condition in vllm/models/deepseek_v4/compressor.py: cudagraph_runtime_mode != FULL",
    ),
    NotNeeded(
        id="wo-a-fp8-bmm",
        claim="the FP8 batched GEMM of the output projection is gated to gfx950",
        finding="No AITER release has such a kernel for gfx942; lifting the gate alone raises at the first call. "
        "The cached bf16 weight is right. A kernel of this bundle may replace it.",
        proof="https://github.com/ROCm/aiter (no gfx942 variant at the commit that the ROCm image pins)",
    ),
    NotNeeded(
        id="aiter-indexer-top-k",
        claim="AITER's indexer top-k is gated to gfx950",
        finding="The compiled top-k that gfx942 uses instead is right; whether AITER's is faster there, and how "
        "it breaks ties, only hardware can tell. Left as it is.",
        proof="vllm/_aiter_ops.py, is_indexer_top_k_enabled",
    ),
    NotNeeded(
        id="routing-bitmatrix-padding",
        claim="vLLM's routing kernel lets the padded lanes of a block (192 to 255 for 6 experts a token) misroute "
        "tokens at high concurrency",
        finding="Those lanes read the next block's pairs, sort behind the block's own of the same expert, and so "
        "compute the very positions that the next block writes. Masking them changes no result.",
        proof=f"{_SERVING}::test_not_needed_padded_lanes_of_the_routing_do_no_harm runs the kernel against a sort, "
        "with and without unrouted slots",
    ),
    NotNeeded(
        id="swiglu-clamp",
        claim="the clamp of 10 in SwiGLU is lost on the way to the experts (F70)",
        finding="Mxfp4MoEMethod hands swiglu_limit to both back ends of gfx942, AITER's GEMM is asked for it, and the "
        "shared expert is built with SiluAndMulWithClamp.",
        proof=f"{_SERVING}::test_not_needed_the_clamp_reaches_every_expert, with values over 10 against float64",
    ),
    NotNeeded(
        id="expert-map",
        claim="with AITER switched on, experts that do not run on AITER get AITER's mask instead of the map (F79)",
        finding="RoutedExperts.expert_map asks the kernel that the layer really uses (consumes_expert_mask).",
        proof=f"{_SERVING}::test_not_needed_the_expert_map_is_the_kernels_own",
    ),
    NotNeeded(
        id="aux-streams-outside-capture",
        claim="side streams are forked in eager steps and in MTP, where they can hang",
        finding="Only where a graph is captured and in the profiling run; MTP is built without any. The switch that "
        "was missing is patch aux-stream-switch, which can also take them out of the profiling run.",
        proof=f"{_SERVING}::test_side_streams asks the attention's own forward",
    ),
    NotNeeded(
        id="kv-offload-native-fence",
        claim="`--kv-offloading-backend native` loads KV blocks back without waiting for the step that uses them (F72)",
        finding="The connector behind that flag orders every transfer behind the computing stream (wait_stream). The "
        "race of https://github.com/vllm-project/vllm/issues/47282 is in the other connector, chosen by "
        "VLLM_USE_SIMPLE_KV_OFFLOAD=1: patch kv-offload-load-fence.",
        proof="tests/rocm_patches/patches/test_sources.py::test_the_native_offload_waits_for_the_computing_stream",
    ),
    NotNeeded(
        id="reasoning-effort-names",
        claim="effort names (low, high, max, ...) put the prompt and the parser at odds about thinking (F75)",
        finding="For every name, with and without `thinking` or `enable_thinking`, the parser expects reasoning "
        "exactly where the prompt opens it. Names beyond DeepSeek's own are mapped to low or high.",
        proof="tests/rocm_patches/chat/test_prompt.py::test_parser_and_prompt_agree_on_thinking",
    ),
    NotNeeded(
        id="streaming-splits",
        claim="a well-formed tool call is damaged by where the stream splits it",
        finding="vLLM's lexer holds back what may become a tag, so that token by token gives the whole text's result. "
        "What is wrong in streams as in whole answers is patch dsml-parser.",
        proof="tests/rocm_patches/chat/test_tool_calls.py: the cases marked `stock`",
    ),
    NotNeeded(
        id="graph-mode",
        claim="prefill and mixed batches run eager on gfx942 (graph defaults)",
        finding="A matter of flags, decided by the plan, not of code. PIECEWISE capture crashed workers with V4.1 "
        "on MI300X (https://github.com/SemiAnalysisAI/InferenceX/pull/3246).",
        proof="vllm/config/vllm.py: the set of models with breakable graphs on ROCm",
    ),
)
