"""The operators as vLLM meets them: through torch's dispatcher, in vLLM's order of arguments.

Each operator is called once with arguments that tell any two of them apart and must give what its reference
gives; the references have tests of their own. Then names and argument counts are held against vLLM's source.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_patches import fp8
from rocm_patches.cpu import operators
from rocm_patches.cpu.exact import ExactRows
from rocm_patches.reference import (
    attention,
    compressor,
    experts,
    indexer,
    linear,
    mhc,
    output,
    prologue,
    router,
)
from rocm_patches.reference.kv_cache import AttentionRows, IndexerKeys
from tests.rocm_patches import independent, vllm_source
from tests.rocm_patches.independent import randn

NAMES = [function.__name__ for function in operators.OPERATORS]
TABLE = independent.rope_table(300)


@dataclass(frozen=True)
class Case:
    """One call: arguments, what it returns, and what each written argument (by index) then holds."""

    arguments: tuple[Any, ...]
    returns: tuple[Tensor, ...] = ()
    writes: dict[int, Tensor] = field(default_factory=dict)


def bf16(*shape: int, seed: int) -> Tensor:
    return randn(*shape, seed=seed, dtype=torch.bfloat16)


def after(write: Callable[[Tensor], None], target: Tensor) -> Tensor:
    """A copy of `target` that `write` has been let at."""
    copy = target.clone()
    write(copy)
    return copy


def convert_weight_packed() -> Case:
    weight = bf16(4, 8, seed=1)
    return Case((weight,), (weight,))


def convert_scale_packed() -> Case:
    scale = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    return Case((scale,), (scale,))


def weight_packed_linear() -> Case:
    out, x, weight, bias = bf16(3, 4, seed=2), bf16(3, 8, seed=3), bf16(4, 8, seed=4), randn(4, seed=5)
    return Case((out, x, weight, bias, True), writes={0: linear.linear(x, weight, bias).bfloat16()})


def fp8_scaled_mm_cpu() -> Case:
    weight, scale = fp8.quantise_block_weight(randn(130, 260, seed=6))
    x, bias = bf16(3, 260, seed=7), randn(130, seed=8)
    scale32 = fp8.decode_e8m0(scale)  # vLLM hands over fp32 scales
    y = linear.block_scaled_linear(x, weight, scale32, (128, 128), bias)
    return Case((x, weight, scale32, [128, 128], bias, torch.bfloat16, True), (y.bfloat16(),))


def bmm_cpu() -> Case:
    out, x, weight = bf16(2, 3, 5, seed=9), bf16(2, 3, 8, seed=10), bf16(2, 5, 8, seed=11)
    return Case((out, x, weight, True, None), writes={0: output.grouped_matmul(x, weight).bfloat16()})


def biased_topk_cpu() -> Case:
    gate, bias = randn(3, 8, seed=12), randn(8, seed=13)
    arguments = (gate, gate, bias, 2, True, "sqrtsoftplus", 0, 2.5, True)
    return Case(arguments, router.biased_topk(gate, bias, 2, True, 2.5))


def hash_topk_cpu() -> Case:
    gate, ids = randn(3, 8, seed=14), torch.tensor([[1, 7], [0, 2], [7, 1]], dtype=torch.int32)
    return Case((gate, ids, 2, "sqrtsoftplus", 0, 8, 1.5), router.hash_route(gate, ids, 1.5))


def fused_experts_cpu() -> Case:
    (w1, s1), (w2, s2) = (
        fp8.quantise_mxfp4(randn(4, 64, 64, seed=15)),
        fp8.quantise_mxfp4(randn(4, 64, 32, seed=16)),
    )
    out, x, weights = bf16(3, 64, seed=17), bf16(3, 64, seed=18), randn(3, 2, seed=19).abs()
    ids = torch.tensor([[0, 3], [2, -1], [3, 1]], dtype=torch.int32)
    expected = experts.routed_experts(
        x, fp8.dequantise_mxfp4(w1, s1), fp8.dequantise_mxfp4(w2, s2), weights, ids, 0.5
    )
    arguments = (out, x, w1, w2, weights, ids, 4, s1, s2, None, None, None, None, None, None, None, 0.5, True)
    return Case(arguments, writes={0: expected.bfloat16()})


def hc_pre_fused_cpu() -> Case:
    x, fn, scale, base = (
        bf16(3, 4, 16, seed=20),
        randn(24, 64, seed=21),
        randn(3, seed=22),
        randn(24, seed=23),
    )
    return Case(
        (x, fn, scale, base, 4, 3, 0.1, 0.01), mhc.pre(x, fn, scale, base, 3, rms_eps=0.1, hc_eps=0.01)
    )


def hc_post_fused_cpu() -> Case:
    x, residual, post, comb = (
        bf16(3, 16, seed=24),
        bf16(3, 4, 16, seed=25),
        randn(3, 4, seed=26),
        randn(3, 4, 4, seed=27),
    )
    return Case((x, residual, post, comb), (mhc.post(x, residual, post, comb),))


def hc_head_fused_cpu() -> Case:
    x, fn, scale, base = bf16(3, 4, 16, seed=28), randn(4, 64, seed=29), randn(1, seed=30), randn(4, seed=31)
    # hc_eps comes first here, unlike in the reference and in vLLM's own wrapper.
    return Case((x, fn, scale, base, 0.01, 0.1), (mhc.head(x, fn, scale, base, norm_eps=0.1, hc_eps=0.01),))


def fused_qnorm_rope_kv_insert_cpu() -> Case:
    q, kv, positions = bf16(3, 2, 512, seed=32), bf16(3, 512, seed=33), torch.tensor([4, 5, 299])
    cache, slots = torch.zeros(2, 64 * 584, dtype=torch.uint8), torch.tensor([5, -1, 64])
    written = after(
        lambda copy: prologue.insert_key(kv, positions, TABLE, copy, slots, 64, AttentionRows()), cache
    )
    returned = prologue.query(q, positions, TABLE, 3, 1e-3)
    return Case((q, kv, positions, cache, slots, TABLE, 3, 1e-3, 64), (returned,), {3: written})


def attention_cache(page_rows: int, seed: int) -> Tensor:
    cache = torch.zeros(2, page_rows * 584, dtype=torch.uint8)
    AttentionRows().write(cache, torch.arange(2 * page_rows), randn(2 * page_rows, 512, seed=seed), page_rows)
    return cache


def flash_mla_with_kvcache_cpu() -> Case:
    out, q, sink = bf16(2, 3, 512, seed=34), bf16(2, 3, 512, seed=35), randn(3, seed=36)
    window = (attention_cache(4, seed=37), torch.tensor([[0, 7, -1], [3, -1, -1]]), 4)
    compressed = (attention_cache(2, seed=38), torch.tensor([[3, 0], [-1, 1]]), 2)
    expected = attention.sparse_attention(q, window, compressed, sink, 0.05, AttentionRows())
    return Case((out, q, *window, *compressed, sink, 0.05), writes={0: expected.bfloat16()})


def inverse_gptj_rope_o_proj_cpu() -> Case:
    o, positions = bf16(3, 2, 512, seed=39), torch.tensor([0, 7, 299])
    return Case((o, positions, TABLE, 64), (output.inverse_rotate(o, positions, TABLE),))


def save_partial_states_cpu() -> Case:
    kv, score, ape = randn(3, 8, seed=40), randn(3, 8, seed=41), randn(4, 8, seed=42)
    positions, state, slots = torch.tensor([2, 3, 4]), torch.zeros(2, 4, 16), torch.tensor([6, -1, 0])
    written = after(lambda copy: compressor.save_state(kv, score, ape, positions, copy, slots), state)
    return Case((kv, score, ape, positions, state, slots), writes={4: written})


def _compress(d: int, row_bytes: int, rows: AttentionRows | IndexerKeys) -> Case:
    state, windows = randn(4, 4, 4 * d, seed=43), torch.arange(16).view(2, 8)
    positions, slots, norm = torch.tensor([8, 11]), torch.tensor([1, 70]), randn(d, seed=44)
    cache = torch.zeros(2, 64 * row_bytes, dtype=torch.uint8)
    before = (state, windows, positions, slots, norm, 1e-3, TABLE)
    written = after(lambda copy: compressor.compress(*before, copy, 64, 4, rows), cache)
    return Case((*before, cache, 64, 4), writes={7: written})


def compress_norm_rope_store_cpu() -> Case:
    return _compress(512, 584, AttentionRows())


def compress_norm_rope_store_indexer_cpu() -> Case:
    return _compress(128, 132, IndexerKeys())


def fused_indexer_q_rope_quant_cpu() -> Case:
    positions, q, weights = torch.tensor([1, 299]), randn(2, 4, 128, seed=45), randn(2, 4, seed=46)
    codes, folded = indexer.quantise_query(q, positions, TABLE, weights, 0.3, 0.7)
    codes_out, folded_out = torch.zeros(2, 4, 128).to(torch.float8_e4m3fn), torch.zeros(2, 4)
    arguments = (positions, q, TABLE, codes_out, weights, 0.3, 0.7, folded_out)
    return Case(arguments, writes={3: codes.view(torch.float8_e4m3fn), 7: folded})


def fp8_paged_mqa_logits_cpu() -> Case:
    cache = torch.zeros(3, 4 * 132, dtype=torch.uint8)
    IndexerKeys().write(cache, torch.arange(12), randn(12, 128, seed=47), 4)
    q = randn(2, 4, 128, seed=48).to(torch.float8_e4m3fn)
    weights, lengths = randn(2, 4, seed=49), torch.tensor([5, 2], dtype=torch.int32)
    pages = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32)
    expected = indexer.paged_logits(q.float(), weights, lengths, pages, cache, 4, 7, IndexerKeys())
    return Case((q, cache, weights, lengths, pages, 4, 7), (expected,))


def topk_transform_512_cpu() -> Case:
    scores, lengths = randn(2, 600, seed=50), torch.tensor([600, 3], dtype=torch.int32)
    pages = torch.stack([torch.randperm(10, generator=independent.generator(51)) for _ in range(2)]).int()
    raw = indexer.topk(scores, lengths, 512)
    slots = indexer.to_slots(raw, pages, 64).int()
    out_pages, out_raw = torch.zeros(2, 512).int(), torch.zeros(2, 512).int()
    return Case((scores, lengths, pages, out_pages, 64, out_raw), writes={3: slots, 5: raw})


@functools.cache
def case(name: str) -> Case:
    built: Case = globals()[name]()
    return built


def as_bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def check(namespace: str, name: str) -> None:
    """Call the operator on copies; compare what it returns and writes, and that it touches nothing else."""
    wanted = case(name)
    given = tuple(a.clone() if isinstance(a, Tensor) else a for a in wanted.arguments)
    result = getattr(getattr(torch.ops, namespace), name)(*given)
    returned = () if result is None else result if isinstance(result, tuple) else (result,)
    assert len(returned) == len(wanted.returns)
    for got, expected in zip(returned, wanted.returns, strict=True):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        assert torch.equal(as_bits(got), as_bits(expected))
        # The schemas promise fresh results.
        assert not any(isinstance(a, Tensor) and a.data_ptr() == got.data_ptr() for a in given)
    for i, (now, before) in enumerate(zip(given, wanted.arguments, strict=True)):
        if isinstance(now, Tensor):
            assert torch.equal(as_bits(now), as_bits(wanted.writes.get(i, before))), f"argument {i}"


@pytest.fixture
def restored_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """install() sets the module's state; put back what was there."""
    for variable in ("DSV4_CPU_KV", "DSV4_CPU_WEIGHT_CACHE_MIB"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(operators, "_state", operators._state)


_numbers = itertools.count()


@pytest.fixture
def scratch(restored_state: None) -> Iterator[str]:
    """A torch.library namespace of this test's own with our operators in it."""
    namespace = f"dsv4_scratch_{next(_numbers)}"
    library = operators.install(namespace)
    yield namespace
    library._destroy()


def test_there_is_a_case_for_every_operator() -> None:
    assert all(callable(globals().get(name)) for name in NAMES)
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_gives_what_its_reference_gives(scratch: str, name: str) -> None:
    check(scratch, name)


# torch says once that a body was replaced, which is what is wanted here.
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("name", NAMES)
def test_an_operator_replaces_a_native_one(restored_state: None, name: str) -> None:
    """A CPU with AMX: the name is defined and has a body before we come."""

    def native(*_: Any) -> Any:
        raise AssertionError("the native body ran")

    namespace = f"dsv4_native_{name}"
    schema = {f.__name__: s for f, s in operators.OPERATORS.items()}[name]
    theirs = torch.library.Library(namespace, "DEF")
    theirs.define(name + schema)
    theirs.impl(name, native, "CPU")
    with pytest.raises(AssertionError, match="native body"):
        getattr(getattr(torch.ops, namespace), name)(*case(name).arguments)
    ours = operators.install(namespace)
    try:
        check(namespace, name)
    finally:
        ours._destroy()
        theirs._destroy()


# --- settings and refusals --------------------------------------------------------------------------


def test_an_unknown_kv_mode_is_named_and_nothing_is_registered(
    restored_state: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4_CPU_KV", "int4")
    with pytest.raises(ValueError, match=r"DSV4_CPU_KV='int4'.*'fp8'.*'exact'"):
        operators.install("dsv4_refused")
    assert not hasattr(torch.ops.dsv4_refused, NAMES[0])


def test_exact_mode_keeps_the_rows_out_of_the_cache(
    restored_state: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4_CPU_KV", "exact")
    library = operators.install("dsv4_exact")
    try:
        q, kv, positions, cache, slots, *rest = case("fused_qnorm_rope_kv_insert_cpu").arguments
        cache = cache.clone()
        torch.ops.dsv4_exact.fused_qnorm_rope_kv_insert_cpu(q, kv, positions, cache, slots, *rest)
        assert not cache.any()
        out, sink = torch.zeros_like(q), torch.zeros(2)
        window = torch.tensor([[5, 64]]).expand(3, 2)
        torch.ops.dsv4_exact.flash_mla_with_kvcache_cpu(
            out, q, cache, window, 64, cache, window[:, :0], 64, sink, 0.05
        )
    finally:
        library._destroy()
    rows = ExactRows(512)
    prologue.insert_key(kv, positions, TABLE, cache, slots, 64, rows)
    expected = attention.sparse_attention(
        q, (cache, window, 64), (cache, window[:, :0], 64), sink, 0.05, rows
    )
    assert torch.equal(out, expected.bfloat16())


def test_what_is_not_deepseek_v4s_is_refused(scratch: str) -> None:
    ops = getattr(torch.ops, scratch)
    topk = list(case("biased_topk_cpu").arguments)
    with pytest.raises(NotImplementedError, match="softmax"):
        ops.biased_topk_cpu(*topk[:5], "softmax", *topk[6:])
    hashed = list(case("hash_topk_cpu").arguments)
    with pytest.raises(NotImplementedError, match="1 fused shared"):
        ops.hash_topk_cpu(*hashed[:4], 1, *hashed[5:])
    moe = list(case("fused_experts_cpu").arguments)
    with pytest.raises(NotImplementedError, match="format 2"):
        ops.fused_experts_cpu(*moe[:6], 2, *moe[7:])
    with pytest.raises(NotImplementedError, match="alpha"):
        ops.fused_experts_cpu(*moe[:15], 1.7, *moe[16:])
    bmm = list(case("bmm_cpu").arguments)
    with pytest.raises(NotImplementedError, match="scale"):
        ops.bmm_cpu(*bmm[:4], torch.ones(()))


# --- against vLLM's source --------------------------------------------------------------------------


def calls_of(owners: tuple[str, ...], tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """(name, call) of every `owner.name(...)` in a syntax tree."""
    for node in ast.walk(tree):
        func = node.func if isinstance(node, ast.Call) else None
        if isinstance(func, ast.Attribute) and ast.unparse(func.value) in owners:
            yield func.attr, node


@functools.cache
def vllm_calls() -> dict[str, list[tuple[str, ast.Call]]]:
    """Every call of `torch.ops._C.<one of our names>` in the installed vLLM, with its place."""
    calls: dict[str, list[tuple[str, ast.Call]]] = {name: [] for name in NAMES}
    for path, tree in vllm_source.trees_that_mention("torch.ops._C."):
        for name, call in calls_of(("torch.ops._C",), tree):
            if name in calls:
                calls[name].append((f"{path.relative_to(vllm_source.root())}:{call.lineno}", call))
    return calls


@pytest.mark.parametrize("name", NAMES)
def test_vllm_calls_the_operator_with_as_many_arguments_as_it_takes(name: str) -> None:
    assert vllm_calls()[name], f"vLLM calls no torch.ops._C.{name}: renamed?"
    schema = {f.__name__: s for f, s in operators.OPERATORS.items()}[name]
    takes = len(torch._C.parse_schema(name + schema).arguments)
    for where, call in vllm_calls()[name]:
        assert not call.keywords, where
        assert len(call.args) == takes, where


def test_vllms_cpu_model_calls_no_operator_that_is_missing_here() -> None:
    called = {
        name
        for path in (vllm_source.root() / "models" / "deepseek_v4" / "cpu").glob("*.py")
        for name, _ in calls_of(("ops", "torch.ops._C"), ast.parse(path.read_text()))
    }
    assert called and called <= set(NAMES)


def test_the_expert_format_number_is_vllms() -> None:
    (formats,) = (
        node
        for node in vllm_source.tree_of("vllm._custom_ops").body
        if isinstance(node, ast.ClassDef) and node.name == "CPUQuantMethod"
    )
    values = {
        ast.unparse(n.targets[0]): ast.literal_eval(n.value)
        for n in formats.body
        if isinstance(n, ast.Assign)
    }
    assert values["MXFP4"] == operators.MXFP4_METHOD
