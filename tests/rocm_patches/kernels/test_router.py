"""Expert choice in the interpreter: scores, ties, NaN, and the table by token id."""

from __future__ import annotations

import pytest
import torch

from rocm_patches.kernels import router, selftest
from rocm_patches.kernels.launch import recording
from rocm_patches.reference import router as reference
from tests.rocm_patches.kernels.findings import CPU, check


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 256, 6), (5, 384, 6), (130, 64, 3), (3, 7, 1)])
def test_biased(tokens: int, experts: int, k: int, ties: bool) -> None:
    check(selftest.routing(CPU, tokens, tokens=tokens, experts=experts, k=k, ties=ties))


@pytest.mark.parametrize("amplitude", [0.01, 2.0, 30.0])
@pytest.mark.parametrize("hashed", [False, True])
def test_amplitudes(hashed: bool, amplitude: float) -> None:
    """Large negative gates too: softplus must not underflow to equal scores."""
    check(selftest.routing(CPU, 6, tokens=9, experts=256, hashed=hashed, amplitude=amplitude))


def test_equals_the_reference() -> None:
    torch.manual_seed(7)
    gate, bias = torch.randn(33, 256), torch.randn(256) * 0.1
    weights, ids = router.biased_topk(gate, bias, 6, True, 2.5)
    expected, chosen = reference.biased_topk(gate, bias, 6, True, 2.5)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)
    assert ids.dtype == torch.int32


def test_weights_unnormalised() -> None:
    gate = torch.randn(3, 16)
    weights, ids = router.biased_topk(gate, torch.zeros(16), 2, False, 1.0)
    torch.testing.assert_close(weights, reference.scores(gate).gather(1, ids.long()))


def test_a_nan_gate_is_chosen_last_and_no_expert_twice() -> None:
    gate = torch.full((2, 8), float("nan"))
    gate[0, 5] = 1.0
    _, ids = router.biased_topk(gate, torch.zeros(8), 3)
    assert ids.tolist() == [[5, 0, 1], [0, 1, 2]]


def test_bf16_gates_and_a_strided_row() -> None:
    wide = torch.randn(4, 600).bfloat16()
    weights, ids = router.biased_topk(wide[:, :256], torch.zeros(256), 6)
    again = router.biased_topk(wide[:, :256].contiguous().float(), torch.zeros(256), 6)
    assert torch.equal(ids, again[1]) and torch.equal(weights, again[0])


def test_one_launch_and_none_for_no_tokens() -> None:
    with recording() as launches:
        check(selftest.routing(CPU, 8, tokens=2, experts=64))
        check(selftest.routing(CPU, 8, tokens=2, experts=64, hashed=True))
        assert len(launches) == 2
        check(selftest.routing(CPU, 8, tokens=0, experts=64))
    assert len(launches) == 2


def test_refusals() -> None:
    with pytest.raises(ValueError, match="9 of 8 experts"):
        router.biased_topk(torch.zeros(1, 8), torch.zeros(8), 9)
    with pytest.raises(ValueError, match="bias of shape"):
        router.biased_topk(torch.zeros(1, 8), torch.zeros(7), 2)
