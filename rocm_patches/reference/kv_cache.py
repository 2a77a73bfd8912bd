"""The paged caches as bytes: 584-byte attention rows and 132-byte indexer keys.

An attention page holds its rows' 576 data bytes one after the other (448 e4m3 codes, 64 bf16 rotated
values each), then 8 scale bytes per row (7 e8m0, one per 64 codes, and a zero). An indexer page holds 128
e4m3 codes per key, then one fp32 scale per key. A cache is seen as uint8 [pages, bytes]; it may be a strided
view into an allocation that other layers share, so it is indexed in place and never reshaped or copied.
Layout: vllm/models/deepseek_v4/common/ops/cache_utils.py, release 0.32.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rocm_patches import fp8

HEAD_DIM = 512
NOPE_DIM = 448
QUANT_BLOCK = 64
ROW_DATA_BYTES = 576
ROW_SCALE_BYTES = 8
INDEX_DIM = 128


class Rows(Protocol):
    """How rows go into a cache and come out of it.

    slots are int64 [N] = page * page_rows + offset. Callers pass only slots >= 0.
    """

    @property
    def width(self) -> int: ...

    def write(self, cache: Tensor, slots: Tensor, rows: Tensor, page_rows: int) -> None: ...

    def read(self, cache: Tensor, slots: Tensor, page_rows: int) -> Tensor: ...


def _split(slots: Tensor, page_rows: int) -> tuple[Tensor, Tensor]:
    slots = slots.long()
    return torch.div(slots, page_rows, rounding_mode="floor"), slots % page_rows


def _pages(cache: Tensor, start: int, page_rows: int, row_bytes: int) -> Tensor:
    """View [pages, page_rows, row_bytes] of the part of every page that begins at byte `start`."""
    return cache.narrow(1, start, page_rows * row_bytes).unflatten(1, (page_rows, row_bytes))


@dataclass(frozen=True)
class AttentionRows:
    """584-byte rows: NoPE part quantised in blocks of 64 with e8m0 scales, RoPE part kept in bf16."""

    dialect: fp8.Dialect = fp8.OCP
    width: int = HEAD_DIM

    def write(self, cache: Tensor, slots: Tensor, rows: Tensor, page_rows: int) -> None:
        """Quantise rows [N, 512] (rounded to bf16 first) into uint8 cache [pages, >= page_rows * 584]."""
        rows = rows.to(torch.bfloat16)
        codes, exponent = fp8.quantise_ue8m0(rows[:, :NOPE_DIM], QUANT_BLOCK, self.dialect)
        scales = (exponent + fp8.E8M0_BIAS).clamp(0, 255).to(torch.uint8)
        page, offset = _split(slots, page_rows)
        data = _pages(cache, 0, page_rows, ROW_DATA_BYTES)
        data[page, offset] = torch.cat((codes, rows[:, NOPE_DIM:].contiguous().view(torch.uint8)), -1)
        scale_area = _pages(cache, page_rows * ROW_DATA_BYTES, page_rows, ROW_SCALE_BYTES)
        scale_area[page, offset] = torch.nn.functional.pad(scales, (0, 1))

    def read(self, cache: Tensor, slots: Tensor, page_rows: int) -> Tensor:
        """Rows [N, 512] in fp32."""
        page, offset = _split(slots, page_rows)
        data = _pages(cache, 0, page_rows, ROW_DATA_BYTES)[page, offset]
        scales = _pages(cache, page_rows * ROW_DATA_BYTES, page_rows, ROW_SCALE_BYTES)[page, offset]
        exponent = scales[:, : NOPE_DIM // QUANT_BLOCK].int() - fp8.E8M0_BIAS
        nope = fp8.dequantise_ue8m0(data[:, :NOPE_DIM].contiguous(), exponent, self.dialect)
        rope = data[:, NOPE_DIM:].contiguous().view(torch.bfloat16).float()
        return torch.cat((nope, rope), -1)


@dataclass(frozen=True)
class IndexerKeys:
    """132-byte indexer keys: 128 e4m3 codes and one fp32 power-of-two scale per key."""

    dialect: fp8.Dialect = fp8.OCP
    width: int = INDEX_DIM

    def write(self, cache: Tensor, slots: Tensor, rows: Tensor, page_rows: int) -> None:
        """Quantise rows [N, 128] (rounded to bf16 first) into uint8 cache [pages, >= page_rows * 132]."""
        codes, exponent = fp8.quantise_ue8m0(rows.to(torch.bfloat16), INDEX_DIM, self.dialect)
        page, offset = _split(slots, page_rows)
        _pages(cache, 0, page_rows, INDEX_DIM)[page, offset] = codes
        scale_area = _pages(cache, page_rows * INDEX_DIM, page_rows, 4)
        scale_area[page, offset] = fp8.power_of_two(exponent).view(torch.uint8)

    def read(self, cache: Tensor, slots: Tensor, page_rows: int) -> Tensor:
        """Keys [N, 128] in fp32, scale applied."""
        page, offset = _split(slots, page_rows)
        codes = _pages(cache, 0, page_rows, INDEX_DIM)[page, offset].contiguous()
        scale = _pages(cache, page_rows * INDEX_DIM, page_rows, 4)[page, offset].contiguous()
        return fp8.decode_e4m3(codes, self.dialect) * scale.view(torch.float32)


def read_table(rows: Rows, cache: Tensor, slots: Tensor, page_rows: int) -> tuple[Tensor, Tensor]:
    """Decode every row that `slots` names once.

    slots int [...], -1 for "none". Returns a table fp32 [U + 1, width] and an index int64 like `slots`
    into it; the last row of the table is zero and stands for "none", so that a masked product never meets
    uninitialised memory (0 x NaN is NaN).
    """
    unique, index = torch.unique(slots.clamp(min=-1), return_inverse=True)
    table = rows.read(cache, unique[unique >= 0], page_rows)
    table = torch.cat((table, table.new_zeros(1, rows.width)))
    none = len(table) - 1
    has_none = int(unique.numel() > 0 and bool(unique[0] < 0))
    return table, torch.where(slots < 0, none, index - has_none)
