"""releases.yaml: which vLLM does what on which GPU, what its images hold, and which host drivers they need.

In: the file. Out: `Releases`, with versions as comparable tuples. One table decides every "too old" and
"does not fit" in the rules and in preflight.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping

from dsv4_deploy.catalog.document import Node, load

RELEASES_FILE = pathlib.Path(__file__).with_name("releases.yaml")

Version = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Feature:
    """Something that works from one version on. `what` is a sentence, `link` where it was decided."""

    since: str
    what: str
    link: str


@dataclasses.dataclass(frozen=True)
class Stack:
    """What the ROCm image of one vLLM release holds. None: not public when this was written."""

    vllm: str
    rocm: str | None
    torch: str | None
    triton: str | None
    aiter: str | None
    source: str


@dataclasses.dataclass(frozen=True)
class DriverWindow:
    """The ROCm releases (major.minor) that AMD tests with one amdgpu driver release."""

    driver: str
    rocm: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Releases:
    """The whole table. `modules` maps the version that the loaded kernel module reports to the driver
    release's name; `image_digest` is None until an operator pins one."""

    supported: tuple[str, ...]
    default: str
    image: str
    image_digest: str | None
    features: Mapping[str, Feature]
    aiter: Mapping[str, Feature]
    stacks: tuple[Stack, ...]
    modules: Mapping[str, str]
    drivers: tuple[DriverWindow, ...]
    drivers_source: str

    def has(self, feature: str, vllm: str) -> bool:
        """Whether that vLLM version has the feature."""
        return version(vllm) >= version(self.features[feature].since)

    def stack(self, vllm: str) -> Stack | None:
        """What the ROCm image of that vLLM release holds, if it is known."""
        return next((stack for stack in self.stacks if stack.vllm == vllm), None)

    def window(self, driver: str) -> DriverWindow | None:
        """The ROCm releases for a driver: its release ("30.20", "30.20.1", "6.4") or the version that
        /sys/module/amdgpu/version shows ("6.16.6"). None for a driver that the table does not have."""
        known = {window.driver: window for window in self.drivers}
        release = self.modules.get(driver, driver)
        parts = release.split(".")
        return known.get(release) or known.get(".".join(parts[:2]))


@functools.cache
def releases() -> Releases:
    """The table of this bundle."""
    return load_releases(RELEASES_FILE)


def version(text: str) -> Version:
    """ "0.33.0", "v0.26.1rc1.dev229", "0.1.24.post1" as comparable numbers: the release part only."""
    match = re.match(r"v?(\d{1,9}(?:\.\d{1,9})*)(?!\d)", text.strip(), re.ASCII)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def split_image(image: str) -> tuple[str, str]:
    """(repository, tag) of an image's name; the tag is empty where there is none. The port of a registry is
    no tag, and a digest belongs to neither."""
    place, slash, name = image.partition("@")[0].rpartition("/")
    name, _, tag = name.partition(":")
    return f"{place}{slash}{name}", tag


def image_version(image: str) -> str:
    """The vLLM release that an image's tag names ("v0.33.0", "0.33.0-rc1"), empty where it names none."""
    match = re.match(r"v?(\d{1,3}\.\d{1,4}(\.\d{1,4})*)(?![\d.])", split_image(image)[1], re.ASCII)
    return match[1] if match else ""


def load_releases(path: pathlib.Path) -> Releases:
    """Read and check one releases file. Raises DeployError that names file, line and reason."""
    root = load(path)
    root.only("supported", "default", "image", "image_digest", "features", "aiter", "stacks", "drivers")
    supported = tuple(_version(item) for item in root.child("supported").items())
    default = _version(root.child("default"))
    if default not in supported:
        raise root.child("default").wrong(f"{default} is not one of the supported releases")
    digest = root.child("image_digest").text_or_null()
    if digest is not None and not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise root.child("image_digest").wrong("expected sha256: and 64 hexadecimal digits, or null")
    drivers = root.child("drivers")
    drivers.only("source", "modules", "windows")
    windows = tuple(_window(item) for item in drivers.child("windows").items())
    names = {window.driver for window in windows}
    modules = {}
    for module, node in drivers.child("modules").unique_pairs():
        modules[module] = node.text()
        if ".".join(modules[module].split(".")[:2]) not in names:
            raise node.wrong(f"there is no window for driver {modules[module]}")
    return Releases(
        supported=supported,
        default=default,
        image=root.child("image").text(),
        image_digest=digest,
        features=_features(root.child("features")),
        aiter=_features(root.child("aiter")),
        stacks=tuple(_stack(item) for item in root.child("stacks").items()),
        modules=modules,
        drivers=windows,
        drivers_source=drivers.child("source").link(),
    )


def _version(node: Node) -> str:
    text = node.text()
    if not version(text):
        raise node.wrong(f"expected a version, found {text!r}")
    return text


def _features(node: Node) -> Mapping[str, Feature]:
    features = {}
    for name, entry in node.unique_pairs():
        entry.only("since", "what", "link")
        features[name] = Feature(
            _version(entry.child("since")), entry.child("what").text(), entry.child("link").link()
        )
    return features


def _stack(node: Node) -> Stack:
    node.only(*(field.name for field in dataclasses.fields(Stack)))
    return Stack(
        vllm=_version(node.child("vllm")),
        rocm=node.child("rocm").text_or_null(),
        torch=node.child("torch").text_or_null(),
        triton=node.child("triton").text_or_null(),
        aiter=node.child("aiter").text_or_null(),
        source=node.child("source").link(),
    )


def _window(node: Node) -> DriverWindow:
    node.only("driver", "rocm")
    return DriverWindow(
        node.child("driver").text(), tuple(_version(item) for item in node.child("rocm").items())
    )
