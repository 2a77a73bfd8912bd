"""The plugin's entry point, and the wall between the two packages."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocm_patches import plugin

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "triton", "vllm", "transformers"}


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


# --- register ---------------------------------------------------------------------------------------

REGISTER = """
import json
from rocm_patches import plugin

result = {"before": plugin.active()}
known = plugin._vllm_release
plugin._vllm_release = lambda: "0.31.0"
try:
    plugin.register()
except RuntimeError as error:
    result["refusal"] = str(error)
result["after_refusal"] = plugin.active()

plugin._vllm_release = known
plugin.register()
result["active"] = plugin.active()

import torch
from rocm_patches.cpu import gates, operators
libraries = list(gates._libraries)
plugin.register()
gates.open_early()
result["again"] = plugin.active()
result["one library"] = len(libraries) == 1 and gates._libraries == libraries
result["missing"] = [f.__name__ for f in operators.OPERATORS if not hasattr(torch.ops._C, f.__name__)]
print("RESULT" + json.dumps(result))
"""


@pytest.fixture(scope="module")
def registered() -> dict[str, object]:
    """register() with real vLLM in a process of its own: an unknown version, the installed one, again."""
    done = run_python(REGISTER)
    assert done.returncode == 0, done.stderr
    (line,) = (text for text in done.stdout.splitlines() if text.startswith("RESULT"))
    result: dict[str, object] = json.loads(line.removeprefix("RESULT"))
    return result


def test_register_installs_the_operators(registered: dict[str, object]) -> None:
    assert registered["before"] is None
    assert str(registered["active"]).startswith("(cpu: ")
    assert registered["missing"] == []


def test_register_twice_changes_nothing(registered: dict[str, object]) -> None:
    assert registered["again"] == registered["active"]
    assert registered["one library"] is True


def test_register_refuses_another_vllm(registered: dict[str, object]) -> None:
    """In words: which version it found, which it knows, and what to do."""
    refusal = str(registered["refusal"])
    for words in ("does not know vLLM 0.31.0", "supports 0.32.0", "Install that release", "VLLM_PLUGINS"):
        assert words in refusal
    assert registered["after_refusal"] is None


def test_the_local_part_of_a_version_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.32.0", "0.32.0+cpu", "0.32.0+rocm700"):
        monkeypatch.setattr(importlib.metadata, "version", {"vllm": version}.__getitem__)
        assert plugin._vllm_release() == "0.32.0"


def test_vllm_finds_the_entry_point() -> None:
    (entry,) = (
        e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "rocm_patches"
    )
    assert entry.load() is plugin.register


# --- patches ----------------------------------------------------------------------------------------

PATCHES = """
import json, os, pathlib, shutil, sys
from rocm_patches import plugin, registry

installed = plugin._vllm_root()
changed = pathlib.Path(sys.argv[1])
for file in registry.fingerprints()["0.32.0"]["files"]:
    (changed / file).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(installed / file, changed / file)
file = changed / "vllm/v1/metrics/prometheus.py"
file.write_text(file.read_text().replace("return REGISTRY", "return CollectorRegistry()"))

def attempt(root, **env):
    for name in ("DSV4_PATCHES", "DSV4_PATCHES_SKIP"):
        os.environ.pop(name, None)
    os.environ.update(env)
    plugin._vllm_root = lambda: root
    plugin._active = plugin._applier = None
    try:
        plugin.register()
    except registry.PatchError as error:
        outcome = str(error)
    else:
        outcome = plugin.active()
    armed = [finder for finder in sys.meta_path if isinstance(finder, registry.Applier)]
    for finder in armed:
        sys.meta_path.remove(finder)
    return outcome, len(armed)

