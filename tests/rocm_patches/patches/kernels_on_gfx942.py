"""This bundle's kernels where vLLM's own AMD code calls them, on a simulated gfx942: `RELEASE [CASE...]`, in a process
of its own; the judgement is test_kernels_on_gfx942.py's. Every case runs vLLM's method with the patch, and the one
that it replaced or a reference, and says how far they are apart and what was launched.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

from tests.rocm_patches import gfx942

CASES: dict[str, Callable[[], Any]] = {}
HIDDEN, TOKENS = 256, 5


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def apart(ours: Any, theirs: Any) -> float:
    """Largest difference of two tensors of one shape, relative to the largest of `theirs`."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def launched(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and the names of this bundle's kernels that it launched."""
    from rocm_patches.kernels import launch

    with launch.recording() as made:
        result = function()
    return result, [one.name for one in made]


def weights(mixes: int, seed: int) -> tuple[Any, Any, Any]:
    """(fn, scale, base) of a seam (24 mixes) or of the head (4)."""
    import torch
    from torch import nn

    from tests.rocm_patches.independent import randn

    fn = nn.Parameter(randn(mixes, 4 * HIDDEN, seed=seed, scale=0.05), requires_grad=False)
    return fn, torch.full((3 if mixes == 24 else 1,), 0.7), randn(mixes, seed=seed + 1)


# --- hyper-connections ------------------------------------------------------------------------------


