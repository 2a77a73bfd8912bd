"""Source: what every renderer gets; the head that every file begins with; and how a file is put in place."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tempfile

from dsv4_deploy import __version__
from dsv4_deploy.errors import DeployError, refused
from dsv4_deploy.plan.settings import Plan
from dsv4_deploy.render import quoting
from dsv4_deploy.spec import ServingSpec

UNCONFIRMED = (
    "No AMD hardware has confirmed these values: they come from public recipes and measurements, and the memory plan "
    "from arithmetic."
)


@dataclasses.dataclass(frozen=True)
class Source:
    """`command` is the command line that asks for this file, so that it can be written again. `render_gid` is
    the group of /dev/dri/renderD* on the machine that will serve, None when it is not known."""

    plan: Plan
    spec: ServingSpec
    command: str
    render_gid: int | None = None


MARK = "Written by dsv4-deploy"


def head(source: Source, what: str) -> list[str]:
    """Comment lines: what this is, how it was made, what was planned, and what the rules said."""
    plan = source.plan
    lines = quoting.comment(f"{what} {MARK} {__version__}: {source.command}")
    lines += quoting.comment("Change the command and write it again, rather than this file.")
    lines.append("#")
    lines += quoting.comment(f"{plan.note} vLLM {plan.vllm}, profile {plan.profile}.")
    if plan.device == "rocm":
        lines += quoting.comment(UNCONFIRMED)
    for notice in plan.notices:
        lines += quoting.comment(notice.line())
    return lines


def checked(source: Source) -> Source:
    """The source, once every text that goes into a file is known to fit into one. Raises DeployError."""
    plan = source.plan
    quoting.check(plan.model, "the model's path")
    for setting in (*plan.env, *plan.flags):
        quoting.check(str(setting.value), setting.name)
    return source


def write(path: pathlib.Path, text: str, *, executable: bool) -> None:
    """Put a rendered file in its place, whole or not at all. A file that dsv4-deploy did not write is never
    replaced. Raises DeployError."""
    try:
        if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace")[:1000]:
            raise refused(
                f"{path} was not written by dsv4-deploy",
                why="Replacing it would lose what somebody else put there.",
                fix="Give another name, or move the file away.",
            )
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            pathlib.Path(name).chmod(0o755 if executable else 0o644)
            pathlib.Path(name).replace(path)
        except BaseException:
            pathlib.Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DeployError(
            f"cannot write {path}",
            why=error.strerror or str(error),
            fix="Give a file in a directory that is there and writable.",
        ) from error
