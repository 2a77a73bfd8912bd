"""Every metadata body against its kernel said again as loops, and against the kernel's own signature.

The loops follow vLLM 0.32.0's Triton kernels: v1/attention/ops/metadata.py and
v1/attention/backends/mla/{compressor_utils,sparse_swa,indexer}.py. What a kernel leaves alone must keep the
SENTINEL here.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from rocm_patches.cpu import metadata
from tests.rocm_patches import independent, vllm_source

SENTINEL = 777
SEEDS = pytest.mark.parametrize("seed", range(6))


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def marked(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full(shape, SENTINEL, dtype=dtype)


@dataclass(frozen=True)
class Batch:
    """Requests of a step: tokens each brings, its length after the step, and its pages."""

    query: list[int]
    length: list[int]
    pages: Tensor  # int32 [requests, 12]

    @property
    def starts(self) -> list[int]:
        return [0, *accumulate(self.query)]

    @property
    def tokens(self) -> int:
        return sum(self.query)

    def position(self, request: int, i: int) -> int:
        return self.length[request] - self.query[request] + i


def random_batch(seed: int) -> Batch:
    """Seven requests: some with one token, some fresh, some continued, some empty, the last one too."""
    source = independent.generator(seed)

    def draw(high: int) -> int:
        return int(torch.randint(0, high, (1,), generator=source))

    query = [1, draw(300), 0, draw(9), 1, draw(150), 0]
    context = [draw(600), 0, 0, draw(300), 0, draw(600), 0]
    length = [q + c if q else 0 for q, c in zip(query, context, strict=True)]
    return Batch(query, length, torch.randperm(84, generator=source).view(7, 12).int())


# --- signatures -------------------------------------------------------------------------------------


def kernel_parameters(name: str) -> list[str]:
    """Parameter names of the kernel that a registry name stands for."""
    parts = name.split(".")
    in_class = parts[-2][0].isupper()
    tree = vllm_source.tree_of(".".join(parts[: -2 if in_class else -1]))
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    if not in_class:
        return [a.arg for a in functions[parts[-1]].args.args]
    (owner,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == parts[-2])
    for node in owner.body:
        if isinstance(node, ast.FunctionDef) and node.name == parts[-1]:
            return [a.arg for a in node.args.args]
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == parts[-1]:
            wrapped = ast.unparse(node.value).removeprefix("staticmethod(").removesuffix(")")
            return [a.arg for a in functions[wrapped].args.args]
    raise AssertionError(f"vLLM has no kernel {name}")


@pytest.mark.parametrize("name", metadata.KERNELS)
def test_a_body_has_its_kernels_parameters_so_that_the_dispatcher_forwards_by_name(name: str) -> None:
    ours = list(inspect.signature(metadata.KERNELS[name]).parameters)
    # This one is launched positionally, and with Triton's own `num_warps`.
    extra = ["num_warps"] if name.endswith("_token_request_mapping_kernel") else []
    assert ours == kernel_parameters(name) + extra


# --- bodies -----------------------------------------------------------------------------------------


@SEEDS
@pytest.mark.parametrize(("padding", "unmapped"), [(0, 0), (5, 0), (5, 3), (5, 9)])
def test_token_request_mapping(seed: int, padding: int, unmapped: int) -> None:
    """A token's request is the first that ends after it, past the end the last; 0 for unmapped tokens."""
    batch = random_batch(seed)
    tokens = batch.tokens + padding
    mapped = tokens - unmapped
    output = marked(tokens + 4)
    starts = int32([*batch.starts, 10**6])  # the buffer goes on after this batch
    metadata.token_request_mapping(starts, output, 7, mapped, tokens, num_warps=4)
    for token in range(tokens):
        owner = next((r for r in range(7) if batch.starts[r + 1] > token), 6)
        assert int(output[token]) == (owner if token < mapped else 0)
    assert output[tokens:].tolist() == [SENTINEL] * 4


