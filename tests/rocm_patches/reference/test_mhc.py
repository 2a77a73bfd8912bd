"""Hyper-connections: the formulas again in float64, transformers' modules, and the Sinkhorn property."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)

from rocm_patches.reference import mhc
from tests.rocm_patches import independent, transformers_modules
from tests.rocm_patches.independent import BF16, randn

HC = 4
MIXES = (2 + HC) * HC
# Both epsilons are the published 1e-6; two different, larger ones here show a swap.
RMS_EPS, HC_EPS = 1e-3, 1e-4
HIDDEN = pytest.mark.parametrize("hidden", [16, 4096, 7168], ids=["tiny", "flash", "pro"])


def sinkhorn64(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """One matrix, float64, element by element: row softmax + eps, columns, then rows and columns in turn."""
    n = logits.shape[-1]
    c = [[0.0] * n for _ in range(n)]
    for i in range(n):
        e = (logits[i].double() - logits[i].double().max()).exp()
        for j in range(n):
            c[i][j] = float(e[j] / e.sum()) + eps

    def divide_columns() -> None:
        for j in range(n):
            total = sum(c[i][j] for i in range(n)) + eps
            for i in range(n):
                c[i][j] /= total

    divide_columns()
    for _ in range(iterations - 1):
        for i in range(n):
            total = sum(c[i]) + eps
            c[i] = [value / total for value in c[i]]
        divide_columns()
    return torch.tensor(c, dtype=torch.float64)


def mixes64(x: Tensor, fn: Tensor, eps: float) -> Tensor:
    """fn times the RMS-normed concatenation of the streams."""
    return torch.einsum("tf,mf->tm", independent.rms_norm(x.flatten(1), eps), fn.double())


def parameters(hidden: int, mixes: int = MIXES, scales: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    # fn so that a mix is of order 1: the normed streams have hc * hidden elements of order 1.
    fn = randn(mixes, HC * hidden, seed=1, scale=(HC * hidden) ** -0.5)
    return fn, randn(scales, seed=2).abs() + 0.5, randn(mixes, seed=3, scale=0.5)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_equals_the_loops(n: int, iterations: int) -> None:
    logits = randn(3, n, n, seed=n, scale=2)
    expected = torch.stack([sinkhorn64(m, iterations, HC_EPS) for m in logits])
    torch.testing.assert_close(
        mhc.sinkhorn(logits, iterations, HC_EPS).double(), expected, rtol=1e-5, atol=1e-7
    )


def test_sinkhorn_is_doubly_stochastic() -> None:
    """The last step divides columns: they sum to 1 up to eps. Rows have converged after 20 steps."""
    c = mhc.sinkhorn(randn(64, HC, HC, seed=5), 20, 1e-6)
    assert bool((c > 0).all())
    torch.testing.assert_close(c.sum(-2), torch.ones(64, HC), rtol=0, atol=1e-5)
    torch.testing.assert_close(c.sum(-1), torch.ones(64, HC), rtol=0, atol=1e-4)


def test_sinkhorn_stands_extreme_logits() -> None:
    c = mhc.sinkhorn(torch.diag(torch.full((HC,), 1e4)) - 5e3, 20, 1e-6)
    torch.testing.assert_close(c, torch.eye(HC), rtol=0, atol=1e-4)


@HIDDEN
def test_pre_equals_the_formula(hidden: int) -> None:
    x = randn(3, HC, hidden, seed=4)
    fn, scale, base = parameters(hidden)
    y, post, comb = mhc.pre(x, fn, scale, base, 20, RMS_EPS, HC_EPS)

    m, s, b = mixes64(x, fn, RMS_EPS), scale.double(), base.double()
    weight = independent.sigmoid(m[:, :4] * s[0] + b[:4]) + HC_EPS
    logits = (m[:, 8:] * s[2] + b[8:]).view(3, HC, HC)  # row-major: index 8 + 4 i + j
    # fp32 sums of 4 * hidden products; the coefficients are of order 1.
    close = {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(y.double(), torch.einsum("ti,tih->th", weight, x.double()), **close)
    torch.testing.assert_close(post.double(), 2 * independent.sigmoid(m[:, 4:8] * s[1] + b[4:8]), **close)
    torch.testing.assert_close(
        comb.double(), torch.stack([sinkhorn64(c, 20, HC_EPS) for c in logits]), **close
    )
    assert post.dtype == comb.dtype == torch.float32


@HIDDEN
def test_pre_equals_transformers(hidden: int) -> None:
    module = transformers_modules.randomised(
        DeepseekV4HyperConnection(transformers_modules.config(hidden_size=hidden)), seed=6, scale=0.02
    )
    x = randn(2, HC, hidden, seed=7)
    y, post, comb = mhc.pre(x, module.fn, module.scale, module.base, 20, 1e-6, 1e-6)
    their_post, their_comb, their_y = module(x.unsqueeze(0))
    for ours, theirs in ((y, their_y), (post, their_post), (comb, their_comb)):
        torch.testing.assert_close(ours, theirs[0], rtol=1e-5, atol=1e-5)


@HIDDEN
def test_post_sums_over_the_first_index(hidden: int) -> None:
    """out_j = post_j x + sum_i comb[i, j] residual_i."""
    x, residual = randn(3, hidden, seed=8), randn(3, HC, hidden, seed=9)
    post, comb = randn(3, HC, seed=10).abs(), randn(3, HC, HC, seed=11).abs()
    out = mhc.post(x, residual, post, comb)
    for t in range(3):
        for j in range(HC):
            expected = post[t, j].double() * x[t].double()
            for i in range(HC):
                expected = expected + comb[t, i, j].double() * residual[t, i].double()
            torch.testing.assert_close(out[t, j].double(), expected, rtol=1e-5, atol=1e-5)


@HIDDEN
def test_head_equals_the_formula(hidden: int) -> None:
    x = randn(3, HC, hidden, seed=12)
    fn, scale, base = parameters(hidden, HC, 1)
    weight = independent.sigmoid(mixes64(x, fn, RMS_EPS) * scale.double() + base.double()) + HC_EPS
    expected = torch.einsum("ti,tih->th", weight, x.double())
    out = mhc.head(x, fn, scale, base, RMS_EPS, HC_EPS)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


@HIDDEN
def test_head_equals_transformers(hidden: int) -> None:
    module = transformers_modules.randomised(
        DeepseekV4HyperHead(transformers_modules.config(hidden_size=hidden)), seed=13, scale=0.02
    )
    x = randn(2, HC, hidden, seed=14)
    out = mhc.head(x, module.hc_fn, module.hc_scale, module.hc_base, 1e-6, 1e-6)
    torch.testing.assert_close(out, module(x.unsqueeze(0))[0], rtol=1e-5, atol=1e-5)


def test_bf16_streams_are_computed_in_fp32_and_rounded_once() -> None:
    x = randn(5, HC, 64, seed=15, dtype=torch.bfloat16)
    fn, scale, base = parameters(64)
    arguments = (fn, scale, base, 20, RMS_EPS, HC_EPS)
    y, post, comb = mhc.pre(x, *arguments)
    exact = mhc.pre(x.float(), *arguments)
    assert y.dtype == torch.bfloat16 and torch.equal(y, exact[0].bfloat16())
    assert torch.equal(post, exact[1]) and torch.equal(comb, exact[2])
    out = mhc.post(y, x, post, comb)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), mhc.post(y.float(), x.float(), post, comb), rtol=BF16, atol=0)
    head = mhc.head(x, fn[:HC], scale[:1], base[:HC], RMS_EPS, HC_EPS)
    assert head.dtype == torch.bfloat16 and head.shape == (5, 64)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    x = randn(3, HC, 16, seed=16)
    fn, scale, base = parameters(16)
    whole = mhc.pre(x, fn, scale, base, 20, RMS_EPS, HC_EPS)
    part = mhc.pre(x[:tokens], fn, scale, base, 20, RMS_EPS, HC_EPS)
    for ours, full in zip(part, whole, strict=True):
        torch.testing.assert_close(ours, full[:tokens], rtol=1e-6, atol=1e-6)
    assert mhc.post(x[:tokens, 0], x[:tokens], part[1], part[2]).shape == (tokens, HC, 16)
    assert mhc.head(x[:tokens], fn[:HC], scale[:1], base[:HC], RMS_EPS, HC_EPS).shape == (tokens, 16)