print("RESULT" + json.dumps({
    "typo": attempt(installed, DSV4_PATCHES_SKIP="typo"),
    "mode": attempt(installed, DSV4_PATCHES="yes"),
    "changed": attempt(changed),
    "changed, auto": attempt(changed, DSV4_PATCHES="auto"),
    "changed, skipped": attempt(changed, DSV4_PATCHES_SKIP="patches-in-metrics"),
    "off": attempt(installed, DSV4_PATCHES="off"),
}))
"""


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, int]]:
    """register() with real vLLM on the CPU: what it said, and how many import hooks it left."""
    done = run_python(PATCHES, str(tmp_path_factory.mktemp("changed")))
    assert done.returncode == 0, done.stderr
    (line,) = (text for text in done.stdout.splitlines() if text.startswith("RESULT"))
    return {name: tuple(outcome) for name, outcome in json.loads(line.removeprefix("RESULT")).items()}


def test_a_changed_vllm_stops_the_process_before_anything_is_patched(
    attempts: dict[str, tuple[str, int]],
) -> None:
    text, hooks = attempts["changed"]
    assert hooks == 0
    for words in (
        "patch patches-in-metrics", "does not fit the installed vLLM 0.32.0", "get_prometheus_registry: unknown source",
        "DSV4_PATCHES_SKIP=patches-in-metrics", "DSV4_PATCHES=auto",
    ):  # fmt: skip
        assert words in text


@pytest.mark.parametrize(
    ("how", "why"), [("changed, auto", "does not fit"), ("changed, skipped", "named in DSV4_PATCHES_SKIP")]
)
def test_the_operator_can_go_on_without_it(attempts: dict[str, tuple[str, int]], how: str, why: str) -> None:
    text, hooks = attempts[how]
    taken, left_out = text.split("left out: ")
    assert f"patches-in-metrics ({why}" in left_out and "patches-in-metrics" not in taken and hooks == 1


def test_off_and_wrong_settings(attempts: dict[str, tuple[str, int]]) -> None:
    assert "patches: none" in attempts["off"][0]
    assert "DSV4_PATCHES_SKIP names typo" in attempts["typo"][0] and attempts["typo"][1] == 0
    assert "DSV4_PATCHES=yes is none of" in attempts["mode"][0] and attempts["mode"][1] == 0


# --- imports ----------------------------------------------------------------------------------------


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    script = (
        "import sys, rocm_patches, rocm_patches.plugin\n"
        f"print(sorted({HEAVY | {'dsv4_deploy', 'numpy'}!r} & set(sys.modules)))"
    )
    done = run_python(script)
    assert done.stdout.strip() == "[]", done.stderr


def runs_later(node: ast.AST) -> bool:
    """Not run when the module is imported: the inside of functions, and what is for type checkers only."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING")
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def imports(tree: ast.AST, everywhere: bool) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of absolute imports: all, or those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, str(node.module).split(".")[0]
        elif everywhere or not runs_later(node):
            yield from imports(node, everywhere)


def found(package: str, names: set[str], everywhere: bool) -> list[str]:
    """file:line of the imports of any of `names` in a package."""
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 5
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in imports(ast.parse(path.read_text()), everywhere)
        if name in names
    ]


def test_rocm_patches_never_imports_the_control_side() -> None:
    assert found("rocm_patches", {"dsv4_deploy"}, everywhere=True) == []


def test_the_control_side_imports_nothing_heavy_at_module_level() -> None:
    assert found("dsv4_deploy", HEAVY, everywhere=False) == []


def test_importing_all_of_the_control_side_loads_nothing_heavy() -> None:
    """Not through a third module either."""
    script = (
        "import importlib, pkgutil, sys, dsv4_deploy\n"
        "names = [m.name for m in pkgutil.walk_packages(dsv4_deploy.__path__, 'dsv4_deploy.')]\n"
        "[importlib.import_module(n) for n in names if not n.endswith('__main__')]\n"
        f"print(len(names) > 5, sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = run_python(script)
    assert done.stdout.strip() == "True []", done.stderr


def test_the_search_for_imports_finds_them() -> None:
    """So that the two tests above cannot pass by looking at nothing."""
    source = (
        "import torch.nn\nif True:\n from vllm.x import y\nclass A:\n import triton\ndef f():\n import json\n"
    )
    assert [name for _, name in imports(ast.parse(source), everywhere=False)] == ["torch", "vllm", "triton"]
    assert [name for _, name in imports(ast.parse(source), everywhere=True)][-1] == "json"
    assert found("rocm_patches", {"torch"}, everywhere=False)
