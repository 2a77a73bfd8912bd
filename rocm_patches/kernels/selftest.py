"""Every kernel against float64 on random inputs. In: an operator, a case, a device. Out: findings, one per output.

The same checks run in Triton's interpreter (`make test`), on a GPU (bench/kernels.py) and wherever an operator
wants to know his own chip. Formulas are written out again in float64 from the published definitions, with the
published storage types between operators; buffers are poisoned before each run.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rocm_patches import fp8
from rocm_patches.kernels import compressor, mhc, output, prologue, router
from rocm_patches.kernels.launch import poison

# Relative errors by the Frobenius norm, against float64 rounded once to the output's type.
# The mixing product of mHC keeps 17 bits of each weight.
FP32, BF16, FP8 = 1e-4, 2e-3, 3e-3


@dataclass(frozen=True)
class Finding:
    """One output of one case: its error and the largest error allowed (0: every byte must be equal)."""

    operator: str
    case: str
    output: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # NaN is not


def relative(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|, expected float64 rounded to got's own type first; infinite where something is not
    finite; 0 for empty tensors."""
    if got.dtype == torch.bfloat16:
        expected = expected.bfloat16()
    if got.shape != expected.shape:
        return float("inf")
    if got.numel() == 0:
        return 0.0
    got, expected = got.double(), expected.double()
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))


def unequal(got: Tensor, expected: Tensor) -> float:
    """How many elements differ; infinite for another shape."""
    return float((got != expected).sum()) if got.shape == expected.shape else float("inf")


