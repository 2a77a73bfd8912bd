"""Kernels on a GPU, one command: every check of rocm_patches.kernels.selftest, then times against vLLM's own kernels
for the same operators in the same run. In: a GPU, torch, triton, and vLLM's directory (--vllm; unpacked is enough).
Out: a table, and with --json every number. On an NVIDIA GPU the same source runs in OCP mode: a stand-in for
gfx942, good for ratios between kernels, not for microseconds. See docs/performance.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import timing  # noqa: E402
import torch  # noqa: E402
import upstream as upstream_files  # noqa: E402
from torch import Tensor  # noqa: E402

from rocm_patches import fp8  # noqa: E402
from rocm_patches.kernels import compressor, mhc, output, prologue, router, selftest  # noqa: E402

Call = Callable[[], object]
EPS = 1e-6


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    heads: int  # per rank at TP 4
    groups: int
    rank: int  # of the query
    experts: int


FLASH = Model("Flash TP4", 4096, 16, 2, 1024, 256)
PRO = Model("Pro TP4", 7168, 32, 4, 1536, 384)


@dataclass(frozen=True)
class Case:
    """One operator at one shape. ours and theirs give one call per input set; theirs is None where vLLM's kernel is
    compiled code that cannot run here. `bytes` as in timing.Row."""

    operator: str
    name: str
    bytes: float
    ours: Callable[[int], list[Call]]
    theirs: Callable[[int], list[Call]] | None


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda") * scale


def bf16(*shape: int, scale: float = 1.0) -> Tensor:
    return normal(*shape, scale=scale).bfloat16()


# --- inputs -----------------------------------------------------------------------------------------


@dataclass
class SeamInput:
    x: Tensor
    o: Tensor
    post: Tensor
    comb: Tensor
    fn: Tensor
    scale: Tensor
    base: Tensor
    norm: Tensor
    mixing: mhc.Mixing

    @staticmethod
    def make(tokens: int, hidden: int, mixes: int = 24) -> SeamInput:
        fn = normal(mixes, 4 * hidden, scale=(4 * hidden) ** -0.5)
        scale, base = torch.rand(3 if mixes == 24 else 1, device="cuda") + 0.5, normal(mixes, scale=0.5)
        comb = selftest.sinkhorn64(normal(tokens, 4, 4), 20, EPS).float()
        return SeamInput(
            bf16(tokens, 4, hidden), bf16(tokens, hidden), torch.rand(tokens, 4, device="cuda") * 2, comb, fn, scale,
            base, bf16(hidden), mhc.prepare(fn, scale, base),
        )  # fmt: skip

    def ours(self, **options: Any) -> mhc.Seam:
        return mhc.seam(
            self.x,
            self.mixing,
            layer_output=self.o,
            post=self.post,
            comb=self.comb,
            norm_weight=self.norm,
            **options,
        )

    def theirs(self, up: Any) -> Any:
        """vLLM's fallback: post, pre; the norm after it is another launch, left out here in its favour."""
        streams = up.mhc_torch.mhc_post_torch(self.o, self.x, self.post.unsqueeze(-1), self.comb)
        return streams, up.mhc_torch.mhc_pre_torch(
            streams, self.fn, self.scale, self.base, EPS, EPS, EPS, 2.0, 20
        )

    def their_head(self, up: Any) -> None:
        hidden = self.o.shape[1]
        out = torch.empty_like(self.o)
        up.mhc_triton._hc_head_triton(self.x, self.fn, self.scale, self.base, out, hidden, EPS, EPS, 4)


@dataclass
class ProjectionInput:
    o: Tensor
    prepared: output.Projection
    layer: torch.nn.Module

    @staticmethod
    def make(tokens: int, groups: int) -> ProjectionInput:
        dense = normal(groups * 1024, 4096, scale=4096**-0.5)
        weight, scale = fp8.quantise_block_weight(dense)
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(dense.bfloat16(), requires_grad=False)
        return ProjectionInput(bf16(tokens, groups * 8, 512), output.prepare(weight, scale, groups), layer)


