"""How programs of one launch meet: each publishes its part, counts itself in, and the one that arrives last goes on
with everybody's. Nobody waits, so no program depends on another one being scheduled.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def publish(anything, AMD: tl.constexpr):
    """All stores of this program are done before any of its threads goes on; an atomic with release may follow.

    A barrier orders the program's threads. On AMD it does not wait for the stores of the other wavefronts (LLVM's
    memory model for gfx942: a work-group fence needs no vmcnt, https://llvm.org/docs/AMDGPUUsage.html), and the
    release of the one wavefront that does the atomic waits only for its own stores: so every wavefront waits
    here. `anything` is an int32 tensor that all threads hold a part of. tools/gfx942_gate.py checks the result.
    """
    if AMD:
        wait: tl.constexpr = "s_waitcnt vmcnt(0)\n\tv_mov_b32 $0, $1"
        tl.inline_asm_elementwise(wait, "=v,v,~{memory}", [anything], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
