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
import zipfile
import zlib
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


# Statements with blocks in which names of the level above may be bound. `match` is taken whole.
_COMPOUND = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith),
    *(ast.Try, ast.TryStar, ast.ExceptHandler),
)
# A statement, and the compound statements that it stands in, each with the number of the block.
_Found = tuple[Any, tuple[tuple[Any, int], ...]]


def _blocks(node: Any) -> list[list[Any]]:
    """The blocks of a compound statement."""
    return [getattr(node, part, []) for part in ("body", "orelse", "finalbody", "handlers")]


def _binds(node: Any, symbol: str) -> bool:
    """Whether a statement, of a compound one the head, gives `symbol` a value or takes it away: assignment to
    the name or, for "Class.method", to the attribute, import, loop variable, `as`, walrus, pattern, `del`.
    """
    inner = {id(one) for block in _blocks(node) for one in block} if isinstance(node, _COMPOUND) else set()
    pending = [node]
    while pending:
        part = pending.pop()
        if isinstance(part, ast.Name | ast.Attribute) and not isinstance(part.ctx, ast.Load):
            if ast.unparse(part) == symbol:
                return True
        elif isinstance(part, ast.alias):
            if part.name == "*" or symbol == (part.asname or part.name.split(".")[0]):
                return True
        elif symbol in (getattr(part, "name", None), getattr(part, "rest", None)):  # handlers, patterns
            return True
        elif isinstance(part, ast.comprehension):  # its variable is its own
            pending += [part.iter, *part.ifs]
            continue
        pending += [child for child in ast.iter_child_nodes(part) if id(child) not in inner]
    return False


def _definitions(body: Iterable[Any], symbol: str, within: tuple[tuple[Any, int], ...] = ()) -> list[_Found]:
    """All that defines `symbol` at this level, in blocks of `if`, `try` and the like as well."""
    found: list[_Found] = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == symbol:
                found.append((node, within))
        elif _binds(node, symbol):
            found.append((node, within))
        elif isinstance(node, _COMPOUND):
            for number, block in enumerate(_blocks(node)):
                found += _definitions(block, symbol, (*within, (node, number)))
    return found


def symbol_digest(source: str, tree: ast.Module, symbol: str) -> str | None:
    """Digest of the text that defines `symbol`, decorators included; None where it is not defined.

    Trailing spaces, line ends and the indentation of the whole do not count, everything else does: also whatever
    gives the name another value further down, and the conditions under which it is defined.
    """
    *classes, name = parts = symbol.split(".")
    body: list[Any] = tree.body
    others: list[_Found] = []
    for part in classes:
        owners = _definitions(body, part)
        if len(owners) > 1 or any(within for _, within in owners):
            others += owners  # the method alone does not say which class it will be
        body = [one for owner, _ in owners if isinstance(owner, ast.ClassDef) for one in owner.body]
    for length in range(2, len(parts) + 1):  # Class.method = ...
        others += _definitions(tree.body, ".".join(parts[:length]))
    found = _definitions(body, name)
    if not found:
        return None
    lines = re.split("\r\n|\r|\n", source)  # as Python counts them; str.splitlines knows more line ends
    text = []
    for node, within in (*found, *others):
        for outer, number in within:
            text.append(f"{type(outer).__name__} {number}")
            if isinstance(outer, ast.If | ast.While):
                text += [line.strip() for line in lines[outer.lineno - 1 : outer.test.end_lineno]]
        first = min(one.lineno for one in (node, *getattr(node, "decorator_list", ())))
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
    """vLLM's source text below `root`, which holds the package `vllm`: site-packages, an unpacked wheel, or a
    wheel as it is. Every file is read once; a file that is byte for byte a known release's is not parsed.
    """

    def __init__(self, root: Path | zipfile.Path) -> None:
        self.root = root
        self._files: dict[str, tuple[str, str] | str] = {}
        self._trees: dict[str, ast.Module | str] = {}

    def release(self) -> str | None:
        """The public version that the package carries in `vllm/_version.py`, or None."""
        read = self._read("vllm/_version.py")
        if isinstance(read, str):
            return None
        pattern = r"""^(?:__version__|version)\b.*=\s*['"]([^'"]+)['"]"""
        match = re.search(pattern, read[0], flags=re.MULTILINE)
        return match[1].split("+")[0] if match else None

    def _read(self, file: str) -> tuple[str, str] | str:
        """(text, digest) of a file, or why there is none."""
        if file not in self._files:
            try:
                data = (self.root / file).read_bytes()
                self._files[file] = data.decode("utf-8-sig"), file_digest(data)
            except (FileNotFoundError, KeyError):
                self._files[file] = f"no file {file}"
            except UnicodeDecodeError:
                self._files[file] = f"{file} is not UTF-8"
            except (OSError, zipfile.BadZipFile, zlib.error) as error:
                self._files[file] = f"{file} cannot be read: {getattr(error, 'strerror', None) or error}"
        return self._files[file]

    def _parsed(self, file: str, text: str) -> ast.Module | str:
        """The syntax tree of a file, or why there is none."""
        if file not in self._trees:
            try:
                self._trees[file] = ast.parse(text)
            except SyntaxError as error:
                where = f", line {error.lineno}" if error.lineno else ""
                self._trees[file] = f"{file} is no Python{where}: {error.msg}"
            except (ValueError, RecursionError, MemoryError) as error:  # null bytes, absurd depth
                self._trees[file] = f"{file} is no Python: {str(error) or type(error).__name__}"
        return self._trees[file]

    def is_pristine(self, file: str, release: str) -> bool:
        """Whether the file is that of the release, byte for byte."""
        known = fingerprints().get(release, {}).get("files", {}).get(file)
        read = self._read(file)
        return not isinstance(read, str) and read[1] == known

    def look(self, target: Target) -> tuple[str | None, str]:
        """(digest of the target's source, "") or (None, why there is none)."""
        read = self._read(target.file)
        if isinstance(read, str):
            return None, read
        tree = self._parsed(target.file, read[0])
        if isinstance(tree, str):
            return None, tree
        found = symbol_digest(read[0], tree, target.symbol)
        return found, "" if found else "no such symbol"

    def digest(self, target: Target) -> str | None:
        """Digest of the target's source; None where there is none."""
        return self.look(target)[0]


