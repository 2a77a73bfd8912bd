"""What `dsv4-deploy patches` tells: the catalogue of patches, whether they fit a vLLM that lies on disk, and
which of them a running server has in which process.

In: `rocm_patches.patches` (data; imports neither torch nor vLLM), vLLM's source files as text, or a server's
/metrics. Out: rows to print.
"""

from __future__ import annotations

import importlib.util
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dsv4_deploy.errors import DeployError, refused
from rocm_patches import registry
from rocm_patches.patches import PATCHES
from rocm_patches.report import METRIC

SUPPORTED = tuple(sorted(registry.fingerprints()))


def find(id: str) -> registry.Patch:
    """The patch of that id; refuses an unknown one and names those that resemble it."""
    import difflib

    for patch in PATCHES:
        if patch.id == id:
            return patch
    near = difflib.get_close_matches(id, [patch.id for patch in PATCHES])
    raise refused(
        f"no patch is called {id}",
        fix=f"Did you mean {' or '.join(near)}?" if near else "`dsv4-deploy patches list` shows all.",
    )


def described(patch: registry.Patch) -> list[tuple[str, str]]:
    """(heading, text) of everything that the catalogue says about a patch."""
    return [
        ("patch", patch.id),
        ("title", patch.title),
        ("symptom", patch.symptom),
        ("cause", patch.cause),
        ("remedy", patch.remedy),
        ("upstream", f"{patch.upstream} ({patch.upstream_state})"),
        ("drop when", patch.drop_when),
        ("platforms", ", ".join(patch.platforms)),
        ("vLLM", ", ".join(patch.releases)),
        ("checked", patch.checked),
        ("needs", ", ".join(patch.needs)),
        ("reports", ", ".join(patch.rows)),
    ]


def edits(target: registry.Target) -> list[tuple[str, str]]:
    """The (old, new) texts of a replacement that edits vLLM's source; [] for one that is code of its own."""
    return list(getattr(target.replace, "edits", ()))


# --- verify -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One patch against one vLLM: "fits", "not needed" or "MISMATCH", and why."""

    id: str
    platforms: str
    result: str
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Verification:
    """All patches against one vLLM. `release` is None where the folder does not say which it is."""

    root: str
    release: str | None
    verdicts: list[Verdict]

    @property
    def known(self) -> bool:
        return self.release in SUPPORTED

    @property
    def ok(self) -> bool:
        return self.known and all(one.result != "MISMATCH" for one in self.verdicts)


def vllm_root(path: Path | None) -> Path | zipfile.Path:
    """What holds the package `vllm`: the folder or wheel `path`, its parent, or where this Python has it installed.

    Nothing is imported. Raises DeployError where there is none.
    """
    if path is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise refused(
                "vLLM is not installed in this Python",
                fix="Name an unpacked wheel or an installation: dsv4-deploy patches verify --vllm-path DIR",
            )
        return Path(spec.submodule_search_locations[0]).parent
    why = "Looked for vllm/__init__.py in it, and whether it is the folder vllm itself."
    try:
        if path.is_file():
            wheel = zipfile.Path(zipfile.ZipFile(path))
            if (wheel / "vllm" / "__init__.py").is_file():
                return wheel
        for root in (path, path.resolve().parent):
            if (root / "vllm" / "__init__.py").is_file() and path.resolve() in (
                root.resolve(),
                root / "vllm",
            ):
                return root
    except (OSError, zipfile.BadZipFile) as error:
        why = f"{type(error).__name__}: {error}"
    raise refused(
        f"{path} holds no vLLM",
        why=why,
        fix="Name site-packages, a wheel of vLLM, or the folder in which one was unpacked.",
    )


def verify(root: Path | zipfile.Path) -> Verification:
    """Compare what the patches touch with the sources below `root`, which are read, not imported."""
    sources = registry.Sources(root)
    release = sources.release()
    verdicts = []
    for patch in PATCHES:
        platforms = ", ".join(patch.platforms)
        if release in SUPPORTED and release not in patch.releases:
            verdicts.append(Verdict(patch.id, platforms, "not needed"))
        elif wrong := registry.examine(patch, sources):
            verdicts.append(Verdict(patch.id, platforms, "MISMATCH", [str(one) for one in wrong]))
        else:
            verdicts.append(Verdict(patch.id, platforms, "fits"))
    return Verification(str(root), release, verdicts)


def advice(result: Verification) -> str:
    """What a failed verification means, and what to do."""
    if not result.known:
        return (
            f"vLLM {result.release or 'of an unknown release'} is not supported: the patches were written for "
            f"{' and '.join(SUPPORTED)}. Install one of these; a server with this vLLM refuses to start unless "
            "DSV4_PATCHES=auto (apply what fits) or off is set."
        )
    ids = ",".join(one.id for one in result.verdicts if one.result == "MISMATCH")
    return (
        f"This vLLM says that it is {result.release}, but not all of its source is. A server with it refuses to "
        f"start. Install vLLM {result.release} unchanged, or go on without these patches: DSV4_PATCHES_SKIP={ids}"
    )


# --- status -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """One process of a running server and what it has of each patch: "active", "armed", "skipped" or "failed"."""

    name: str
    pid: int
    platform: str
    vllm: str
    patches: dict[str, str]


_SAMPLE = re.compile(rf"^{METRIC}{{(?P<labels>.*)}} 1(?:\.0)?$", re.MULTILINE)
_LABELS = {"patch", "state", "process", "pid", "platform", "vllm"}
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse_metrics(text: str) -> list[Process]:
    """The processes that a /metrics page tells of, in its order. Samples of another shape are nobody's."""
    found: dict[int, Process] = {}
    for sample in _SAMPLE.finditer(text):
        labels = dict(_LABEL.findall(sample["labels"]))
        if not labels.keys() >= _LABELS or not labels["pid"].isdecimal():
            continue
        pid = int(labels["pid"])
        process = found.setdefault(
            pid, Process(labels["process"], pid, labels["platform"], labels["vllm"], {})
        )
        if labels["patch"]:
            process.patches[labels["patch"]] = labels["state"]
    return list(found.values())


def status(url: str, timeout_s: float = 5.0) -> list[Process]:
    """Ask a server. Raises DeployError where it does not answer, or runs without rocm_patches."""
    import httpx

    address = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    try:
        answer = httpx.get(f"{address}/metrics", timeout=timeout_s)
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DeployError(
            f"{address}/metrics gives no answer",
            why=f"{type(error).__name__}: {error}",
            fix="Name vLLM's own address, for example http://127.0.0.1:8000; `dsv4-deploy status` says whether "
            "it is up.",
        ) from error
    processes = parse_metrics(answer.text)
    if not processes:
        raise DeployError(
            f"the server at {address} runs without rocm_patches, or without its patch patches-in-metrics",
            why=f"Its /metrics has no {METRIC}.",
            fix="Look for `rocm_patches active` in its log; VLLM_PLUGINS must be unset or name rocm_patches.",
        )
    return processes


def columns(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Text lines with aligned columns."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