class Draw:
    """Random tensors of one case, reproducible by its seed."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return (drawn * scale).to(dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device) * (high - low) + low

    def integer(self, *shape: int, below: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(below, shape, generator=self.generator, device=self.device, dtype=dtype)


# --- hyper-connections ------------------------------------------------------------------------------


def _mixes64(x: Tensor, fn: Tensor, eps: float) -> Tensor:
    f = x.double().flatten(1)
    return (f @ fn.double().T) * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps)


def sinkhorn64(logits: Tensor, iterations: int, eps: float) -> Tensor:
    c = logits.double().softmax(-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def mhc_seam(
    device: torch.device,
    seed: int,
    *,
    tokens: int,
    hidden: int,
    after_layer: bool = True,
    head: bool = False,
    norm: bool = True,
    quantise: bool = False,
    tile: mhc.Tiling | None = None,
    sharpness: float = 1.0,
) -> list[Finding]:
    """One seam: [post,] pre [, norm [, quantisation]], or the head. `sharpness` scales the Sinkhorn logits."""
    draw, eps = Draw(device, seed), 1e-6
    m = 4 if head else 24
    x = draw.normal(tokens, 4, hidden, dtype=torch.bfloat16)
    fn = draw.normal(m, 4 * hidden, scale=(4 * hidden) ** -0.5)
    scale = draw.uniform(1 if head else 3, low=0.5, high=1.5)
    base = draw.normal(m, scale=0.5)
    if not head:
        scale[2] *= sharpness
    weight = draw.uniform(hidden, low=0.5, high=1.5).bfloat16() if norm else None
    before: dict[str, Tensor] = {}
    if after_layer:
        before = {
            "layer_output": draw.normal(tokens, hidden, dtype=torch.bfloat16),
            "post": draw.uniform(tokens, 4, high=2.0),
            "comb": sinkhorn64(draw.normal(tokens, 4, 4), 20, eps).float(),
        }
    mixing = mhc.prepare(fn, scale, base)
    with poison():
        if head and not quantise:
            empty = x.new_empty(0)
            out = mhc.Seam(x, mhc.head(x, mixing, norm_weight=weight, tile=tile), empty, empty, empty, empty)
        else:
            out = mhc.seam(x, mixing, **before, norm_weight=weight, quantise=quantise, tile=tile)

    case = f"T{tokens} H{hidden}{' head' if head else ''}{' post' if after_layer else ''}"
    case += f"{' norm' if norm else ''}{' fp8' if quantise else ''} sharpness {sharpness:g} seed {seed}"
    found: list[Finding] = []

    def add(output: str, error: float, limit: float) -> None:
        found.append(Finding("mhc", case, output, error, limit))

    streams = x.double()
    if after_layer:
        streams = torch.einsum("tij,tih->tjh", before["comb"].double(), streams)
        streams += before["post"].double().unsqueeze(-1) * before["layer_output"].double().unsqueeze(1)
        add("streams", relative(out.streams, streams), BF16)
        streams = out.streams.double()  # what the kernel rounded is what pre is defined on
    mix = _mixes64(streams, fn, eps)
    scales, bases = scale.double(), base.double()
    pre = torch.sigmoid(mix[:, :4] * scales[0] + bases[:4]) + eps
    y = torch.einsum("ti,tih->th", pre, streams)
    if weight is not None:
        y = y.bfloat16().double()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.double()
    # With the norm there are two roundings: y's own before it, which may fall on the other side of a tie.
    add("y", relative(out.y, y), BF16)
    if not head:
        add("post", relative(out.post, 2 * torch.sigmoid(mix[:, 4:8] * scales[1] + bases[4:8])), FP32)
        logits = (mix[:, 8:] * scales[2] + bases[8:]).view(-1, 4, 4)
        comb = sinkhorn64(logits, 20, eps)
        add("comb", relative(out.comb, comb), FP32 * max(1.0, sharpness))
        for axis, name in ((-1, "rows"), (-2, "columns")):
            converged = (comb.sum(axis) - 1).abs() <= 1e-4 / 2
            off = (out.comb.double().sum(axis) - 1).abs()[converged]
            add(f"sum of {name}", float(off.max()) if off.numel() else 0.0, 1e-4)
    if quantise:
        codes, exponent = fp8.quantise_ue8m0(out.y, mhc.GROUP, fp8.FNUZ)
        add("codes", unequal(out.codes, codes), 0)
        add("scales", unequal(out.scales, fp8.power_of_two(exponent)), 0)
    if mixing.arrived.any():
        add("counters", float("inf"), 0)
    return found


def mhc_post(device: torch.device, seed: int, *, tokens: int, hidden: int) -> list[Finding]:
    """Post alone."""
    draw = Draw(device, seed)
    x, o = (
        draw.normal(tokens, 4, hidden, dtype=torch.bfloat16),
        draw.normal(tokens, hidden, dtype=torch.bfloat16),
    )
    post, comb = draw.uniform(tokens, 4, high=2.0), draw.uniform(tokens, 4, 4)
    with poison():
        out = mhc.post(o, x, post, comb)
    expected = torch.einsum("tij,tih->tjh", comb.double(), x.double())
    expected += post.double().unsqueeze(-1) * o.double().unsqueeze(1)
    return [
        Finding(
            "mhc", f"post alone T{tokens} H{hidden} seed {seed}", "streams", relative(out, expected), BF16
        )
    ]


def mhc_cases(count: int, seed: int) -> Iterator[Callable[[torch.device], list[Finding]]]:
    """Random seams, with the token counts that break tilings."""
    rng = random.Random(seed)  # noqa: S311 (test data)
    edges = [0, 1, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 127, 128, 129, 257, 4097]
    for i in range(count):
        case: dict[str, Any] = {
            "tokens": edges[i % len(edges)] if i < 3 * len(edges) else rng.randint(1, 600),
            "hidden": rng.choice([64, 192, 1280, 4096, 4096, 5120, 7168, 7168]),
            "head": rng.random() < 0.25,
            "norm": rng.random() < 0.7,
        }
        case["after_layer"] = not case["head"] and rng.random() < 0.75
        case["quantise"] = case["norm"] and case["hidden"] % 128 == 0 and rng.random() < 0.7
        case["sharpness"] = rng.choice([1.0, 1.0, 4.0, 20.0])
        yield functools.partial(mhc_seam, seed=seed + i, **case)
        if i % 4 == 0:
            yield functools.partial(mhc_post, seed=seed + i, tokens=case["tokens"], hidden=case["hidden"])


# --- output projection ------------------------------------------------------------------------------


def rotate64(x: Tensor, positions: Tensor, table: Tensor, *, inverse: bool = False) -> Tensor:
    """RoPE on the last 64 of [T, ..., d] in float64."""
    x = x.double().clone()
    cos, sin = table[positions.long()].double().chunk(2, -1)
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (32,)
    cos, sin = cos.view(shape), (-sin if inverse else sin).view(shape)
    a, b = x[..., -64::2].clone(), x[..., -63::2].clone()
    x[..., -64::2], x[..., -63::2] = a * cos - b * sin, b * cos + a * sin
    return x


def rope_table(device: torch.device, positions: int) -> Tensor:
    """The window layers' table, fp32 [positions, 64]."""
    frequency = 10000.0 ** (-torch.arange(32, device=device, dtype=torch.float64) / 32)
    angle = torch.arange(positions, device=device, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), -1).float()


