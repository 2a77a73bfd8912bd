"""gpus.yaml: every device id that people met is there once, and a wrong file complains with its line."""

from __future__ import annotations

import pathlib

import pytest

from dsv4_deploy import catalog
from dsv4_deploy.catalog.card import GPUS_FILE
from dsv4_deploy.errors import DeployError


@pytest.mark.parametrize(
    ("device_id", "name", "virtual"),
    # https://github.com/ROCm/k8s-device-plugin; the virtual functions: https://github.com/vllm-project/vllm/issues/48266
    [
        ("74a1", "mi300x", False),
        ("74a9", "mi300x", False),
        ("74bd", "mi300x", False),
        ("74b5", "mi300x", True),
        ("74a2", "mi308x", False),
        ("74a8", "mi308x", False),
        ("74b6", "mi308x", True),
        ("0x74BC", "mi308x", True),
        ("74a5", "mi325x", False),
        ("74b9", "mi325x", True),
        ("75a0", "mi350x", False),
        ("75a3", "mi355x", False),
    ],
)
def test_cards_are_found_by_device_id(device_id: str, name: str, virtual: bool) -> None:
    found = catalog.card_by_device_id(device_id)
    assert found is not None
    assert (found[0].name, found[1]) == (name, virtual)


def test_an_unknown_device_id_is_none() -> None:
    assert catalog.card_by_device_id("74a0") is None  # MI300A: no discrete memory, not ours
    assert catalog.card_by_device_id("") is None


def test_the_three_targets_are_gfx942_with_the_fnuz_dialect() -> None:
    targets = {name: card for name, card in catalog.cards().items() if card.target}
    assert list(targets) == ["mi300x", "mi308x", "mi325x"]
    assert {card.gfx for card in targets.values()} == {"gfx942"}
    assert {card.fp8 for card in targets.values()} == {"fnuz"}
    assert targets["mi308x"].compute_units == 80
    assert targets["mi308x"].hbm_bytes == targets["mi300x"].hbm_bytes < targets["mi325x"].hbm_bytes


def test_an_unknown_card_gets_the_nearest_names() -> None:
    with pytest.raises(DeployError) as raised:
        catalog.find_card("mi300")
    assert raised.value.exit_code == 2
    assert "mi300x" in raised.value.fix
    assert catalog.find_card("MI325X").name == "mi325x"


GOOD = GPUS_FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ('["74a5"]', '["74a1"]', "device id 74a1 belongs to mi300x already"),
        ('["74a5"]', '["74A5"]', "lower-case hexadecimal"),
        ('["74a5"]', "74a5", "expected a list"),
        ("fp8: fnuz           #", "fp8: ocp           #", "gfx942 has the fnuz dialect"),
        ("compute_units: 80", "compute_units: eighty", "'eighty'"),
        ("hbm_bytes: 274_877_906_944", "hbm_bytes: -5", "'-5'"),
        ("  mi308x:\n", "  mi300x:\n", "listed twice"),
        ("    target: true\n", "    target: perhaps\n", "true, false"),
        ("    target: true\n", "", "'target' is missing"),
        ("    target: true\n", "    target: true\n    price: 5\n", "unknown key 'price'"),
    ],
)
def test_a_wrong_file_is_reported_with_its_line(
    tmp_path: pathlib.Path, before: str, after: str, reason: str
) -> None:
    assert before in GOOD
    path = tmp_path / "gpus.yaml"
    path.write_text(GOOD.replace(before, after, 1), encoding="utf-8")
    with pytest.raises(DeployError) as raised:
        catalog.load_cards(path)
    assert raised.value.what.startswith("gpus.yaml, line ")
    assert reason in raised.value.what
