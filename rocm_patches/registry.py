"""Patches as data, and what puts them into a vLLM process: which fit this vLLM (by the source of what they
touch, read as text, never imported), in which order, and what became of each. In: the catalogue in
`rocm_patches.patches`, the digests in `fingerprints.json`, two environment variables. Out: a `Selection`,
and patched modules.

A replacement is made the moment its module has been executed (an import hook), so whoever imports the name
by value afterwards gets the replacement; modules that were there already are put right as well. Standard
library only: the control side reads the catalogue where there is neither torch nor vLLM.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.abc
import importlib.machinery
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

FINGERPRINTS = Path(__file__).with_name("fingerprints.json")
MODES = ("require", "auto", "off")
PLATFORMS = ("gfx942", "cpu", "any")
# A digest of a symbol is shortened: it tells revisions of one function apart, it is no defence against
# somebody who can write into site-packages.
DIGITS = 16


class PatchError(RuntimeError):
    """A patch does not fit, or the catalogue contradicts itself. The text says what to do."""


@dataclass(frozen=True)
class Target:
    """One name in vLLM that a patch replaces, or relies on.

    `symbol` is a function, class, method ("Class.method") or module variable of `module`. `replace` takes
    the original object (for a method: the plain function) and returns its replacement; None means that the
    patch only relies on this source, which is why it is fingerprinted too. Keep the original's name and
    arguments: vLLM's callers are not changed.
    """

    module: str
    symbol: str
    replace: Callable[[Any], Any] | None = None

    @property
    def key(self) -> str:
        return f"{self.module}:{self.symbol}"

    @property
    def file(self) -> str:
        """Path of the module below the folder that holds the package `vllm`."""
        return self.module.replace(".", "/") + ".py"


@dataclass(frozen=True)
class Measurement:
    """One line of a self-test: a patched operator against its reference, in the operator's own unit."""

    operator: str
    dialect: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN, too


@dataclass(frozen=True)
class Patch:
    """One defect of vLLM and its remedy.

    `platforms`: where it is applied (`any` = on every platform). `releases`: vLLM releases that need it.
    `after`: ids that are applied before it where both are; two patches of one symbol must be ordered so.
    `needs`: ids without which it is wrong. `conflicts`: ids that exclude it. `self_test(device)`, where
    `device` is a torch device string, measures the patched operator; it may import torch and vLLM.
    `rows`: numbers of public failure reports that it settles.
    """

    id: str
    title: str
    symptom: str
    cause: str
    remedy: str
    upstream: str
    upstream_state: str
    drop_when: str
    platforms: tuple[str, ...]
    targets: tuple[Target, ...]
    releases: tuple[str, ...] = ("0.32.0", "0.33.0")
    after: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    self_test: Callable[[str], list[Measurement]] | None = None
    rows: tuple[str, ...] = ()
    checked: str = (
        "vLLM 0.32.0's own code on a simulated gfx942 (Triton's interpreter); never on AMD hardware"
    )

    def on(self, platform: str) -> bool:
        return platform in self.platforms or "any" in self.platforms


@dataclass(frozen=True)
class NotNeeded:
    """A patch that others carry, or that we expected to need, and the proof that it is not wanted here."""

    id: str
    claim: str
    finding: str
    proof: str


# --- fingerprints -----------------------------------------------------------------------------------


def _definitions(body: Iterable[ast.stmt], name: str) -> list[ast.stmt]:
    """Statements that define `name` at this level, those below `if` and `try` included, in text order."""
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == name:
                found.append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            written = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(one, ast.Name) and one.id == name for one in written):
                found.append(node)
        elif isinstance(node, ast.If | ast.Try):
            for part in (node.body, node.orelse, getattr(node, "finalbody", [])):
                found += _definitions(part, name)
            for handler in getattr(node, "handlers", []):
                found += _definitions(handler.body, name)
    return found


