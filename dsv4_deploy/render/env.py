"""Target `env`: the plan's environment as NAME=value lines, for `. FILE` or an env_file of Compose."""

from __future__ import annotations

from dsv4_deploy.render import quoting
from dsv4_deploy.render.source import Source, head


def render(source: Source) -> str:
    """The file's text."""
    lines = head(source, "Environment of vLLM for DeepSeek-V4.")
    lines += quoting.comment(
        "For a shell (set -a; . FILE) or Compose's env_file; docker's own --env-file reads the values without quotes."
    )
    for setting in source.plan.env:
        lines += ["", *quoting.comment(setting.reason)]
        lines.append(f"{setting.name}={quoting.env_file(str(setting.value))}")
    return "\n".join(lines) + "\n"
