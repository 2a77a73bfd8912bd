"""Counts the launches of a decode token in the parts of DeepSeek-V4 that this bundle has kernels for, without a GPU:
vLLM's own AMD code on a simulated gfx942, with the patches off and on. In: the vLLM beside this Python, the catalogue.
Out: docs/launches.md (`--write`), or whether it is current (`--check`), else the page on stdout.

A launch is a Triton kernel or an operator of torch that computes (views and allocations are none). Compiled operators
(`torch.ops._C`, RMSNorm) are not here; each counts as one, the least that it can be. Triton kernels are counted where
they would start and do not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "launches.md"
RELEASE = "0.32.0"
MODELS = {"Flash": "deepseek-v4-flash", "Pro": "deepseek-v4-pro"}
KINDS = {0: "window only", 4: "CSA (ratio 4)", 128: "HCA (ratio 128)"}
PARTS = (
    "hyper-connections and norms",
    "query and key preparation",
    "compressors",
    "output projection",
    "router",
)

PROGRAM = "import sys; from bench import census; census.simulated(sys.argv[1] == 'patched', *map(int, sys.argv[2:]))"


# --- in a process of its own ------------------------------------------------------------------------

# What torch does on the host only.
_FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty"),
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "as_strided", "alias", "detach", "lift_fresh"),
    *("slice", "select", "split", "split_with_sizes", "unbind"),
    *("unsqueeze", "squeeze", "expand", "permute", "transpose", "t"),
}


def counter(made: list[str]) -> Any:
    """A torch mode that appends the name of every operator that computes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            namespace, name = str(function).split(".")[:2]
            if namespace == "aten" and name not in _FREE:
                made.append(name)
            return function(*args, **(kwargs or {}))

    return Counter()


def simulated(patched: bool, *hidden: int) -> None:
    """Print {hidden size: {part: names of what one token launches}}."""
    from tests.rocm_patches import gfx942

    gfx942.simulate(patched=patched)
    import torch
    from triton.runtime import interpreter

    from rocm_patches.kernels import launch
    from rocm_patches.patches import mhc as mhc_patch

    made: list[str] = []
    interpreter.InterpretedFunction.run = lambda self, *_, **__: made.append(self.fn.__name__)
    mhc_patch._works = lambda *_: True  # a probe compares numbers, and nothing computes any here

    def count(function: Any) -> list[str]:
        """What a call launches once weights are prepared."""
        function()
        made.clear()
        with counter(made):
            function()
        return list(made)

    with launch.assume(launch.MI300X), torch.no_grad():
        gfx942.answer(**{str(size): parts_of(patched, size, count, made) for size in hidden})


