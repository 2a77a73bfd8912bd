"""Compiles every kernel for gfx942 without a GPU and reads the machine code. In: the launches that the launchers make
for V4-Flash and V4-Pro on `meta` tensors. Out: registers, scratch, LDS, matrix instructions, waves per SIMD, compared
with the table in tools/gfx942_gate.json; `--write` renews the table. Needs triton, no GPU; see docs/kernels.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from rocm_patches.kernels import launch as door  # noqa: E402

TABLE = ROOT / "tools" / "gfx942_gate.json"
LDS = 65536  # bytes per compute unit of CDNA3
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# --- what is compiled -------------------------------------------------------------------------------


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, a call of a launcher on meta tensors) for the shapes that production meets."""
    from rocm_patches import fp8
    from rocm_patches.kernels import compressor, mhc, output, prologue, router

    fp32, u8, i32, i64 = torch.float32, torch.uint8, torch.int32, torch.int64
    # The key/value pool: 40 GiB, over the 2 GiB that 32-bit addressing reaches, and a short one below.
    pools = {"": 40 << 30, " small pool": 1 << 30}
    table = meta(1 << 20, 64, dtype=fp32)
    for model, hidden, heads, groups, experts in (("Flash", 4096, 16, 2, 256), ("Pro", 7168, 32, 4, 384)):
        mixing, head = (
            mhc.Mixing(
                meta(m, 4 * hidden, dtype=fp32),
                meta(2, m, hidden, 4),
                meta(s, dtype=fp32),
                meta(m, dtype=fp32),
                meta(256, dtype=i32),
            )
            for m, s in ((24, 3), (4, 1))
        )
        norm = {"norm_weight": meta(hidden)}
        for tokens in (1, 16, 128, 4096):
            x, o = meta(tokens, 4, hidden), meta(tokens, hidden)
            before = {
                "layer_output": o,
                "post": meta(tokens, 4, dtype=fp32),
                "comb": meta(tokens, 4, 4, dtype=fp32),
            }
            seam = functools.partial(mhc.seam, x)
            yield (
                f"mhc post+pre {model} T{tokens}",
                functools.partial(seam, mixing, **before, **norm, quantise=True),
            )
            yield f"mhc pre {model} T{tokens}", functools.partial(seam, mixing)
            yield f"mhc head {model} T{tokens}", functools.partial(mhc.head, x, head, **norm)
        yield f"mhc post {model}", functools.partial(mhc.post, o, x, before["post"], before["comb"])

        projection = output.Projection(
            meta(groups, 1024, 4096, dtype=u8), meta(groups, 8, 32, dtype=fp32), meta(4096, dtype=i32)
        )
        for tokens in (1, 32, 128, 4096):
            o, positions = meta(tokens, heads, 512), meta(tokens, dtype=i64)
            call = functools.partial(output.project, o, projection, positions, table)
            yield f"output {model} T{tokens}", call

        tokens = 64
        q, kv, positions, slots = (
            meta(tokens, heads, 512),
            meta(tokens, 512),
            meta(tokens, dtype=i64),
            meta(tokens, dtype=i64),
        )
        for pool, size in pools.items():
            cache = meta(size // 37440, 37440, dtype=u8)[:, :37376]
            yield (
                f"prologue {model}{pool}",
                functools.partial(prologue.prologue, q, kv, meta(512), positions, table, cache, slots, 64),
            )
            for ratio, dim, page_rows, page, rows in (
                (4, 512, 64, 37440, 4),
                (128, 512, 2, 1728, 8),
                (4, 128, 64, 8640, 4),
            ):
                width = 2 * dim if ratio == 4 else dim
                cache = meta(size // page, page, dtype=u8)
                state = meta(size // (rows * width * 8), rows, 2 * width, dtype=fp32)
                yield (
                    f"compressor ratio {ratio} d{dim} {model}{pool}",
                    functools.partial(
                        compressor.compress, meta(tokens, 2 * width, dtype=fp32), meta(ratio, width, dtype=fp32),
                        positions, meta(tokens, dtype=i32), state, slots, meta(64, 4096, dtype=i32), meta(dim), table,
                        cache, slots, page_rows, ratio=ratio, dialect=fp8.OCP if dim == 512 else fp8.FNUZ,
                    ),
                )  # fmt: skip
        gate, bias = meta(tokens, experts, dtype=fp32), meta(experts, dtype=fp32)
        yield f"router {model}", functools.partial(router.biased_topk, gate, bias, 6, True, 1.5)
        chosen = meta(129280, 6, dtype=i32)
        yield (
            f"router hash {model}",
            functools.partial(router.hash_route, gate, meta(tokens, dtype=i64), chosen, 1.5),
        )


# --- compiling --------------------------------------------------------------------------------------


def source(made: door.Launch) -> tuple[Any, dict[str, int]]:
    """Triton's source object and options of a launch, specialised as the launch itself would be: 16-divisible
    pointers and integers, integers equal to 1 as constants, 32-bit addressing for tensors under 2 GiB."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    names = made.kernel.arg_names
    for i, name in enumerate(names):
        value = made.constants[name] if name in made.constants else made.arguments[i]
        if name in made.constants or (isinstance(value, int) and value == 1):
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = TYPES[value.dtype]
            marks = []
            if value.storage_offset() * value.element_size() % 16 == 0:
                marks.append(["tt.divisibility", 16])
            if value.untyped_storage().nbytes() < 1 << 31:
                marks.append(["tt.pointer_range", 32])
            attributes[(i,)] = marks
        elif isinstance(value, int):
            signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    made_from = triton.compiler.ASTSource(
        fn=made.kernel, signature=signature, constexprs=constants, attrs=attributes
    )
    return made_from, dict(made.options)


def publishes(text: str) -> bool:
    """Whether every wavefront waits for its own stores before the barrier that precedes a releasing atomic
    (rocm_patches/kernels/sync.py). True for a kernel without one."""
    lines = text.splitlines()
    for at in (i for i, line in enumerate(lines) if line.lstrip().startswith("buffer_wbl2")):
        barrier = max((i for i in range(at) if lines[i].strip() == "s_barrier"), default=-1)
        stores = (i for i in range(barrier) if re.match(r"\s+(buffer|global)_store", lines[i]))
        between = lines[max(stores, default=0) : barrier]
        if not any(line.strip() == "s_waitcnt vmcnt(0)" for line in between):
            return False
    return True


def read(compiled: Any) -> dict[str, Any]:
    """What the gate looks at, from the assembly text and the metadata."""
    text = compiled.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        assert found is not None, key  # noqa: S101 (LLVM writes them for every kernel)
        return int(found[1])

    vgpr, shared = number("vgpr_count"), compiled.metadata.shared
    opcodes = Counter(m[1] for m in re.finditer(r"^\s+([a-z][a-z0-9_]+)", text, re.MULTILINE))
    matrix = Counter()
    for name, count in opcodes.items():
        if name.startswith("v_mfma"):
            matrix[name.removeprefix("v_mfma_f32_")] += count
    warps = compiled.metadata.num_warps
    by_registers = min(8, 512 // (-(-max(vgpr, 1) // 8) * 8))
    by_lds = (LDS // shared if shared else 64) * warps / 4  # waves of the workgroups that fit, per SIMD
    return {
        "vgpr": vgpr,
        "sgpr": number("sgpr_count"),
        "spills": number("vgpr_spill_count") + number("sgpr_spill_count"),
        "scratch": number("private_segment_fixed_size"),
        "lds": shared,
        "waves_per_simd": int(
            max(0, min(by_registers, by_lds if by_lds >= 1 else (1 if shared <= LDS else 0)))
        ),
        "mfma": dict(sorted(matrix.items())),
        "published": publishes(text),
        "byte_loads": sum(
            n for o, n in opcodes.items() if o.startswith(("buffer_load_u", "global_load_u")) and "byte" in o
        ),
        "code_bytes": int(found[1]) if (found := re.search(r"codeLenInByte = (\d+)", text)) else 0,
    }


def compile_all(only: str = "") -> dict[str, dict[str, Any]]:
    """Name of case and kernel -> figures. Launches that compile to the same code are compiled once."""
    target = GPUTarget("hip", "gfx942", 64)
    known: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, call in cases():
        if only not in name:
            continue
        with door.recording() as launches:
            call()
        for made in launches:
            made_from, options = source(made)
            key = f"{made_from.hash()} {sorted(options.items())}"
            if key not in known:
                known[key] = read(triton.compile(made_from, target=target, options=options))
            found[f"{name}: {made.name}"] = known[key]
    return found


def faults(name: str, row: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a kernel, whatever the table says."""
    if row["scratch"] or row["spills"]:
        yield f"{name}: {row['scratch']} bytes of scratch, {row['spills']} spilled registers; none are allowed"
    if row["lds"] > LDS:
        yield f"{name}: {row['lds']} bytes of LDS; a compute unit has {LDS}"
    if not row["published"]:
        yield f"{name}: a releasing atomic without a wait of every wavefront before it"
    kinds = set(row["mfma"])
    if "product_kernel" in name and not (kinds and all(kind.endswith("fp8_fp8") for kind in kinds)):
        yield f"{name}: the product must run on FP8 matrix instructions, found {sorted(kinds)}"
    if "seam_kernel" in name and not (kinds and all(kind.endswith("bf16") for kind in kinds)):
        yield f"{name}: the mixing product must run on bf16 matrix instructions, found {sorted(kinds)}"


# A figure may grow by this much before the gate asks for a look; fewer waves per SIMD always do.
ROOM = {"vgpr": 8, "lds": 0, "byte_loads": 0}


def regressions(found: dict[str, dict[str, Any]], table: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Where the figures are worse than the checked-in table's, or the table does not list the same kernels."""
    for name in sorted(found.keys() | table.keys()):
        if name not in table:
            yield f"{name}: not in the table"
        elif name not in found:
            yield f"{name}: in the table, but no launcher makes it"
        else:
            for key, room in ROOM.items():
                if found[name][key] > table[name][key] + room:
                    yield f"{name}: {key} {found[name][key]}, the table says {table[name][key]}"
            if found[name]["waves_per_simd"] < table[name]["waves_per_simd"]:
                now, before = found[name]["waves_per_simd"], table[name]["waves_per_simd"]
                yield f"{name}: {now} waves per SIMD, the table says {before}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="print the figures of cases whose name contains this text, no more"
    )
    parser.add_argument("--write", action="store_true", help="renew the table")
    options = parser.parse_args()
    start = time.monotonic()
    found = compile_all(options.only)
    if options.only:
        for name, row in found.items():
            print(name, json.dumps(row))
        return 0
    wrong = [fault for name, row in found.items() for fault in faults(name, row)]
    if options.write and not wrong:
        temporary = TABLE.with_suffix(".tmp")
        table = {"triton": triton.__version__, "kernels": found}
        temporary.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        temporary.replace(TABLE)
    table = json.loads(TABLE.read_text())
    if table["triton"] != triton.__version__:
        wrong.append(f"the table was written with triton {table['triton']}, this is {triton.__version__}")
    wrong += regressions(found, table["kernels"])
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    if wrong:
        print(
            "  Look at the change; if it is meant, renew the table: tools/gfx942_gate.py --write",
            file=sys.stderr,
        )
    print(f"{len(found)} kernels compiled for gfx942, {len(wrong)} faults, {time.monotonic() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
