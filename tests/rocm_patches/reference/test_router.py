"""The router: Python's math per gate, transformers' routers, and what must not reach the weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter, DeepseekV4TopKRouter

from rocm_patches.reference import router
from tests.rocm_patches import independent, transformers_modules
from tests.rocm_patches.independent import randn

EXPERTS = pytest.mark.parametrize("experts", [8, 256, 384], ids=["tiny", "flash", "pro"])
K = 6


def score64(gate: float) -> float:
    """sqrt(log(1 + e^g)); log1p keeps small e^g, and for large g the sum is g + log(1 + e^-g)."""
    return math.sqrt(math.log1p(math.exp(gate)) if gate < 30 else gate + math.log1p(math.exp(-gate)))


def route64(gate: Tensor, ids: list[int], scale: float) -> list[float]:
    chosen = [score64(float(gate[i])) for i in ids]
    return [scale * c / sum(chosen) for c in chosen]


def test_scores_equal_the_formula_without_underflow() -> None:
    """The naive log(1 + e^g) is 0 in fp32 from g = -17 on; e^g itself is normal until g = -87."""
    gate = torch.cat((torch.linspace(-87, 87, 349), torch.tensor([0.0, -17.5, 1e4])))
    expected = torch.tensor([score64(g) for g in gate.tolist()], dtype=torch.float64)
    torch.testing.assert_close(router.scores(gate.unsqueeze(0))[0].double(), expected, rtol=1e-6, atol=0)


@EXPERTS
@pytest.mark.parametrize("scale", [1.0, 1.5, 2.5])
def test_biased_topk_equals_the_formula(experts: int, scale: float) -> None:
    gate, bias = randn(5, experts, seed=1, scale=2), randn(experts, seed=2)
    weights, ids = router.biased_topk(gate, bias, K, scale=scale)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    for t in range(5):
        biased = [score64(float(gate[t, e])) + float(bias[e]) for e in range(experts)]
        best = sorted(range(experts), key=lambda e: -biased[e])[:K]
        assert sorted(ids[t].tolist()) == sorted(best)
        assert weights[t].tolist() == pytest.approx(route64(gate[t], ids[t].tolist(), scale), rel=1e-5)


def test_the_bias_chooses_but_never_weighs() -> None:
    gate = randn(4, 256, seed=3)
    bias = torch.zeros(256)
    wanted = [3, 50, 77, 128, 200, 255]
    bias[wanted] = 1e4
    weights, ids = router.biased_topk(gate, bias, K, scale=1.5)
    for t in range(4):
        assert sorted(ids[t].tolist()) == wanted
        assert weights[t].tolist() == pytest.approx(route64(gate[t], ids[t].tolist(), 1.5), rel=1e-5)
        assert float(weights[t].sum()) == pytest.approx(1.5, rel=1e-6)


def test_without_normalising_the_weights_are_the_scores() -> None:
    gate, bias = randn(3, 16, seed=4), randn(16, seed=5)
    weights, ids = router.biased_topk(gate, bias, 3, normalise=False, scale=2.0)
    for t in range(3):
        expected = [2 * score64(float(gate[t, e])) for e in ids[t].tolist()]
        assert weights[t].tolist() == pytest.approx(expected, rel=1e-6)


def test_gates_that_are_all_very_negative_still_share_the_weight() -> None:
    weights, ids = router.biased_topk(torch.full((1, 8), -60.0), torch.zeros(8), 4)
    assert len(set(ids[0].tolist())) == 4
    assert weights[0].tolist() == pytest.approx([0.25] * 4, rel=1e-5)


@EXPERTS
def test_biased_topk_equals_transformers(experts: int) -> None:
    configuration = transformers_modules.config(n_routed_experts=experts, num_experts_per_tok=K)
    module = transformers_modules.randomised(DeepseekV4TopKRouter(configuration), seed=6)
    module.e_score_correction_bias.copy_(randn(experts, seed=7, scale=0.5))
    gate, their_weights, their_ids = module(randn(5, 64, seed=8))
    weights, ids = router.biased_topk(
        gate, module.e_score_correction_bias, K, scale=configuration.routed_scaling_factor
    )
    ours, theirs = ids.long().sort(), their_ids.sort()
    assert torch.equal(ours.values, theirs.values)
    torch.testing.assert_close(weights.gather(1, ours.indices), their_weights.gather(1, theirs.indices))


@EXPERTS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hash_route_equals_the_formula_and_transformers(experts: int, dtype: torch.dtype) -> None:
    configuration = transformers_modules.config(n_routed_experts=experts, num_experts_per_tok=K)
    module = transformers_modules.randomised(DeepseekV4HashRouter(configuration), seed=9)
    table = torch.randint(0, experts, module.tid2eid.shape, generator=independent.generator(10))
    module.tid2eid.copy_(table)
    tokens = torch.tensor([[5, 99, 0, 5]])
    gate, their_weights, their_ids = module(randn(4, 64, seed=11), tokens)
    given = table[tokens[0]].to(dtype)
    scale = configuration.routed_scaling_factor
    weights, ids = router.hash_route(gate, given, scale)
    assert ids.dtype == torch.int32 and torch.equal(ids.long(), their_ids)
    torch.testing.assert_close(weights, their_weights)
    for t in range(4):
        assert weights[t].tolist() == pytest.approx(route64(gate[t], given[t].tolist(), scale), rel=1e-5)


def test_hash_route_returns_no_alias_of_its_input() -> None:
    given = torch.tensor([[0, 1]], dtype=torch.int32)
    _, ids = router.hash_route(randn(1, 8, seed=12), given)
    ids.fill_(7)
    assert given.tolist() == [[0, 1]]


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    gate = randn(tokens, 8, seed=13)
    for weights, ids in (
        router.biased_topk(gate, torch.zeros(8), 2),
        router.hash_route(gate, torch.zeros(tokens, 2, dtype=torch.int32)),
    ):
        assert weights.shape == ids.shape == (tokens, 2)
