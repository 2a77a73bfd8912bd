"""Torch bodies for the attention-metadata kernels that vLLM has in Triton only.

vLLM 0.32.0 runs without Triton on the CPU; `vllm.triton_utils.dispatcher.register_kernels` lets a platform
supply the body of a named kernel. Each function here has its kernel's parameter names and order, because the
dispatcher forwards by name only then; outputs are written in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _requests(starts: Tensor, tokens: Tensor) -> Tensor:
    """Index of the request that owns each token; `starts` int [R + 1]. Tokens past the end: the last."""
    owner = torch.searchsorted(starts[1:].contiguous().long(), tokens.long(), right=True)
    return owner.clamp(max=starts.shape[0] - 2)


def token_request_mapping(
    query_start_loc: Tensor,
    output: Tensor,
    num_reqs: int,
    num_mapped: int,
    num_tokens: int,
    num_warps: int = 0,
) -> None:
    token = torch.arange(num_tokens, device=output.device)
    owner = _requests(query_start_loc[: num_reqs + 1], token)
    output[:num_tokens] = torch.where(token < num_mapped, owner, 0).to(output.dtype)


def compressed_slot_mapping(
    compressed_slot_mapping_ptr: Tensor,
    slot_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    seq_lens_ptr: Tensor,
    block_table_ptr: Tensor,
    block_table_stride: int,
    block_size: int,
    dcp_world_size: int,
    cp_interleave: int,
    COMPRESS_RATIO: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    if dcp_world_size != 1:
        raise NotImplementedError("the no-GPU mode has no decode context parallelism")
    requests = block_table_ptr.shape[0]
    starts = query_start_loc_ptr[: requests + 1].long()
    tokens = min(int(starts[-1]), compressed_slot_mapping_ptr.shape[0], slot_mapping_ptr.shape[0])
    token = torch.arange(tokens, device=starts.device)
    owner = _requests(starts, token)
    lengths = seq_lens_ptr[:requests].long()
    position = lengths[owner] - starts[owner + 1] + token
    due = ((position + 1) % COMPRESS_RATIO == 0) & (slot_mapping_ptr[:tokens] != PAD_ID) & (position >= 0)
    entry = torch.div(position.clamp(min=0), COMPRESS_RATIO, rounding_mode="floor")
    page = torch.div(entry, block_size, rounding_mode="floor").clamp(max=block_table_ptr.shape[1] - 1)
    slot = block_table_ptr[owner, page].long() * block_size + entry % block_size
    compressed_slot_mapping_ptr[:tokens] = torch.where(due, slot, PAD_ID)


def prefill_metadata(
    prefill_gather_lens_ptr: Tensor,
    seq_lens_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    replay_start_ptr: Tensor,
    num_prefills: int,
    num_decodes: int,
    window_size: int,
    BLOCK_SIZE: int,
) -> None:
    here = slice(num_decodes, num_decodes + num_prefills)
    starts = query_start_loc_ptr[num_decodes : num_decodes + num_prefills + 1]
    query = starts.diff()
    prefix = (seq_lens_ptr[here] - query - replay_start_ptr[here]).clamp(min=0)
    prefill_gather_lens_ptr[:num_prefills] = query + prefix.clamp(max=window_size - 1)


def swa_indices_and_lens(
    swa_indices_ptr: Tensor,
    swa_indices_stride: int,
    swa_lens_ptr: Tensor,
    window_size: int,
    index_width: int,
    left_visible_ptr: Tensor,
    right_visible_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    seq_lens_ptr: Tensor,
    token_to_req_indices_ptr: Tensor,
    is_valid_token_ptr: Tensor,
    block_table_ptr: Tensor,
    block_table_stride: int,
    block_size: int,
    replay_start_ptr: Tensor,
    token_offset: int,
    HAS_IMAGE: bool,
    TRITON_BLOCK_SIZE: int,
) -> None:
    # vLLM's CPU attention derives the window from the positions and never reads these two; "no row" is
    # the safe content for whoever would.
    swa_indices_ptr.fill_(-1)
    swa_lens_ptr.fill_(0)


def prefill_chunk_metadata(
    query_start_loc_ptr: Tensor,
    uncompressed_seq_lens_ptr: Tensor,
    cu_compressed_seq_lens_ptr: Tensor,
    row_start_cu_compressed_seq_lens_ptr: Tensor,
    token_to_seq_ptr: Tensor,
    cu_compressed_seq_len_ks_ptr: Tensor,
    cu_compressed_seq_len_ke_ptr: Tensor,
    query_slice_start: int,
    query_slice_stop: int,
    DCP_RANK: int,
    DCP_WORLD: int,
    DCP_INTERLEAVE: int,
    BLOCK_SIZE: int,
    COMPRESS_RATIO: int,
) -> None:
    if DCP_WORLD > 1:
        raise NotImplementedError("the no-GPU mode has no decode context parallelism")
    starts = query_start_loc_ptr.long()
    token = torch.arange(query_slice_start, min(query_slice_stop, int(starts[-1])), device=starts.device)
    owner = _requests(starts, token)
    position = uncompressed_seq_lens_ptr.long()[owner] - starts[owner + 1] + token
    first = row_start_cu_compressed_seq_lens_ptr[owner]
    entries = torch.div(position + 1, COMPRESS_RATIO, rounding_mode="floor")
    cu_compressed_seq_len_ks_ptr[: token.numel()] = first
    cu_compressed_seq_len_ke_ptr[: token.numel()] = (first + entries).to(first.dtype)
    requests = starts.shape[0] - 1
    per_request = cu_compressed_seq_lens_ptr[: requests + 1].diff().long()
    rows = torch.repeat_interleave(torch.arange(requests, device=starts.device), per_request)
    token_to_seq_ptr[: rows.numel()] = rows.to(token_to_seq_ptr.dtype)


def prepare_uniform_decode(
    seq_lens_ptr: Tensor,
    decode_seq_lens_ptr: Tensor,
    block_table_ptr: Tensor,
    block_table_stride: int,
    expanded_block_table_ptr: Tensor,
    expanded_bt_stride: int,
    decode_lens_ptr: Tensor,
    max_decode_len: int,
    BLOCK_SIZE: int,
) -> None:
    # The launch grid says how many rows there are, and a body does not see it: the outputs are buffers for
    # the largest batch, the lengths are those of this one.
    rows = seq_lens_ptr.shape[0] * max_decode_len
    row = torch.arange(rows, device=seq_lens_ptr.device)
    request = torch.div(row, max_decode_len, rounding_mode="floor")
    length = seq_lens_ptr[request] - max_decode_len + row % max_decode_len + 1
    decode_seq_lens_ptr.view(-1)[:rows] = length.clamp(min=0)
    width = min(expanded_block_table_ptr.shape[1], block_table_ptr.shape[1])
    expanded_block_table_ptr[:rows, :width] = block_table_ptr[request, :width]
    decode_lens_ptr[:rows] = 1


KERNELS: dict[str, Callable[..., Any]] = {
    "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": token_request_mapping,
    "vllm.v1.attention.backends.mla.compressor_utils.CompressedSlotMappingKernel.kernel": (
        compressed_slot_mapping
    ),
    "vllm.v1.attention.backends.mla.sparse_swa.ComputePrefillMetadataKernel.kernel": prefill_metadata,
    "vllm.v1.attention.backends.mla.sparse_swa.ComputeSWAIndicesAndLensKernel.kernel": swa_indices_and_lens,
    "vllm.v1.attention.backends.mla.indexer.BuildPrefillChunkMetadataKernel.kernel": prefill_chunk_metadata,
    "vllm.v1.attention.backends.mla.indexer.PrepareUniformDecodeKernel.kernel": prepare_uniform_decode,
}
