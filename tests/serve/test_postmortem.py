"""How a death is put into words."""

from __future__ import annotations

import pytest

from dsv4_deploy.serve import postmortem


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "it ended"),
        (3, "exit code 3"),
        (-9, "killed by SIGKILL; "),
        (-11, "killed by SIGSEGV"),
        (-35, "killed by signal 35"),
    ],
)
def test_every_exit_code_has_words(code: int | None, words: str) -> None:
    assert words in postmortem.how(code)
