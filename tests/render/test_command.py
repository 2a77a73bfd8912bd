"""`dsv4-deploy render`: the command itself, its files and its refusals."""

from __future__ import annotations

import os
import pathlib
import stat
import subprocess
import sys

import pytest

from dsv4_deploy.render import TARGETS, quoting
from dsv4_deploy.render.source import MARK

FLASH = ["--gpu", "mi300x:8", "--model", "deepseek-v4-flash", "--tp", "4"]


def deploy(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dsv4_deploy", *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "kubernetes"])
def test_each_target_names_the_command_that_made_it(target: str) -> None:
    done = deploy("render", target, *FLASH, "--render-gid", "109")
    assert done.returncode == 0, done.stderr
    head = " ".join(line.removeprefix("# ") for line in done.stdout.splitlines()[:6])
    assert f"dsv4-deploy render {target} --gpu mi300x:8" in head
    assert "No AMD hardware has confirmed" in done.stdout.replace("\n# ", " ")


def test_a_file_is_written_whole_and_can_be_run(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "serve.sh"
    done = deploy("render", "shell", *FLASH, "--output", str(file))
    assert done.returncode == 0 and done.stdout == "" and f"Wrote {file}" in done.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o755
    assert MARK in file.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["serve.sh"], "no temporary file is left"
    again = deploy("render", "shell", *FLASH, "--port", "9000", "--output", str(file))
    assert again.returncode == 0 and "--port 9000" in file.read_text()
    values = tmp_path / "values.yaml"
    deploy("render", "helm-values", *FLASH, "--output", str(values))
    assert stat.S_IMODE(values.stat().st_mode) == 0o644


def test_a_file_of_somebody_else_is_left_alone(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text("services: {}\n")
    done = deploy("render", "compose", *FLASH, "--output", str(file))
    assert done.returncode == 2
    assert "was not written by dsv4-deploy" in done.stderr
    assert file.read_text() == "services: {}\n"


def test_a_directory_that_is_not_there(tmp_path: pathlib.Path) -> None:
    done = deploy("render", "env", *FLASH, "--output", str(tmp_path / "none" / "x.env"))
    assert done.returncode == 1
    assert "cannot write" in done.stderr and "fix:" in done.stderr


def test_a_plan_that_is_refused_writes_nothing(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "serve.sh"
    done = deploy(
        "render",
        "shell",
        "--gpu",
        "mi300x:8",
        "--model",
        "deepseek-v4-pro",
        "--tp",
        "4",
        "--output",
        str(file),
    )
    assert done.returncode == 2
    assert "rule weights-fit" in done.stderr
    assert not file.exists()


def test_an_unknown_target() -> None:
    done = deploy("render", "nomad", *FLASH)
    assert done.returncode == 2
    assert "quadlet" in done.stderr


def test_it_needs_no_torch(tmp_path: pathlib.Path) -> None:
    code = (
        "import sys\n"
        "from dsv4_deploy.cli import main\n"
        f"try:\n    main(['render', 'compose', *{FLASH!r}, '--output', {str(tmp_path / 'c.yaml')!r}])\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "print('HEAVY', sorted({'torch', 'vllm', 'transformers', 'httpx', 'rocm_patches'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_comments_stay_comments() -> None:
    lines = quoting.comment("a\nrm -rf / \u2028 b\r\x00" + "x" * 200, "  ")
    assert all(line.startswith("  # ") for line in lines)
    assert "\\n" in lines[0] and len("".join(lines).splitlines()) == 1
