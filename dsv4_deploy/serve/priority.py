"""Asks Linux to wake this process soon: the probes' answers are short and must not queue behind vLLM's work.

Since Linux 6.12 every process may choose how long its turns are; who asks for short ones gets the processor
sooner, and no more of it (https://docs.kernel.org/scheduler/sched-eevdf.html). It is a wish: an older kernel
refuses, and nothing else changes. bench/health.py measures the answers.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

SLICE_NS = 100_000
"""The shortest turn that Linux grants: 0.1 ms."""

# sched_setattr has no wrapper in the C library; its number by machine, from the kernel's syscall tables.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
# struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
# (https://man7.org/linux/man-pages/man2/sched_setattr.2.html); for ordinary processes runtime is the slice.
_ATTRIBUTES = struct.Struct("IIQiIQQQ")
_ORDINARY = 0
_RESET_ON_FORK = 1


def prefer_short_turns(slice_ns: int = SLICE_NS) -> bool:
    """Ask for it, for this thread only and not for vLLM; False when the kernel refuses."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK != _ORDINARY:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wish = _ATTRIBUTES.pack(_ATTRIBUTES.size, _ORDINARY, _RESET_ON_FORK, nice, 0, slice_ns, 0, 0)
    return ctypes.CDLL(None).syscall(number, 0, wish, 0) == 0
