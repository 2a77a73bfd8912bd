"""The command line itself: it answers at once, imports little, and wrong usage ends with exit code 2 and a
reason."""

from __future__ import annotations

import os
import pathlib
import pty
import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Callable

import pytest

from dsv4_deploy import __version__
from dsv4_deploy.errors import DeployError, refused, render
from tests import small_checkpoint

HEAVY = ("torch", "vllm", "transformers", "httpx", "rich", "yaml", "psutil", "rocm_patches", "numpy")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Run:
    """Runs dsv4-deploy with a state and cache directory of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DSV4_", "VLLM_"))}
    env = {**clean, "DSV4_STATE_DIR": str(tmp_path / "state"), "DSV4_CACHE_DIR": str(tmp_path / "cache")}

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dsv4_deploy", *arguments],
            env={**env, **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["down", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from dsv4_deploy.cli import main\n"
        f"try:\n    main({arguments!r})\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        f"print('HEAVY', sorted(set({HEAVY!r}) & sys.modules.keys()))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "HEAVY []"


def test_a_dry_run_imports_no_torch_and_no_vllm(tmp_path: pathlib.Path) -> None:
    code = (
        "import sys\n"
        "from dsv4_deploy.cli import main\n"
        "try:\n    main(['up', '--dry-run', '--device', 'cpu'])\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "print('HEAVY', sorted({'torch', 'vllm', 'transformers', 'rocm_patches'} & sys.modules.keys()))\n"
    )
    env = {**os.environ, "DSV4_CACHE_DIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "HEAVY []"


def test_help_is_quick(run: Run) -> None:
    # Processor time, and the least of several: what else this machine does must not decide. `make bench` has
    # the time on the clock.
    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(once() for _ in range(4)) < 0.25


def test_the_version_is_that_of_the_package(run: Run) -> None:
    pyproject = pathlib.Path(__file__).parents[1] / "pyproject.toml"
    assert tomllib.loads(pyproject.read_text())["project"]["version"] == __version__
    assert run("--version").stdout == f"dsv4-deploy, version {__version__}\n"


def test_help_says_what_is_idempotent_and_names_the_variables(run: Run) -> None:
    assert "can be repeated" in " ".join(run("down", "--help").stdout.split())
    text = run("up", "--help").stdout
    for variable in ("DSV4_VLLM_COMMAND", "DSV4_STATE_DIR", "DSV4_CACHE_DIR"):
        assert variable in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--port", "0"], "--port"),
        (["up", "--port", "65536"], "--port"),
        (["up", "--port", "http"], "--port"),
        (["down", "--port", "-1"], "--port"),
        (["up", "--tp", "0"], "--tp"),
        (["up", "--tp", "two"], "--tp"),
        (["up", "--tp", "3", "--device", "cpu"], "Use --tp 1, 2 or 4."),
        (["up", "--max-model-len", "-5"], "--max-model-len"),
        (["up", "--max-model-len", "8 k"], "--max-model-len"),
        (["up", "--max-model-len", "10", "--device", "cpu"], "Use a length from 256 to 8192."),
        (["up", "--max-model-len", "99999", "--device", "cpu"], "Use a length from 256 to 8192."),
        (["up", "--model", "tinny", "--device", "cpu"], "Did you mean tiny"),
        (["up", "--model", "deepseek-v4-flash", "--device", "cpu"], "too large for the no-GPU mode"),
        (["up", "--model", "/no/such/dir"], "is not a directory"),
        (["up", "--device", "tpu"], "--device"),
        (["up", "--set", "max-num-seqs"], "--set max-num-seqs=VALUE"),
        (["up", "--set", "port=9"], "--port N"),
        (["up", "--set", "api-key=x"], "VLLM_API_KEY"),
        (["up", "--timeout", "0"], "--timeout"),
        (["up", "--nonsense"], "--nonsense"),
        (["logs", "-n", "-1"], "--lines"),
        (["sideways"], "sideways"),
        (["tiny"], "DIRECTORY"),
        (["tiny", "--seed", "-1", "x"], "--seed"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_a_reason(run: Run, arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_model_directory_that_lacks_a_file(run: Run, tmp_path: pathlib.Path) -> None:
    model = small_checkpoint.write(tmp_path / "model")
    (model / small_checkpoint.SHARDS[1]).unlink()
    result = run("up", "--device", "cpu", "--model", str(model))
    assert result.returncode == 2
    assert f"{small_checkpoint.SHARDS[1]} is missing" in result.stderr
    assert "fix: Download" in result.stderr


def test_a_relative_model_directory(
    run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_checkpoint.write(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    root = str(pathlib.Path(__file__).parents[1])
    for name in ("model", "./model"):
        result = run("up", "--device", "cpu", "--model", name, "--dry-run", PYTHONPATH=root)
        assert f"serve {tmp_path / 'model'} " in result.stdout


def test_rocm_can_be_planned_anywhere_but_not_started_without_gpus(run: Run) -> None:
    planned = run("up", "--device", "rocm", "--dry-run")
    assert planned.returncode == 0
    assert "VLLM_ROCM_USE_AITER=1" in planned.stdout
    if not pathlib.Path("/sys/class/kfd").exists():
        refusal = run("up", "--device", "rocm")
        assert refusal.returncode == 2
        assert "no AMD GPU is visible" in refusal.stderr


def test_status_and_down_with_nothing_running(run: Run) -> None:
    status = run("status")
    assert (status.returncode, status.stdout) == (0, "Nothing is running.\n")
    assert run("status", "--json").stdout == "[]\n"
    assert run("down").returncode == 0
    assert run("down", "--all").returncode == 0


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("/no/such/vllm", "is not a program here"),
        ('["unterminated', "cannot be read"),
        ('"open', "cannot be read"),
        ("[1]", "not a list of strings"),
        ("[]", "not a list of strings"),
    ],
)
def test_a_launcher_that_is_none(run: Run, tmp_path: pathlib.Path, launcher: str, words: str) -> None:
    model = small_checkpoint.write(tmp_path / "model")
    result = run("up", "--device", "cpu", "--model", str(model), DSV4_VLLM_COMMAND=launcher)
    assert result.returncode == 2
    assert words in result.stderr


def test_a_reader_that_goes_away_is_no_error_message(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "8000" / "vllm.log"
    log.parent.mkdir()
    log.write_text("a line of the log\n" * 100_000)
    process = subprocess.Popen(
        [sys.executable, "-m", "dsv4_deploy", "logs", "-n", "100000"],
        env={**os.environ, "DSV4_STATE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout
    assert process.stderr
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=30) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_tiny_is_written_whole_and_not_over_something_else(run: Run, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "tiny"
    assert run("tiny", str(target)).returncode == 0
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    again = run("tiny", str(target))
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert run("tiny", str(target), "--force", "--seed", "1").returncode == 0
    after = {path.name: path.read_bytes() for path in target.iterdir()}
    assert before.keys() == after.keys()
    assert before != after
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_errors_are_rendered_with_their_parts_only() -> None:
    assert render(refused("it broke")) == "error: it broke"
    whole = DeployError("it broke", why="old", fix="new", detail="line 1\n\nline 2")
    assert render(whole) == "error: it broke\n  why: old\n  fix: new\n  | line 1\n  |\n  | line 2"
    assert whole.exit_code == 1


def test_a_terminal_gets_a_live_line(tmp_path: pathlib.Path) -> None:
    code = (
        "import time\n"
        "from dsv4_deploy.serve.progress import Event, Stage\n"
        "from dsv4_deploy.serve.report import LiveReport, report\n"
        "talk = report()\n"
        "assert isinstance(talk, LiveReport)\n"
        "with talk.live('vLLM is starting'):\n"
        "    talk.stage(Event(Stage.LOADING))\n"
        "    talk.activity('1/2 files, 50 %')\n"
        "    time.sleep(0.5)\n"
        "talk.note('done [really]')\n"
    )
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=slave, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    ) as process:
        os.close(slave)
        shown = b""
        while chunk := _read(master):
            shown += chunk
    os.close(master)
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode()
    assert process.returncode == 0, text
    assert "s] loading weights" in text
    assert "vLLM is starting: 1/2 files, 50 %" in text
    assert "done [really]" in text


def _read(master: int) -> bytes:
    try:
        return os.read(master, 4096)
    except OSError:  # the other side has closed the terminal
        return b""
