"""A debugging aid: cache rows kept in fp32 beside vLLM's paged cache (`DSV4_CPU_KV=exact`).

With it the no-GPU mode has no KV quantisation, so that what is left of a difference to another
implementation is not the cache format. It costs 2 KiB per token and layer: make the pool small
(`--num-gpu-blocks-override`). Not for serving.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ExactRows:
    """`reference.kv_cache.Rows` over fp32 tables, one for each cache, found by the cache's address."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._tables: dict[int, Tensor] = {}

    def _table(self, cache: Tensor, page_rows: int) -> Tensor:
        key = cache.data_ptr()
        if key not in self._tables:
            self._tables[key] = torch.zeros(cache.shape[0] * page_rows, self.width)
        return self._tables[key]

    def write(self, cache: Tensor, slots: Tensor, rows: Tensor, page_rows: int) -> None:
        """Keep rows [N, width] under slots [N]; the bytes of `cache` stay as they are."""
        self._table(cache, page_rows)[slots] = rows.float()

    def read(self, cache: Tensor, slots: Tensor, page_rows: int) -> Tensor:
        """Rows fp32 [N, width]."""
        return self._table(cache, page_rows)[slots]
