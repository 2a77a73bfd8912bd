"""The one error that people see: what is wrong, why, and what to do about it.

Every module raises `DeployError`; only `cli.main` catches it, prints `render(error)` to stderr and exits
with its code.
"""

from __future__ import annotations

FAILED = 1
"""Exit code of something that was right to try and did not work."""

REFUSED = 2
"""Exit code of wrong usage, or of something that a rule refuses."""


class DeployError(Exception):
    """A problem described for the person who has to solve it.

    `what` is one line without a final full stop; `why` and `fix` are sentences. `detail` is quoted verbatim
    below them (lines of a log, for example). `exit_code` is FAILED or REFUSED.
    """

    def __init__(
        self, what: str, why: str = "", fix: str = "", *, detail: str = "", exit_code: int = FAILED
    ) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix
        self.detail = detail
        self.exit_code = exit_code


def refused(what: str, *, why: str = "", fix: str = "") -> DeployError:
    """A DeployError for wrong usage or a broken rule (exit code 2)."""
    return DeployError(what, why=why, fix=fix, exit_code=REFUSED)


def render(error: DeployError) -> str:
    """The error as plain text, ready for stderr; parts that it does not have are left out."""
    lines = [f"error: {error.what}"]
    if error.why:
        lines.append(f"  why: {error.why}")
    if error.fix:
        lines.append(f"  fix: {error.fix}")
    if error.detail:
        lines += [f"  | {line}".rstrip() for line in error.detail.splitlines()]
    return "\n".join(lines)
