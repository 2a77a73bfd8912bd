"""Patches of vllm/models/deepseek_v4/common/ops/fused_compress_quant_cache.py: the Triton writers of the
compressed caches and of the indexer's key cache.
"""

from __future__ import annotations

from rocm_patches.registry import Measurement, Patch, Target
from rocm_patches.rewrite import rewrite

MODULE = "vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache"
INDEXER_OPS = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"

# OCP and FNUZ share their bytes: the same byte is half the value in FNUZ, except 0x80, -0 in OCP and NaN in
# FNUZ. So the writer keeps its OCP arithmetic, writes 0 for 0x80 and doubles the (power-of-two) scale: what
# it writes is byte for byte what a FNUZ writer that clamps to 224 writes, whatever the hardware's conversion
# makes of a negative value that underflows.
KEY_EDITS = (
    (
        "x_uint8 = x_fp8.to(tl.uint8, bitcast=True)",
        "x_uint8 = x_fp8.to(tl.uint8, bitcast=True)\n"
        "    x_uint8 = tl.where(x_uint8 == 0x80, 0, x_uint8).to(tl.uint8)",
    ),
    ("scale_val = tl.exp2(exponent)", "scale_val = tl.exp2(exponent + 1.0)"),
)


def _key_bytes(device: str) -> list[Measurement]:
    """The claim above, on this device: OCP keys turned as the patched writer does, read as FNUZ."""
    import torch

    from rocm_patches import fp8

    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(4096, 128, generator=generator).to(device)
    keys[:, :4] *= 40  # outliers, so that small values underflow
    codes, exponent = fp8.quantise_ue8m0(keys, 128, fp8.OCP)
    truth = fp8.dequantise_ue8m0(codes, exponent, fp8.OCP)
    read = fp8.dequantise_ue8m0(torch.where(codes == 0x80, 0, codes), exponent + 1, fp8.FNUZ)
    return [Measurement("indexer keys, OCP bytes as FNUZ", "fnuz", float((read - truth).abs().max()), 0.0)]


PATCHES = (
    Patch(
        id="indexer-key-dialect",
        title="Indexer keys are written in the dialect that they are read in",
        symptom="beyond 2048 (Flash) or 4096 (Pro) tokens some keys get score 0 instead of their own, so the "
        "wrong compressed entries are attended to; every score is halved",
        cause="the indexer's key writer is OCP e4m3 on every platform, while all readers on gfx942 view the "
        "page as e4m3fnuz, where byte 0x80 (OCP's -0) is NaN and every value is half",
        remedy="write 0x00 for 0x80 and double the scale: the bytes of a FNUZ writer that clamps to 224. KV "
        "transfer of indexer pages between gfx942 and other architectures is no longer possible",
        upstream="https://github.com/vllm-project/vllm/pull/42893",
        upstream_state="merged; it made weights, queries and the sliding-window cache FNUZ, not this writer",
        drop_when="the writer takes the platform's FP8 dialect",
        platforms=("gfx942",),
        targets=(
            Target(MODULE, "_fused_kv_compress_norm_rope_insert_indexer_attn", rewrite(*KEY_EDITS)),
            # The launcher takes the kernel by its global name; these are all that read the pages.
            Target(MODULE, "FusedKVCompressNormRopeInsertIndexerTritonKernel.__call__"),
            Target(INDEXER_OPS, "cp_gather_indexer_k_quant_cache_triton"),
            Target(INDEXER_OPS, "rocm_fp8_paged_mqa_logits_triton"),
            Target(INDEXER_OPS, "fp8_paged_mqa_logits_torch"),
        ),
        self_test=_key_bytes,
        rows=("F67", "F68"),
    ),
    Patch(
        id="compressed-cache-nan",
        title="No NaN in the compressed caches",
        symptom="one NaN in a request's state reaches its compressed entries; prefill attention does not "
        "scrub them, so all later tokens of the request are NaN",
        cause="both writers of the compressed caches sanitise NaN on gfx950 only (SANITIZE_CACHE_NANS)",
        remedy="sanitise on gfx942 as well: one select per rotated value",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/" + MODULE.replace(".", "/") + ".py",
        upstream_state="done for gfx950 only",
        drop_when="SANITIZE_CACHE_NANS is set on gfx942",
        platforms=("gfx942",),
        targets=(
            # Only the two launchers below read this variable of the module, to choose that constexpr.
            Target(MODULE, "_ON_GFX950", lambda _: True),
            Target(MODULE, "compress_norm_rope_store_triton"),
            Target(MODULE, "_launch_two_stage_sparse_attn_compressor"),
        ),
    ),
)