@SEEDS
@pytest.mark.parametrize(("ratio", "page_rows"), [(4, 64), (128, 2), (4, 16)])
def test_compressed_slot_mapping(seed: int, ratio: int, page_rows: int) -> None:
    """The last token of each `ratio` gets the entry's slot, unless its own slot is padding; all others -1."""
    batch = random_batch(seed)
    source = independent.generator(100 + seed)
    own = torch.randint(0, 9999, (batch.tokens + 6,), generator=source)
    own[torch.rand(len(own), generator=source) < 0.2] = -1
    output = marked(batch.tokens + 6, dtype=torch.int64)
    metadata.compressed_slot_mapping(
        output,
        own,
        int32(batch.starts),
        int32(batch.length),
        batch.pages,
        batch.pages.stride(0),
        page_rows,
        1,
        1,
        COMPRESS_RATIO=ratio,
        PAD_ID=-1,
        TRITON_BLOCK_SIZE=1024,
    )
    written = 0
    for request in range(7):
        for i in range(batch.query[request]):
            token, position = batch.starts[request] + i, batch.position(request, i)
            expected = -1
            if (position + 1) % ratio == 0 and int(own[token]) != -1:
                page, offset = divmod(position // ratio, page_rows)
                expected = int(batch.pages[request, page]) * page_rows + offset
                written += 1
            assert int(output[token]) == expected
    assert output[batch.tokens :].tolist() == [SENTINEL] * 6
    assert written > 0


@SEEDS
@pytest.mark.parametrize("window", [1, 8, 128])
@pytest.mark.parametrize("replayed", [False, True])
def test_prefill_metadata(seed: int, window: int, replayed: bool) -> None:
    """Its own tokens and at most window - 1 of the context that is really there, per prefill request."""
    batch, decodes = random_batch(seed), 2
    replay = [int(replayed) * (length // 3) for length in batch.length]
    output = marked(9)
    metadata.prefill_metadata(
        output, int32(batch.length), int32(batch.starts), int32(replay), 5, decodes, window, BLOCK_SIZE=8
    )
    for i in range(5):
        request = decodes + i
        context = batch.length[request] - batch.query[request] - replay[request]
        assert int(output[i]) == batch.query[request] + min(max(context, 0), window - 1)
    assert output[5:].tolist() == [SENTINEL] * 4


def test_swa_indices_say_no_row_whatever_was_there() -> None:
    """Not the kernel's result: vLLM's CPU attention never reads these, and nobody may follow them."""
    indices, lens, unused = marked(5, 128), marked(5), torch.empty(0)
    metadata.swa_indices_and_lens(
        swa_indices_ptr=indices,
        swa_indices_stride=128,
        swa_lens_ptr=lens,
        window_size=128,
        index_width=128,
        left_visible_ptr=unused,
        right_visible_ptr=unused,
        query_start_loc_ptr=int32([0, 5]),
        seq_lens_ptr=int32([5]),
        token_to_req_indices_ptr=int32([0] * 5),
        is_valid_token_ptr=torch.ones(5, dtype=torch.bool),
        block_table_ptr=int32([3]).view(1, 1),
        block_table_stride=1,
        block_size=64,
        replay_start_ptr=int32([0]),
        token_offset=0,
        HAS_IMAGE=False,
        TRITON_BLOCK_SIZE=1024,
    )
    assert bool((indices == -1).all()) and bool((lens == 0).all())


@SEEDS
@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("part", [(0.0, 1.0), (0.0, 0.4), (0.3, 0.8), (0.6, 1.0), (0.5, 0.5)])
def test_prefill_chunk_metadata(seed: int, ratio: int, part: tuple[float, float]) -> None:
    """Inside the query slice: first row of the token's request, and that plus the entries it may see.

    Every compressed row names its request, whatever the slice.
    """
    batch = random_batch(seed)
    begin, end = (int(share * batch.tokens) for share in part)
    entries = [0, *accumulate(length // ratio for length in batch.length)]
    rows_from = [3 * e + 1 for e in entries]  # its own argument, so not the same numbers here
    to_seq, first, last = marked(entries[-1] + 3), marked(end - begin + 3), marked(end - begin + 3)
    metadata.prefill_chunk_metadata(
        int32(batch.starts),
        int32(batch.length),
        int32(entries),
        int32(rows_from),
        to_seq,
        first,
        last,
        begin,
        end,
        0,
        1,
        1,
        BLOCK_SIZE=1024,
        COMPRESS_RATIO=ratio,
    )
    seen = 0
    for request in range(7):
        for i in range(batch.query[request]):
            token = batch.starts[request] + i
            if begin <= token < end:
                visible = (batch.position(request, i) + 1) // ratio
                assert int(first[token - begin]) == rows_from[request]
                assert int(last[token - begin]) == rows_from[request] + visible
                seen += 1
        assert set(to_seq[entries[request] : entries[request + 1]].tolist()) <= {request}
    assert seen == end - begin
    for output, used in ((first, seen), (last, seen), (to_seq, entries[-1])):
        assert output[used:].tolist() == [SENTINEL] * 3


@pytest.mark.parametrize("per_request", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2])
def test_prepare_uniform_decode(per_request: int, rank: int) -> None:
    """One row per token: it sees itself and what came before; a padded request of length 0 sees nothing.

    The outputs are buffers for the largest batch: rows past this batch stay as they are.
    """
    lengths, pages = [10, per_request, 600, 0], torch.arange(40).view(4, 10).int()
    rows = 4 * per_request
    seq_lens = marked(rows + 5) if rank == 1 else marked(rows + 5, 1)
    table, ones = marked(rows + 5, 12), marked(rows + 5)
    metadata.prepare_uniform_decode(
        int32(lengths), seq_lens, pages, 10, table, 12, ones, per_request, BLOCK_SIZE=1024
    )
    for request, length in enumerate(lengths):
        for i in range(per_request):
            row = request * per_request + i
            assert int(seq_lens.flatten()[row]) == max(length - per_request + i + 1, 0)
            assert table[row, :10].tolist() == pages[request].tolist()
            assert int(ones[row]) == 1
    assert bool((seq_lens[rows:] == SENTINEL).all())
    assert bool((table[rows:] == SENTINEL).all()) and bool((ones[rows:] == SENTINEL).all())


def test_context_parallelism_is_refused() -> None:
    unused = int32([0, 0])
    with pytest.raises(NotImplementedError, match="context parallelism"):
        metadata.compressed_slot_mapping(unused, unused, unused, unused, unused, 1, 64, 2, 1, 4, -1, 1024)
    with pytest.raises(NotImplementedError, match="context parallelism"):
        metadata.prefill_chunk_metadata(
            unused, unused, unused, unused, unused, unused, unused, 0, 1, 0, 2, 1, 1, 4
        )
