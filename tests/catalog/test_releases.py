"""releases.yaml: the version table answers what rules and preflight ask, and a wrong file names its line."""

from __future__ import annotations

import pathlib

import pytest

from dsv4_deploy import catalog
from dsv4_deploy.catalog.release import RELEASES_FILE
from dsv4_deploy.errors import DeployError
from dsv4_deploy.serve import command
from rocm_patches import plugin


def test_the_supported_releases_are_those_of_the_launcher_and_of_the_plugin() -> None:
    assert catalog.releases().supported == command.SUPPORTED == plugin.SUPPORTED_VLLM
    assert catalog.releases().image.endswith(f":v{catalog.releases().default}")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.33.0", (0, 33, 0)),
        ("v0.26.1rc1.dev229", (0, 26, 1)),
        ("0.1.24.post1", (0, 1, 24)),
        ("0.32.0+cpu", (0, 32, 0)),
        ("nightly", ()),
        ("", ()),
    ],
)
def test_versions(text: str, numbers: tuple[int, ...]) -> None:
    assert catalog.version(text) == numbers


def test_features_come_with_a_release() -> None:
    table = catalog.releases()
    assert not table.has("v4_gfx942", "0.25.0")
    assert table.has("v4_gfx942", "0.25.1")
    assert not table.has("a16w4_hash_routing", "0.32.0")
    assert table.has("a16w4_hash_routing", "0.33.0")
    for feature in (*table.features.values(), *table.aiter.values()):
        assert feature.link.startswith("https://")


@pytest.mark.parametrize(
    ("driver", "rocm", "inside"),
    # https://instinct.docs.amd.com/projects/amdgpu-docs/en/latest/compatibility/compatibility-matrix.html
    [
        ("6.14.14", "10.0", True),  # what the loaded module of release 30.10 reports
        ("6.16.6", "6.2", False),
        ("30.20.1", "7.2", True),
        ("6.4", "10.0", False),
        ("6.3", "7.0", True),
        ("6.3", "7.1", False),
        ("31.40", "6.4", False),
    ],
)
def test_driver_windows(driver: str, rocm: str, inside: bool) -> None:
    window = catalog.releases().window(driver)
    assert window is not None
    assert (rocm in window.rocm) is inside


def test_an_unknown_driver_has_no_window() -> None:
    assert catalog.releases().window("5.2") is None


def test_stacks() -> None:
    stack = catalog.releases().stack("0.27.1")
    assert stack is not None
    assert (stack.rocm, stack.aiter) == ("7.2.3", "0.1.19")
    assert catalog.releases().stack("0.1.0") is None


GOOD = RELEASES_FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ('default: "0.33.0"', 'default: "0.34.0"', "0.34.0 is not one of the supported"),
        ('since: "0.25.1"', "since: soon", "expected a version"),
        ("image_digest: null", "image_digest: sha256:12", "64 hexadecimal digits"),
        ('"6.16.6": "30.20.1"', '"6.16.6": "29.0"', "no window for driver 29.0"),
        ('link: "https://github.com/vllm-project/vllm/pull/45681"', "link: somewhere", "https://"),
        ("stacks:", "stocks:", "unknown key 'stocks'"),
    ],
)
def test_a_wrong_file_is_reported_with_its_line(
    tmp_path: pathlib.Path, before: str, after: str, reason: str
) -> None:
    assert before in GOOD
    path = tmp_path / "releases.yaml"
    path.write_text(GOOD.replace(before, after, 1), encoding="utf-8")
    with pytest.raises(DeployError) as raised:
        catalog.load_releases(path)
    assert raised.value.what.startswith("releases.yaml, line ")
    assert reason in raised.value.what
