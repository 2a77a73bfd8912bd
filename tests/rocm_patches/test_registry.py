"""The registry on small packages made for it: what fits, what is chosen, and that a patch takes effect whoever
imported the name, when, and how."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rocm_patches import registry
from rocm_patches.patches import PATCHES
from rocm_patches.registry import Applier, Patch, PatchError, Selection, Sources, Target, patches_of, select

SOURCE = '''"""A module of somebody else."""

LIMIT = 3


def outer(f):
    return f


@outer
def area(a, b):
    # a comment
    return a * b


if True:
    def nested():
        return 1
else:
    def nested():
        return 2


class Box:
    def size(self):
        return 1

    @classmethod
    def make(cls):
        return cls()

    @staticmethod
    def free():
        return "free"
'''


def patch(id: str = "p", *targets: Target, **more: Any) -> Patch:
    words = dict.fromkeys(
        ("title", "symptom", "cause", "remedy", "upstream", "upstream_state", "drop_when"), "words"
    )
    return Patch(
        **{
            "id": id,
            **words,
            "platforms": ("gfx942",),
            "releases": ("1.0", "2.0"),
            "targets": targets,
            **more,
        }
    )


# --- fingerprints -----------------------------------------------------------------------------------


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package `vllm` whose module `m` is that of releases 1.0 and, with another body, 2.0."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_version.py").write_text("__version__ = version = '1.0+rocm7'\n")
    (package / "m.py").write_text(SOURCE)
    known: dict[str, dict[str, dict[str, str]]] = {}
    for release, text in {"1.0": SOURCE, "2.0": SOURCE.replace("a * b", "b * a")}.items():
        tree = registry.ast.parse(text)
        symbols = ("area", "LIMIT", "nested", "Box.size", "Box.make", "Box.free", "Box")
        digests = {f"vllm.m:{name}": registry.symbol_digest(text, tree, name) for name in symbols}
        assert None not in digests.values()
        known[release] = {"files": {"vllm/m.py": registry.file_digest(text.encode())}, "symbols": digests}  # type: ignore[dict-item]
    monkeypatch.setattr(registry, "fingerprints", lambda: known)
    return tmp_path


AREA = Target("vllm.m", "area", lambda f: f)


def edit(root: Path, old: str, new: str) -> None:
    file = root / "vllm" / "m.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def problems(root: Path, *targets: Target) -> list[str]:
    return [
        f"{one.target.symbol}: {one.problem}" for one in registry.examine(patch("p", *targets), Sources(root))
    ]


def test_known_source_fits(vllm: Path) -> None:
    assert problems(vllm, AREA, Target("vllm.m", "Box.make"), Target("vllm.m", "LIMIT")) == []
    assert Sources(vllm).release() == "1.0"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a * b", "a * b + 0"),
        ("@outer\n", ""),
        ("# a comment", "# another"),
        ("def area(a, b)", "def area(a, b=1)"),
    ],
)
def test_any_change_of_the_target_is_noticed(vllm: Path, old: str, new: str) -> None:
    edit(vllm, old, new)
    assert problems(vllm, AREA) == ["area: unknown source"]


@pytest.mark.parametrize(
    ("old", "new"), [("LIMIT = 3", "LIMIT = 4"), ("return 1", "return 3"), ('"free"', '"Free"')]
)
def test_changes_elsewhere_do_not_matter(vllm: Path, old: str, new: str) -> None:
    edit(vllm, old, new)
    assert problems(vllm, AREA) == []


def test_both_branches_of_a_conditional_definition_count(vllm: Path) -> None:
    edit(vllm, "return 2", "return 3")
    assert problems(vllm, Target("vllm.m", "nested")) == ["nested: unknown source"]


def test_a_method_is_told_from_its_neighbours(vllm: Path) -> None:
    edit(vllm, "return cls()", "return cls")
    assert problems(vllm, Target("vllm.m", "Box.size"), Target("vllm.m", "Box.make")) == [
        "Box.make: unknown source"
    ]


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (Target("vllm.m", "gone"), "gone: no such symbol"),
        (Target("vllm.m", "Box.gone"), "Box.gone: no such symbol"),
        (Target("vllm.m", "Nobody.size"), "Nobody.size: no such symbol"),
        (Target("vllm.other", "area"), "area: no file vllm/other.py"),
    ],
)
def test_what_is_missing_is_named(vllm: Path, target: Target, problem: str) -> None:
    edit(vllm, "LIMIT = 3", "LIMIT = 4")  # else the whole file is known
    assert problems(vllm, target) == [problem]


DEEP = b"x = " + b"-" * 200_000 + b"1\n"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"x = 1\ndef area(:\n", "vllm/m.py is no Python, line 2: invalid syntax"),
        (
            b"def area(a, b):\n    return a\0\n",
            "vllm/m.py is no Python: source code string cannot contain null bytes",
        ),
        (DEEP, "vllm/m.py is no Python: MemoryError"),
        (b"def area(a, b):  # \xff\n    return a\n", "vllm/m.py is not UTF-8"),
        (None, "vllm/m.py cannot be read: Is a directory"),
    ],
    ids=["syntax", "null byte", "depth", "encoding", "directory"],
)
def test_a_file_that_is_no_python_fits_nothing(vllm: Path, data: bytes | None, problem: str) -> None:
    file = vllm / "vllm" / "m.py"
    file.unlink()
    file.mkdir() if data is None else file.write_bytes(data)
    (found,) = problems(vllm, AREA)
    assert found.startswith(f"area: {problem.split(':')[0]}")
    assert found == f"area: {problem}" or data is DEEP  # newer Pythons say it in other words


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.replace(b"LIMIT", b"# \xe2\x80\xa8 \x0c \x1c \xc2\x85\n\x0c\nLIMIT"),
        lambda data: data.replace(b"    return a * b\n", b"    return a * b \t\n"),
    ],
    ids=["CRLF", "byte order mark", "line ends that Python does not know", "trailing spaces"],
)
def test_what_python_does_not_see_does_not_matter(vllm: Path, change: Callable[[bytes], bytes]) -> None:
    file = vllm / "vllm" / "m.py"
    file.write_bytes(change(file.read_bytes()))
    known = [Target("vllm.m", name) for name in ("area", "nested", "Box.make", "Box.free")]
    assert registry.ast.parse(file.read_bytes()) and problems(vllm, *known) == []


@pytest.mark.parametrize(
    "line",
    [
        "area = outer",
        "area, more = outer, 1",
        "area: object = outer",
        "from os.path import join as area",
        "import os as area",
        "from os.path import *",
        "del area",
        "for area in (outer,): pass",
        "with open(__file__) as area: pass",
        "if (area := outer): pass",
        "try: pass\nexcept ValueError as area: pass",
        "if LIMIT:\n    from os.path import join as area",
        "match outer:\n    case area: pass",
    ],
)
def test_a_name_that_gets_another_value_is_noticed(vllm: Path, line: str) -> None:
    file = vllm / "vllm" / "m.py"
    file.write_text(f"{SOURCE}\n{line}\n")
    assert problems(vllm, AREA) == ["area: unknown source"]
    if "*" not in line:
        assert problems(vllm, Target("vllm.m", "nested"), Target("vllm.m", "Box.size")) == []


@pytest.mark.parametrize(
    "line",
    [
        "Box = type('Box', (), {})",
        "class Box:\n    pass",
        "from os import path as Box",
        "Box.size = Box.free",
        "del Box.size",
    ],
)
def test_a_class_or_method_that_is_replaced_is_noticed(vllm: Path, line: str) -> None:
    (vllm / "vllm" / "m.py").write_text(f"{SOURCE}\n{line}\n")
    assert problems(vllm, Target("vllm.m", "Box.size")) == ["Box.size: unknown source"]
    assert problems(vllm, AREA) == []


def test_conditions_of_a_definition_count(vllm: Path) -> None:
    edit(vllm, "if True:", "if False:")
    assert problems(vllm, Target("vllm.m", "nested")) == ["nested: unknown source"]
    body = SOURCE.split("@outer\ndef area")[1].split("\n\n\n")[0].replace("\n", "\n    ")
    moved = SOURCE.replace("@outer\ndef area", "if LIMIT > 3:\n    @outer\n    def area", 1)
    start = moved.index("    def area") + len("    def area")
    end = start + len(SOURCE.split("@outer\ndef area")[1].split("\n\n\n")[0])
    (vllm / "vllm" / "m.py").write_text(moved[:start] + body + moved[end:])
    assert problems(vllm, AREA) == ["area: unknown source"]


def test_an_alias_is_no_definition_of_what_was_written(vllm: Path) -> None:
    head, rest = SOURCE.split("@outer\n")
    tail = rest.split("\n\n\n", 1)[1]
    (vllm / "vllm" / "m.py").write_text(f"{head}from vllm.elsewhere import area\n\n\n{tail}")
    assert problems(vllm, AREA) == ["area: unknown source"]


def test_targets_of_two_releases_do_not_mix(vllm: Path) -> None:
    """Half of the source from one release and half from another is neither."""
    edit(vllm, "a * b", "b * a")
    assert problems(vllm, AREA) == []  # 2.0 all over
    edit(vllm, '"free"', '"Free"')
    assert problems(vllm, AREA, Target("vllm.m", "Box.free")) == ["Box.free: unknown source"]


# --- selection --------------------------------------------------------------------------------------


def choose(
    root: Path, *patches: Patch, release: str = "1.0", platform: str = "gfx942", **env: str
) -> Selection:
    return select(patches, Sources(root), platform, release, env)


def ids(selection: Selection) -> list[str]:
    return [one.id for one in selection.patches]


def test_require_is_the_default_and_stops_with_everything_needed(vllm: Path) -> None:
    edit(vllm, "a * b", "a + b")
    with pytest.raises(PatchError) as refusal:
        choose(vllm, patch("scale-fix", AREA))
    for words in (
        "patch scale-fix", "does not fit the installed vLLM 1.0", "vllm.m:area: unknown source", "digest",
        "written for 1.0, 2.0", "DSV4_PATCHES_SKIP=scale-fix", "DSV4_PATCHES=auto",
    ):  # fmt: skip
        assert words in str(refusal.value)


def test_auto_goes_on_without_what_does_not_fit(vllm: Path) -> None:
    edit(vllm, "a * b", "a + b")
    fits, broken = patch("fits", Target("vllm.m", "LIMIT", lambda _: 5)), patch("broken", AREA)
    selection = choose(vllm, broken, fits, DSV4_PATCHES="auto")
    assert ids(selection) == ["fits"] and "unknown source" in selection.skipped["broken"]


def test_off_takes_none(vllm: Path) -> None:
    assert choose(vllm, patch("p", AREA), DSV4_PATCHES="off").skipped == {"p": "DSV4_PATCHES=off"}


@pytest.mark.parametrize("mode", ["require", "auto", " AUTO "])
def test_skip_leaves_out_by_name(vllm: Path, mode: str) -> None:
    edit(vllm, "a * b", "a + b")
    selection = choose(vllm, patch("p", AREA), DSV4_PATCHES=mode, DSV4_PATCHES_SKIP=" p ,")
    assert selection.skipped == {"p": "named in DSV4_PATCHES_SKIP"} and not selection.patches


def test_skip_of_an_unknown_id_is_an_error(vllm: Path) -> None:
    with pytest.raises(
        PatchError, match=r"DSV4_PATCHES_SKIP names typo, which no patch is called.*patches list"
    ):
        choose(vllm, patch("p", AREA), DSV4_PATCHES_SKIP="p,typo")


def test_an_unknown_mode_is_an_error(vllm: Path) -> None:
    with pytest.raises(PatchError, match="DSV4_PATCHES=on is none of require, auto, off"):
        choose(vllm, patch("p", AREA), DSV4_PATCHES="on")


@pytest.mark.parametrize("release", ["0.9", "3.0"])
def test_an_unknown_release_stops_even_where_the_source_fits(vllm: Path, release: str) -> None:
    with pytest.raises(
        PatchError, match=rf"does not know vLLM {release}; its patches were written for 1.0, 2.0"
    ):
        choose(vllm, patch("p", AREA), release=release)
    assert ids(choose(vllm, patch("p", AREA), release=release, DSV4_PATCHES="auto")) == ["p"]


def test_platforms_and_releases(vllm: Path) -> None:
    mine, everywhere = patch("mine", AREA), patch("everywhere", AREA, platforms=("any",), after=("mine",))
    later = patch("later", AREA, releases=("2.0",), after=("mine", "everywhere"))
    assert ids(choose(vllm, mine, everywhere)) == ["mine", "everywhere"]
    assert ids(choose(vllm, mine, everywhere, platform="gfx950")) == ["everywhere"]
    assert choose(vllm, mine, later).skipped == {"later": "vLLM 1.0 does not need it"}


def test_order_needs_and_conflicts(vllm: Path) -> None:
    first, second = patch("first", AREA), patch("second", AREA, needs=("first",))
    assert ids(choose(vllm, second, first)) == ["first", "second"]
    without = choose(vllm, second, first, DSV4_PATCHES_SKIP="first")
    assert without.skipped["second"] == "needs first, which is left out" and not without.patches
    with pytest.raises(PatchError, match=r"both replace vllm\.m:area and neither names the other in `after`"):
        choose(vllm, first, patch("other", AREA))
    with pytest.raises(PatchError, match="wait for each other: a -> b -> a"):
        choose(vllm, patch("a", after=("b",)), patch("b", after=("a",)))
    with pytest.raises(PatchError, match="exclude each other"):
        choose(vllm, first, patch("rival", conflicts=("first",)))
    with pytest.raises(PatchError, match="needs absent, which is no patch of this platform"):
        choose(vllm, patch("p", needs=("absent",)))


# --- application ------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Makes packages below `vllm.`: each test its own, since modules stay loaded."""
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    before, finders = dict(sys.modules), list(sys.meta_path)
    stand_in = types.ModuleType("vllm")
    stand_in.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "vllm", stand_in)

    def make(**modules: str) -> str:
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        return "vllm"

    yield make
    sys.meta_path[:] = finders
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: original(*args) * 2


