"""Writes the golden files of tests/render/golden: `python -m tests.render.golden`. Look at the difference then."""

from __future__ import annotations

import pathlib

from dsv4_deploy import __version__, render
from tests.render import sources

FOLDER = pathlib.Path(__file__).with_name("golden")
NAMES = {
    "shell": "serve.sh",
    "docker": "docker.sh",
    "compose": "compose.yaml",
    "quadlet": "dsv4.container",
    "env": "serve.env",
    "helm-values": "values.yaml",
}


def text(case: sources.Named, target: str) -> str:
    """The file as it is checked in: without this bundle's own version, so that a release changes none of them."""
    return render.renderer(target)(sources.source(case.spec)).replace(
        f"dsv4-deploy {__version__}:", "dsv4-deploy VERSION:"
    )


def main() -> None:
    for case in sources.CASES:
        folder = FOLDER / case.name
        folder.mkdir(parents=True, exist_ok=True)
        for target, name in NAMES.items():
            (folder / name).write_text(text(case, target), encoding="utf-8")


if __name__ == "__main__":
    main()
