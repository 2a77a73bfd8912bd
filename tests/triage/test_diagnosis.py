"""A diagnosis as text and JSON, and in Kubernetes' termination log."""

from __future__ import annotations

import json
import pathlib

from hypothesis import given
from hypothesis import strategies as st

from dsv4_deploy.triage.diagnosis import TERMINATION_LIMIT, Cause, Diagnosis, Line, write_termination_log

CAUSE = Cause("F01", "it broke", "It was öld ▄▄.", "Take a new one.", ("https://example.org/1",))
FULL = Diagnosis(
    log="vllm.log",
    verdict="known",
    summary="it broke",
    cause=CAUSE,
    line=Line(12, "(Worker pid=1) ValueError: bad"),
    speakers=("A pid=1", "B pid=2", "C pid=3", "D pid=4", "E pid=5", "F pid=6"),
    excerpt=(Line(11, "Traceback"), Line(12, "ValueError: bad")),
    possible=(Cause("F61", "other", "Else.", "Look.", ("https://example.org/2",)),),
    notes=("One.",),
)


def test_the_text() -> None:
    assert (
        FULL.text()
        == """\
F01: it broke
  line 12: (Worker pid=1) ValueError: bad
  said by: A pid=1, B pid=2, C pid=3, D pid=4 and 2 more
  cause: It was öld ▄▄.
  fix: Take a new one.
  see: https://example.org/1
  or F61: other
    cause: Else.
    fix: Look.
    see: https://example.org/2
  note: One.
      11 | Traceback
      12 | ValueError: bad
"""
    )


def test_the_dictionary_is_json_and_says_the_same() -> None:
    content = json.loads(json.dumps(FULL.to_dict()))
    assert (content["id"], content["verdict"], content["line"]["number"]) == ("F01", "known", 12)
    assert content["cause"]["fix"] == "Take a new one."
    assert Diagnosis("x", "unknown", "no idea").to_dict()["id"] == "unknown"


@given(st.integers(0, 600))
def test_a_limit_in_bytes_never_cuts_a_character(limit: int) -> None:
    text = FULL.text(limit)
    assert len(text.encode("utf-8")) <= limit
    whole = FULL.text()
    if limit >= len(whole.encode("utf-8")):
        assert text == whole
    elif limit > 150:
        assert text.endswith("dsv4-deploy triage]\n")
        assert whole.startswith(text[: text.rindex("[cut")])


def test_a_lone_surrogate_cannot_break_the_output() -> None:
    assert Diagnosis("x", "unknown", "bad \ud800 text").text(50).encode("utf-8")


def test_the_termination_log_is_filled_only_where_it_exists(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "termination-log"
    assert not write_termination_log(FULL, path)
    assert not path.exists()
    path.write_text("older and longer" * 500)
    assert write_termination_log(FULL, path)
    assert path.read_text() == FULL.text()
    long = Diagnosis("x", "unknown", "▄" * 5000)
    assert write_termination_log(long, path)
    assert len(path.read_bytes()) <= TERMINATION_LIMIT
    assert path.read_bytes().decode("utf-8").startswith("unknown: ▄▄")


def test_a_directory_is_no_termination_log(tmp_path: pathlib.Path) -> None:
    assert not write_termination_log(FULL, tmp_path)
