"""Puts the Helm chart into the wheel, as dsv4_deploy/chart: it lies beside the package, where setuptools does not look.

Everything else about the build is in pyproject.toml. In an editable installation the chart stays where it is.
"""

from __future__ import annotations

import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).resolve().parent


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = pathlib.Path(self.build_lib) / "dsv4_deploy" / "chart"
            shutil.rmtree(target, ignore_errors=True)
            # ci/ is for the tests; helm leaves it out of its package as well (.helmignore).
            shutil.copytree(ROOT / "helm" / "dsv4", target, ignore=shutil.ignore_patterns("ci"))


setup(cmdclass={"build_py": BuildPy})