def projection(
    device: torch.device,
    seed: int,
    *,
    tokens: int,
    groups: int,
    heads_per_group: int = 8,
    rank: int = 1024,
    rotated: bool = False,
    spread: float = 1.0,
    tile: output.Tiling | None = None,
) -> list[Finding]:
    """FP8 output projection against float64 on the same quantised operands. `spread` widens the activations' range."""
    draw = Draw(device, seed)
    heads, depth = groups * heads_per_group, heads_per_group * 512
    o = draw.normal(tokens, heads, 512) * torch.exp(spread * draw.normal(tokens, heads, 1))
    o = o.bfloat16()
    positions, table = draw.integer(tokens, below=4096), rope_table(device, 4096)
    weight, scale = fp8.quantise_block_weight(draw.normal(groups * rank, depth, scale=depth**-0.5))
    prepared = output.prepare(weight, scale, groups)
    with poison():
        z = output.project(o, prepared, positions, table, rotated=rotated, tile=tile)
    x = o.double() if rotated else rotate64(o, positions, table, inverse=True)
    x = fp8.dequantise_ue8m0(*fp8.quantise_ue8m0(x.float(), 128, fp8.FNUZ), fp8.FNUZ).double()
    w = fp8.dequantise_block_weight(weight, scale).double().view(groups, rank, depth)
    expected = torch.einsum("tgk,grk->tgr", x.view(tokens, groups, depth), w)
    case = (
        f"T{tokens} G{groups} K{depth} R{rank}{' rotated' if rotated else ''} spread {spread:g} seed {seed}"
    )
    found = [Finding("output", case, "z", relative(z, expected), FP8)]
    if prepared.arrived.any():
        found.append(Finding("output", case, "counters", float("inf"), 0))
    return found


def projection_cases(count: int, seed: int) -> Iterator[Callable[[torch.device], list[Finding]]]:
    """Random projections; the last heads of a rank, odd ranks, and token counts around every tile."""
    rng = random.Random(seed)  # noqa: S311 (test data)
    edges = [0, 1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 1025, 4097]
    for i in range(count):
        case: dict[str, Any] = {
            "tokens": edges[i % len(edges)] if i < 2 * len(edges) else rng.randint(1, 400),
            "groups": rng.choice([1, 2, 4, 8]),
            "heads_per_group": rng.choice([8, 8, 8, 1, 3]),
            "rank": rng.choice([1024, 1024, 128, 384]),
            "rotated": rng.random() < 0.3,
            "spread": rng.choice([0.0, 1.0, 3.0]),
        }
        yield functools.partial(projection, seed=seed + i, **case)


# --- caches -----------------------------------------------------------------------------------------

UNTOUCHED = 0x55