def applied(*patches: Patch, changed: Callable[[Applier], object] = lambda _: None) -> Applier:
    applier = Applier(Selection("gfx942", "1.0", "require", patches), changed)
    applier.arm()
    return applier


def test_importers_by_value_get_the_replacement(package: Callable[..., str]) -> None:
    package(m=SOURCE, user="from vllm.m import area\n\ndef use():\n    return area(2, 3)\n")
    applier = applied(patch("p", Target("vllm.m", "area", doubled)))
    assert applier.state == {"p": "armed"}
    user = importlib.import_module("vllm.user")
    assert user.use() == 12 and applier.state == {"p": "active"}
    assert patches_of(user.area) == ("p",)


def test_modules_that_were_there_already_are_put_right(package: Callable[..., str]) -> None:
    package(m=SOURCE, user="from vllm.m import area\n\ndef use():\n    return area(2, 3)\n")
    user = importlib.import_module("vllm.user")
    assert user.use() == 6
    assert applied(patch("p", Target("vllm.m", "area", doubled))).state == {"p": "active"}
    assert user.use() == 12 and user.area is sys.modules["vllm.m"].area


def test_an_importer_within_an_import_cycle_is_put_right(package: Callable[..., str]) -> None:
    """`user` takes the name while `m` is still being executed, before the hook gets its turn."""
    package(m=f"{SOURCE}\nimport vllm.user\n", user="from vllm.m import area\n")
    applied(patch("p", Target("vllm.m", "area", doubled)))
    importlib.import_module("vllm.m")
    assert sys.modules["vllm.user"].area(2, 3) == 12


