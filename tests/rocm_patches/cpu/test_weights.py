"""The store of decoded weights: what it keeps, for which key, and up to which budget."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from rocm_patches.cpu.weights import DEFAULT_BUDGET_MIB, DecodedWeights, from_environment


class Decoder:
    """weight * scale, and how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, weight: Tensor, scale: Tensor) -> Tensor:
        self.calls += 1
        return weight.float() * scale


def pair(size: int = 64) -> tuple[Tensor, Tensor]:
    return torch.arange(size, dtype=torch.uint8), torch.full((1,), 2.0)


def test_a_kept_weight_is_decoded_once() -> None:
    store, decode, (weight, scale) = DecodedWeights(1 << 20), Decoder(), pair()
    first = store.get(weight, scale, decode)
    assert torch.equal(first, weight.float() * 2)
    assert store.get(weight, scale, decode) is first
    assert decode.calls == 1


def test_another_weight_scale_or_shape_is_another_entry() -> None:
    store, decode, (weight, scale) = DecodedWeights(1 << 20), Decoder(), pair()
    store.get(weight, scale, decode)
    assert torch.equal(store.get(weight, torch.full((1,), 3.0), decode), weight.float() * 3)
    assert torch.equal(store.get(weight + 1, scale, decode), weight.float() * 2 + 2)
    # The first rows of a fused weight have its address.
    assert torch.equal(store.get(weight[:8], scale, decode), weight[:8].float() * 2)
    assert decode.calls == 4


def test_what_does_not_fit_is_decoded_each_time_and_equal() -> None:
    # 64 fp32 values are 256 bytes: one weight fits, a second does not, a small third does again.
    store, decode = DecodedWeights(256 + 40), Decoder()
    kept, late, small = pair(), pair(), pair(10)
    for _ in range(2):
        for weight, scale in (kept, late, small):
            assert torch.equal(store.get(weight, scale, decode), weight.float() * 2)
    assert decode.calls == 3 + 1


def test_without_a_budget_nothing_is_kept() -> None:
    store, decode, (weight, scale) = DecodedWeights(0), Decoder(), pair()
    store.get(weight, scale, decode)
    store.get(weight, scale, decode)
    assert decode.calls == 2


def test_an_entry_keeps_its_weight_alive_so_that_the_address_cannot_be_reused() -> None:
    store, (weight, scale) = DecodedWeights(1 << 20), pair()
    held, dropped = weakref.ref(weight), weakref.ref(scale)
    store.get(weight, scale, Decoder())
    del weight, scale
    assert held() is not None and dropped() is not None
    del store
    assert held() is None and dropped() is None


@pytest.mark.parametrize(("text", "kept"), [(None, True), ("1", True), ("0", False)])
def test_budget_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str | None, kept: bool) -> None:
    if text is None:
        monkeypatch.delenv("DSV4_CPU_WEIGHT_CACHE_MIB", raising=False)
    else:
        monkeypatch.setenv("DSV4_CPU_WEIGHT_CACHE_MIB", text)
    store, decode = from_environment(), Decoder()
    weight, scale = torch.zeros(1 << 18, dtype=torch.uint8), torch.ones(1)  # 1 MiB decoded
    store.get(weight, scale, decode)
    store.get(weight, scale, decode)
    assert decode.calls == (1 if kept else 2)
    assert DEFAULT_BUDGET_MIB >= 1


@pytest.mark.parametrize("text", ["lots", "-1", "1.5", ""])
def test_a_budget_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DSV4_CPU_WEIGHT_CACHE_MIB", text)
    with pytest.raises(ValueError, match="DSV4_CPU_WEIGHT_CACHE_MIB"):
        from_environment()