def cache_pages(device: torch.device, pages: int, page_rows: int, row_bytes: int, padding: int) -> Tensor:
    """A cache full of a pattern, its pages a strided view as when layers share an allocation."""
    whole = torch.full((pages, page_rows * row_bytes + padding), UNTOUCHED, dtype=torch.uint8, device=device)
    return whole[:, : page_rows * row_bytes]


def attention_bytes(cache: Tensor, slots: Tensor, page_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [n, 448], rotated values bf16 [n, 64] and scale bytes [n, 8] of rows."""
    page, offset = slots // page_rows, slots % page_rows
    data = cache[:, : page_rows * 576].unflatten(1, (page_rows, 576))[page, offset]
    scales = cache[:, page_rows * 576 : page_rows * 584].unflatten(1, (page_rows, 8))[page, offset]
    return data[:, :448], data[:, 448:].contiguous().view(torch.bfloat16), scales


def key_bytes(cache: Tensor, slots: Tensor, page_rows: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [n, 128] and fp32 scales [n] of indexer keys."""
    page, offset = slots // page_rows, slots % page_rows
    codes = cache[:, : page_rows * 128].unflatten(1, (page_rows, 128))[page, offset]
    scales = cache[:, page_rows * 128 : page_rows * 132].unflatten(1, (page_rows, 4))[page, offset]
    return codes, scales.contiguous().view(torch.float32).squeeze(-1)


def written(
    operator: str, case: str, cache: Tensor, slots: Tensor, page_rows: int, dialect: fp8.Dialect, rows: Tensor
) -> list[Finding]:
    """Findings on cache rows: what a reader gets against float64 `rows` [n, d], no NaN byte, nothing else touched."""
    attention = rows.shape[1] == 512
    rounded = rows.float().bfloat16()
    if attention:
        codes, turned, scales = attention_bytes(cache, slots, page_rows)
        exponent = scales[:, :7].int() - fp8.E8M0_BIAS
        expected = fp8.dequantise_ue8m0(*fp8.quantise_ue8m0(rounded[:, :448], 64, dialect), dialect)
        got = fp8.dequantise_ue8m0(codes.contiguous(), exponent, dialect)
        found = [
            Finding(operator, case, "rotated part", relative(turned, rows[:, 448:]), BF16),
            Finding(operator, case, "scale padding", float(scales[:, 7].int().sum()), 0),
        ]
        row_bytes = 576
    else:
        codes, scale = key_bytes(cache, slots, page_rows)
        expected = fp8.dequantise_ue8m0(*fp8.quantise_ue8m0(rounded, 128, dialect), dialect)
        got = fp8.decode_e4m3(codes.contiguous(), dialect) * scale[:, None]
        found, row_bytes = [], 128
    # One value in some hundred lands on the other side of a rounding step: fp32 against float64 before bf16.
    found.append(Finding(operator, case, "codes", relative(got, expected), FP8))
    found.append(Finding(operator, case, "0x80 bytes", float((codes == 0x80).sum()), 0))
    rest = torch.ones(cache.shape[0], page_rows, dtype=torch.bool, device=cache.device)
    rest[slots // page_rows, slots % page_rows] = False
    data = cache[:, : page_rows * row_bytes].unflatten(1, (page_rows, row_bytes))[rest]
    found.append(Finding(operator, case, "other rows", float((data != UNTOUCHED).sum()), 0))
    return found


# --- prologue ---------------------------------------------------------------------------------------


def qkv(
    device: torch.device,
    seed: int,
    *,
    tokens: int,
    heads: int,
    normed: bool = False,
    dialect: fp8.Dialect = fp8.FNUZ,
    page_rows: int = 64,
    amplitude: float = 1.0,
) -> list[Finding]:
    """Query and key preparation. `normed`: the key comes with its norm done."""
    draw, eps = Draw(device, seed), 1e-6
    q = draw.normal(tokens, heads, 512, scale=amplitude, dtype=torch.bfloat16)
    kv = draw.normal(tokens, 512, scale=amplitude, dtype=torch.bfloat16)
    gain = None if normed else draw.uniform(512, low=0.5, high=1.5).bfloat16()
    positions, table = draw.integer(tokens, below=4096), rope_table(device, 4096)
    pages = max(2, 2 * tokens // page_rows + 1)
    cache = cache_pages(device, pages, page_rows, 584, 64)
    slots = torch.randperm(pages * page_rows, generator=draw.generator, device=device)[:tokens]
    slots = slots.masked_fill(draw.uniform(tokens) < 0.2, -1)
    with poison():
        out = prologue.prologue(
            q, kv, gain, positions, table, cache, slots, page_rows, eps=eps, dialect=dialect
        )
    case = f"T{tokens} h{heads}{' normed' if normed else ''} {dialect.name} page {page_rows} x{amplitude:g} seed {seed}"
    x = q.double()
    x = rotate64(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), positions, table)
    found = [Finding("prologue", case, "q", relative(out, x), BF16)]
    k = kv.double()
    if gain is not None:
        k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + eps) * gain.double()
    live = slots >= 0
    rows = rotate64(k, positions, table)[live]
    found += written("prologue", case, cache, slots[live], page_rows, dialect, rows)
    if normed:  # nothing is computed on these columns: bytes must agree, but for the negative zero
        codes, _, scales = attention_bytes(cache, slots[live], page_rows)
        expected, exponent = fp8.quantise_ue8m0(kv[live][:, :448], 64, dialect)
        found.append(
            Finding("prologue", case, "bytes", unequal(codes, expected.masked_fill(expected == 0x80, 0)), 0)
        )
        found.append(
            Finding("prologue", case, "scale bytes", unequal(scales[:, :7].int() - 127, exponent), 0)
        )
    return found


def qkv_cases(count: int, seed: int) -> Iterator[Callable[[torch.device], list[Finding]]]:
    rng = random.Random(seed)  # noqa: S311 (test data)
    edges = [0, 1, 3, 63, 64, 65, 127, 128, 129, 4097]
    for i in range(count):
        case: dict[str, Any] = {
            "tokens": edges[i % len(edges)] if i < 2 * len(edges) else rng.randint(1, 300),
            "heads": rng.choice([1, 6, 8, 16, 32, 64, 128]),
            "normed": rng.random() < 0.4,
            "dialect": rng.choice([fp8.OCP, fp8.FNUZ]),
            "page_rows": rng.choice([64, 2, 16]),
            "amplitude": rng.choice([1.0, 1e-3, 1e3]),
        }
        if case["tokens"] > 2000:
            case["heads"] = 16
        yield functools.partial(qkv, seed=seed + i, **case)


# --- compressor -------------------------------------------------------------------------------------


def compression(
    device: torch.device,
    seed: int,
    *,
    lengths: list[tuple[int, int]],
    ratio: int,
    dim: int = 512,
    dialect: fp8.Dialect = fp8.OCP,
    padding: int = 0,
    page_rows: int = 64,
) -> list[Finding]:
    """A step of several requests, each (tokens before it, tokens in it); `padding` tokens without a slot follow, as in
    a captured graph. State rows that nobody may read hold NaN."""
    draw, eps = Draw(device, seed), 1e-6
    overlap = ratio == 4
    width, window = (2 if overlap else 1) * dim, (2 if overlap else 1) * ratio
    state_rows = 4 if overlap else 8
    ape, gain = draw.normal(ratio, width), draw.uniform(dim, low=0.5, high=1.5).bfloat16()
    longest = max((before + now for before, now in lengths), default=0)
    table = rope_table(device, longest + ratio + 1)
    pages_each = longest // state_rows + 1
    order = torch.randperm(len(lengths) * pages_each + 1, generator=draw.generator, device=device)[1:]
    block_table = order.view(len(lengths), pages_each).int()
    state = torch.full((len(lengths) * pages_each + 1, state_rows, 2 * width), float("nan"), device=device)
    scores, positions, requests, slots, entries, expected = [], [], [], [], [], []
    free = iter(torch.randperm(1 << 12, generator=torch.Generator().manual_seed(seed)).tolist())
    for r, (before, now) in enumerate(lengths):
        history = draw.normal(before + now, 2 * width)
        biased = history.clone()
        where = torch.arange(before + now, device=device)
        biased[:, width:] += ape[where % ratio]
        page, offset = block_table[r].long()[where // state_rows], where % state_rows
        needed = where[max(0, before - window + 1) : before]
        state[page[needed], offset[needed]] = biased[needed]
        for p in range(before, before + now):
            scores.append(history[p])
            positions.append(p)
            requests.append(r)
            slots.append(int(page[p]) * state_rows + int(offset[p]))
            entries.append(-1)
            if (p + 1) % ratio == 0:
                if draw.uniform(1).item() < 0.9:
                    entries[-1] = next(free)
                rows = biased[max(0, p - window + 1) : p + 1].double()
                value, gate = rows[:, :width], rows[:, width:]
                if overlap:
                    old = max(0, len(rows) - ratio)
                    value = torch.cat((value[:old, :dim], value[old:, dim:]))
                    gate = torch.cat((gate[:old, :dim], gate[old:, dim:]))
                pooled = (gate.softmax(0) * value).sum(0)
                pooled = pooled * torch.rsqrt(pooled.square().mean() + eps) * gain.double()
                at = torch.tensor([p // ratio * ratio], device=device)
                if entries[-1] >= 0:
                    expected.append(rotate64(pooled[None], at, table)[0])
    for _ in range(padding):
        scores.append(torch.full((2 * width,), float("nan"), device=device))
        positions.append(0)
        requests.append(0)
        slots.append(-1)
        entries.append(-1)
    row_bytes = 584 if dim == 512 else 132
    cache = cache_pages(device, (1 << 12) // page_rows + 1, page_rows, row_bytes, 16)
    integers = [torch.tensor(x, dtype=torch.int64, device=device) for x in (positions, slots, entries)]
    stacked = torch.stack(scores) if scores else torch.empty(0, 2 * width, device=device)
    compressor.compress(
        stacked, ape, integers[0], torch.tensor(requests, dtype=torch.int32, device=device), state, integers[1],
        block_table, gain, table, cache, integers[2], page_rows, ratio=ratio, eps=eps, dialect=dialect,
    )  # fmt: skip
    shown = lengths if len(lengths) <= 4 else f"{len(lengths)} requests, {sum(n for _, n in lengths)} tokens"
    case = f"ratio {ratio} d{dim} {dialect.name} page {page_rows} {shown} padding {padding} seed {seed}"
    live, into = integers[2] >= 0, integers[1][integers[1] >= 0]
    rows = torch.stack(expected) if expected else torch.empty(0, dim, dtype=torch.float64, device=device)
    found = written("compressor", case, cache, integers[2][live], page_rows, dialect, rows)
    saved = stacked[: len(into)].clone()
    saved[:, width:] += ape[integers[0][: len(into)] % ratio]
    got = state[into // state_rows, into % state_rows]
    found.append(Finding("compressor", case, "state", relative(got, saved), FP32))
    return found


def compression_cases(count: int, seed: int) -> Iterator[Callable[[torch.device], list[Finding]]]:
    """Decode, prefill, chunks and mixtures, around the windows' edges."""
    rng = random.Random(seed)  # noqa: S311 (test data)
    edges = [0, 1, 3, 4, 7, 8, 126, 127, 128, 129, 255, 256]
    for i in range(count):
        ratio, dim = rng.choice([(4, 512), (4, 128), (128, 512)])
        lengths = [
            (
                rng.choice([*edges, rng.randint(0, 500)]),
                rng.choice([1, 1, 1, 2, rng.choice(edges), rng.randint(1, 40)]),
            )
            for _ in range(rng.choice([1, 2, 5, 17]))
        ]
        lengths = [(before, now) for before, now in lengths if now] or [(3, 1)]
        case: dict[str, Any] = {
            "lengths": [(0, 4097)] if i in (3, 4) else [] if i == 5 else lengths,
            "ratio": (4, 128)[i - 3] if i in (3, 4) else ratio,
            "dim": 512 if i in (3, 4) else dim,
            "dialect": rng.choice([fp8.OCP, fp8.FNUZ]),
            "padding": rng.choice([0, 0, 5]) if i != 5 else 0,
            "page_rows": rng.choice([64, 2]),
        }
        yield functools.partial(compression, seed=seed + i, **case)


# --- router -----------------------------------------------------------------------------------------


def routing(
    device: torch.device,
    seed: int,
    *,
    tokens: int,
    experts: int,
    k: int = 6,
    hashed: bool = False,
    ties: bool = False,
    amplitude: float = 2.0,
) -> list[Finding]:
    """Expert choice. `ties`: gates from a coarse grid and no bias, so that many scores are equal."""
    draw = Draw(device, seed)
    # Under -87 exp(gate) is subnormal in fp32, and a GPU may flush it: no published router gets near.
    gate = draw.normal(tokens, experts, scale=amplitude).clamp(min=-80)
    bias = draw.normal(experts, scale=0.1)
    if ties:
        gate, bias = (gate * 2).round() / 2, torch.zeros_like(bias)
    case = f"T{tokens} E{experts} k{k}{' hash' if hashed else ''}{' ties' if ties else ''} x{amplitude:g} seed {seed}"
    score = torch.nn.functional.softplus(gate.double(), threshold=1e9).sqrt()
    if hashed:
        chosen = torch.stack(
            [torch.randperm(experts, generator=draw.generator, device=device)[:k] for _ in range(97)]
        )
        words = draw.integer(tokens, below=97)
        with poison():
            weights, ids = router.hash_route(gate, words, chosen.int(), 1.5)
        found = [Finding("router", case, "ids", unequal(ids.long(), chosen[words]), 0)]
    else:
        with poison():
            weights, ids = router.biased_topk(gate, bias, k, True, 1.5)
        key = score + bias.double()
        best = key.sort(dim=-1, descending=True, stable=True)
        # fp32 may order two keys differently that are equal to seven digits; equal ones go to the lower expert.
        got = key.gather(1, ids.long().clamp(0, experts - 1))
        found = [Finding("router", case, "keys", relative(got, best.values[:, :k]), 1e-6)]
        doubled = [row.unique().numel() for row in ids]
        found.append(Finding("router", case, "repeated experts", float(sum(k - n for n in doubled)), 0))
        if ties:
            found.append(Finding("router", case, "ids", unequal(ids.long(), best.indices[:, :k]), 0))
    expected = score.gather(1, ids.long().clamp(0, experts - 1))
    expected = 1.5 * expected / (expected.sum(-1, keepdim=True) + 1e-20)
    found.append(Finding("router", case, "weights", relative(weights, expected), 1e-5))
    return found


def routing_cases(count: int, seed: int) -> Iterator[Callable[[torch.device], list[Finding]]]:
    rng = random.Random(seed)  # noqa: S311 (test data)
    edges = [0, 1, 3, 4, 5, 127, 1025, 4097]
    for i in range(count):
        case: dict[str, Any] = {
            "tokens": edges[i % len(edges)] if i < 2 * len(edges) else rng.randint(1, 700),
            "experts": rng.choice([256, 256, 384, 384, 128, 64, 7]),
            "k": rng.choice([6, 6, 6, 3, 1]),
            "hashed": rng.random() < 0.3,
            "ties": rng.random() < 0.3,
            "amplitude": rng.choice([2.0, 0.01, 30.0]),
        }
        yield functools.partial(routing, seed=seed + i, **case)


ALL = {
    "mhc": mhc_cases,
    "output": projection_cases,
    "prologue": qkv_cases,
    "compressor": compression_cases,
    "router": routing_cases,
}