def symbol_digest(source: str, tree: ast.Module, symbol: str) -> str | None:
    """Digest of the text that defines `symbol`, decorators included; None where it is not defined.

    Trailing spaces and the indentation of the whole do not count, everything else does.
    """
    *classes, name = symbol.split(".")
    body: list[ast.stmt] = tree.body
    for part in classes:
        owners = [node for node in _definitions(body, part) if isinstance(node, ast.ClassDef)]
        body = [statement for owner in owners for statement in owner.body]
    found = _definitions(body, name)
    if not found:
        return None
    lines = source.splitlines()
    text = []
    for node in found:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(one.lineno for one in decorators)])
        block = lines[first - 1 : node.end_lineno]
        indent = len(block[0]) - len(block[0].lstrip())
        text += [line[indent:].rstrip() if not line[:indent].strip() else line.rstrip() for line in block]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:DIGITS]


def file_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@functools.cache
def fingerprints() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """release -> {"files": {path: digest of the whole file}, "symbols": {"module:symbol": digest}}."""
    loaded: dict[str, dict[str, dict[str, str]]] = json.loads(FINGERPRINTS.read_text())
    return loaded


class Sources:
    """vLLM's source text below `root`, the folder that holds the package `vllm` (site-packages, or an
    unpacked wheel). Every file is read once; a file that is byte for byte a known release's is not parsed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[str, tuple[str, str] | None] = {}
        self._trees: dict[str, ast.Module | None] = {}

    def release(self) -> str | None:
        """The public version that the package carries in `vllm/_version.py`, or None."""
        try:
            text = (self.root / "vllm" / "_version.py").read_text()
        except OSError:
            return None
        match = re.search(r"""^(?:__version__|version)\b.*=\s*['"]([^'"]+)['"]""", text, flags=re.MULTILINE)
        return match[1].split("+")[0] if match else None

    def _read(self, file: str) -> tuple[str, str] | None:
        """(text, digest) of a file, or None where it does not exist."""
        if file not in self._files:
            try:
                data = (self.root / file).read_bytes()
                self._files[file] = data.decode(), file_digest(data)
            except (OSError, UnicodeDecodeError):
                self._files[file] = None
        return self._files[file]

    def is_pristine(self, file: str, release: str) -> bool:
        """Whether the file is that of the release, byte for byte."""
        known = fingerprints().get(release, {}).get("files", {}).get(file)
        read = self._read(file)
        return read is not None and read[1] == known

    def digest(self, target: Target) -> str | None:
        """Digest of the target's source; None where the file or the symbol is missing."""
        read = self._read(target.file)
        if read is None:
            return None
        if target.file not in self._trees:
            try:
                self._trees[target.file] = ast.parse(read[0])
            except SyntaxError:
                self._trees[target.file] = None
        tree = self._trees[target.file]
        return None if tree is None else symbol_digest(read[0], tree, target.symbol)


@dataclass(frozen=True)
class Mismatch:
    """Why a target's source is not the one that a patch was written for."""

    target: Target
    problem: str  # "no such file", "no such symbol", "unknown source"
    found: str | None = None
    known: tuple[str, ...] = ()

    def __str__(self) -> str:
        detail = ""
        if self.found:
            detail = f" (digest {self.found}, known: {', '.join(self.known) or 'none'})"
        return f"{self.target.key}: {self.problem}{detail}"


def examine(patch: Patch, sources: Sources) -> list[Mismatch]:
    """What of a patch's targets is not as in any one release that it was written for; [] = it fits."""
    best: list[Mismatch] | None = None
    for release in patch.releases:
        known = fingerprints().get(release, {}).get("symbols", {})
        wrong = []
        for target in patch.targets:
            if target.key in known and sources.is_pristine(target.file, release):
                continue
            found = sources.digest(target)
            if found is not None and found == known.get(target.key):
                continue
            if found is not None:
                problem = "unknown source"
            else:
                problem = (
                    "no such symbol" if sources._read(target.file) is not None else f"no file {target.file}"
                )
            digests = (fingerprints().get(one, {}).get("symbols", {}) for one in patch.releases)
            everything = dict.fromkeys(d[target.key] for d in digests if target.key in d)
            wrong.append(Mismatch(target, problem, found, tuple(everything)))
        if not wrong:
            return []
        if best is None or len(wrong) < len(best):
            best = wrong
    return best or []


# --- selection --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """What `select` decided: patches to apply, in order, and why the others are left out."""

    platform: str
    release: str
    mode: str
    patches: tuple[Patch, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)


