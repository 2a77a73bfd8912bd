"""The references against float64: the arbiters of every kernel have to be right themselves, on this torch and this
device. In: a torch device. Out: measurements, one per operator, shape and dialect.

The shapes are a tiny one and those of V4-Flash and V4-Pro at TP4. An error is the largest absolute one over the largest
true value, unless the operator's name says "bytes": then it counts bytes that differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rocm_patches import fp8
from rocm_patches.reference import (
    attention,
    compressor,
    experts,
    indexer,
    linear,
    mhc,
    output,
    prologue,
    rope,
    router,
)
from rocm_patches.reference.kv_cache import AttentionRows, IndexerKeys
from rocm_patches.registry import Measurement
from rocm_patches.selftest import exact

# fp32 results of sums over some thousand products; results stored in bf16 (8 significant bits).
FP32, BF16 = 2e-5, 2.0**-8
EPS = 1e-6


class Draw:
    """Random inputs on one device, the same for the same seed."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(self.device, dtype)

    def bf16(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.normal(*shape, scale=scale, dtype=torch.bfloat16)

    def below(self, limit: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(limit, shape, generator=self.generator).to(self.device, dtype)

    def choice(self, count: int, out_of: int) -> Tensor:
        return torch.randperm(out_of, generator=self.generator)[:count].to(self.device)

    def rope(self, positions: int) -> Tensor:
        """fp32 [positions, 64]: cosines and sines of theta 10000."""
        angle = torch.arange(positions).double()[:, None] * 10000.0 ** (-torch.arange(32).double() / 32)
        return torch.cat((angle.cos(), angle.sin()), 1).float().to(self.device)


def error(got: Tensor, truth: Tensor) -> float:
    if got.shape != truth.shape:
        return float("inf")
    difference = (got.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-30)
    return float(difference)  # NaN stays NaN, which no tolerance admits


def measurements(device: torch.device) -> Iterator[Measurement]:
    """All of them. Dialect "-" where no FP8 is involved."""
    for dialect in (fp8.OCP, fp8.FNUZ):
        yield from formats(device, dialect)
        yield from caches(device, dialect)
        yield from index(device, dialect)
        yield from attend(device, dialect)
        yield from compress(device, dialect)
        yield from projections(device, dialect)
    yield from hyper_connections(device)
    yield from routing(device)
    yield from mlp(device)
    yield from rotation(device)


def formats(device: torch.device, dialect: fp8.Dialect) -> Iterator[Measurement]:
    codes = torch.arange(256, device=device, dtype=torch.uint8)
    truth, got = exact.e4m3_values(dialect.name, device), fp8.decode_e4m3(codes, dialect).double()
    unequal = int(((got != truth) & ~(got.isnan() & truth.isnan())).sum())
    yield Measurement("e4m3 decode, bytes", dialect.name, unequal, 0)
    x = Draw(device).normal(64, 4096) * torch.logspace(-6, 3, 64, device=device)[:, None]
    # The first block of each row peaks exactly where the scale changes, and reaches down to e4m3's subnormals.
    peak = dialect.limit * exact.power_of_two(torch.arange(64, device=device) // 2 - 27).float()[:, None]
    small = x[:, 1:128].clamp(-peak, peak) * torch.logspace(0, -6, 127, device=device)
    x[:, :128] = torch.cat((peak, small), 1)
    stored, exponent = fp8.quantise_ue8m0(x.bfloat16(), 128, dialect)
    back = fp8.dequantise_ue8m0(stored, exponent, dialect)
    unequal = int((back.double() != exact.quantised(x.bfloat16().double(), 128, dialect.name)).sum())
    yield Measurement("e4m3 quantisation, bytes", dialect.name, unequal, 0)


def caches(device: torch.device, dialect: fp8.Dialect) -> Iterator[Measurement]:
    """Query and key preparation, and the rows that come out of the pages again."""
    draw, table = Draw(device, 1), None
    for tokens, heads in ((3, 2), (64, 16)):
        q, kv, positions = draw.bf16(tokens, heads, 512), draw.bf16(tokens, 512), draw.below(4096, tokens)
        table = draw.rope(4096) if table is None else table
        truth = exact.rotated(exact.rms_norm(q.double(), EPS), positions, table)
        got = prologue.query(q, positions, table, heads, EPS)
        yield Measurement(f"query T{tokens} h{heads}", "-", error(got, truth), BF16)
        cache = torch.full((8, 64 * 584 + 96), 0x55, dtype=torch.uint8, device=device)
        slots, rows = draw.choice(tokens, 8 * 64), AttentionRows(dialect)
        prologue.insert_key(kv, positions, table, cache, slots, 64, rows)
        stored = exact.rotated(kv.double(), positions, table).float().bfloat16().double()
        truth = torch.cat((exact.quantised(stored[:, :448], 64, dialect.name), stored[:, 448:]), 1)
        yield Measurement(
            f"window cache T{tokens}", dialect.name, error(rows.read(cache, slots, 64), truth), BF16
        )


def index(device: torch.device, dialect: fp8.Dialect) -> Iterator[Measurement]:
    draw = Draw(device, 2)
    table = draw.rope(4096)
    for rows, heads, entries in ((2, 4, 70), (8, 64, 1000)):
        q, weights, positions = draw.bf16(rows, heads, 128), draw.normal(rows, heads), draw.below(4096, rows)
        codes, folded = indexer.quantise_query(q, positions, table, weights, 0.1, 0.2, dialect)
        turned = exact.rotated(q.double(), positions, table).float().bfloat16().double()
        keys, pages = draw.bf16(entries, 128), -(-entries // 64)
        cache = torch.full((pages, 64 * 132 + 32), 0x55, dtype=torch.uint8, device=device)
        IndexerKeys(dialect).write(cache, torch.arange(entries, device=device), keys, 64)
        lengths = torch.full((rows,), entries, device=device)
        page_table = torch.arange(pages, device=device).repeat(rows, 1)
        decoded = fp8.decode_e4m3(codes, dialect)
        got = indexer.paged_logits(
            decoded, folded, lengths, page_table, cache, 64, entries, IndexerKeys(dialect)
        )
        truth = exact.index_scores(
            exact.quantised(turned, 128, dialect.name), weights.double() * 0.02,
            exact.quantised(keys.double(), 128, dialect.name),
        )  # fmt: skip
        yield Measurement(f"indexer logits B{rows} N{entries}", dialect.name, error(got, truth), FP32)
        chosen = indexer.topk(got, lengths, 32).long().sort().values
        best = truth.topk(32).indices.sort().values
        lost = (truth.gather(1, best).sum(1) - truth.gather(1, chosen).sum(1)).abs().max()
        yield Measurement(f"indexer top-k N{entries}", dialect.name, float(lost / truth.abs().max()), FP32)


def attend(device: torch.device, dialect: fp8.Dialect) -> Iterator[Measurement]:
    draw = Draw(device, 3)
    for tokens, heads, window, kept in ((2, 2, 5, 3), (4, 16, 128, 512)):
        layout = AttentionRows(dialect)
        segments, values = [], []
        for count, pages in ((window, 6), (kept, 12)):
            rows = draw.bf16(count, 512)
            cache = torch.full((pages, 64 * 584), 0x55, dtype=torch.uint8, device=device)
            slots = draw.choice(count, pages * 64)
            layout.write(cache, slots, rows, 64)
            segments.append((cache, slots.repeat(tokens, 1), 64))
            stored = rows.double()
            values.append(torch.cat((exact.quantised(stored[:, :448], 64, dialect.name), stored[:, 448:]), 1))
        q, sink = draw.bf16(tokens, heads, 512), draw.normal(heads)
        got = attention.sparse_attention(q, segments[0], segments[1], sink, 512**-0.5, layout)
        rows = torch.cat(values)
        truth = torch.stack([exact.attention(one, rows, sink.double(), 512**-0.5) for one in q.double()])
        name = f"sparse attention h{heads} K{window}+{kept}"
        yield Measurement(name, dialect.name, error(got, truth), FP32)


def compress(device: torch.device, dialect: fp8.Dialect) -> Iterator[Measurement]:
    draw = Draw(device, 4)
    table = draw.rope(512)
    for ratio, page in ((4, 4), (128, 8)):
        tokens, width = 256, 512 * (2 if ratio == 4 else 1)
        kv, score, ape = draw.normal(tokens, width), draw.normal(tokens, width), draw.normal(ratio, width)
        positions = torch.arange(tokens, device=device)
        state = torch.full((tokens // page, page, 2 * width), float("nan"), device=device)
        compressor.save_state(kv, score, ape, positions, state, positions)
        windows, blocks = (2 if ratio == 4 else 1) * ratio, tokens // ratio
        ends = torch.arange(1, blocks + 1, device=device) * ratio
        slots = ends[:, None] - windows + torch.arange(windows, device=device)
        gain, cache = (
            draw.bf16(512, scale=0.1) + 1,
            torch.zeros(blocks, 64 * 584, dtype=torch.uint8, device=device),
        )
        where = torch.arange(blocks, device=device) * 64
        rows = AttentionRows(dialect)
        compressor.compress(
            state, slots.clamp(min=-1), ends - 1, where, gain, EPS, table, cache, 64, ratio, rows
        )
        values, gates = kv.double(), score.double() + ape.double()[positions % ratio]
        entries = []
        for block in range(blocks):
            now = slice(block * ratio, (block + 1) * ratio)
            if ratio == 128:
                entries.append(exact.pooled(values[None, now], gates[None, now]))
                continue
            before = slice((block - 1) * ratio, block * ratio) if block else slice(0, 0)
            entries.append(
                exact.pooled(
                    torch.cat((values[before, :512], values[now, 512:]))[None],
                    torch.cat((gates[before, :512], gates[now, 512:]))[None],
                )
            )
        normed = exact.rms_norm(torch.cat(entries), EPS, gain.double())
        turned = exact.rotated(normed, ends - ratio, table).float().bfloat16().double()
        truth = torch.cat((exact.quantised(turned[:, :448], 64, dialect.name), turned[:, 448:]), 1)
        # A value next to a rounding boundary may fall on its other side: one step of e4m3.
        yield Measurement(
            f"compressor 1:{ratio}", dialect.name, error(rows.read(cache, where, 64), truth), 2.0**-4
        )


def projections(device: torch.device, dialect: fp8.Dialect) -> Iterator[Measurement]:
    draw = Draw(device, 5)
    grid = exact.e4m3_values(dialect.name, device)
    for m, n, k in ((3, 256, 128), (16, 1536, 4096)):
        x, codes = draw.bf16(m, k), draw.below(0x78, n, k, dtype=torch.uint8)
        codes = codes | (draw.below(2, n, k, dtype=torch.uint8) << 7)
        codes = codes.masked_fill(codes == 0x80, 0)
        scale = exact.power_of_two(draw.below(8, n // 128, k // 128) - 12)
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        truth = x.double() @ (grid[codes.long()] * wide).T
        got = linear.block_scaled_linear(x, codes.view(dialect.dtype), scale.float(), dialect=dialect)
        yield Measurement(f"block-scaled linear {m}x{n}x{k}", dialect.name, error(got, truth), FP32)


def hyper_connections(device: torch.device) -> Iterator[Measurement]:
    draw = Draw(device, 6)
    for tokens, hidden in ((3, 256), (32, 4096), (16, 7168)):
        x, fn = draw.bf16(tokens, 4, hidden), draw.normal(24, 4 * hidden, scale=(4 * hidden) ** -0.5)
        scale, base = draw.normal(3).abs() + 0.5, draw.normal(24)
        truth = exact.mhc_pre(x.double(), fn.double(), scale.double(), base.double(), EPS)
        got = mhc.pre(x, fn, scale, base, 20, EPS, EPS)
        tolerances = (BF16, FP32, FP32)
        worst = max(error(a, b) / t for a, b, t in zip(got, truth, tolerances, strict=True))
        yield Measurement(f"mHC pre H{hidden} (of its tolerances)", "-", worst, 1)
        layer = draw.bf16(tokens, hidden)
        mixed = mhc.post(layer, x, got[1], got[2])
        truth_post = exact.mhc_post(layer.double(), x.double(), got[1].double(), got[2].double())
        yield Measurement(f"mHC post H{hidden}", "-", error(mixed, truth_post), BF16)
        folded = mhc.head(x, fn[:4], scale[:1], base[:4], EPS, EPS)
        mix = exact.mixes(x.double(), fn[:4].double(), EPS) * scale[0].double() + base[:4].double()
        truth_head = torch.einsum("ti,tih->th", 1 / (1 + (-mix).exp()) + EPS, x.double())
        yield Measurement(f"mHC head H{hidden}", "-", error(folded, truth_head), BF16)


def routing(device: torch.device) -> Iterator[Measurement]:
    draw = Draw(device, 7)
    for tokens, count in ((5, 16), (256, 256), (64, 384)):
        gate, bias = draw.normal(tokens, count, scale=3), draw.normal(count, scale=0.1)
        score = exact.expert_scores(gate.double())
        weights, ids = router.biased_topk(gate, bias, 6, scale=1.5)
        chosen, best = (score + bias.double()).gather(1, ids.long()), (score + bias.double()).topk(6).values
        yield Measurement(
            f"router choice E{count}", "-", error(chosen.sort().values, best.sort().values), FP32
        )
        truth = score.gather(1, ids.long())
        truth = truth / truth.sum(-1, keepdim=True) * 1.5
        yield Measurement(f"router weights E{count}", "-", error(weights, truth), FP32)
        fixed, same = router.hash_route(gate, ids, 1.5)
        yield Measurement(
            f"router by table E{count}", "-", error(fixed, truth) + float((same != ids).any()), FP32
        )


def mlp(device: torch.device) -> Iterator[Measurement]:
    """FP4 experts; inputs so large that the clamp at 10 is met."""
    draw = Draw(device, 8)
    for tokens, hidden, inner, count in ((5, 128, 64, 8), (4, 4096, 512, 6)):
        x, decoded = draw.bf16(tokens, hidden, scale=4), []
        for rows, columns in ((2 * inner, hidden), (hidden, inner)):
            codes = draw.below(16, count, rows, columns, dtype=torch.uint8)
            scale = draw.below(4, count, rows, columns // 32, dtype=torch.uint8) + 119
            packed = codes[..., ::2] | (codes[..., 1::2] << 4)
            value, truth = fp8.dequantise_mxfp4(packed, scale), exact.mxfp4(codes, scale)
            yield Measurement(
                f"FP4 decode {rows}x{columns}, bytes", "e2m1", int((value.double() != truth).sum()), 0
            )
            decoded.append((value, truth))
        weights = draw.normal(tokens, 6).softmax(-1)
        ids = torch.stack([draw.choice(6, count) for _ in range(tokens)])
        got = experts.routed_experts(x, decoded[0][0], decoded[1][0], weights, ids, 10.0)
        truth = exact.experts(x.double(), decoded[0][1], decoded[1][1], weights.double(), ids, 10.0)
        yield Measurement(f"experts T{tokens} H{hidden} I{inner}", "e2m1", error(got, truth), BF16)


def rotation(device: torch.device) -> Iterator[Measurement]:
    draw = Draw(device, 9)
    table = draw.rope(4096)
    for tokens, heads in ((3, 2), (64, 16)):
        x, positions = draw.bf16(tokens, heads, 512), draw.below(4096, tokens)
        for inverse in (False, True):
            got = rope.rotate(x, positions, table, inverse=inverse)
            truth = exact.rotated(x.double(), positions, table, inverse=inverse)
            yield Measurement(f"{'inverse ' * inverse}rotation T{tokens}", "-", error(got, truth), FP32)
        o, weight = draw.bf16(4, tokens, 1024), draw.bf16(4, 128, 1024)
        truth = torch.einsum("gtk,grk->gtr", o.double(), weight.double())
        yield Measurement(
            f"grouped output T{tokens}", "-", error(output.grouped_matmul(o, weight), truth), FP32
        )
