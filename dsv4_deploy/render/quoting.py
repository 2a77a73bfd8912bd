"""Quoting: how a value is written so that the reader of a file gets exactly that value and nothing runs.

One function per language: POSIX shell, YAML, Compose, systemd. Comments get their own, since a reason may
repeat a value and a line break in it would end the comment.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable

from dsv4_deploy.errors import refused

WIDTH = 110

_PLAIN = re.compile(r"[A-Za-z0-9_./:@+,=-]+", re.ASCII)
# What shellcheck wonders at in a quoted word: a sign for the shell, a tilde in front, a backslash at the end.
_KEPT = re.compile(r"'[^']*[$`][^']*'|'~|\\'")
_SYSTEMD_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}
# Podman's generator hands these on as one byte, which is no UTF-8, however they are written (seen with 5.4.2, whose
# output tests/render reads): Latin-1's control characters, and the soft hyphen.
_LOST_BY_QUADLET = re.compile("[\x80-\x9f\xad]")


def check(text: str, what: str) -> str:
    """The text, if any file can hold it. Raises DeployError for NUL, which ends every string of the kernel,
    and for bytes that are no characters (a path that is not UTF-8)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refused(
            f"{what} holds bytes that are not UTF-8", why="The files are UTF-8 text.", fix="Rename it."
        ) from error
    if "\0" in text:
        raise refused(f"{what} holds a NUL character", why="No program can be given one.", fix="Remove it.")
    return text


def shell(text: str) -> str:
    """One word for a POSIX shell."""
    return shlex.quote(text)


def shell_meant(lines: Iterable[str]) -> list[str]:
    """The directive for shellcheck where a quoted value holds a sign that a shell would act on: that it does not
    is meant (SC1003, SC2016, SC2088). Nothing where no value does."""
    code = [line for line in lines if not line.lstrip().startswith("#")]
    return ["# shellcheck disable=SC1003,SC2016,SC2088"] if any(_KEPT.search(line) for line in code) else []


def env_file(text: str) -> str:
    """A value for NAME=value lines that a shell can read (`. FILE`). Plain values stay as they are, so that
    `docker --env-file`, which knows no quotes, reads those too."""
    if _PLAIN.fullmatch(text):
        return text
    return '"' + re.sub(r'(["\\$`])', r"\\\1", text) + '"'


def yaml(text: str) -> str:
    """A double-quoted YAML scalar. What does not print is escaped, so that no line break gets in."""
    out = []
    for letter in text:
        if letter in '"\\':
            out.append(f"\\{letter}")
        elif letter.isprintable():
            out.append(letter)
        elif letter == "\n":
            out.append("\\n")
        else:
            code = ord(letter)
            out.append(
                f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
            )
    return f'"{"".join(out)}"'


def compose(text: str) -> str:
    """A YAML scalar in which Compose puts in no variable: https://docs.docker.com/reference/compose-file/interpolation/"""
    return yaml(text.replace("$", "$$"))


def systemd(text: str) -> str:
    """One word of an Exec= line, or NAME=value of an Environment= line, of a Quadlet file.

    Quadlet copies it into the ExecStart= of a service, where systemd puts in specifiers (%h) and variables
    ($HOME) unless their signs are doubled: https://www.freedesktop.org/software/systemd/man/latest/systemd.service.html#Command%20lines
    """
    return _systemd(text, "%$")


def systemd_path(text: str) -> str:
    """A path in a line that knows specifiers and no variables, such as RequiresMountsFor=."""
    return _systemd(text, "%")


def _systemd(text: str, doubled: str) -> str:
    if lost := _LOST_BY_QUADLET.search(text):
        raise refused(
            f"{text!r} holds the character U+{ord(lost[0]):04X}",
            why="Podman's Quadlet does not carry it: the container would get another value.",
            fix="Remove the character, or use `dsv4-deploy render compose`.",
        )
    if _PLAIN.fullmatch(text):
        return text
    out = []
    for letter in text:
        if letter in _SYSTEMD_ESCAPES:
            out.append(_SYSTEMD_ESCAPES[letter])
        elif letter in doubled:
            out.append(letter * 2)
        elif letter.isprintable():
            out.append(letter)
        else:
            code = ord(letter)
            out.append(
                f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
            )
    return f'"{"".join(out)}"'


def comment(text: str, indent: str = "") -> list[str]:
    """The text as lines that begin with "# ", whatever is in it."""
    clean = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    wrapped = textwrap.wrap(clean, WIDTH - len(indent) - 2, break_long_words=False, break_on_hyphens=False)
    return [f"{indent}# {line}" for line in wrapped]