def parse_mode(environ: Mapping[str, str]) -> tuple[str, frozenset[str]]:
    """(DSV4_PATCHES, ids of DSV4_PATCHES_SKIP). Raises PatchError for another mode."""
    mode = environ.get("DSV4_PATCHES", "").strip().lower() or "require"
    if mode not in MODES:
        raise PatchError(f"DSV4_PATCHES={mode} is none of {', '.join(MODES)}. Unset it for `require`.")
    skip = frozenset(filter(None, (one.strip() for one in environ.get("DSV4_PATCHES_SKIP", "").split(","))))
    return mode, skip


def in_order(patches: Sequence[Patch]) -> list[Patch]:
    """The patches, each behind those that it names in `after` and `needs`, else in the order given.

    Raises PatchError for a circle, for a conflict, and for two patches of one symbol without an order.
    """
    by_id = {patch.id: patch for patch in patches}
    ordered: list[Patch] = []
    visiting: list[str] = []

    def visit(patch: Patch) -> None:
        if patch in ordered:
            return
        if patch.id in visiting:
            raise PatchError(f"patches wait for each other: {' -> '.join([*visiting, patch.id])}")
        visiting.append(patch.id)
        for other in (*patch.after, *patch.needs):
            if other in by_id:
                visit(by_id[other])
        visiting.pop()
        ordered.append(patch)

    for patch in patches:
        visit(patch)
    owners: dict[str, Patch] = {}
    for patch in ordered:
        for other in patch.conflicts:
            if other in by_id:
                raise PatchError(
                    f"patches {patch.id} and {other} exclude each other. Name one of them in "
                    "DSV4_PATCHES_SKIP."
                )
        for target in patch.targets:
            if target.replace is None:
                continue
            former = owners.setdefault(target.key, patch)
            if former is not patch:
                if former.id not in (*patch.after, *patch.needs):
                    raise PatchError(
                        f"patches {former.id} and {patch.id} both replace {target.key} and neither names "
                        "the other in `after`"
                    )
                owners[target.key] = patch
    return ordered


def select(
    patches: Sequence[Patch], sources: Sources, platform: str, release: str, environ: Mapping[str, str]
) -> Selection:
    """Choose what to apply, or raise PatchError before anything is touched.

    `require` (the default): every patch of this platform and release must fit, or nobody starts. `auto`:
    those that fit. `off`: none. Ids in DSV4_PATCHES_SKIP are left out in either mode.
    """
    mode, skip = parse_mode(environ)
    if unknown := skip - {patch.id for patch in patches}:
        raise PatchError(
            f"DSV4_PATCHES_SKIP names {', '.join(sorted(unknown))}, which no patch is called. "
            "`dsv4-deploy patches list` shows the ids."
        )
    wanted = [patch for patch in patches if patch.on(platform)]
    if mode == "off":
        return Selection(platform, release, mode, (), {patch.id: "DSV4_PATCHES=off" for patch in wanted})
    known = sorted({one for patch in patches for one in patch.releases})
    if mode == "require" and wanted and release not in known:
        raise PatchError(
            f"rocm_patches does not know vLLM {release}; its patches were written for {', '.join(known)}. "
            "Install one of these, or set DSV4_PATCHES=auto to apply only patches whose source is unchanged."
        )
    skipped: dict[str, str] = {}
    chosen: list[Patch] = []
    for patch in wanted:
        if patch.id in skip:
            skipped[patch.id] = "named in DSV4_PATCHES_SKIP"
        elif release in known and release not in patch.releases:
            skipped[patch.id] = f"vLLM {release} does not need it"
        elif wrong := examine(patch, sources):
            if mode == "require":
                raise PatchError(
                    f"patch {patch.id} ({patch.title}) does not fit the installed vLLM {release}: "
                    f"{'; '.join(map(str, wrong))}. It was written for {', '.join(patch.releases)}. Install "
                    f"one of these unchanged, or go on without this patch: DSV4_PATCHES_SKIP={patch.id}, or "
                    "without every patch that does not fit: DSV4_PATCHES=auto."
                )
            skipped[patch.id] = f"does not fit: {'; '.join(map(str, wrong))}"
        else:
            chosen.append(patch)
    # A patch that builds on one that is left out goes with it, and what builds on that one as well.
    while broken := {p.id: one for p in chosen for one in p.needs if one not in {q.id for q in chosen}}:
        for id, missing in broken.items():
            if mode == "require" and missing not in skipped:
                raise PatchError(f"patch {id} needs {missing}, which is no patch of this platform")
            skipped[id] = f"needs {missing}, which is left out"
        chosen = [patch for patch in chosen if patch.id not in broken]
    return Selection(platform, release, mode, tuple(in_order(chosen)), skipped)


