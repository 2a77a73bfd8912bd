"""Target `shell`: a POSIX script that sets the plan's environment and becomes `vllm serve` on this host."""

from __future__ import annotations

from dsv4_deploy.plan.plan import TINY
from dsv4_deploy.plan.settings import Setting
from dsv4_deploy.render import quoting
from dsv4_deploy.render.source import Source, head

OPEN_FILES = 65536


def render(source: Source) -> str:
    """The script's text."""
    plan = source.plan
    lines = ["#!/bin/sh", *head(source, "Serves DeepSeek-V4 with vLLM on this host.")]
    lines += quoting.comment(
        "Secrets are not in here: export VLLM_API_KEY and HF_TOKEN where they are needed; vLLM reads them."
    )
    body = ["set -eu", "", *_requirements(source)]
    for setting in plan.env:
        body += [
            *quoting.comment(setting.reason),
            f"export {setting.name}={quoting.shell(str(setting.value))}",
        ]
    body += ["", f"set -- serve {quoting.shell(plan.model)}"]
    for flag in plan.flags:
        body += [*quoting.comment(flag.reason), f'set -- "$@" {_words(flag)}']
    body += ["", 'exec vllm "$@"']
    return "\n".join([*lines, *quoting.shell_meant(body), *body]) + "\n"


def _requirements(source: Source) -> list[str]:
    plan = source.plan
    lines = [
        "if [ $# -ne 0 ]; then",
        '    echo "error: this script takes no arguments; write it again with other options" >&2',
        "    exit 2",
        "fi",
        "if ! command -v vllm >/dev/null; then",
        '    echo "error: there is no vllm on the PATH; activate the environment that has it" >&2',
        "    exit 127",
        "fi",
    ]
    if plan.device == "rocm":
        lines += [
            *quoting.comment(
                "The compile caches hold tens of thousands of files. Not in POSIX, but every shell has it."
            ),
            "# shellcheck disable=SC3045",
            f"ulimit -n {OPEN_FILES} 2>/dev/null ||",
            f'    echo "warning: fewer than {OPEN_FILES} open files are allowed here" >&2',
        ]
    if source.spec.model in (None, TINY) and plan.device == "cpu":
        path = quoting.shell(plan.model)
        lines += [
            *quoting.comment("The tiny checkpoint is made when it is not there."),
            f"[ -e {quoting.shell(plan.model + '/config.json')} ] || dsv4-deploy tiny {path}",
        ]
    return [*lines, ""]


def _words(flag: Setting) -> str:
    if flag.value is True:
        return f"--{flag.name}"
    if flag.value.startswith("-"):
        return quoting.shell(f"--{flag.name}={flag.value}")
    return f"--{flag.name} {quoting.shell(flag.value)}"
