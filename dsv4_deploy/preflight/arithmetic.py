"""The check that an AMD GPU computes right, before a byte of weights is read. In: a Case. Out: findings.

Unlike the other checks it uses the GPU and takes up to a minute, so only a start runs it. It has never met AMD
hardware.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4_deploy import selftest as program
from dsv4_deploy.errors import DeployError
from dsv4_deploy.preflight.case import Case
from dsv4_deploy.preflight.finding import Finding, fail, ok, warn


def selftest(case: Case) -> Iterator[Finding]:
    """Every reference, kernel and patched operator agrees with float64 on this GPU."""
    try:
        verdict = program.judge(case.environ)
    except DeployError as error:
        yield fail("selftest", error.what, error.why, error.fix)
        return
    if verdict.skipped:
        yield warn(
            "selftest",
            f"wrong, but named in {program.SKIP}: {'; '.join(verdict.skipped)}",
            "Answers may be wrong wherever this is used.",
            f"Take the name out of {program.SKIP} once it is right.",
        )
    if verdict.wrong:
        yield fail(
            "selftest",
            f"{len(verdict.wrong)} of {verdict.count} measurements on {verdict.device} are wrong: "
            + "; ".join(verdict.wrong[:4]),
            "Text from wrong arithmetic looks fluent; nothing later would notice.",
            f"Run `dsv4-deploy selftest` for all of them. To serve all the same: {program.SKIP}='NAME;NAME'.",
        )
    elif not verdict.skipped:
        yield ok("selftest", f"{verdict.count} measurements on {verdict.device} in {verdict.seconds:.0f} s")
