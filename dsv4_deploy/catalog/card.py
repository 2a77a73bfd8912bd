"""gpus.yaml: the GPUs that DeepSeek-V4 meets, found by PCI device id. In: the file. Out: `Card`s.

A product name is never looked at: names differ between boards and drivers, and one of them (MI308X) is
missing from the tables of several tools. See https://github.com/gpustack/gpustack/issues/4166
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import pathlib
from collections.abc import Mapping
from typing import Literal

from dsv4_deploy.catalog.document import load
from dsv4_deploy.errors import refused

GPUS_FILE = pathlib.Path(__file__).with_name("gpus.yaml")


@dataclasses.dataclass(frozen=True)
class Card:
    """One kind of GPU. `hbm_bytes` is what tools report as total memory, `compute_units` those of the whole
    card; fewer mean a partition. `target` is False for a card that we know and do not support.

    Device ids are four lower-case hexadecimal digits; `vf_device_ids` are those of its virtual functions.
    `fp8` is the dialect of its FP8 instructions. `tuned_gemm_rows` counts AITER's tuned matrix shapes of
    DeepSeek-V4 for this architecture and CU count, None where nobody has counted.
    """

    name: str
    gfx: str
    target: bool
    hbm_bytes: int
    compute_units: int
    device_ids: tuple[str, ...]
    vf_device_ids: tuple[str, ...]
    fp8: Literal["fnuz", "ocp"]
    tuned_gemm_rows: int | None
    sources: tuple[str, ...]


@functools.cache
def cards() -> Mapping[str, Card]:
    """Every card of the catalog by name ("mi300x"), in the file's order."""
    return load_cards(GPUS_FILE)


def card_by_device_id(device_id: str) -> tuple[Card, bool] | None:
    """The card with that PCI device id ("74a1", "0x74A1"), and whether it is a virtual function of it.

    None when the id is unknown.
    """
    wanted = device_id.lower().removeprefix("0x")
    for card in cards().values():
        if wanted in card.device_ids:
            return card, False
        if wanted in card.vf_device_ids:
            return card, True
    return None


def find_card(name: str) -> Card:
    """The card of that name. Raises DeployError (exit code 2) that names the nearest known ones."""
    known = cards()
    wanted = name.lower()
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, list(known), n=2, cutoff=0.5) or list(known)
    raise refused(
        f"there is no GPU called {name!r} in the catalog",
        why=f"It has: {', '.join(known)}.",
        fix=f"Did you mean {' or '.join(near)}?",
    )


def load_cards(path: pathlib.Path) -> Mapping[str, Card]:
    """Read and check one GPU file. Raises DeployError that names file, line and reason."""
    root = load(path)
    root.only("gpus")
    loaded: dict[str, Card] = {}
    taken: dict[str, str] = {}
    for name, entry in root.child("gpus").unique_pairs():
        entry.only(*(field.name for field in dataclasses.fields(Card) if field.name != "name"))
        ids: dict[str, tuple[str, ...]] = {}
        for key in ("device_ids", "vf_device_ids"):
            items = entry.child(key).items_or_none()
            for item in items:
                text = item.text()
                if len(text) != 4 or any(digit not in "0123456789abcdef" for digit in text):
                    raise item.wrong(
                        f"expected a PCI device id of four lower-case hexadecimal digits, found {text!r}"
                    )
                if text in taken:
                    raise item.wrong(f"device id {text} belongs to {taken[text]} already")
                taken[text] = name
            ids[key] = tuple(item.text() for item in items)
        gfx = entry.child("gfx").text()
        fp8 = entry.child("fp8").one_of("fnuz", "ocp")
        if (gfx == "gfx942") != (fp8 == "fnuz"):
            raise entry.child("fp8").wrong(f"{gfx} has the {'fnuz' if gfx == 'gfx942' else 'ocp'} dialect")
        loaded[name] = Card(
            name=name,
            gfx=gfx,
            target=entry.child("target").flag(),
            hbm_bytes=entry.child("hbm_bytes").count(),
            compute_units=entry.child("compute_units").count(),
            device_ids=ids["device_ids"],
            vf_device_ids=ids["vf_device_ids"],
            fp8=fp8,  # type: ignore[arg-type]
            tuned_gemm_rows=tuned.number() if (tuned := entry.maybe("tuned_gemm_rows")) else None,
            sources=entry.child("sources").links(),
        )
    return loaded
