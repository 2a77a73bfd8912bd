"""Fixtures that several test packages share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded tiny model, written once for the whole run. Read only."""
    from dsv4_deploy.tiny import write_tiny

    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_tiny(directory)
    return directory