@dataclass
class CompressorInput:
    """A decode step of `requests` at random positions, or (prefill) one request from position 0."""

    ratio: int
    dim: int
    scores: Tensor
    positions: Tensor
    requests: Tensor
    state: Tensor
    slots: Tensor
    block_table: Tensor
    cache: Tensor
    entries: Tensor
    page_rows: int

    @staticmethod
    def make(tokens: int, ratio: int, dim: int, prefill: bool) -> CompressorInput:
        width = 2 * dim if ratio == 4 else dim
        state_rows, page_rows, page = (4, 64, 37440) if ratio == 4 else (8, 2, 1728)
        if dim == 128:
            page = 8640
        device = "cuda"
        if prefill:
            positions = torch.arange(tokens, device=device)
            requests = torch.zeros(tokens, dtype=torch.int32, device=device)
        else:
            # Boundaries as often as in a long run: one token in `ratio` completes an entry.
            positions = 4096 + torch.randint(0, 4096, (tokens,), device=device)
            requests = torch.arange(tokens, dtype=torch.int32, device=device)
        # Only a window of state rows is alive, so the pages of a request are used in turn.
        rows, ring = 1 if prefill else tokens, 256 // state_rows
        numbers = torch.arange(8192 // state_rows + 1, device=device) % ring
        table = (torch.arange(rows, device=device)[:, None] * ring + numbers).int()
        slots = table[requests.long(), positions // state_rows].long() * state_rows + positions % state_rows
        state = normal(rows * ring, state_rows, 2 * width)
        cache = torch.zeros(max(2, 2 * tokens // page_rows + 2), page, dtype=torch.uint8, device=device)
        entries = torch.arange(tokens, device=device).masked_fill((positions + 1) % ratio != 0, -1)
        return CompressorInput(
            ratio,
            dim,
            normal(tokens, 2 * width),
            positions,
            requests,
            state,
            slots,
            table,
            cache,
            entries,
            page_rows,
        )

    def ours(self, shared: dict[str, Tensor]) -> None:
        compressor.compress(
            self.scores, shared[f"ape{self.ratio}{self.dim}"], self.positions, self.requests, self.state, self.slots,
            self.block_table, shared[f"gain{self.dim}"], shared["table"], self.cache, self.entries, self.page_rows,
            ratio=self.ratio, dialect=fp8.OCP if self.dim == 512 else fp8.FNUZ,
        )  # fmt: skip

    def theirs(self, up: Any, shared: dict[str, Tensor]) -> None:
        """vLLM's two launches: save the state, then compress and store (its single-stage form)."""
        tokens, width = self.scores.shape[0], self.scores.shape[1] // 2
        kv, score = self.scores.split([width, width], -1)
        ape, state = shared[f"ape{self.ratio}{self.dim}"], self.state
        up.save_partial_states.SavePartialStatesKernel.kernel[(tokens,)](
            kv, kv.stride(0), score, score.stride(0), ape, ape.stride(0), self.positions, state, state.stride(0),
            state.stride(1), self.slots, state.shape[1], HEAD_SIZE=width,
            TRITON_BLOCK_SIZE=width, STATE_WIDTH=width, COMPRESS_RATIO=self.ratio,
        )  # fmt: skip
        gain, table = shared[f"gain{self.dim}"], shared["table"]
        files = up.fused_compress_quant_cache
        kernel = (
            files._fused_kv_compress_norm_rope_insert_sparse_attn
            if self.dim == 512
            else files._fused_kv_compress_norm_rope_insert_indexer_attn
        )
        options: dict[str, Any] = {"SANITIZE_CACHE_NANS": False} if self.dim == 512 else {}
        kernel[(tokens,)](
            state, state.stride(0), state.stride(1), self.requests, self.positions, self.slots, self.block_table,
            self.block_table.stride(0), state.shape[1], gain, EPS, table, table.stride(0), self.cache, self.entries,
            self.page_rows, HEAD_SIZE=self.dim, TRITON_BLOCK_SIZE=self.dim, STATE_WIDTH=width,
            COMPRESS_RATIO=self.ratio, OVERLAP=self.ratio == 4, ROPE_HEAD_DIM=64, FP8_MAX=448.0,
            QUANT_BLOCK=64 if self.dim == 512 else 128, TOKEN_STRIDE=576 if self.dim == 512 else 128,
            SCALE_DIM=8 if self.dim == 512 else 4, KV_BLOCK_STRIDE=self.cache.stride(0),
            num_warps=4 if self.dim == 512 else 1, **options,
        )  # fmt: skip

    def bytes(self) -> float:
        """Scores in, state out, and per entry its window's older rows in and the row out."""
        row = self.scores.shape[1] * 4
        window = (2 if self.ratio == 4 else 1) * self.ratio
        made = int((self.entries >= 0).sum())
        fresh = self.requests.shape[0] > 1 and bool((self.requests == 0).all())
        width = row / 2 if self.ratio == 4 else row  # an overlapping window reads half of each row's columns
        older = 0 if fresh else made * (window - 1) * width
        return 2.0 * self.scores.shape[0] * row + older + made * (584 if self.dim == 512 else 132)


@functools.cache
def shared() -> dict[str, Tensor]:
    """Small tensors that every case reads."""
    made = {"table": selftest.rope_table(torch.device("cuda"), 16384)}
    for ratio, dim in ((4, 512), (128, 512), (4, 128)):
        made[f"ape{ratio}{dim}"] = normal(ratio, 2 * dim if ratio == 4 else dim)
        made[f"gain{dim}"] = bf16(dim)
    return made


# --- cases ------------------------------------------------------------------------------------------


def many(count: int, make: Callable[[], Any], call: Callable[[Any], object]) -> list[Call]:
    return [functools.partial(call, made) for made in [make() for _ in range(count)]]


def cases(up: Any) -> Iterator[Case]:
    for model in (FLASH, PRO):
        h = model.hidden
        for t in (1, 16, 128, 1024, 4096):
            make = functools.partial(SeamInput.make, t, h)
            yield Case(
                "mHC seam", f"{model.name} T{t}", 20.0 * t * h + 96 * 4 * h,
                lambda n, make=make: many(n, make, lambda s: s.ours()),
                lambda n, make=make: many(n, make, lambda s: s.theirs(up)),
            )  # fmt: skip
        for t in (1, 16, 128, 1024):
            make = functools.partial(SeamInput.make, t, h, 4)
            yield Case(
                "mHC head", f"{model.name} T{t}", 10.0 * t * h + 16 * 4 * h,
                lambda n, make=make: many(n, make, lambda s: mhc.head(s.x, s.mixing)),
                lambda n, make=make: many(
                    n, make,
                    lambda s: s.their_head(up),
                ),
            )  # fmt: skip
        for t in (1, 16, 128, 1024):
            make = functools.partial(ProjectionInput.make, t, model.groups)
            positions = torch.randint(0, 8192, (t,), device="cuda")
            rotary = type("Rotary", (), {"cos_sin_cache": shared()["table"]})
            yield Case(
                "output projection", f"{model.name} T{t}", model.groups * (1024 * 4096 + 2.0 * t * (4096 + 1024)),
                lambda n, make=make, p=positions: many(
                    n, make, lambda s: output.project(s.o, s.prepared, p, shared()["table"])
                ),
                lambda n, make=make, p=positions, r=rotary, g=model.groups: many(
                    n, make,
                    lambda s: up.rocm_aiter_mla_sparse.rocm_inv_rope_einsum(r, s.o, p, 64, g, 1024, s.layer),
                ),
            )  # fmt: skip
        for t in (1, 64, 1024):
            positions = torch.randint(0, 8192, (t,), device="cuda")
            slots = torch.randperm(max(128, 2 * t), device="cuda")[:t]

            def prologue_input(t: int = t, model: Model = model) -> Any:
                cache = torch.zeros(max(2, t // 32 + 1), 37440, dtype=torch.uint8, device="cuda")
                return bf16(t, model.heads, 512), bf16(t, 512), bf16(512), cache

            yield Case(
                "prologue", f"{model.name} T{t}", t * (model.heads * 2048 + 1024 + 584.0),
                lambda n, make=prologue_input, p=positions, s=slots: many(
                    n, make, lambda d: prologue.prologue(d[0], d[1], d[2], p, shared()["table"], d[3], s, 64)
                ),
                None,
            )  # fmt: skip
        for t in (1, 64, 4096):
            bias = normal(model.experts, scale=0.1)
            yield Case(
                "router", f"{model.name} T{t}", t * (model.experts * 4 + 48.0),
                lambda n, t=t, e=model.experts, b=bias: many(
                    n, lambda: normal(t, e), lambda g: router.biased_topk(g, b, 6, True, 1.5)
                ),
                None,
            )  # fmt: skip
    for ratio, dim, what in ((4, 512, "CSA"), (4, 128, "indexer K"), (128, 512, "HCA")):
        for t, prefill in ((1, False), (64, False), (4096, True)):
            make = functools.partial(CompressorInput.make, t, ratio, dim, prefill)
            yield Case(
                "compressor", f"{what} {'prefill' if prefill else 'decode'} T{t}", make().bytes(),
                lambda n, make=make: many(n, make, lambda c: c.ours(shared())),
                lambda n, make=make: many(n, make, lambda c: c.theirs(up, shared())),
            )  # fmt: skip
    for model in (FLASH, PRO):
        for t in (1, 8, 64):
            yield layer(up, model, t)


def layer(up: Any, model: Model, t: int) -> Case:
    """The attention half of a CSA layer and both seams, without the sparse attention and the indexer's scores, which
    are the same on both sides. Dense products are bf16 torch on both sides; the query/key preparation, compiled
    code in vLLM, is ours on both sides."""
    h, table = model.hidden, shared()["table"]
    positions = 4096 + torch.randint(0, 4096, (t,), device="cuda")
    rotary = type("Rotary", (), {"cos_sin_cache": table})
    slots = torch.arange(t, device="cuda")

    @dataclass
    class Inputs:
        first: SeamInput
        second: SeamInput
        projection: ProjectionInput
        main: CompressorInput
        index: CompressorInput
        qkv: Tensor
        query: Tensor
        scores: Tensor
        back: Tensor
        cache: Tensor

    def make() -> Inputs:
        cache = torch.zeros(max(2, t // 32 + 1), 37440, dtype=torch.uint8, device="cuda")
        return Inputs(
            SeamInput.make(t, h), SeamInput.make(t, h), ProjectionInput.make(t, model.groups),
            CompressorInput.make(t, 4, 512, False), CompressorInput.make(t, 4, 128, False),
            bf16(model.rank + 512, h, scale=h**-0.5), bf16(model.heads * 512, model.rank, scale=model.rank**-0.5),
            bf16(2048 + 512, h, scale=h**-0.5), bf16(h, model.groups * 1024, scale=0.02), cache,
        )  # fmt: skip

    def attention(i: Inputs, y: Tensor, ours: bool) -> Tensor:
        qr, kv = (y @ i.qkv.T).split([model.rank, 512], -1)
        qr = torch.nn.functional.rms_norm(qr, (model.rank,))
        q = (qr @ i.query.T).view(t, model.heads, 512)
        q = prologue.prologue(q, kv, shared()["gain512"], positions, table, i.cache, slots, 64)
        y @ i.scores.T
        for c in (i.main, i.index):
            if ours:
                c.ours(shared())
            else:
                c.theirs(up, shared())
        if ours:
            z = output.project(q, i.projection.prepared, positions, table)
        else:
            z = up.rocm_aiter_mla_sparse.rocm_inv_rope_einsum(
                rotary, q, positions, 64, model.groups, 1024, i.projection.layer
            )
        return z.flatten(1) @ i.back.T

    def ours(i: Inputs) -> object:
        seam = i.first.ours()
        o = attention(i, seam.y, True)
        return mhc.seam(
            seam.streams,
            i.second.mixing,
            layer_output=o,
            post=seam.post,
            comb=seam.comb,
            norm_weight=i.second.norm,
        )

    def theirs(i: Inputs) -> object:
        streams, (post, comb, y) = i.first.theirs(up)
        y = torch.nn.functional.rms_norm(y, (h,), i.first.norm)
        o = attention(i, y, False)
        streams = up.mhc_torch.mhc_post_torch(o, streams, post, comb)
        s = i.second
        _, _, y = up.mhc_torch.mhc_pre_torch(streams, s.fn, s.scale, s.base, EPS, EPS, EPS, 2.0, 20)
        return torch.nn.functional.rms_norm(y, (h,), s.norm)

    weights = 2.0 * h * (model.rank + 512 + 2560) + 2.0 * model.rank * model.heads * 512
    size = 2 * (20.0 * t * h + 96 * 4 * h) + weights + model.groups * 1024 * (4096 + 2.0 * h)
    return Case(
        "layer part", f"{model.name} T{t}", size,
        lambda n: many(min(n, 6), make, ours), lambda n: many(min(n, 6), make, theirs),
    )  # fmt: skip


# --- running ----------------------------------------------------------------------------------------


def check(operators: list[str], count: int, seed: int) -> tuple[int, list[selftest.Finding]]:
    """Number of cases run, and the findings that are not ok."""
    ran, bad = 0, []
    for name in operators:
        for case in selftest.ALL[name](count, seed):
            ran += 1
            bad += [f for f in case(torch.device("cuda")) if not f.ok]
    return ran, bad


def compile_share(share: tuple[int, int, str, int, int, str]) -> None:
    """Run one share of the work once and forget the results: what it compiles lands in triton's cache on disk."""
    index, shares, vllm, count, seed, only = share
    for name in selftest.ALL:
        for i, case in enumerate(selftest.ALL[name](count, seed)):
            if i % shares == index:
                case(torch.device("cuda"))
    up = upstream_files.load(Path(vllm))
    for i, case in enumerate(cases(up)):
        if i % shares == index and only in case.operator:
            for side in (case.ours, case.theirs):
                if side:
                    side(1)[0]()
    torch.cuda.synchronize()


def markdown(rows: list[timing.Row]) -> str:
    """The table of docs/performance.md."""
    by_case: dict[tuple[str, str], dict[str, timing.Row]] = {}
    for row in rows:
        by_case.setdefault((row.operator, row.case), {})[row.side] = row
    lines = [
        "| operator | case | ours us | launches | of copy | vLLM us | launches | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (operator, case), sides in by_case.items():
        ours, theirs = sides["ours"], sides.get("vLLM")
        line = f"| {operator} | {case} | {ours.us:.1f} | {ours.launches} | {ours.copy_share:.0%} |"
        if theirs:
            line += f" {theirs.us:.1f} | {theirs.launches} | {theirs.us / ours.us:.2f} |"
        lines.append(line if theirs else line + " - | - | - |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--vllm", required=True, help="directory vllm/ of an unpacked or installed vLLM 0.32 or 0.33"
    )
    parser.add_argument("--checks", type=int, default=220, help="random cases per operator (0: none)")
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--only", default="", help="time the operators whose name contains this text")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile before the measuring")
    parser.add_argument("--json", type=Path, help="write every number here")
    options = parser.parse_args()
    start = time.monotonic()
    if options.workers:
        shares = [
            (i, options.workers, options.vllm, options.checks, options.seed, options.only)
            for i in range(options.workers)
        ]
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
            pool.map(compile_share, shares, chunksize=1)
        print(f"compiled by {options.workers} processes in {time.monotonic() - start:.0f} s", flush=True)
    torch.manual_seed(options.seed)
    up = upstream_files.load(Path(options.vllm))
    ran, bad = check(list(selftest.ALL), options.checks, options.seed) if options.checks else (0, [])
    print(
        f"checks: {ran} cases, {len(bad)} findings out of limits, {time.monotonic() - start:.0f} s",
        flush=True,
    )
    for finding in bad[:20]:
        print("  ", finding)
    top = timing.ceilings()
    print(top, flush=True)
    rows: list[timing.Row] = []
    chosen = [case for case in cases(up) if options.only in case.operator]
    for case in chosen:
        count = timing.sets(case.bytes)
        for side, make in (("ours", case.ours), ("vLLM", case.theirs)):
            if make:
                rows.append(timing.measure(case.operator, case.name, side, make(count), case.bytes, top))
        print(f"timed {case.operator}, {case.name}: {rows[-1].side} {rows[-1].us:.2f} us", flush=True)
        torch.cuda.empty_cache()
    makes = [make for case in chosen for make in (case.ours, case.theirs) if make]
    rows = [replace(r, launches=timing.launches(make(1)[0])) for r, make in zip(rows, makes, strict=True)]
    print(markdown(rows))
    if options.json:
        result = {
            "ceilings": asdict(top),
            "versions": {"torch": torch.__version__, "triton": __import__("triton").__version__},
            "checks": {"cases": ran, "bad": [asdict(f) for f in bad]},
            "rows": [row.as_dict() for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"total {time.monotonic() - start:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
