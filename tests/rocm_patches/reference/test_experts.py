"""Routed experts: loops over tokens and choices in float64, transformers' module, and the clamp's edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

from rocm_patches.reference import experts
from tests.rocm_patches import independent, transformers_modules
from tests.rocm_patches.independent import BF16, randn

LIMIT = 10.0


def swiglu64(gate: float, up: float, limit: float | None) -> float:
    """g / (1 + e^-g) * u with g cut from above and u on both sides."""
    if limit is not None:
        gate, up = min(gate, limit), max(min(up, limit), -limit)
    return gate / (1 + math.exp(-gate)) * up


def experts64(
    x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, limit: float | None
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(ids.shape[0]):
        for weight, expert in zip(weights[t].tolist(), ids[t].tolist(), strict=True):
            if expert < 0:
                continue
            both = w13[expert].double() @ x[t].double()
            inner = len(both) // 2
            activation = [swiglu64(float(both[i]), float(both[inner + i]), limit) for i in range(inner)]
            out[t] += weight * (w2[expert].double() @ torch.tensor(activation, dtype=torch.float64))
    return out


def case(hidden: int, inner: int, count: int, tokens: int, k: int) -> tuple[Tensor, ...]:
    # Projections of order 8, so that the clamp at 10 acts on some of them.
    x = randn(tokens, hidden, seed=1)
    w13 = randn(count, 2 * inner, hidden, seed=2, scale=8 * hidden**-0.5)
    w2 = randn(count, hidden, inner, seed=3, scale=inner**-0.5)
    ids = torch.stack(
        [torch.randperm(count, generator=independent.generator(4 + t))[:k] for t in range(tokens)]
    )
    return x, w13, w2, torch.rand(tokens, k, generator=independent.generator(50)), ids.int()


# A rank's slice of an expert: Flash 2048 / 8, Pro 3072 / 8.
SHAPES = pytest.mark.parametrize(
    ("hidden", "inner", "count"), [(16, 8, 8), (4096, 256, 4), (7168, 384, 3)], ids=["tiny", "flash", "pro"]
)


# --- swiglu -----------------------------------------------------------------------------------------

AT_LIMIT = [
    LIMIT,
    math.nextafter(LIMIT, 0),
    math.nextafter(LIMIT, 99),
    LIMIT + 1,
    1e4,
    -LIMIT,
    -LIMIT - 1,
    -50.0,
    0.0,
]


@pytest.mark.parametrize("limit", [LIMIT, None, 0.5])
def test_swiglu_at_and_around_the_limits(limit: float | None) -> None:
    values = torch.tensor(AT_LIMIT)
    gate, up = (v.flatten() for v in torch.meshgrid(values, values, indexing="ij"))
    pairs = zip(gate.tolist(), up.tolist(), strict=True)
    expected = torch.tensor([swiglu64(g, u, limit) for g, u in pairs], dtype=torch.float64)
    torch.testing.assert_close(experts.swiglu(gate, up, limit).double(), expected, rtol=2e-6, atol=1e-30)


def test_swiglu_cuts_the_gate_from_above_only() -> None:
    one, far = torch.tensor([1.0]), torch.tensor([-30.0])
    assert experts.swiglu(far, one, LIMIT).item() == pytest.approx(-30 * math.exp(-30), rel=1e-5)
    assert torch.equal(
        experts.swiglu(torch.tensor([99.0]), one, LIMIT), experts.swiglu(torch.tensor([10.0]), one, LIMIT)
    )
    assert torch.equal(experts.swiglu(one, far, LIMIT), experts.swiglu(one, torch.tensor([-10.0]), LIMIT))


# --- routed_experts ---------------------------------------------------------------------------------


@SHAPES
@pytest.mark.parametrize("limit", [LIMIT, None])
def test_routed_experts_equal_the_loops(hidden: int, inner: int, count: int, limit: float | None) -> None:
    """fp32 tokens: no rounding in between, so only fp32 sums differ from float64."""
    x, w13, w2, weights, ids = case(hidden, inner, count, tokens=3, k=2)
    out = experts.routed_experts(x, w13, w2, weights, ids, limit)
    assert out.dtype == torch.float32
    expected = experts64(x, w13, w2, weights, ids, limit)
    size = float(expected.abs().max())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5 * size)


@SHAPES
def test_the_clamp_matters_in_these_cases(hidden: int, inner: int, count: int) -> None:
    x, w13, w2, weights, ids = case(hidden, inner, count, tokens=3, k=2)
    clamped = experts.routed_experts(x, w13, w2, weights, ids, LIMIT)
    free = experts.routed_experts(x, w13, w2, weights, ids, None)
    assert not torch.allclose(clamped, free, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("hidden", [64, 4096, 7168])
def test_routed_experts_equal_transformers(hidden: int) -> None:
    configuration = transformers_modules.config(hidden_size=hidden, n_routed_experts=5)
    module = transformers_modules.randomised(DeepseekV4Experts(configuration), seed=5, scale=hidden**-0.5)
    module.gate_up_proj.mul_(8)
    x = randn(4, hidden, seed=6)
    weights = torch.rand(4, 3, generator=independent.generator(7))
    ids = torch.tensor([[0, 1, 2], [4, 0, 3], [1, 2, 0], [3, 4, 1]])
    out = experts.routed_experts(x, module.gate_up_proj, module.down_proj, weights, ids, LIMIT)
    torch.testing.assert_close(out, module(x, ids, weights), rtol=1e-4, atol=1e-4)


def test_bf16_tokens_round_the_activation_to_bf16() -> None:
    x, w13, w2, weights, ids = case(64, 32, 4, tokens=5, k=2)
    x = x.bfloat16()
    out = experts.routed_experts(x, w13, w2, weights, ids, LIMIT)
    exact = experts64(x, w13, w2, weights, ids, LIMIT)
    # Each of 32 activations (up to 100) is off by at most its own rounding.
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=BF16 * float(exact.abs().max()))
    unrounded = experts.routed_experts(x.float(), w13, w2, weights, ids, LIMIT)
    assert not torch.equal(out, unrounded)


def test_negative_ids_belong_to_another_rank() -> None:
    x, w13, w2, weights, ids = case(16, 8, 4, tokens=4, k=3)
    ids[0] = -1
    ids[1, 2] = -1
    out = experts.routed_experts(x, w13, w2, weights, ids, LIMIT)
    assert not out[0].any()
    expected = experts64(x, w13, w2, weights, ids, LIMIT)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


def test_an_expert_that_nobody_chose_is_never_read() -> None:
    x, w13, w2, weights, ids = case(16, 8, 4, tokens=4, k=2)
    ids = ids % 2
    w13[2:] = w2[2:] = float("nan")
    out = experts.routed_experts(x, w13, w2, weights, ids, LIMIT)
    assert bool(out.isfinite().all())


def test_one_expert_named_twice_by_a_token_counts_twice() -> None:
    """Hash tables may do that."""
    x, w13, w2, _, _ = case(16, 8, 4, tokens=1, k=2)
    twice = experts.routed_experts(x, w13, w2, torch.tensor([[0.25, 0.5]]), torch.tensor([[3, 3]]), LIMIT)
    once = experts.routed_experts(x, w13, w2, torch.tensor([[0.75]]), torch.tensor([[3]]), LIMIT)
    torch.testing.assert_close(twice, once)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    x, w13, w2, weights, ids = case(16, 8, 4, tokens=1, k=2)
    out = experts.routed_experts(x[:tokens], w13, w2, weights[:tokens], ids[:tokens], LIMIT)
    assert out.shape == (tokens, 16) and out.dtype == torch.float32