def test_methods_keep_their_kind(package: Callable[..., str]) -> None:
    package(m=SOURCE)
    applied(
        patch(
            "p",
            Target("vllm.m", "Box.size", lambda f: lambda self: f(self) + 1),
            Target("vllm.m", "Box.make", lambda f: lambda cls: (f(cls), cls)),
            Target("vllm.m", "Box.free", lambda f: lambda: f().upper()),
        )
    )
    box = importlib.import_module("vllm.m").Box
    assert (box().size(), box.free()) == (2, "FREE")
    made, cls = box.make()
    assert isinstance(made, box) and cls is box


def test_a_variable_stays_in_its_module(package: Callable[..., str]) -> None:
    """False is one object: that another module's variable is the same says nothing."""
    package(m="FLAG = False\n\ndef read():\n    return FLAG\n", other="FLAG = False\n")
    other = importlib.import_module("vllm.other")
    applied(patch("p", Target("vllm.m", "FLAG", lambda _: True)))
    assert importlib.import_module("vllm.m").read() is True and other.FLAG is False


def test_two_patches_of_one_symbol_stack_in_order(package: Callable[..., str]) -> None:
    package(m=SOURCE)
    plus = Target("vllm.m", "area", lambda f: lambda a, b: f(a, b) + 1)
    applied(patch("first", Target("vllm.m", "area", doubled)), patch("second", plus, after=("first",)))
    area = importlib.import_module("vllm.m").area
    assert area(2, 3) == 13 and patches_of(area) == ("first", "second")


