"""What vLLM's own AMD code does on a simulated gfx942: `RELEASE stock|patched [CASE...]`. Run in a process of
its own by tests.rocm_patches.gfx942.run, which see. Every case calls vLLM where vLLM calls it, and says what came out;
the judgement is test_on_gfx942.py's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from tests.rocm_patches import gfx942

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


# --- helpers ----------------------------------------------------------------------------------------

ENTRIES, HEADS, KEEP = 96, 64, 8


def keys() -> Any:
    """fp32 [96, 128]: large first dimensions, the others so small that some round to -0."""
    import torch

    from tests.rocm_patches.independent import randn

    k = randn(ENTRIES, 128, seed=1)
    k[:, :4] *= 40
    k[:, 100:] *= 1e-4
    return torch.where(k == 0, 1.0, k)


def write_keys(launch: Callable[..., None]) -> Any:
    """Run vLLM's compressor over 4 x 96 tokens whose gates choose `keys()`; the page [2, 64, 132] it fills."""
    import torch

    from tests.rocm_patches.independent import rope_table

    tokens = 4 * ENTRIES
    # A state row is [values | gates], for two overlapping windows of 128. The last token's gate wins.
    state = torch.zeros(tokens // 64, 64, 4 * 128)
    rows = state.view(tokens, 512)
    rows[:, 256:] = -1e4
    rows[3::4, 128:256] = keys()
    rows[3::4, 384:512] = 0
    positions = torch.arange(tokens)
    page = torch.zeros(2, 64, 132, dtype=torch.uint8)
    launch(
        state_cache=state,
        num_actual=tokens,
        token_to_req_indices=torch.zeros(tokens).int(),
        positions=positions,
        slot_mapping=positions,
        block_table=torch.arange(tokens // 64).int().view(1, -1),
        block_size=64,
        state_width=256,
        cos_sin_cache=rope_table(tokens),
        kv_cache=page,
        k_cache_metadata=types.SimpleNamespace(
            slot_mapping=torch.where(positions % 4 == 3, positions // 4, -1)
        ),
        pdl_kwargs={},
        head_dim=128,
        rope_head_dim=64,
        compress_ratio=4,
        overlap=True,
        use_fp4_cache=False,
        rms_norm_weight=torch.ones(128),
        rms_norm_eps=1e-6,
        quant_block=128,
        token_stride=128,
        scale_dim=4,
    )
    return page


def true_keys() -> Any:
    """float64 [96, 128]: norm, rotation at the window's first position, one rounding to OCP e4m3."""
    import torch

    from tests.rocm_patches import independent

    table, values = independent.rope_table(4 * ENTRIES), independent.e4m3_values("ocp")
    out = []
    for entry, key in enumerate(keys()):
        turned = independent.rotate(independent.rms_norm(key, 1e-6), table[4 * entry])
        rounded = independent.bf16_values(independent.bf16_bytes(turned.float()))
        codes, (n,) = independent.quantise(rounded, 128, "ocp")
        out.append(values[codes.long()] * 2.0**n)
    return torch.stack(out)


def queries(rows: int) -> tuple[Any, Any]:
    """(codes e4m3fnuz [rows, 64, 128], weights fp32 [rows, 64])."""
    import torch

    from tests.rocm_patches.independent import randn

    q = (randn(rows, HEADS, 128, seed=2) * 30).clamp(-224, 224).to(torch.float8_e4m3fnuz)
    return q, randn(rows, HEADS, seed=3).abs()


def true_logits(q: Any, weights: Any) -> Any:
    """float64 [rows, 96]."""
    import torch

    dots = torch.einsum("mhd,nd->mhn", q.double(), true_keys()).relu()
    return torch.einsum("mh,mhn->mn", weights.double(), dots)


@contextlib.contextmanager
def indexer_context(metadata: Any) -> Iterator[None]:
    """What the indexer's operator finds around it in a step: the layer's metadata and the workspace."""
    import torch
    from vllm.v1.attention.ops import rocm_aiter_mla_sparse
    from vllm.v1.worker import workspace

    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("cpu"))
    context = types.SimpleNamespace(attn_metadata={"k_cache": metadata}, cudagraph_runtime_mode=None)
    stock = rocm_aiter_mla_sparse.get_forward_context
    rocm_aiter_mla_sparse.get_forward_context = lambda: context
    rocm_aiter_mla_sparse._decode_cu_count = lambda: 4
    try:
        yield
    finally:
        rocm_aiter_mla_sparse.get_forward_context = stock


def step(rows: int, **kind: Any) -> Any:
    """The indexer's metadata of a step over one request of 96 entries."""
    import torch
    from vllm.v1.attention.backends.mla import indexer

    return indexer.DeepseekV32IndexerMetadata(
        seq_lens=None, max_seq_len=4 * ENTRIES, slot_mapping=torch.zeros(rows).long(), **kind
    )


def decode_step(rows: int) -> Any:
    import torch
    from vllm.v1.attention.backends.mla import indexer

    decode = indexer.DeepSeekV32IndexerDecodeMetadata(
        block_table=torch.arange(2).int().repeat(rows, 1),
        seq_lens=torch.full((rows,), ENTRIES).int(),
        decode_lens=torch.ones(rows).int(),
        requires_padding=False,
        schedule_metadata=None,
    )
    return step(
        rows, num_decodes=rows, num_decode_tokens=rows, num_prefills=0, num_prefill_tokens=0, decode=decode
    )


def prefill_step(rows: int) -> Any:
    import torch
    from vllm.v1.attention.backends.mla import indexer

    fields = {field.name for field in dataclasses.fields(indexer.DeepseekV32IndexerPrefillChunkMetadata)}
    new = {"max_seqlen_k": ENTRIES} if "max_seqlen_k" in fields else {}  # 0.33.0
    chunk = indexer.DeepseekV32IndexerPrefillChunkMetadata(
        block_table=torch.arange(2).int().view(1, 2),
        cu_seqlen_ks=torch.zeros(rows).int(),
        cu_seqlen_ke=torch.full((rows,), ENTRIES).int(),
        cu_seq_lens=torch.tensor([0, ENTRIES]).int(),
        token_to_seq=torch.zeros(ENTRIES).int(),
        total_seq_lens=ENTRIES,
        token_start=0,
        token_end=rows,
        num_reqs=1,
        **new,
    )
    prefill = indexer.DeepseekV32IndexerPrefillMetadata(chunks=[chunk])
    return step(
        rows, num_decodes=0, num_decode_tokens=0, num_prefills=1, num_prefill_tokens=rows, prefill=prefill
    )


def compiled_top_k() -> list[Any]:
    """Stand in for the HIP top-k operators; returns the list in which they leave the logits they got."""
    import torch

    if hasattr(torch.ops._C, "top_k_per_row_decode"):
        return compiled_top_k.seen  # type: ignore[attr-defined]
    seen: list[Any] = []
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(
        "top_k_per_row_prefill(Tensor logits, Tensor starts, Tensor ends, Tensor(a!) out, int rows, "
        "int stride0, int stride1, int k) -> ()"
    )
    library.define(
        "top_k_per_row_decode(Tensor logits, int next_n, Tensor lens, Tensor(a!) out, int rows, "
        "int stride0, int stride1, int k) -> ()"
    )

    def prefill(logits: Any, starts: Any, ends: Any, out: Any, rows: int, s0: int, s1: int, k: int) -> None:
        for row in range(rows):
            live = logits[row, int(starts[row]) : int(ends[row])]
            best = live.topk(min(k, len(live))).indices
            out[row, : len(best)] = best.int()
        seen.append(logits.clone())

    def decode(logits: Any, next_n: int, lens: Any, out: Any, rows: int, s0: int, s1: int, k: int) -> None:
        prefill(logits, torch.zeros(rows).int(), lens.reshape(-1), out, rows, s0, s1, k)

    library.impl("top_k_per_row_prefill", prefill, "CPU")
    library.impl("top_k_per_row_decode", decode, "CPU")
    compiled_top_k.seen, compiled_top_k.library = seen, library  # type: ignore[attr-defined]
    return seen


def compare(logits: Any, chosen: Any, q: Any, weights: Any) -> dict[str, Any]:
    """Against float64: the largest error over the largest score, NaN counted, and the wrongly chosen."""
    import torch

    truth = true_logits(q, weights)
    got = logits[: truth.shape[0], :ENTRIES].double()
    error = (torch.nan_to_num(got, nan=0.0) - truth).abs().max() / truth.max()
    best = truth.topk(KEEP).indices
    wrong = sum(
        len(set(map(int, a)) - set(map(int, b))) for a, b in zip(chosen[: truth.shape[0]], best, strict=True)
    )
    return {"error": float(error), "nan": int(got.isnan().sum()), "wrong": wrong, "rows": len(truth)}


def attention_pages(rows: Any, dialect: str, page_rows: int) -> Any:
    """uint8 [pages, page_rows, 584] with these fp32 rows [n, 512] in vLLM's fp8_ds_mla layout."""
    from tests.rocm_patches import independent

    pages = [bytearray(page_rows * 584) for _ in range(-(-len(rows) // page_rows))]
    for n, row in enumerate(rows):
        independent.write_attention_row(pages[n // page_rows], n % page_rows, page_rows, row, dialect)
    return independent.as_tensor(pages).view(len(pages), page_rows, 584)


def attention_rows(pages: Any, count: int, dialect: str) -> Any:
    """float64 [count, 512]: the inverse of `attention_pages`."""
    import torch

    from tests.rocm_patches import independent

    size = pages.shape[1]
    data = [independent.as_bytes(page.reshape(-1)) for page in pages]
    return torch.stack(
        [independent.read_attention_row(data[n // size], n % size, size, dialect) for n in range(count)]
    )


def gpu(x: Any) -> Any:
    """A CPU tensor that says that it is not one: the launcher of the sparse decode kernels asks."""
    import torch

    return x.as_subclass(type("OnGpu", (torch.Tensor,), {"is_cpu": False}))


def decode_from(cache: Any, page: int) -> Any:
    """Sparse decode of two entries of one page, which is both the window's and the compressed cache."""
    import torch
    from vllm.models.deepseek_v4.amd import rocm
    from vllm.v1.attention.ops import rocm_aiter_mla_sparse as ops

    from tests.rocm_patches.independent import randn

    ops._decode_num_splits = lambda *_: 1
    out = torch.zeros(1, 16, 512, dtype=torch.bfloat16)
    slots = gpu(torch.tensor([page * 64, page * 64 + 1]).int())
    ends = gpu(torch.tensor([0, 2]).int())
    rocm.rocm_sparse_attn_decode(
        q=gpu(randn(1, 16, 512, seed=9).bfloat16()), kv_cache=gpu(cache), swa_k_cache=gpu(cache), swa_only=False,
        topk_indices=None, topk_lens=None, swa_indices=torch.zeros(1, 1).int(), swa_lens=torch.tensor([2]).int(),
        swa_ragged_indices=slots, swa_ragged_indptr=ends, topk_ragged_indices=slots, topk_ragged_indptr=ends,
        attn_sink=None, scale=0.04, head_dim=512, nope_head_dim=448, rope_head_dim=64, output=out,
    )  # fmt: skip
    return out


def compress_attention(nan_at: int | None = None) -> tuple[Any, Any, Any]:
    """Run vLLM's compressor of ratio 4 over 64 tokens: (page [1, 64, 584], values chosen [16, 512], table)."""
    import torch
    from vllm.models.deepseek_v4 import compressor

    from tests.rocm_patches.independent import randn, rope_table

    tokens, table = 64, rope_table(64)
    values = randn(16, 512, seed=5)
    if nan_at is not None:
        values[nan_at] = float("nan")
    state = torch.zeros(1, 64, 4 * 512)
    rows = state.view(tokens, 2048)
    rows[:, 1024:] = -1e4
    rows[3::4, 512:1024] = values
    rows[3::4, 1536:] = 0
    positions = torch.arange(tokens)
    page = torch.zeros(1, 64, 584, dtype=torch.uint8)
    compressor.compress_norm_rope_store_triton(
        state_cache=state,
        num_actual=tokens,
        token_to_req_indices=torch.zeros(tokens).int(),
        positions=positions,
        slot_mapping=positions,
        block_table=torch.zeros(1, 1).int(),
        block_size=64,
        state_width=1024,
        cos_sin_cache=table,
        kv_cache=page,
        k_cache_metadata=types.SimpleNamespace(
            slot_mapping=torch.where(positions % 4 == 3, positions // 4, -1)
        ),
        pdl_kwargs={},
        head_dim=512,
        rope_head_dim=64,
        compress_ratio=4,
        overlap=True,
        use_fp4_cache=False,
        rms_norm_weight=torch.ones(512),
        rms_norm_eps=1e-6,
        quant_block=64,
        token_stride=576,
        scale_dim=8,
    )
    return page, values, table


# --- cases ------------------------------------------------------------------------------------------


@case
def indexer_decode_and_prefill() -> dict[str, Any]:
    """One decode and one prefill request through the layer's operator, on keys that vLLM's writer wrote."""
    import torch
    from vllm.models.deepseek_v4 import compressor
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import rocm_aiter_sparse_attn_indexer

    page = write_keys(compressor.compress_norm_rope_store_triton)
    codes = page.view(2, -1)[:, : 64 * 128]
    seen = compiled_top_k()
    rows = 4
    q, weights = queries(rows)
    results: dict[str, Any] = {"codes 0x80": int((codes == 0x80).sum())}
    for name, metadata in {"decode": decode_step(rows), "prefill": prefill_step(rows)}.items():
        chosen = torch.full((rows, KEEP), -1).int()
        with indexer_context(metadata):
            rocm_aiter_sparse_attn_indexer(
                torch.zeros(rows, 1), "k_cache", page, q, None, weights, 128, "ue8m0", KEEP, 128, 128, 128,
                chosen, skip_k_cache_insert=True, compress_ratio=4,
            )  # fmt: skip
        results[name] = compare(seen.pop(), chosen, q, weights)
    return results


@case
def call_sites() -> dict[str, Any]:
    """Every loaded module of vLLM that holds a patched function by its name: does it hold the patched one?"""
    import importlib

    from rocm_patches import plugin
    from rocm_patches.patches import PATCHES
    from rocm_patches.registry import patches_of

    for name in ("amd.model", "amd.mtp", "amd.dspark", "amd.rocm"):
        importlib.import_module(f"vllm.models.deepseek_v4.{name}")
    mine = [patch for patch in PATCHES if "gfx942" in patch.platforms and sys.argv[1] in patch.releases]
    for patch in mine:
        for target in patch.targets:
            importlib.import_module(target.module)
    holders: dict[str, list[str]] = {}
    unpatched = []
    for patch in mine:
        for target in patch.targets:
            thing: Any = sys.modules[target.module]
            for part in target.symbol.split("."):
                thing = getattr(thing, part)
            if target.replace is None or not callable(thing):
                continue
            places = [(target.key, thing)]
            if "." not in target.symbol:
                places += [
                    (f"{name}:{target.symbol}", vars(module)[target.symbol])
                    for name, module in list(sys.modules.items())
                    if name.startswith("vllm.") and target.symbol in getattr(module, "__dict__", {})
                ]
            holders[target.key] = sorted({place for place, _ in places})
            unpatched += [place for place, held in places if patch.id not in patches_of(held)]
    applier = plugin.applier()
    states = applier.state if applier else {}
    return {
        "holders": holders,
        "unpatched": unpatched,
        "states": {patch.id: states.get(patch.id) for patch in mine},
    }


@case
def compressed_cache_nan() -> dict[str, int]:
    """NaN in one request's state: how many NaN the written RoPE halves hold (of 64)."""
    import torch

    page, _, _ = compress_attention(nan_at=7)
    rope = page.view(-1)[: 64 * 576].view(64, 576)[:, 448:].view(torch.bfloat16)
    scales = page.view(-1)[64 * 576 :].view(64, 8)
    return {"nan": int(rope.isnan().sum()), "nan_scales": int((scales == 255).sum())}


@case
def dialects_of_caches() -> dict[str, float]:
    """Not patched: the compressed cache is OCP and the sliding-window cache FNUZ for writers and readers alike."""
    import torch
    from vllm.models.deepseek_v4.amd import rocm

    from tests.rocm_patches import independent
    from tests.rocm_patches.independent import randn

    page, values, table = compress_attention()
    written = attention_rows(page, 16, "ocp")
    truth = torch.stack(
        [
            independent.rotate(independent.rms_norm(value, 1e-6), table[4 * n])
            for n, value in enumerate(values)
        ]
    )
    results = {"compressed writer": float(((written - truth).abs() / truth.abs().amax()).max())}

    def gather(pages: Any, count: int, fnuz: bool) -> Any:
        out = torch.zeros(1, count, 512, dtype=torch.bfloat16)
        rocm.dequantize_and_gather_k_cache(
            out, pages, torch.tensor([count]).int(), None, torch.arange(len(pages)).int().view(1, -1),
            pages.shape[1], 0, use_fnuz=fnuz,
        )  # fmt: skip
        return out[0].double()

    results["compressed gather"] = float(
        (gather(page, 16, False) - written).abs().max() / written.abs().max()
    )
    window = randn(40, 512, seed=6).bfloat16().float()
    pages = attention_pages(window, "fnuz", 16)
    truth = attention_rows(pages, 40, "fnuz")
    results["window gather"] = float((gather(pages, 40, True) - truth).abs().max() / truth.abs().max())
    return results


@case
def decode() -> dict[str, Any]:
    """Sparse decode as the model calls it: FNUZ window, OCP compressed entries; its error, and where it wrote."""
    import torch
    from vllm.models.deepseek_v4.amd import rocm
    from vllm.v1.attention.ops import rocm_aiter_mla_sparse as ops

    from tests.rocm_patches.independent import randn

    queries, heads, window, extra = 2, 16, 40, 24
    main = attention_pages(randn(window, 512, seed=7).bfloat16().float(), "fnuz", 16)
    compressed = attention_pages(randn(extra, 512, seed=8).bfloat16().float(), "ocp", 64)
    q = randn(queries, heads, 512, seed=9).bfloat16()
    sink = randn(heads, seed=10)
    ops._decode_num_splits = lambda *_: 2
    allocated: list[Any] = []
    stock = ops._rocm_sparse_attn_decode_triton

    def watch(*args: Any, **kwargs: Any) -> Any:
        allocated.append(kwargs.get("out"))
        return stock(*args, **kwargs)

    ops._rocm_sparse_attn_decode_triton = watch
    indptr = lambda n: torch.arange(queries + 1).int() * n  # noqa: E731
    results: dict[str, Any] = {}
    scale = 512**-0.5
    keys = torch.cat((attention_rows(main, window, "fnuz"), attention_rows(compressed, extra, "ocp")))
    scores = torch.einsum("bhd,kd->bhk", q.double(), keys) * scale
    with_sink = torch.cat((scores, sink.double().view(1, -1, 1).expand(queries, -1, 1)), -1).softmax(-1)
    truth = with_sink[..., :-1] @ keys
    # As the model has it; into a slice of a wider buffer; and into a type that the kernel cannot write.
    outputs = {
        "plain": torch.zeros(queries, heads, 512, dtype=torch.bfloat16),
        "slice": torch.zeros(queries, heads + 8, 512, dtype=torch.bfloat16)[:, :heads],
        "fp32": torch.zeros(queries, heads, 512),
    }
    for name, output in outputs.items():
        rocm.rocm_sparse_attn_decode(
            q=gpu(q), kv_cache=gpu(compressed), swa_k_cache=gpu(main), swa_only=False, topk_indices=None,
            topk_lens=None, swa_indices=torch.zeros(queries, 1).int(), swa_lens=torch.full((queries,), window).int(),
            swa_ragged_indices=gpu(torch.arange(window).int().repeat(queries)),
            swa_ragged_indptr=gpu(indptr(window)),
            topk_ragged_indices=gpu(torch.arange(extra).int().repeat(queries)),
            topk_ragged_indptr=gpu(indptr(extra)),
            attn_sink=sink, scale=scale, head_dim=512, nope_head_dim=448, rope_head_dim=64, output=output,
        )  # fmt: skip
        results[name] = {
            "in place": allocated.pop() is output,
            "error": float((output.double() - truth).abs().max() / truth.abs().max()),
        }
    ops._rocm_sparse_attn_decode_triton = stock
    return results


@case
def without_aiter() -> dict[str, Any]:
    """The indexer's layer, switched to no AITER, in a decode step."""
    import torch
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
    from vllm.models.deepseek_v4 import compressor

    page = write_keys(compressor.compress_norm_rope_store_triton)
    rows = 2
    q, weights = queries(rows)
    chosen = torch.full((rows, KEEP), -1).int()
    layer = types.SimpleNamespace(
        use_fp4_cache=False,
        k_cache=types.SimpleNamespace(prefix="k_cache", kv_cache=page),
        quant_block_size=128,
        scale_fmt="ue8m0",
        topk_tokens=KEEP,
        head_dim=128,
        max_model_len=128,
        max_total_seq_len=128,
        topk_indices_buffer=chosen,
        skip_k_cache_insert=True,
        compress_ratio=4,
        candidate_blocks=None,
        candidate_block_size=0,
        candidate_write=False,
    )
    seen = compiled_top_k()
    with indexer_context(decode_step(rows)):
        SparseAttnIndexer.forward_hip(layer, torch.zeros(rows, 1), q, None, weights)
    return compare(seen.pop(), chosen, q, weights)


@case
def damaged_checkpoint() -> dict[str, Any]:
    """FP8 weights with NaN codes, or with a scale that is NaN, through the linear layer's loader."""
    import torch
    from vllm.model_executor.kernels.linear.scaled_mm import BlockScaledMMLinearKernel
    from vllm.model_executor.layers.quantization import fp8

    from tests.rocm_patches import independent

    def load(code: int, scale: int, function: Callable[..., Any], kind: str) -> Any:
        weight = torch.full((128, 128), 0x38, dtype=torch.uint8)  # 1.0
        weight[0, 0] = code
        scales = torch.tensor([[scale]], dtype=torch.uint8)
        typed = scales.view(torch.float8_e8m0fnu) if kind == "e8m0" else torch.exp2(scales.float() - 127)
        try:
            got, got_scale = function(weight.view(torch.float8_e4m3fn), typed)[:2]
        except ValueError as error:
            return f"refused: {error}"
        value = independent.e4m3_value(int(got.view(torch.uint8)[0, 0]), "fnuz")
        return value * float(got_scale.float()[0, 0])

    block, tensor = (
        BlockScaledMMLinearKernel.process_fp8_weight_block_strategy,
        fp8.normalize_e4m3fn_to_e4m3fnuz,
    )
    return {
        "whole": load(0x38, 127, block, "e8m0"),
        "minus zero": load(0x80, 127, block, "e8m0"),
        "NaN code": load(0x7F, 127, block, "e8m0"),
        "NaN scale": load(0x38, 255, block, "e8m0"),
        "scale too large": load(0x38, 254, block, "e8m0"),
        "NaN code, fp32 scale": load(0xFF, 127, block, "fp32"),
        "NaN code, experts": load(0xFF, 127, tensor, "fp32"),
        "whole, experts": load(0x38, 127, tensor, "fp32"),
    }


@case
def prefill_logits() -> dict[str, Any]:
    """rocm_fp8_mqa_logits with AITER switched on and its kernels there or not; error against float64."""
    import torch
    from vllm._aiter_ops import rocm_aiter_ops
    from vllm.v1.attention.ops import rocm_aiter_mla_sparse as ops

    from rocm_patches.patches import rocm_aiter_mla_sparse as patch
    from rocm_patches.registry import patches_of
    from tests.rocm_patches.independent import randn

    q, weights = queries(5)
    k = (randn(ENTRIES, 128, seed=11) * 16).to(torch.float8_e4m3fnuz)
    scale = torch.exp2(torch.arange(ENTRIES).float() % 5).view(-1, 1)
    starts, ends = torch.tensor([0, 0, 3, 95, 20]).int(), torch.tensor([96, 1, 50, 96, 20]).int()
    dots = torch.einsum("mhd,nd->mhn", q.double(), k.double()).relu()
    truth = torch.einsum("mh,mhn->mn", weights.double(), dots) * scale.double().T
    column = torch.arange(ENTRIES)
    live = (column >= starts.unsqueeze(1)) & (column < ends.unsqueeze(1))
    calls: list[str] = []

    def kernel(name: str) -> Callable[..., Any]:
        def answer(q: Any, k: Any, scale: Any, weights: Any, starts: Any, ends: Any, **_: Any) -> Any:
            calls.append(name)
            return torch.where(live, truth, float("-inf")).float()

        return answer

    rocm_aiter_ops.is_enabled = classmethod(lambda cls: True)
    original = ops.rocm_fp8_mqa_logits

    def fresh() -> Callable[..., Any]:
        """The patched function chooses once per process: make it anew, as in a new process."""
        if not patches_of(original):
            return original
        return patch._prefill_logits_with_fallback(original.__wrapped__)

    results: dict[str, Any] = {}
    for name, modules in {
        "nothing": {},
        "triton": {"aiter.ops.triton.attention.fp8_mqa_logits": {"fp8_mqa_logits": kernel("triton")}},
        "flydsl": {
            "aiter.ops.flydsl": {"flydsl_fp8_mqa_logits": kernel("flydsl")},
            "aiter.ops.triton.attention.fp8_mqa_logits": {"fp8_mqa_logits": kernel("triton")},
        },
        "flydsl broken": {"aiter.ops.flydsl": {}},
    }.items():
        for loaded in [module for module in sys.modules if module.split(".")[0] == "aiter"]:
            del sys.modules[loaded]
        for module, contents in modules.items():
            gfx942.package(module, **contents)
        ops.mqa_logits_module.cache_clear()
        ops.rocm_fp8_mqa_logits = fresh()
        calls.clear()
        try:
            got = ops.rocm_fp8_mqa_logits(q, (k, scale), weights, starts, ends)
        except ImportError as error:
            results[name] = {"raised": f"{type(error).__name__}: {error}"}
            continue
        outside = bool((got[~live] == float("-inf")).all())
        error = float(((got.double() - truth)[live] / truth.max()).abs().max())
        results[name] = {"kernel": calls[:], "error": error, "outside": outside}
    rocm_aiter_ops.is_enabled = classmethod(lambda cls: False)
    ops.rocm_fp8_mqa_logits = fresh()
    got = ops.rocm_fp8_mqa_logits(q, (k, scale), weights, starts, ends)
    results["switched off"] = {"error": float(((got.double() - truth)[live] / truth.max()).abs().max())}
    return results


@case
def far_pages() -> dict[str, Any]:
    """Not patched: every paged kernel of the path, on a page beyond 2^31 bytes and on a near one: same result?

    The cache begins in the middle of its memory, so that an offset that has wrapped to a negative number reads
    and writes something else instead of crashing; the last entry shows that this is noticed.
    """
    import torch
    from vllm.models.deepseek_v4.amd import rocm
    from vllm.models.deepseek_v4.common.ops import cache_utils
    from vllm.models.deepseek_v4.common.ops import fused_compress_quant_cache as writers
    from vllm.v1.attention.ops import rocm_aiter_mla_sparse as ops

    from rocm_patches.rewrite import rewrite
    from tests.rocm_patches.independent import randn, rope_table

    # Virtual memory: only the pages that are touched become real.
    storage = torch.zeros(1, dtype=torch.uint8).new_empty((1 << 32) + (1 << 20))

    def pages(width: int) -> tuple[Any, int]:
        """(cache [n, 64, width], n - 1): the last page is the first that lies wholly beyond 2^31 bytes."""
        size = 64 * width
        count = (1 << 31) // size + 2
        return storage[1 << 31 :][: count * size].view(count, 64, width), count - 1

    def write(
        cache: Any, page: int, width: int, launch: Callable[..., None], ratio: int, **more: Any
    ) -> None:
        tokens, overlap = 2 * ratio, ratio == 4
        columns = width * (2 if overlap else 1)
        positions = torch.arange(tokens)
        launch(
            state_cache=randn(1, tokens, 2 * columns, seed=12), num_actual=tokens,
            token_to_req_indices=torch.zeros(tokens).int(), positions=positions, slot_mapping=positions,
            block_table=torch.zeros(1, 1).int(), block_size=tokens, state_width=columns,
            cos_sin_cache=rope_table(tokens), kv_cache=cache,
            k_cache_metadata=types.SimpleNamespace(
                slot_mapping=torch.where((positions + 1) % ratio == 0, page * 64 + positions // ratio, -1)
            ),
            pdl_kwargs={}, head_dim=width, rope_head_dim=64, compress_ratio=ratio, overlap=overlap,
            use_fp4_cache=False, rms_norm_weight=torch.ones(width), rms_norm_eps=1e-6,
            quant_block=128 if width == 128 else 64, token_stride=128 if width == 128 else 576,
            scale_dim=4 if width == 128 else 8, **more,
        )  # fmt: skip

    results: dict[str, Any] = {}
    index, index_page = pages(132)
    attention, attention_page = pages(584)
    near = {132: torch.zeros(2, 64, 132, dtype=torch.uint8), 584: torch.zeros(2, 64, 584, dtype=torch.uint8)}
    far = {132: (index, index_page), 584: (attention, attention_page)}
    single, two_stage = (
        writers.compress_norm_rope_store_triton,
        writers.compress_norm_rope_store_two_stage_triton,
    )
    writers._n_cu = lambda: 4
    split = {"num_decode_tokens": 0, "compress_scratch": torch.zeros(256, 512)}
    for name, row, width, launch, ratio, more in (
        ("compressed writer, ratio 128", 584, 512, two_stage, 128, split),
        ("compressed writer, ratio 4", 584, 512, single, 4, {}),
        ("indexer writer", 132, 128, single, 4, {}),
    ):
        cache, page = far[row]
        cache[page].fill_(0)
        near[row].fill_(0)
        write(cache, page, width, launch, ratio, **more)
        write(near[row], 1, width, launch, ratio, **more)
        results[name] = torch.equal(cache[page], near[row][1]) and bool(near[row].any())

    def both(function: Callable[[Any, int], Any], row: int) -> bool:
        """Whether it gives the same, and something, for the far page and the near one."""
        a, b = function(*far[row]), function(near[row], 1)
        return torch.equal(a, b) and bool(b.any())

    def gather(cache: Any, page: int) -> Any:
        out = torch.zeros(1, 2, 512, dtype=torch.bfloat16)
        table = torch.tensor([[page]]).int()
        rocm.dequantize_and_gather_k_cache(out, cache, torch.tensor([2]).int(), None, table, 64, 0)
        return out

    def gather_keys(cache: Any, page: int) -> Any:
        k, scale = torch.zeros(2, 128, dtype=torch.float8_e4m3fnuz), torch.zeros(2, 4, dtype=torch.uint8)
        ops.cp_gather_indexer_k_quant_cache_triton(
            cache, k, scale, torch.tensor([[page]]).int(), torch.tensor([0, 2]).int(),
            token_to_seq=torch.zeros(2).int(), cache_layout="NORMAL",
        )  # fmt: skip
        return torch.cat((k.view(torch.uint8), scale), 1)

    def logits(cache: Any, page: int) -> Any:
        q, weights = queries(1)
        with indexer_context(None):
            out = ops.rocm_fp8_paged_mqa_logits_triton(
                q.unsqueeze(1), cache.unsqueeze(2), weights, torch.tensor([2]).int(),
                torch.tensor([[page]]).int(), 64,
            )  # fmt: skip
        return out[:, :2].clone()

    results["gather"] = both(gather, 584)
    results["indexer gather"] = both(gather_keys, 132)
    results["paged logits"] = both(logits, 132)
    results["sparse decode"] = both(decode_from, 584)
    holder = type(cache_utils._DEQUANTIZE_AND_GATHER_K_CACHE_KERNEL)
    name = next(name for name in vars(holder) if hasattr(getattr(holder, name), "fn"))
    narrow = rewrite(("physical_block_idx.to(tl.int64) * block_stride", "physical_block_idx * block_stride"))
    setattr(holder, name, staticmethod(narrow(getattr(holder, name))))
    results["gather with 32 bits"] = both(gather, 584)
    return results


@case
def prefill_budget() -> dict[str, int]:
    """Not patched: the indexer's workspace and its chunks count compressed rows, not tokens."""
    import torch
    from vllm.v1.attention.backends.mla import indexer

    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(max_model_len=131072),
        attention_config=types.SimpleNamespace(sparse_mla_prefill_workspace_factor=5),
    )
    workspace = indexer.get_max_prefill_buffer_size(config) // 4
    # Ten requests of the greatest length. Counted in tokens they would need ten chunks of one each.
    lengths = torch.full((10,), 131072)
    split = indexer.DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks
    chunks = split(lengths // 4, torch.full((10,), 16), workspace, 1 << 40)
    return {"workspace rows": workspace, "chunks": len(chunks)}


@case
def rope_results() -> dict[str, Any]:
    """DeepseekV2MLAAttention of the V3.2 kind, built by vLLM; how far its indexer's queries and keys are off."""
    import torch
    from torch import nn
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.model_executor.models import deepseek_v2

    from tests.rocm_patches.independent import randn

    results: dict[str, Any] = {}
    for name, rope in {
        "yarn": {
            "rope_type": "deepseek_yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096,
        },
        "plain": {"rope_type": "default", "rope_theta": 10000.0},
    }.items():  # fmt: skip
        config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))
        with set_current_vllm_config(config):
            embedding = get_rope(64, max_position=256, rope_parameters=rope, is_neox_style=True)
            layer = build_mla(deepseek_v2, embedding)
        indexer = layer.indexer

        class Fixed(nn.Module):
            """Stands in for a projection: the same result for every input."""

            def __init__(self, result: Any) -> None:
                super().__init__()
                self.result = result

            def forward(self, _: Any) -> Any:
                return self.result.clone(), None

        class Seen(nn.Module):
            def forward(self, hidden: Any, q: Any, k: Any, weights: Any) -> Any:
                self.k = k

        q, k = randn(6, 2 * 128, seed=14).bfloat16(), randn(6, 128, seed=15).bfloat16()
        indexer.wq_b = Fixed(q)
        indexer.wk_weights_proj = Fixed(torch.cat((k, torch.ones(6, 2).bfloat16()), 1))
        indexer.k_norm = nn.Identity()
        indexer.indexer_op = Seen()
        positions = torch.arange(6) * 37 + 1
        indexer(torch.zeros(6, 1), torch.zeros(6, 1), positions, embedding)
        truth = embedding.forward_native(positions, q.view(6, 2, 128)[..., :64], k[:, None, :64])[1][:, 0]
        results[name] = {
            "in place": indexer.is_inplace_rope,
            "key error": float(
                (indexer.indexer_op.k[:, :64].float() - truth.float()).abs().max() / truth.float().abs().max()
            ),
        }
    return results


def build_mla(module: Any, embedding: Any) -> Any:
    """A DeepseekV2MLAAttention whose projections are left out; its constructor and its indexer are vLLM's."""
    from torch import nn

    class Nothing(nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()

    for name in (
        "DeepSeekV2FusedQkvAProjLinear", "ReplicatedLinear", "ColumnParallelLinear", "RowParallelLinear",
        "MergedColumnParallelLinear", "RMSNorm", "LayerNorm", "MultiHeadLatentAttentionWrapper", "SparseAttnIndexer",
        "DeepseekV32IndexerCache", "MLAModules",
    ):  # fmt: skip
        setattr(module, name, Nothing)
    module.get_rope = lambda *args, **kwargs: embedding
    # Compiled operators: quantisation, which is not looked at here, and the rotation in place.
    module.per_token_group_quant_fp8 = lambda q, *args, **kwargs: (q, q.new_ones(q.shape[0], 1))
    from vllm import _custom_ops

    def rotate(positions: Any, query: Any, key: Any, head: int, cache: Any, neox: bool) -> None:
        turned = embedding.forward_static(positions, query, key, head, head, cache, neox)
        query.copy_(turned[0].view_as(query))
        key.copy_(turned[1].view_as(key))

    _custom_ops.rotary_embedding = rotate
    module.get_tensor_model_parallel_world_size = lambda: 1
    from vllm.v1.attention.backends.mla import indexer

    indexer.get_max_prefill_buffer_size = lambda _: 1
    config = types.SimpleNamespace(
        rms_norm_eps=1e-6, rope_parameters={"rope_type": "default"}, index_topk=8, index_n_heads=2,
        index_head_dim=128, qk_rope_head_dim=64, num_hidden_layers=1,
    )  # fmt: skip
    vllm_config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(max_model_len=256),
        parallel_config=types.SimpleNamespace(
            dcp_q_replicate=False, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
    )
    return module.DeepseekV2MLAAttention(
        vllm_config, config, 256, 2, 128, 64, 128, 64, 64, 256, cache_config=types.SimpleNamespace(block_size=64),
        prefix="model.layers.0.self_attn",
    )  # fmt: skip


@case
def mhc() -> dict[str, Any]:
    """mHC's first operator with an AITER whose kernel works for one width and is wrong or cannot run for others."""
    import torch
    from vllm.model_executor.layers import mhc

    from rocm_patches.kernels import launch
    from rocm_patches.patches import mhc as patches
    from tests.rocm_patches.independent import randn

    results: dict[str, Any] = {}
    patches._PROBED_TOKENS = (1, 17)  # the interpreter takes half a minute for a prefill chunk
    mhc.has_tilelang = lambda: True
    results["TileLang"] = mhc._has_tilelang_mhc()
    mhc.HAS_AITER_MHC = True  # as if the package had been there when the module was imported
    gfx942.package("aiter.ops.mhc", mhc_pre=aiter_mhc_pre)
    for name, hidden in (("works", 256), ("wrong", 512), ("cannot run", 768)):
        residual = randn(3, 4, hidden, seed=16).bfloat16()
        fn, base = randn(24, 4 * hidden, seed=17, scale=0.05), randn(24, seed=18)
        calls.clear()
        inputs = (residual, fn, torch.ones(3), base, 1e-6, 1e-6, 1e-6, 2.0, 20)
        try:
            with launch.recording() as made:
                post, comb, layer_input = mhc.MHCPreOp.forward_hip(
                    types.SimpleNamespace(forward_native=native), *inputs
                )
        except RuntimeError as error:
            results[name] = {"raised": str(error)}
            continue
        truth = mhc_in_float64(residual, fn, base)
        pairs = zip((post.squeeze(-1), comb, layer_input), truth, strict=True)
        results[name] = {
            "error": max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs),
            "kernel": "aiter" if calls and calls[-1] == (hidden, 3) else "ours" if made else "torch",
        }
    return results


calls: list[tuple[int, int]] = []


def native(*inputs: Any) -> Any:
    from vllm.model_executor.kernels.mhc import mhc_pre_torch

    return mhc_pre_torch(*inputs[:9])


def mhc_in_float64(residual: Any, fn: Any, base: Any) -> tuple[Any, Any, Any]:
    """(post [T, 4], comb [T, 4, 4], layer input [T, H]) from the formulas, scale 1."""
    import torch

    x = residual.double().flatten(1)
    mixes = (x @ fn.double().T) / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt() + base.double()
    pre = 1 / (1 + (-mixes[:, :4]).exp()) + 1e-6
    comb = mixes[:, 8:].view(-1, 4, 4).softmax(-1) + 1e-6
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    return 2 / (1 + (-mixes[:, 4:8]).exp()), comb, torch.einsum("ti,tih->th", pre, residual.double())


def aiter_mhc_pre(residual: Any, fn: Any, scale: Any, base: Any, *numbers: Any, **_: Any) -> Any:
    """Stands in for AITER's kernel: right at 256, off by a factor at 512, cannot be launched at 768."""
    hidden = residual.shape[-1]
    calls.append((hidden, residual.shape[0]))
    if hidden == 768:
        raise RuntimeError("mhc_pre: CUDA error: invalid configuration argument")
    post, comb, layer_input = native(residual, fn, scale, base, *numbers)
    return post, comb, layer_input * (2 if hidden == 512 else 1)


def main() -> None:
    release, state, names = sys.argv[1], sys.argv[2], sys.argv[3:]
    gfx942.simulate(release=release, patched=state == "patched")
    gfx942.answer_cases(CASES, names)


if __name__ == "__main__":
    main()
