"""The wish for short turns: for the supervisor's own thread, and not for what it starts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# What the kernel says of the calling thread, by sched_getattr: the sixth field is the length of its turns.
READ = """
import ctypes, json, platform, struct
answer = ctypes.create_string_buffer(48)
number = {"x86_64": 315, "aarch64": 275}[platform.machine()]
assert ctypes.CDLL(None).syscall(number, 0, answer, 48, 0) == 0
turn = struct.unpack("IIQiIQQQ", answer.raw)[5]
"""
# In a process of its own: the wish cannot be taken back.
WISH = f"""
import subprocess, sys
from dsv4_deploy.serve import priority
granted = priority.prefer_short_turns()
{READ}
child = subprocess.run([sys.executable, "-c", {READ + "print(turn)"!r}], capture_output=True, text=True, check=True)
print(json.dumps([granted, turn, int(child.stdout)]))
"""


def test_short_turns_are_not_inherited() -> None:
    done = subprocess.run([sys.executable, "-c", WISH], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    granted, mine, child = json.loads(done.stdout)
    if not granted or not mine:
        pytest.skip("this kernel (older than 6.12) has one length of turn for all")
    assert mine == 100_000
    assert child > mine