# --- application ------------------------------------------------------------------------------------

_MARK = "__dsv4_patches__"


def patches_of(thing: Any) -> tuple[str, ...]:
    """Ids of the patches whose replacement `thing` is, in the order of application."""
    return tuple(getattr(thing, _MARK, ()))


class Applier(importlib.abc.MetaPathFinder):
    """Puts a selection into this process. One per process; `arm` may be called again.

    `state` maps each patch to "armed" (a module that it replaces something in is not loaded here) or
    "active". `changed` is called after every change of it.
    """

    def __init__(self, selection: Selection, changed: Callable[[Applier], object] = lambda _: None) -> None:
        self.selection = selection
        self.changed = changed
        self._work: dict[str, list[tuple[Patch, Target]]] = {}
        self._done: set[tuple[str, str]] = set()
        self._searching: set[str] = set()
        for patch in selection.patches:
            for target in patch.targets:
                if target.replace is not None:
                    self._work.setdefault(target.module, []).append((patch, target))

    @property
    def state(self) -> dict[str, str]:
        return {
            patch.id: "active"
            if all((patch.id, t.key) in self._done for t in patch.targets if t.replace)
            else "armed"
            for patch in self.selection.patches
        }

    def arm(self) -> None:
        """Patch what is loaded, and watch for the rest. Call it again and nothing happens."""
        for module in [name for name in self._work if name in sys.modules]:
            self._arrived(sys.modules[module])
        if self._work and self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self.changed(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._work or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = next(
                (s for f in sys.meta_path if f is not self and (s := f.find_spec(fullname, path, target))),
                None,
            )
        finally:
            self._searching.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for done in [one for one in self._done if one[1].startswith(f"{fullname}:")]:
                self._done.discard(done)  # a reload brings the originals back
            self._arrived(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _arrived(self, module: ModuleType) -> None:
        for patch, target in self._work.get(module.__name__, ()):
            if (patch.id, target.key) not in self._done:
                _substitute(patch, target, module)
                self._done.add((patch.id, target.key))
        if self in sys.meta_path:  # else `arm` is at work and will say so itself
            self.changed(self)


def _substitute(patch: Patch, target: Target, module: ModuleType) -> None:
    """Replace one symbol in its module, and in every loaded module that holds it under the same name.

    A variable is replaced in its own module only: that another module's `False` is the same object says
    nothing about where it comes from.
    """
    assert target.replace is not None  # noqa: S101 (callers filter)
    owner: Any = module
    *parts, name = target.symbol.split(".")
    for part in parts:
        owner = getattr(owner, part)
    if name not in vars(owner):
        raise PatchError(f"patch {patch.id}: {target.key} is not defined, although its source is known")
    raw = vars(owner)[name]
    kind = type(raw) if isinstance(raw, classmethod | staticmethod) else None
    original = raw.__func__ if kind else raw
    replacement = target.replace(original)
    if callable(original) and not callable(replacement):
        raise PatchError(f"patch {patch.id}: the replacement of {target.key} is {replacement!r}")
    if callable(original):
        setattr(replacement, _MARK, (*patches_of(original), patch.id))
    setattr(owner, name, kind(replacement) if kind else replacement)
    if owner is module and callable(original) and replacement is not original:
        for other in list(sys.modules.values()):
            # `vars` of a module, never getattr: lazy modules import things when asked.
            names = getattr(other, "__dict__", {}) if isinstance(other, ModuleType) else {}
            if names.get(name) is original and other.__name__.startswith("vllm."):
                setattr(other, name, replacement)


def summary(selection: Selection) -> str:
    """One line for logs: which patches, and which are left out for what reason."""
    ids = ", ".join(patch.id for patch in selection.patches) or "none"
    text = f"vLLM {selection.release}, platform {selection.platform}, patches: {ids}"
    if selection.skipped:
        text += "; left out: " + "; ".join(f"{id} ({why})" for id, why in selection.skipped.items())
    return text
