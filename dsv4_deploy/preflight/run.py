"""Runs the checks. In: a Case and the names of findings to let pass. Out: findings, as lines, blocks or JSON.

To add a check: write the function in the module of its subject, list it in CHECKS, add its test. A check
yields findings, reads what it needs and changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from dsv4_deploy.errors import DeployError
from dsv4_deploy.facts import host
from dsv4_deploy.plan import rules
from dsv4_deploy.plan.plan import Plan
from dsv4_deploy.preflight import arithmetic, gpus, machine, model, server
from dsv4_deploy.preflight.case import Case, gather
from dsv4_deploy.preflight.finding import Finding
from dsv4_deploy.serve.report import Report
from dsv4_deploy.serve.state import Store
from dsv4_deploy.serve.up import plan_for
from dsv4_deploy.spec import ServingSpec

Check = Callable[[Case], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    gpus.gpu_driver,
    gpus.gpu_devices,
    gpus.gpu_card,
    gpus.gpu_partition,
    gpus.gpu_memory,
    gpus.gpu_power,
    gpus.driver_window,
    machine.shared_memory,
    machine.open_files,
    machine.locked_memory,
    machine.numa_balancing,
    machine.iommu,
    machine.memory,
    model.planned,
    model.model_files,
    model.load_time,
    model.download,
    server.vllm,
    server.caches,
    server.port,
)
GPU_CHECKS = frozenset(check for check in CHECKS if check.__module__ == gpus.__name__)

NAMES = frozenset(
    {check.__name__.replace("_", "-") for check in CHECKS} - {"planned"}
    | {"plan", "hub", "selftest", *rules.BY_ID}
)
"""The names that findings have, those of the plan's rules among them, and that --allow takes."""


def run(case: Case, *, without: Collection[Check] = ()) -> list[Finding]:
    """All findings, in the order of CHECKS. The GPU checks are for a server on GPUs only."""
    return [
        finding
        for check in CHECKS
        if check not in without and not (case.device == "cpu" and check in GPU_CHECKS)
        for finding in check(case)
    ]


def let_pass(findings: Iterable[Finding], allowed: Collection[str]) -> list[Finding]:
    """The findings after the operator's word: what is allowed by name fails no more, but is still told; its
    warnings are gone."""
    kept = []
    for finding in findings:
        if finding.check not in allowed or finding.level == "ok":
            kept.append(finding)
        elif finding.level == "fail":
            kept.append(
                dataclasses.replace(
                    finding, level="warn", fix=f"Allowed by --allow {finding.check}. {finding.fix}"
                )
            )
    return kept


def line(finding: Finding) -> str:
    """One line: what, why it matters, what to do, and how to silence a warning."""
    silence = f"; silence: --allow {finding.check}" if finding.level == "warn" else ""
    known = (
        f" ({', '.join(finding.refs)}{silence})"
        if finding.refs
        else f" ({silence.lstrip('; ')})"
        if silence
        else ""
    )
    return (
        " ".join(part for part in (f"{finding.check}: {finding.found}.", finding.why, finding.fix) if part)
        + known
    )


def block(finding: Finding) -> list[str]:
    """The finding for a page of them: one line when all is well, else cause and fix below it."""
    lines = [f"{finding.level:<5} {finding.check:<18} {finding.found}"]
    for label, text in (("why", finding.why), ("fix", finding.fix), ("see", _see(finding))):
        if text:
            lines.append(f"{'':25}{label}: {text}")
    return lines


def summary(findings: Iterable[Finding]) -> str:
    """The last line of a page."""
    levels = [finding.level for finding in findings]
    fails, warns = levels.count("fail"), levels.count("warn")
    if not fails and not warns:
        return f"All {len(levels)} checks are fine."
    return f"{_count(fails, 'problem')}, {_count(warns, 'warning')}, {levels.count('ok')} fine."


def as_json(findings: Iterable[Finding]) -> str:
    """{"ok": ..., "findings": [...]}: ok is false when one of them fails."""
    listed = list(findings)
    return json.dumps(
        {"ok": passed(listed), "findings": [dataclasses.asdict(finding) for finding in listed]}, indent=2
    )


def passed(findings: Iterable[Finding]) -> bool:
    return all(finding.level != "fail" for finding in findings)


def examine(
    spec: ServingSpec, environ: Mapping[str, str], store: Store, *, rocm: str | None = None
) -> list[Finding]:
    """Everything about this host for the deployment that `up` would start. A plan that is refused is a
    finding too."""
    plan, refusal = None, None
    try:
        plan = plan_for(spec, dry_run=True, report=Report())
    except DeployError as error:
        refusal = error
    case = gather(
        spec,
        environ,
        host.read(),
        plan=plan,
        refusal=refusal,
        rocm=rocm,
        our_pid=_running(store, spec.port),
    )
    return let_pass(run(case), spec.allow)


def _running(store: Store, port: int) -> int | None:
    record = store.load(port)
    return record.pid if record is not None and record.is_running() else None


def before_start(
    spec: ServingSpec, plan: Plan, environ: Mapping[str, str], store: Store, note: Callable[[str], None]
) -> None:
    """What a start runs first: warnings go to `note`, one line each. Raises DeployError (exit code 1) when a
    check fails. Left out is what the start does itself: what the plan says, vLLM's version, and the port,
    where a server of our own may be."""
    case = gather(spec, environ, host.read(), plan=plan, our_pid=_running(store, spec.port))
    findings = let_pass(run(case, without=(model.planned, server.vllm, server.port)), spec.allow)
    for finding in findings:
        if finding.level == "warn":
            note(f"warning: {line(finding)}")
    insist(findings)
    if plan.device == "rocm" and case.our_pid is None:  # a running server has the GPUs, and has been tested
        findings = let_pass(arithmetic.selftest(case), spec.allow)
        for finding in findings:
            if finding.level != "fail":
                note(f"{'warning: ' * (finding.level == 'warn')}{line(finding)}")
        insist(findings)


def insist(findings: Iterable[Finding]) -> None:
    """Raise DeployError (exit code 1) with all that failed, for a command that cannot go on."""
    failed = [finding for finding in findings if finding.level == "fail"]
    if failed:
        first = failed[0]
        raise DeployError(
            f"preflight: {first.found} ({', '.join((first.check, *first.refs))})",
            why=first.why,
            fix=first.fix,
            detail="\n".join(text for other in failed[1:] for text in block(other)),
        )


def _see(finding: Finding) -> str:
    return ", ".join(part for part in (*finding.refs, finding.link) if part)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