def parts_of(patched: bool, hidden: int, count: Any, made: list[str]) -> dict[str, list[str]]:
    """What vLLM's own classes launch for one token, by part."""
    import torch
    from torch import nn
    from vllm.model_executor.layers.mhc import HCHeadOp
    from vllm.models.deepseek_v4 import attention
    from vllm.models.deepseek_v4.amd import rocm

    from tests.rocm_patches.patches import kernels_on_gfx942 as pieces

    class Norm(nn.Module):
        """RMSNorm as compiled code: one launch."""

        variance_epsilon = 1e-6

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(hidden).bfloat16(), requires_grad=False)

        def forward(self, x: Any) -> Any:
            made.append("rms_norm (compiled)")
            return x

    pieces.HIDDEN = hidden
    found: dict[str, list[str]] = {}
    layer = pieces.decoder_layer()
    layer.attn_norm, layer.ffn_norm = Norm(), Norm()
    layer.attn.forward = lambda positions, x, _: x
    layer.ffn.forward = lambda x, _: x
    x, positions = torch.zeros(1, 4, hidden).bfloat16(), torch.zeros(1).long()
    found["layer"], found["last post"] = count(lambda: layer(x, positions, None)), []
    if layer.use_fused_mhc:
        # A layer's first seam includes the post of the one before, so one post is left behind the last layer.
        out, *state = layer(x, positions, None)
        found["layer"] = count(lambda: layer(out, positions, None, state[1], state[2], state[0]))
        found["last post"] = count(lambda: layer.hc_post(out, *state))
    weights = pieces.weights(4, 7)
    if patched:
        found["head"] = count(lambda: HCHeadOp.forward_hip(None, x, *weights, 1e-6, 1e-6))
    else:  # what vLLM's operator runs; torch's mode does not see into a registered operator
        head = sys.modules["vllm.model_executor.kernels.mhc.triton"]._hc_head_triton
        y = torch.zeros(1, hidden).bfloat16()
        found["head"] = count(lambda: head(x, *weights, y, hidden, 1e-6, 1e-6, 4))
    q, kv, gains = torch.zeros(1, 1024), torch.zeros(1, 512), (torch.ones(1024), torch.ones(512))
    found["norms of query and key"] = count(lambda: attention.fused_q_kv_rmsnorm(q, kv, *gains, 1e-6))
    found["insert"] = ["fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert (compiled)"]
    found["router"] = ["topk_hash_softplus_sqrt (compiled)"]
    for name, ratio, dim in (("CSA", 4, 512), ("indexer", 4, 128), ("HCA", 128, 512)):
        found[name] = count(compressor_step(pieces, ratio, dim))
    groups, rank = 2, 1024
    wo_a = nn.Module()
    wo_a.weight = nn.Parameter(torch.zeros(groups * rank, 4096).bfloat16(), requires_grad=False)
    o = torch.zeros(1, groups * 8, 512).bfloat16()
    found["output projection"] = count(
        lambda: rocm.rocm_inv_rope_einsum(None, o, positions, 64, groups, rank, wo_a, inverse_rope=False)
    )
    return found


def compressor_step(pieces: Any, ratio: int, dim: int) -> Any:
    """A call of the compressor for one decoded token that completes an entry."""
    import types

    import torch
    import vllm.forward_context
    from vllm.models.deepseek_v4 import compressor as module

    from tests.rocm_patches.independent import rope_table

    table = rope_table(128)
    width, row = dim * (2 if ratio == 4 else 1), 584 if dim == 512 else 132
    cache, state = torch.zeros(1, 64, row, dtype=torch.uint8), torch.zeros(16, 16, 2 * width)
    layer = pieces.compressor_layer(ratio, dim, table, cache, state)
    # vLLM's choice on ROCm (_prefer_two_stage_compressor) for ratio 128.
    layer._use_two_stage_fused_compressor = module._prefer_two_stage_compressor() and ratio == 128
    layer._compress_scratch = torch.zeros(1, 512)
    last = torch.tensor([ratio - 1])
    step = types.SimpleNamespace(
        token_to_req_indices=torch.zeros(1).int(), slot_mapping=last, block_size=16, num_decode_tokens=1,
        block_table=torch.arange(16).int().view(1, -1),
    )  # fmt: skip
    keys = types.SimpleNamespace(slot_mapping=torch.zeros(1).long(), block_size=64)
    context = types.SimpleNamespace(attn_metadata={"state": step, "k": keys}, cudagraph_runtime_mode=None)
    module.get_forward_context = lambda: context
    vllm.forward_context.get_forward_context = lambda: context
    rotary = types.SimpleNamespace(cos_sin_cache=table)
    scores = torch.zeros(1, 2 * width)
    return lambda: module.DeepseekCompressor.forward(layer, scores, last, rotary)


# --- the page ---------------------------------------------------------------------------------------