def test_arming_twice_changes_nothing(package: Callable[..., str]) -> None:
    package(m=SOURCE)
    applier = applied(patch("p", Target("vllm.m", "area", doubled)))
    module = importlib.import_module("vllm.m")
    applier.arm()
    assert module.area(2, 3) == 12 and sys.meta_path.count(applier) == 1


def test_a_reloaded_module_is_patched_again(package: Callable[..., str]) -> None:
    package(m=SOURCE)
    applied(patch("p", Target("vllm.m", "area", doubled)))
    module = importlib.import_module("vllm.m")
    assert importlib.reload(module).area(2, 3) == 12


def test_what_is_only_relied_on_is_not_touched(package: Callable[..., str]) -> None:
    package(m=SOURCE)
    applier = applied(patch("p", Target("vllm.m", "area", doubled), Target("vllm.m", "nested")))
    assert importlib.import_module("vllm.m").nested() == 1 and applier.state == {"p": "active"}


def test_every_change_is_reported(package: Callable[..., str]) -> None:
    package(m=SOURCE)
    states: list[dict[str, str]] = []
    applied(patch("p", Target("vllm.m", "area", doubled)), changed=lambda a: states.append(a.state))
    importlib.import_module("vllm.m")
    assert states == [{"p": "armed"}, {"p": "active"}]


