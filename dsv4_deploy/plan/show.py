"""A plan and the rules as people and programs read them. In: a Plan. Out: lines of text, or JSON.

What is printed is what was decided: nothing is worked out here.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsv4_deploy.plan.memory import GIB, MEAN_LENGTH_SHARE, Memory
from dsv4_deploy.plan.rules import RULES, Rule
from dsv4_deploy.plan.settings import Plan, Setting

_VERDICTS = {
    "refuse": "stops before anything is started",
    "set": "changes the value and says so",
    "warn": "goes on and says why it matters",
}


def command(plan: Plan, launcher: Sequence[str]) -> list[str]:
    """Environment and command line, each value with its reason, as a shell would take them."""
    lines = ["# Environment, added to yours:"]
    lines += [f"{setting.name}={shlex.quote(str(setting.value))}  # {setting.reason}" for setting in plan.env]
    lines.append("# Command line:")
    for flag in plan.flags:
        lines.append(f"#   --{flag.name}{'' if flag.value is True else f' {flag.value}'}: {flag.reason}")
    lines.append(shlex.join([*launcher, *plan.argv]))
    return lines


def text(plan: Plan, launcher: Sequence[str], *, explain: bool) -> list[str]:
    """The whole plan: note, memory, notices, environment and command line."""
    image = f", image {plan.image}" if plan.image else ""
    lines = [plan.note, f"vLLM {plan.vllm}, profile {plan.profile}{image}", ""]
    if plan.memory:
        lines += [*memory(plan.memory, explain=explain), ""]
    if plan.notices:
        lines += [*(notice.line() for notice in plan.notices), ""]
    return lines + command(plan, launcher)


def memory(found: Memory, *, explain: bool) -> list[str]:
    """The memory of one rank as a table, and what follows from it."""
    layout = found.layout
    where = f"{layout.card.name}, {layout.hbm_bytes / GIB:.1f} GiB" if layout.card else "CPU"
    parallel = f"TP {layout.tp}" + (f", DP {layout.dp}" if layout.dp > 1 else "")
    width = max(len(row.name) for row in found.rows)
    lines = [f"Memory of one rank ({where}, {parallel}):"]
    for row in found.rows:
        lines.append(
            f"  {row.name:<{width}} {row.bytes / GIB:9.3f} GiB{f'   {row.formula}' if explain else ''}"
        )
        if explain:
            lines.append(f"  {'':<{width}}                 {row.source}")
    if layout.card:
        lines.append(f"  {'unused':<{width}} {found.free / GIB:9.3f} GiB")
    return lines + [f"  {line}" for line in _cache(found, explain=explain)]


def _cache(found: Memory, *, explain: bool) -> list[str]:
    """What the pool holds, in sentences."""
    if found.blocks is None or found.request_blocks is None or found.fixed_blocks is None:
        return ["KV tokens: not known; the cache layout of this model is not public."]
    layout, size = found.layout, found.block_bytes or 0
    length, batch = layout.max_model_len, layout.max_num_batched_tokens
    fixed = found.fixed_blocks * size / 1e9
    lines = [
        f"KV cache: {found.blocks} blocks of 256 tokens, {size} bytes each ({found.token_bytes:.0f} per token)",
        f"a request reserves {found.fixed_blocks} blocks ({fixed:.2f} GB) for --max-num-batched-tokens {batch}",
        "in flight, and one block per 256 tokens of its length",
        f"vLLM will log: KV cache size {found.logged_tokens:,} tokens, maximum concurrency {found.concurrency:.2f}x",
        f"for {length:,} tokens per request (a derived figure, no capacity)",
        f"longest --max-model-len that fits: {found.longest}",
        f"sequences at a quarter of {length} tokens each: {found.sequences}",
        "TP does not add KV tokens: every rank holds the whole cache. More replicas do.",
    ]
    if explain:
        lines += [
            f"blocks = pool / block bytes; a request needs {found.request_blocks} = ceil({length} / 256)",
            "+ 2 window groups (128 tokens, pages of 64) + two compressor states (pages of 4 and 8), each of them",
            f"for {layout.engine.tokens_in_flight} tokens in flight",
            f"logged tokens = blocks / {found.request_blocks} x {length}",
            f"sequences = blocks / blocks held while decoding at 1/{MEAN_LENGTH_SHARE} of the length",
        ]
    return lines


def as_json(plan: Plan) -> str:
    """The plan as one JSON object, for programs. Sizes are in bytes, times in seconds."""
    content = {
        "note": plan.note,
        "device": plan.device,
        "profile": plan.profile,
        "model": plan.model,
        "served_name": plan.served_name,
        "tp": plan.tp,
        "vllm": plan.vllm,
        "image": plan.image,
        "gpu": plan.card.name if plan.card else None,
        "argv": plan.argv,
        "environment": plan.environment,
        "flags": [_setting(flag) for flag in plan.flags],
        "variables": [_setting(variable) for variable in plan.env],
        "memory": _memory(plan.memory) if plan.memory else None,
        "notices": [dataclasses.asdict(notice) for notice in plan.notices],
        "deployment": dataclasses.asdict(plan.deployment),
        "weight_bytes": plan.weight_bytes,
        "ready_timeout_s": plan.ready_timeout_s,
        "shutdown_timeout_s": plan.shutdown_timeout_s,
    }
    return json.dumps(content, indent=2)


def rules_text(wanted: Iterable[Rule] = RULES) -> list[str]:
    """One line per rule: verdict, id, rows, what it is about."""
    listed = list(wanted)
    width = max(len(rule.id) for rule in listed)
    return [f"{rule.verdict:<6}  {rule.id:<{width}}  {rule.title}{_rows(rule)}" for rule in listed]


def rule_text(rule: Rule) -> list[str]:
    """One rule in full."""
    return [
        f"{rule.id}: {rule.title}",
        f"  verdict: {rule.verdict} ({_VERDICTS[rule.verdict]})",
        f"  rows:    {' '.join(rule.rows) or '-'}",
        f"  link:    {rule.link}",
        f"  override: --allow {rule.id}",
    ]


def rules_json(wanted: Iterable[Rule] = RULES) -> str:
    """The rules as a JSON list."""
    return json.dumps([_rule(rule) for rule in wanted], indent=2)


def rules_markdown() -> str:
    """docs/rules.md, which is generated; a test fails when it is stale."""
    lines = [
        "# Rules",
        "",
        "<!-- Generated by `dsv4-deploy rules --markdown`; edit dsv4_deploy/plan/rules instead. -->",
        "",
        "Every plan goes through these rules (`dsv4-deploy plan`, `up`, `render`, `preflight`). They are told as",
        "`rule NAME`, and the row numbers F and W name the kind of failure that people had. `--allow NAME` overrides a",
        "refusal, keeps a value that would be changed, or silences a warning; overrides are printed.",
    ]
    for verdict, meaning in _VERDICTS.items():
        lines += ["", f"## {verdict}: {meaning}", "", "| rule | about | rows | seen |", "|---|---|---|---|"]
        lines += [
            f"| `{rule.id}` | {rule.title} | {' '.join(rule.rows) or '-'} | [link]({rule.link}) |"
            for rule in RULES
            if rule.verdict == verdict
        ]
    return "\n".join(lines) + "\n"


def _setting(setting: Setting) -> Mapping[str, Any]:
    return {"name": setting.name, "value": setting.value, "reason": setting.reason}


def _memory(found: Memory) -> Mapping[str, Any]:
    return {
        "rows": [dataclasses.asdict(row) for row in found.rows],
        "used_bytes": found.used,
        "free_bytes": found.free,
        "pool_bytes": found.pool,
        "block_bytes": found.block_bytes,
        "blocks": found.blocks,
        "request_blocks": found.request_blocks,
        "fixed_blocks": found.fixed_blocks,
        "bytes_per_token": found.token_bytes,
        "logged_tokens": found.logged_tokens,
        "concurrency": found.concurrency,
        "longest": found.longest,
        "sequences": found.sequences,
    }


def _rule(rule: Rule) -> Mapping[str, Any]:
    return {
        "id": rule.id,
        "verdict": rule.verdict,
        "title": rule.title,
        "rows": list(rule.rows),
        "link": rule.link,
    }


def _rows(rule: Rule) -> str:
    return f" [{' '.join(rule.rows)}]" if rule.rows else ""