@dataclass(frozen=True)
class Mismatch:
    """Why a target's source is not the one that a patch was written for."""

    target: Target
    problem: str  # "unknown source", "no such symbol", or what is wrong with the file
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
            found, problem = sources.look(target)
            if found is not None and found == known.get(target.key):
                continue
            digests = (fingerprints().get(one, {}).get("symbols", {}) for one in patch.releases)
            everything = dict.fromkeys(d[target.key] for d in digests if target.key in d)
            wrong.append(Mismatch(target, problem or "unknown source", found, tuple(everything)))
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

    `state` maps each patch to "armed" (a module that it replaces something in is not loaded here),
    "active" or "failed". `changed` is called after every change of it.
    """

    def __init__(self, selection: Selection, changed: Callable[[Applier], object] = lambda _: None) -> None:
        self.selection = selection
        self.changed = changed
        self._work: dict[str, list[tuple[Patch, Target]]] = {}
        self._done: dict[tuple[str, str], Callable[[], None]] = {}  # with what brings the original back
        self._failure: tuple[str, str] | None = None  # patch, what happened
        self._searching: set[str] = set()
        for patch in selection.patches:
            for target in patch.targets:
                if target.replace is not None:
                    self._work.setdefault(target.module, []).append((patch, target))

    @property
    def state(self) -> dict[str, str]:
        states = {}
        for patch in self.selection.patches:
            done = all((patch.id, target.key) in self._done for target in patch.targets if target.replace)
            states[patch.id] = "active" if done else "armed"
        return states | ({self._failure[0]: "failed"} if self._failure else {})

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
                del self._done[done]  # a reload brings the originals back
            self._arrived(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _arrived(self, module: ModuleType) -> None:
        """Patch a module that has been executed. Raises PatchError when that fails: then the module and whatever
        the patch replaced elsewhere are as they were, and so does every later import of a module with work.
        """
        for patch, target in self._work.get(module.__name__, ()):
            if self._failure is not None:
                raise PatchError(self._failure[1])
            if (patch.id, target.key) in self._done:
                continue
            try:
                self._done[patch.id, target.key] = _substitute(patch, target, module)
            except Exception as error:
                what = str(error) if isinstance(error, PatchError) else f"{type(error).__name__}: {error}"
                self._failure = patch.id, f"patch {patch.id} cannot replace {target.key}: {what}"
                for id, key in [*reversed(self._done)]:
                    if id == patch.id or key.startswith(f"{module.__name__}:"):
                        self._done.pop((id, key))()
                self.changed(self)
                raise PatchError(self._failure[1]) from error
        if self in sys.meta_path:  # else `arm` is at work and will say so itself
            self.changed(self)


def _swap(name: str, old: Any, new: Any) -> None:
    """Put `new` into every loaded module of vLLM that holds `old` under this name."""
    for module in list(sys.modules.values()):
        # `vars` of a module, never getattr: lazy modules import things when asked.
        names = getattr(module, "__dict__", {}) if isinstance(module, ModuleType) else {}
        if names.get(name) is old and module.__name__.startswith("vllm."):
            setattr(module, name, new)


def _substitute(patch: Patch, target: Target, module: ModuleType) -> Callable[[], None]:
    """Replace one symbol in its module, and in every loaded module that holds it under the same name. Returns what
    brings the original back.

    A variable is replaced in its own module only: that another module's `False` is the same object says
    nothing about where it comes from.
    """
    assert target.replace is not None  # noqa: S101 (callers filter)
    owner: Any = module
    *parts, name = target.symbol.split(".")
    for part in parts:
        owner = getattr(owner, part)
    if name not in vars(owner):
        raise PatchError("it is not defined, although its source is known")
    raw = vars(owner)[name]
    kind = type(raw) if isinstance(raw, classmethod | staticmethod) else None
    original = raw.__func__ if kind else raw
    replacement = target.replace(original)
    if callable(original) and not callable(replacement):
        raise PatchError(f"the replacement is {replacement!r}")
    if callable(original):
        setattr(replacement, _MARK, (*patches_of(original), patch.id))
    everywhere = owner is module and callable(original) and replacement is not original
    setattr(owner, name, kind(replacement) if kind else replacement)
    if everywhere:
        _swap(name, original, replacement)

    def back() -> None:
        setattr(owner, name, raw)
        if everywhere:
            _swap(name, replacement, original)

    return back


def summary(selection: Selection) -> str:
    """One line for logs: which patches, and which are left out for what reason."""
    ids = ", ".join(patch.id for patch in selection.patches) or "none"
    text = f"vLLM {selection.release}, platform {selection.platform}, patches: {ids}"
    if selection.skipped:
        text += "; left out: " + "; ".join(f"{id} ({why})" for id, why in selection.skipped.items())
    return text
