"""vLLM's KV cache for DeepSeek-V4: bytes per block, blocks per request, and the figures that its log prints.

In: Dims and the limits of the engine. Out: counts. vLLM keeps one pool of blocks that hold a page of every
layer's cache; a request reserves whole blocks, so the pool is counted in blocks, never in bytes per token.
Every tensor-parallel rank holds the same cache: more ranks add no tokens.
Sources: vllm/v1/kv_cache_interface.py, vllm/v1/core/kv_cache_utils.py and vllm/models/deepseek_v4/attention.py
in https://github.com/vllm-project/vllm/tree/v0.33.0; both block sizes were checked against published logs
(https://github.com/Vercantez/deepseek-v4-flash-mi300x).
"""

from __future__ import annotations

import dataclasses

from dsv4_deploy.catalog import Dims, releases

TOKENS_PER_BLOCK = 256
ALIGNMENT = 576
"""Every page is padded to a multiple of a row's 576 data bytes."""

_ENTRY = 448 + 2 * 64 + 8
"""One cached key: 448 FP8 values, 64 rotated values in bf16, 7 scale bytes and one of padding."""

_INDEX_ENTRY = 128 + 4
"""One index key: 128 FP8 values and a float32 scale."""

_WINDOW_TOKENS = 64
_CSA_STATE_TOKENS, _HCA_STATE_TOKENS = 4, 8
# Tokens whose rows the compressors look back over, as vLLM declares their state's sliding windows.
_CSA_STATE_WINDOW, _HCA_STATE_WINDOW = 8, 128
_SWA_GROUPS = 2


@dataclasses.dataclass(frozen=True)
class Engine:
    """The engine's limits that decide how much a request reserves. `batches` is how many steps are in
    flight at once (`batches_in_flight`)."""

    max_model_len: int
    max_num_batched_tokens: int
    batches: int

    @property
    def tokens_in_flight(self) -> int:
        return self.max_num_batched_tokens * self.batches


def batches_in_flight(vllm: str, *, pp: int = 1, asynchronous: bool = True) -> int:
    """Steps that are scheduled before the first has come back."""
    doubled = asynchronous and releases().has("async_doubles_window", vllm)
    return pp + 1 if doubled else pp


def block_bytes(dims: Dims, vllm: str, draft_layers: int = 0) -> int:
    """Bytes of one block of the pool on one rank, all caches together."""
    csa, hca = dims.layers(4), dims.layers(128)
    window = _page(_WINDOW_TOKENS * _ENTRY)
    csa_page = _page(TOKENS_PER_BLOCK // 4 * _ENTRY)
    hca_page = _page(TOKENS_PER_BLOCK // 128 * _ENTRY)
    index_page = _page(TOKENS_PER_BLOCK // 4 * _INDEX_ENTRY)
    windows = -(-(dims.num_hidden_layers + draft_layers) // _SWA_GROUPS)
    if not releases().has("packed_kv_blocks", vllm):
        # Up to 0.25 a block had one slot per layer of the largest window group.
        return windows * window + csa * index_page + hca * hca_page
    csa_state = _page(_CSA_STATE_TOKENS * 4 * 4 * dims.head_dim)
    hca_state = _page(_HCA_STATE_TOKENS * 4 * 2 * dims.head_dim)
    index_state = _page(_CSA_STATE_TOKENS * 4 * 4 * dims.index_head_dim)
    return max(
        csa * (csa_page + index_page) + hca * hca_page,
        -(-dims.num_hidden_layers // _SWA_GROUPS) * window,
        csa * (csa_state + index_state),
        hca * hca_state,
    )


def blocks_per_request(dims: Dims, engine: Engine) -> int:
    """Blocks that vLLM reserves for one request of the full length, as its start-up check counts them."""
    length, flight = engine.max_model_len, engine.tokens_in_flight

    def windowed(window: int, tokens: int) -> int:
        return -(-min(window - 1 + flight, length) // tokens) + 1

    return (
        -(-length // TOKENS_PER_BLOCK)
        + _SWA_GROUPS * windowed(dims.sliding_window, _WINDOW_TOKENS)
        + (windowed(_CSA_STATE_WINDOW, _CSA_STATE_TOKENS) if dims.layers(4) else 0)
        + (windowed(_HCA_STATE_WINDOW, _HCA_STATE_TOKENS) if dims.layers(128) else 0)
    )


def steady_blocks(dims: Dims, tokens: int) -> int:
    """Blocks that a request of that many tokens holds while it decodes: its compressed entries, its window
    and the state of the compressors."""
    window = _SWA_GROUPS * (-(-dims.sliding_window // _WINDOW_TOKENS) + 1)
    csa = _CSA_STATE_WINDOW // _CSA_STATE_TOKENS + 1 if dims.layers(4) else 0
    hca = _HCA_STATE_WINDOW // _HCA_STATE_TOKENS + 1 if dims.layers(128) else 0
    return -(-tokens // TOKENS_PER_BLOCK) + window + csa + hca


def blocks(pool_bytes: float, block: int) -> int:
    """Blocks in the pool, those that vLLM reserves for itself included."""
    return max(int(pool_bytes // block), 0)


def logged_tokens(pool_blocks: int, per_request: int, max_model_len: int) -> int:
    """The number behind "GPU KV cache size" in vLLM's log: full-length requests that fit, in tokens. It is no
    capacity: a short max-model-len or large batches make it collapse."""
    return int(pool_blocks / per_request * max_model_len)


def _page(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
