"""Fetches the programs that read rendered files for real: podman's Quadlet generator and docker compose.

In: what this machine has, else Debian 13's archive through apt (Debian 12's podman has no Quadlet yet, and its compose
is the Python one of 2021). Out: paths; fetched programs are kept in `.cache/tools` of the repository.
"""

from __future__ import annotations

import fcntl
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "tools"
SUITE = "trixie"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

# Our name -> (Debian's package, the file in it, where distributions put it, how to ask for its version, the oldest that
# will do)
PROGRAMS = {
    "quadlet": (
        "podman",
        "usr/libexec/podman/quadlet",
        ("/usr/libexec/podman/quadlet", "/usr/lib/podman/quadlet"),
        ("-version",),
        (4, 6),
    ),
    "docker-compose": (
        "docker-compose",
        "usr/libexec/docker/cli-plugins/docker-compose",
        ("/usr/libexec/docker/cli-plugins/docker-compose", "/usr/lib/docker/cli-plugins/docker-compose"),
        ("version", "--short"),
        (2, 20),
    ),
}


class ToolError(Exception):
    """What is wrong, why, and what to do, in one text."""


def fetch(cache: Path = CACHE) -> dict[str, Path]:
    """Make sure that both programs are there; return name -> path. Raises ToolError.

    Safe to call from several processes at once: one fetches, the others wait for it.
    """
    cache.mkdir(parents=True, exist_ok=True)
    found: dict[str, Path] = {}
    with (cache / ".render.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, (_, _, places, ask, oldest) in PROGRAMS.items():
            for place in (cache / name, *map(Path, places)):
                if _version(place, ask) >= oldest:
                    found[name] = place
                    break
        missing = [name for name in PROGRAMS if name not in found]
        if missing:
            print(f"  fetching {', '.join(missing)} (Debian {SUITE})", file=sys.stderr, flush=True)
            _fetch(missing, cache)
            for name in missing:
                _, _, _, ask, oldest = PROGRAMS[name]
                if _version(cache / name, ask) < oldest:
                    raise ToolError(
                        f"{name} of Debian {SUITE} does not run here; it needs glibc 2.34 or newer."
                    )
                found[name] = cache / name
    return found


def _version(program: Path, ask: Sequence[str]) -> tuple[int, ...]:
    """What it says its version is; () when it is not there or does not run."""
    try:
        done = subprocess.run([program, *ask], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"(\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if done.returncode == 0 and match else ()


def _fetch(names: Sequence[str], cache: Path) -> None:
    """Download the packages with a package list of our own, so that this machine's stays as it is."""
    if shutil.which("apt-get") is None or not KEYRING.exists():
        raise ToolError(
            "The tests need podman 4.6 or newer (for its Quadlet generator) and docker compose 2.20 or newer.\n"
            "  Install them with your distribution's package manager."
        )
    with tempfile.TemporaryDirectory(prefix="dsv4-tools-") as scratch:
        home = Path(scratch)
        (home / "lists" / "partial").mkdir(parents=True)
        (home / "archives" / "partial").mkdir(parents=True)
        (home / "sources.list").write_text(f"deb [signed-by={KEYRING}] {_mirror()} {SUITE} main\n")
        options = {
            "Dir::Etc::sourcelist": home / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": home / "lists",
            "Dir::Cache": home,
            "APT::Sandbox::User": "root",
        }
        apt = [
            "apt-get",
            "-qq",
            *(word for key, value in options.items() for word in ("-o", f"{key}={value}")),
        ]
        _run([*apt, "update"], home)
        _run([*apt, "download", *(PROGRAMS[name][0] for name in names)], home)
        for name in names:
            package, member, _, _, _ = PROGRAMS[name]
            (archive,) = home.glob(f"{package}_*.deb")
            data = _run(["dpkg-deb", "--fsys-tarfile", str(archive)], home)
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                file = tar.extractfile(f"./{member}")
                if file is None:
                    raise ToolError(f"{member} is not in {archive.name}.")
                _install(file.read(), cache / name)


def _mirror() -> str:
    """Where this machine gets Debian's packages from. apt knows it once it has a package list."""
    for attempt in range(2):
        if attempt:
            subprocess.run(["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "update"], capture_output=True)
        done = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(REPO_URI) $(LABEL)", "Created-By: Packages"],
            capture_output=True,
            text=True,
        )
        for line in done.stdout.splitlines():
            uri, _, label = line.partition(" ")
            if label == "Debian":
                return uri
    raise ToolError("apt does not know where Debian's packages are.\n  Check /etc/apt/sources.list.d.")


def _run(command: Sequence[str], directory: Path) -> bytes:
    done = subprocess.run(command, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode:
        tail = "\n".join(f"    {line}" for line in done.stderr.decode(errors="replace").splitlines()[-6:])
        raise ToolError(f"`{command[0]} {command[-1]}` failed:\n{tail}")
    return done.stdout


def _install(data: bytes, path: Path) -> None:
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_bytes(data)
    scratch.chmod(0o755)
    scratch.replace(path)


def main() -> int:
    try:
        fetch()
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