def decoder_layer() -> Any:
    """vLLM's decoder layer without its attention and experts, which stand-ins of the same shape replace."""
    import torch
    from torch import nn
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.models.deepseek_v4.amd import model

    class Attention(nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()

        def forward(self, positions: Any, x: Any, _: Any) -> Any:
            return x.roll(1, -1)

    class Experts(Attention):
        def forward(self, x: Any, input_ids: Any) -> Any:  # type: ignore[override]
            return x.flip(-1)

    model.DeepseekV4ROCMAiterMLAAttention = Attention
    model.DeepseekV4MoE = Experts
    if hasattr(model, "MonoDecodeLayer"):  # 0.33.0; for other chips
        model.MonoDecodeLayer.create = lambda *_: None
    config = types.SimpleNamespace(
        hidden_size=HIDDEN, rms_norm_eps=1e-6, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, num_hidden_layers=2,
        model_type="deepseek_v4", dspark_block_size=None, compress_ratios=[0, 0], layer_types=["x"] * 2,
    )  # fmt: skip
    asked = types.SimpleNamespace(
        model_config=types.SimpleNamespace(hf_config=config), quant_config=None, parallel_config=None
    )
    with set_current_vllm_config(VllmConfig()):
        layer = model.DeepseekV4DecoderLayer(asked, "model.layers.0")
        for name in ("attn_norm", "ffn_norm"):
            setattr(layer, name, RMSNorm(HIDDEN, 1e-6).bfloat16())
    for seed, kind in ((1, "attn"), (3, "ffn")):
        for name, value in zip(("fn", "scale", "base"), weights(24, seed), strict=True):
            getattr(layer, f"hc_{kind}_{name}").data = value.data if name == "fn" else value
        norm = getattr(layer, f"{kind}_norm").weight
        norm.data = torch.linspace(0.5, 1.5, HIDDEN).bfloat16()
    return layer


@case
def seams() -> dict[str, Any]:
    """Two decoder layers on the path that the patch gives them, and on vLLM's own without AITER."""
    import torch

    from rocm_patches.patches import mhc
    from tests.rocm_patches.independent import randn

    mhc._PROBED_TOKENS = (1, 17)  # the interpreter takes half a minute for a prefill chunk
    layer = decoder_layer()
    x = randn(TOKENS, 4, HIDDEN, seed=9).bfloat16()
    positions, ids = torch.arange(TOKENS), torch.arange(TOKENS)
    mine = {"fused": layer.use_fused_mhc, "norms inside": layer.fuse_mhc_rmsnorm}
    layer(x, positions, ids)  # the kernels are tried here, once

    def two() -> Any:
        state = layer(x, positions, ids)
        state = layer(state[0], positions, ids, *state[2:], state[1])
        return layer.hc_post(state[0], state[1], state[2], state[3])

    ours, names = launched(two)
    layer.use_fused_mhc = False
    for op in (layer.mhc_pre, layer.mhc_post):
        op._forward_method = op.forward_native
    theirs = layer(layer(x, positions, ids)[0], positions, ids)[0]
    return mine | {"error": apart(ours, theirs), "launches": names}


@case
def head() -> dict[str, Any]:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.mhc import HCHeadOp

    from rocm_patches.reference import mhc as reference
    from tests.rocm_patches.independent import randn

    with set_current_vllm_config(VllmConfig()):
        op = HCHeadOp()
    x, (fn, scale, base) = randn(TOKENS, 4, HIDDEN, seed=6).bfloat16(), weights(4, 7)
    op(x, fn, scale, base, 1e-6, 1e-6)
    ours, names = launched(lambda: op(x, fn, scale, base, 1e-6, 1e-6))
    truth = reference.head(x, fn, scale, base, 1e-6, 1e-6)
    fn.data.copy_(fn * 2)  # weights loaded anew into the same memory
    model = sys.modules["vllm.models.deepseek_v4.amd.model"]
    holder = torch.nn.Module()
    holder.fn = fn
    from rocm_patches.patches.mhc import _fresh_weights

    _fresh_weights(lambda _: None)(holder)
    again = op(x, fn, scale, base, 1e-6, 1e-6)
    return {
        "error": apart(ours, truth),
        "launches": names,
        "reloaded": apart(again, reference.head(x, fn, scale, base, 1e-6, 1e-6)),
        "hooked": hasattr(model.DeepseekV4ForCausalLM.process_weights_after_loading, "__wrapped__"),
    }


# --- compressor -------------------------------------------------------------------------------------


def compressor_layer(ratio: int, dim: int, table: Any, cache: Any, state: Any) -> Any:
    import torch
    from vllm.models.deepseek_v4.compressor import DeepseekCompressor

    from tests.rocm_patches.independent import randn

    width = dim * (2 if ratio == 4 else 1)
    layer = object.__new__(DeepseekCompressor)
    torch.nn.Module.__init__(layer)
    vars(layer).update(
        compress_ratio=ratio, head_dim=dim, rope_head_dim=64, overlap=ratio == 4, coff=width // dim,
        use_fp4_cache=False, rms_norm_eps=1e-6, k_cache_prefix="k", _quant_block=128 if dim == 128 else 64,
        _use_two_stage_fused_compressor=False,
        _token_stride=128 if dim == 128 else 576, _scale_dim=4 if dim == 128 else 8, ape=randn(ratio, width, seed=20),
        state_cache=types.SimpleNamespace(prefix="state", kv_cache=state),
        norm=types.SimpleNamespace(weight=torch.linspace(0.5, 1.5, dim).bfloat16()),
        _static_forward_context={"k": types.SimpleNamespace(kv_cache=cache)},
    )  # fmt: skip
    return layer


@case
def compressors() -> dict[str, Any]:
    """A step of prefill and one of decode through `forward`, after which the caches hold the same rows."""
    import torch
    from vllm.models.deepseek_v4 import compressor as module

    from tests.rocm_patches.independent import randn, rope_table

    results: dict[str, Any] = {}
    plain = module.DeepseekCompressor.forward.__wrapped__
    for name, ratio, dim in (("CSA", 4, 512), ("indexer", 4, 128), ("HCA", 128, 512)):
        width, row = dim * (2 if ratio == 4 else 1), 584 if dim == 512 else 132
        length = ratio * (3 if ratio == 4 else 1)
        table = rope_table(length)
        states, caches, names = [], [], []
        for method in (module.DeepseekCompressor.forward, plain):
            state = torch.zeros(-(-length // 16), 16, 2 * width)
            # Pages with room behind them, as where the cache shares its pages with another.
            cache = torch.zeros(2, 65, row, dtype=torch.uint8)[:, :64]
            layer = compressor_layer(ratio, dim, table, cache, state)
            for first, end in ((0, length - 3), (length - 3, length)):
                positions = torch.arange(first, end)
                step = types.SimpleNamespace(
                    token_to_req_indices=torch.zeros(end - first).int(), slot_mapping=positions,
                    block_table=torch.arange(len(state)).int().view(1, -1), block_size=16, num_decode_tokens=0,
                )  # fmt: skip
                keys = torch.where((positions + 1) % ratio == 0, positions // ratio, -1)
                context = types.SimpleNamespace(
                    attn_metadata={"state": step, "k": types.SimpleNamespace(slot_mapping=keys)},
                    cudagraph_runtime_mode=None,
                )
                module.get_forward_context = lambda context=context: context
                import vllm.forward_context

                vllm.forward_context.get_forward_context = module.get_forward_context
                scores = randn(end - first, 2 * width, seed=30 + first)
                rotary = types.SimpleNamespace(cos_sin_cache=table)
                names += launched(lambda m=method, a=(layer, scores, positions, rotary): m(*a))[1]
            states.append(state)
            caches.append(cache)
        ours, theirs = (cache.flatten(1)[0] for cache in caches)
        results[name] = {
            "state": torch.equal(*states),
            "same bytes": float((ours == theirs).float().mean()),
            # Where a product is rounded another way, a code or a bf16 mantissa moves by one.
            "furthest byte": int((ours.int() - theirs.int()).abs().max()),
            "written": int((theirs != 0).sum()),
            "launches": names,
        }
    return results


# --- on request -------------------------------------------------------------------------------------


@case
def output_projection() -> dict[str, Any]:
    """`_o_proj` with DSV4_KERNELS=all: FNUZ weights as vLLM has them after loading, against its bf16 path."""
    import torch
    from vllm.models.deepseek_v4.amd.rocm import DeepseekV4ROCMAiterMLAAttention as Attention

    from rocm_patches.patches import amd_rocm
    from tests.rocm_patches.independent import randn, rope_table

    groups, rank, heads = 2, 128, 4
    codes = torch.randint(
        0, 0x78, (groups * rank, heads // groups * 512), generator=torch.Generator().manual_seed(1)
    )
    layer = types.SimpleNamespace(
        _wo_a_fp8_weight=None, _wo_b_scale=None, n_local_groups=groups, o_lora_rank=rank, rope_head_dim=64,
        wo_b=lambda z: z, rotary_emb=types.SimpleNamespace(cos_sin_cache=rope_table(TOKENS)),
        wo_a=types.SimpleNamespace(
            weight=codes.to(torch.uint8).view(torch.float8_e4m3fnuz),
            weight_scale_inv=torch.full((groups, heads // groups * 4), 2.0**-6),
        ),
    )  # fmt: skip
    o, positions = randn(TOKENS, heads, 512, seed=40).bfloat16(), torch.arange(TOKENS)
    plain = Attention._o_proj.__wrapped__
    ours, names = launched(lambda: Attention._o_proj(layer, o, positions))
    theirs = plain(layer, o, positions)
    os.environ["DSV4_KERNELS"] = "auto"
    by_default, none = launched(lambda: amd_rocm._in_fp8(plain)(layer, o, positions))
    return {
        "error": apart(ours, theirs),
        "launches": names,
        "by default": [apart(by_default, theirs), none],
    }


@case
def prologue() -> dict[str, Any]:
    """`_fused_qnorm_rope_kv_insert` with DSV4_KERNELS=all; vLLM's is compiled, so against the reference."""
    import torch
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention

    from rocm_patches import fp8
    from rocm_patches.reference import kv_cache
    from rocm_patches.reference import prologue as reference
    from tests.rocm_patches.independent import randn, rope_table

    table, positions = rope_table(TOKENS), torch.arange(TOKENS)
    slots = torch.tensor([3, -1, 0, 64, 5])
    cache = torch.zeros(2, 64, 584, dtype=torch.uint8)
    layer = types.SimpleNamespace(
        padded_heads=8, n_local_heads=8, eps=1e-6, rotary_emb=types.SimpleNamespace(cos_sin_cache=table),
        swa_cache_layer=types.SimpleNamespace(kv_cache=cache, prefix="swa"),
    )  # fmt: skip
    q, kv = randn(TOKENS, 8, 512, seed=50).bfloat16(), randn(TOKENS, 512, seed=51).bfloat16()
    steps = {"swa": types.SimpleNamespace(slot_mapping=slots, block_size=64)}
    ours, names = launched(
        lambda: DeepseekV4Attention._fused_qnorm_rope_kv_insert(layer, q, kv, positions, steps)
    )
    expected = torch.zeros_like(cache)
    rows = kv_cache.AttentionRows(fp8.FNUZ)
    reference.insert_key(kv, positions, table, expected.view(2, -1), slots, 64, rows)
    return {
        "error": apart(ours, reference.query(q, positions, table, 8, 1e-6)),
        "same bytes": float((cache == expected).float().mean()),
        "written": int((expected != 0).sum()),
        "launches": names,
    }


@case
def router() -> dict[str, Any]:
    """`fused_topk_bias` where the model calls it with DSV4_KERNELS=all; vLLM's is compiled: against the reference."""
    import torch
    from vllm.models.deepseek_v4.amd import model

    from rocm_patches.reference import router as reference
    from tests.rocm_patches.independent import randn

    gate, bias, x = randn(TOKENS, 256, seed=60), randn(256, seed=61), torch.zeros(TOKENS, 64)
    table = torch.randint(0, 256, (40, 6), generator=torch.Generator().manual_seed(2)).int()
    tokens = torch.tensor([0, 39, 7, 7, 12])
    results = {}
    for name, hashed in (("biased", {}), ("hashed", {"input_tokens": tokens, "hash_indices_table": table})):
        (ours, ids), names = launched(
            lambda h=hashed: model.fused_topk_bias(
                x, gate, "sqrtsoftplus", None if h else bias, 6, True, routed_scaling_factor=1.5, **h
            )
        )
        if hashed:
            truth, chosen = reference.hash_route(gate, table[tokens], 1.5)
        else:
            truth, chosen = reference.biased_topk(gate, bias, 6, True, 1.5)
        results[name] = {
            "error": apart(ours, truth),
            "experts": torch.equal(ids, chosen),
            "launches": names,
        }
    return results


def main() -> None:
    gfx942.simulate(release=sys.argv[1])
    import importlib

    import torch

    importlib.import_module("vllm.models.deepseek_v4.amd.model")
    with torch.inference_mode():  # as vLLM runs a step
        gfx942.answer_cases(CASES, sys.argv[2:])


if __name__ == "__main__":
    main()
