"""Orphans come to us and leave no zombie; our own child's exit code is not taken from it. In a process of its
own, because it changes what this one adopts."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, os, pathlib, signal, subprocess, sys, time
from dsv4_deploy.serve import reaper

reaper.adopt_orphans()
own = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(0.3); raise SystemExit(7)"])
# A child that starts two grandchildren and leaves them behind.
middle = subprocess.Popen(["sh", "-c", "sleep 0.2 & sleep 0.4 & echo $!; exit 0"], stdout=subprocess.PIPE)
orphan = int(middle.stdout.readline())
middle.wait()
parent = int(pathlib.Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[1])
deadline = time.monotonic() + 20
def children():
    return pathlib.Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
while children() and time.monotonic() < deadline:
    reaper.reap(own)
    time.sleep(0.05)
print(json.dumps({"adopted": parent == os.getpid(), "code": own.returncode, "left": children()}))
reaper.reap(None)
"""


def test_orphans_are_adopted_and_reaped() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == {"adopted": True, "code": 7, "left": []}