def found(patched: bool, sizes: list[int]) -> dict[str, dict[str, list[str]]]:
    """Launches by hidden size and part, from a process of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_", "VLLM_"))}
    argv = [sys.executable, "-c", PROGRAM, "patched" if patched else "stock", *map(str, sizes)]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    if done.returncode or not lines:
        raise RuntimeError(f"the simulated gfx942 ended with {done.returncode}: {done.stderr[-2000:]}")
    made: dict[str, dict[str, list[str]]] = json.loads(lines[-1].removeprefix("ANSWER "))
    return made


def by_part(made: dict[str, list[str]], ratio: int) -> dict[str, int]:
    """Launches of one layer by PARTS."""
    compressors = {0: (), 4: ("CSA", "indexer"), 128: ("HCA",)}[ratio]
    return dict(
        zip(
            PARTS,
            (
                len(made["layer"]),
                len(made["norms of query and key"]) + len(made["insert"]),
                sum(len(made[name]) for name in compressors),
                len(made["output projection"]),
                len(made["router"]),
            ),
            strict=True,
        )
    )


def page() -> str:
    """docs/launches.md."""
    from dsv4_deploy.catalog import model as catalog

    lines = [HEAD]
    totals = []
    models = {name: catalog.models()[key].dims for name, key in MODELS.items()}
    sizes = [dims.hidden_size for dims in models.values()]
    stock, patched = found(False, sizes), found(True, sizes)
    for name, dims in models.items():
        off, on = stock[str(dims.hidden_size)], patched[str(dims.hidden_size)]
        lines += ["", f"## {name}: {dims.num_hidden_layers} layers, H = {dims.hidden_size}", ""]
        lines += ["| layer kind | layers | " + " | ".join(PARTS) + " | all |", "|---|---|" + "---|" * 6]
        whole = [0, 0]
        for ratio, kind in KINDS.items():
            layers = dims.compress_ratios.count(ratio)
            if not layers:
                continue
            before, after = by_part(off, ratio), by_part(on, ratio)
            cells = [f"{before[part]} → {after[part]}" for part in PARTS]
            sums = sum(before.values()), sum(after.values())
            lines.append(f"| {kind} | {layers} | {' | '.join(cells)} | {sums[0]} → {sums[1]} |")
            whole = [a + layers * b for a, b in zip(whole, sums, strict=True)]
        ends = [len(made["head"]) + len(made["last post"]) for made in (off, on)]
        lines.append(f"| after the layers: last post, head | | | | | | | {ends[0]} → {ends[1]} |")
        whole = [a + b for a, b in zip(whole, ends, strict=True)]
        totals.append(f"| {name} | {whole[0]} | {whole[1]} | {100 * whole[1] / whole[0]:.0f} % |")
        rest = whole[0] - dims.num_hidden_layers * len(off["layer"]) - ends[0]
        rest_on = whole[1] - dims.num_hidden_layers * len(on["layer"]) - ends[1]
        totals.append(
            f"| {name} without hyper-connections | {rest} | {rest_on} | {100 * rest_on / rest:.0f} % |"
        )
    lines += ["", "## Per token", "", "| model | patches off | on | of it |", "|---|---|---|---|", *totals]
    return "\n".join(lines) + "\n" + TAIL


HEAD = f"""# Launches per decode token

<!-- Written by `python bench/census.py --write`; do not edit. -->

vLLM {RELEASE}'s own AMD code on a simulated gfx942, **without AITER**, one token that completes an entry in every
compressor; "patches off → on", with the default `DSV4_KERNELS`. Triton kernels and torch operators that compute are
counted where they would start; compiled operators (RMSNorm, query/key insert, router) count as one each. **Counted,
not run on AMD hardware.** Up to four tokens a seam is one launch; above, two."""

TAIL = """
## What is left, and why

* **Where AITER's mHC passes its probe** vLLM uses it, with patches or without: this bundle's kernels have not run on
  AMD hardware, AITER's have. How many launches AITER makes cannot be counted here, so nothing is claimed for that
  case but for the head, which AITER does not have.
* **Query and key preparation**: the query's low-rank norm stands before a matrix product, the rest behind it: two
  launches at least. `DSV4_KERNELS=all` replaces the second, one for one.
* **Output projection, router**: one launch each, with patches or without.
* **Not in scope**: matrix products and their quantisation, sparse attention, the indexer's scores and top-k, experts,
  all-reduce, the LM head.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/launches.md")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when it is stale")
    options = parser.parse_args()
    text = page()
    if options.write:
        PAGE.write_text(text)
    elif options.check:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
