"""docs/triage.md lists the rules as they are."""

from __future__ import annotations

import pathlib
import re

from dsv4_deploy.triage.rules import book

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "triage.md"


def test_every_rule_is_listed_with_its_title_in_the_order_of_the_file() -> None:
    rows = re.findall(r"^\| ([FWD]\d\d) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(rule.about.id, rule.about.title) for rule in book().rules]
