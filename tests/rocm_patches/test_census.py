"""The census of launches (bench/census.py): what its page says of the patches is what vLLM's own classes launch."""

from __future__ import annotations

import re

import pytest

from bench import census


@pytest.fixture(scope="module")
def patched() -> dict[str, list[str]]:
    return census.found(True, [256])["256"]


@pytest.mark.vllm
def test_page_is_what_is_launched(patched: dict[str, list[str]]) -> None:
    text = census.PAGE.read_text()
    for ratio, kind in census.KINDS.items():
        rows = re.findall(rf"^\| {re.escape(kind)} \| \d+ \| (.*) \|$", text, flags=re.MULTILINE)
        assert rows
        counts = census.by_part(patched, ratio)
        for row in rows:
            after = [int(cell.split(" → ")[1]) for cell in row.split(" | ")]
            assert after == [*counts.values(), sum(counts.values())]


@pytest.mark.vllm
def test_seams_head_and_compressors_are_one_launch(patched: dict[str, list[str]]) -> None:
    assert patched["layer"] == ["seam_kernel"] * 2
    assert patched["head"] == ["seam_kernel"] and patched["last post"] == ["post_kernel"]
    assert patched["CSA"] == patched["indexer"] == patched["HCA"] == ["compress_kernel"]


def test_at_most_three_fifths_are_left() -> None:
    """The target of the issue, for the parts in scope and every model."""
    rows = re.findall(
        r"^\| (\w+) \| (\d+) \| (\d+) \| \d+ % \|$", census.PAGE.read_text(), flags=re.MULTILINE
    )
    assert {name for name, _, _ in rows} == set(census.MODELS)
    assert all(int(on) <= 0.6 * int(off) for _, off, on in rows)