def test_a_replacement_that_cannot_be_called_stops_the_import(package: Callable[..., str]) -> None:
    package(m=SOURCE)
    applied(patch("p", Target("vllm.m", "area", lambda _: None)))
    with pytest.raises(PatchError, match=r"patch p cannot replace vllm\.m:area: the replacement is None"):
        importlib.import_module("vllm.m")


def test_a_symbol_that_is_not_there_stops_the_import(package: Callable[..., str]) -> None:
    package(m="")
    applied(patch("p", Target("vllm.m", "area", doubled)))
    with pytest.raises(PatchError, match=r"patch p cannot replace vllm\.m:area: it is not defined"):
        importlib.import_module("vllm.m")


def test_a_class_that_is_not_there_stops_the_import(package: Callable[..., str]) -> None:
    package(m="")
    applied(patch("p", Target("vllm.m", "Box.size", doubled)))
    with pytest.raises(PatchError, match=r"patch p cannot replace vllm\.m:Box\.size: AttributeError: .*Box"):
        importlib.import_module("vllm.m")


def broken(_: Any) -> Any:
    raise KeyError("midway")


def test_a_patch_that_fails_midway_leaves_nothing_of_itself(package: Callable[..., str]) -> None:
    """Its first half, also with those who imported it by value, is undone, and no later import gets by."""
    package(
        a="def one():\n    return 1\n\ndef two():\n    return 2\n",
        user="from vllm.a import one\n",
        b="def three():\n    return 3\n",
        c="def four():\n    return 4\n",
    )
    states: list[dict[str, str]] = []
    applier = applied(
        patch("good", Target("vllm.a", "two", doubled), Target("vllm.c", "four", doubled)),
        patch("bad", Target("vllm.a", "one", doubled), Target("vllm.b", "three", broken)),
        changed=lambda one: states.append(one.state),
    )
    a, user = importlib.import_module("vllm.a"), importlib.import_module("vllm.user")
    assert (a.one(), user.one(), a.two()) == (2, 2, 4)
    with pytest.raises(PatchError, match=r"patch bad cannot replace vllm\.b:three: KeyError: 'midway'"):
        importlib.import_module("vllm.b")
    assert (a.one(), user.one(), a.two()) == (1, 1, 4) and patches_of(user.one) == ()
    assert states[-1] == applier.state == {"good": "armed", "bad": "failed"}
    for name in ("vllm.b", "vllm.c"):  # also where somebody swallowed the first exception
        with pytest.raises(PatchError, match="patch bad cannot replace"):
            importlib.import_module(name)
        assert name not in sys.modules


