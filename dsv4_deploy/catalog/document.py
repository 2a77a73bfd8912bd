"""A YAML file whose every complaint names its line. In: a path. Out: a `Node` to take checked values from.

The catalog's files are data that people edit; a slip in one must say where it is and what was expected,
instead of turning up later as a wrong flag.
"""

from __future__ import annotations

import pathlib
from typing import Any

from dsv4_deploy.errors import DeployError


class Node:
    """A YAML node that knows its line. Every method raises DeployError when the node is not what it says."""

    def __init__(self, node: Any, path: pathlib.Path) -> None:
        self._node = node
        self._path = path

    def wrong(self, reason: str) -> DeployError:
        """The error that says what is wrong with this node, with file and line."""
        line = self._node.start_mark.line + 1
        return DeployError(
            f"{self._path.name}, line {line}: {reason}",
            why=f"{self._path} is part of dsv4-deploy and must be complete and consistent.",
            fix="Correct that line, or install dsv4-deploy again.",
        )

    def pairs(self) -> list[tuple[str, Node]]:
        """A mapping's keys and values in the file's order."""
        if self._node.id != "mapping":
            raise self.wrong("expected a mapping (key: value)")
        return [(str(key.value), Node(value, self._path)) for key, value in self._node.value]

    def items(self) -> list[Node]:
        """A list's items; an empty list is wrong."""
        if self._node.id != "sequence" or not self._node.value:
            raise self.wrong("expected a list with at least one item")
        return [Node(value, self._path) for value in self._node.value]

    def items_or_none(self) -> list[Node]:
        """A list's items; the list may be empty."""
        if self._node.id == "sequence" and not self._node.value:
            return []
        return self.items()

    def only(self, *names: str, optional: tuple[str, ...] = ()) -> None:
        """Refuse keys that are missing, unknown or given twice."""
        seen = [name for name, _ in self.pairs()]
        for name, node in self.pairs():
            if name not in names and name not in optional:
                raise node.wrong(f"unknown key {name!r}; known: {', '.join((*names, *optional))}")
            if seen.count(name) > 1:
                raise node.wrong(f"key {name!r} is given twice")
        for name in names:
            if name not in seen:
                raise self.wrong(f"key {name!r} is missing")

    def unique_pairs(self) -> list[tuple[str, Node]]:
        """`pairs` of a mapping whose keys are names of our own: each may occur once."""
        pairs = self.pairs()
        seen: set[str] = set()
        for name, node in pairs:
            if name in seen:
                raise node.wrong(f"{name!r} is listed twice")
            seen.add(name)
        return pairs

    def child(self, name: str) -> Node:
        """The value of a key that `only` has checked to be there."""
        return dict(self.pairs())[name]

    def maybe(self, name: str) -> Node | None:
        """The value of an optional key, None when it is absent or null."""
        node = dict(self.pairs()).get(name)
        return None if node is None or node.is_null() else node

    def is_null(self) -> bool:
        return bool(self._node.id == "scalar" and self._node.tag == "tag:yaml.org,2002:null")

    def text(self) -> str:
        if self._node.id != "scalar" or not str(self._node.value).strip():
            raise self.wrong("expected some text")
        return str(self._node.value)

    def text_or_null(self) -> str | None:
        return None if self.is_null() else self.text()

    def one_of(self, *allowed: str) -> str:
        value = self.text()
        if value not in allowed:
            raise self.wrong(f"expected one of {', '.join(allowed)}, found {value!r}")
        return value

    def link(self) -> str:
        """A public address, or a path in this repository: where a value can be checked."""
        value = self.text()
        if not value.startswith("https://") and ("/" not in value or " " in value or ":" in value):
            raise self.wrong(f"expected an https:// address or a path of this repository, found {value!r}")
        return value

    def links(self) -> tuple[str, ...]:
        return tuple(item.link() for item in self.items())

    def flag(self) -> bool:
        return self.one_of("true", "false") == "true"

    def number(self) -> int:
        """A whole number that is not negative. Underscores between digits are allowed."""
        value = self.text()
        digits = value.replace("_", "")
        if not digits.isascii() or not digits.isdigit():
            raise self.wrong(f"expected a whole number, found {value!r}")
        return int(digits)

    def count(self) -> int:
        value = self.text()
        if not value.replace("_", "").isdigit() or self.number() < 1:
            raise self.wrong(f"expected a positive whole number, found {value!r}")
        return self.number()

    def gibibytes(self) -> float:
        """A positive decimal number."""
        value = self.text()
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not 0 < number < 1e6:
            raise self.wrong(f"expected a positive number, found {value!r}")
        return number


def load(path: pathlib.Path) -> Node:
    """Read one YAML file. Raises DeployError that names the file, the line and the reason."""
    import yaml

    try:
        # The C parser where PyYAML has it: a command must answer in a blink.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=loader)
    except OSError as error:
        raise DeployError(
            f"cannot read {path}", why=str(error), fix="Install dsv4-deploy again; this file is part of it."
        ) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise DeployError(
            f"{path.name}, line {line}: {error.problem}", why=f"{path} is not valid YAML.", fix="Correct it."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DeployError(f"{path.name} is not a YAML text", why=str(error), fix="Correct it.") from error
    if node is None:
        raise DeployError(f"{path.name}, line 1: the file is empty", fix="Install dsv4-deploy again.")
    return Node(node, path)