def test_a_module_is_patched_whole_or_not_at_all(package: Callable[..., str]) -> None:
    package(m=SOURCE)
    module = importlib.import_module("vllm.m")
    before = dict(vars(module)), vars(module.Box)["make"]
    applier = Applier(
        Selection(
            "gfx942",
            "1.0",
            "require",
            (
                patch(
                    "first",
                    Target("vllm.m", "area", doubled),
                    Target("vllm.m", "Box.make", lambda f: lambda c: 1),
                ),
                patch("second", Target("vllm.m", "area", doubled), Target("vllm.m", "nested", broken)),
            ),
        )
    )
    with pytest.raises(PatchError, match="patch second cannot replace"):
        applier.arm()
    assert (dict(vars(module)), vars(module.Box)["make"]) == before
    assert applier.state == {"first": "armed", "second": "failed"} and applier not in sys.meta_path


# --- the catalogue ----------------------------------------------------------------------------------


def test_the_catalogue_is_complete_and_without_contradiction() -> None:
    assert len({one.id for one in PATCHES}) == len(PATCHES) >= 9
    known = json.loads(registry.FINGERPRINTS.read_text())
    for one in PATCHES:
        texts = (
            one.title,
            one.symptom,
            one.cause,
            one.remedy,
            one.upstream_state,
            one.drop_when,
            one.checked,
        )
        assert all(texts) and one.upstream.startswith("https://")
        assert set(one.platforms) <= set(registry.PLATFORMS) and one.platforms
        assert any(target.replace for target in one.targets)
        for release in one.releases:
            missing = [target.key for target in one.targets if target.key not in known[release]["symbols"]]
            assert not missing, f"{one.id}: run `make fingerprints`"
    for release in known:
        for platform in ("gfx942", "cpu"):
            mine = [one for one in PATCHES if one.on(platform) and release in one.releases]
            assert len(registry.in_order(mine)) == len(mine)


def test_the_catalogue_imports_nothing_but_the_registry_at_module_level() -> None:
    """The control side reads it on machines without torch."""
    allowed = {*sys.stdlib_module_names, "rocm_patches"}
    files = list((Path(registry.__file__).parent / "patches").glob("*.py"))
    assert len(files) > 5
    for file in files:
        for node in registry.ast.parse(file.read_text()).body:
            if isinstance(node, registry.ast.Import | registry.ast.ImportFrom):
                module = getattr(node, "module", None) or node.names[0].name
                assert module.split(".")[0] in allowed, f"{file.name} imports {module}"
