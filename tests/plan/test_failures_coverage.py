"""Nothing of the public failure log is forgotten: every row, and what of this bundle deals with it.

F01 to F82 are kinds of failure that people reported, W01 to W54 wrong inputs; docs/rules.md links the reports.
`rule:` is a rule of the support matrix, `preflight:` a check of this host, `facts:` a reader that refuses,
`triage:` a named cause for a log, `patch:` a patch of vLLM, `serve:` the supervisor, `chart:` the Helm chart,
`trait:` a field of the catalog that own kernels obey. `smoke:` and `doc:` say what has to be tried on a running
server or read by a person; what those rows call for beyond a decision is not this package's to do.
"""

from __future__ import annotations

import pathlib

import pytest
import yaml

from dsv4_deploy.plan.rules import BY_ID, RULES
from dsv4_deploy.preflight.run import NAMES

ROOT = pathlib.Path(__file__).parents[2]

HANDLED = {
    "F01": "rule:vllm-too-old triage:F01 patch:fp8_utils",
    "F02": "rule:vllm-too-old triage:F02",
    "F03": "rule:vllm-too-old triage:F03",
    "F04": "patch:mhc triage:F04",
    "F05": "rule:virtual-function-tp8 triage:F05",
    "F06": "rule:weights-fit rule:data-parallel-pro",
    "F07": "rule:moe-aiter-version rule:moe-aiter-parallel rule:moe-backend triage:F07",
    "F08": "triage:F08",
    "F09": "rule:cache-fits",
    "F10": "rule:memory-utilization triage:F10",
    "F11": "rule:memory-limit rule:memory-limit-tight preflight:memory triage:F11",
    "F12": "chart:tolerations",
    "F13": "rule:startup-budget triage:F13",
    "F14": "serve:warm-up before readiness",
    "F15": "rule:ready-timeout preflight:load-time triage:F15",
    "F16": "preflight:gpu-devices triage:F16",
    "F17": "rule:gpu-partition preflight:gpu-partition",
    "F18": "rule:tp-divides triage:F18",
    "F19": "preflight:open-files triage:F19",
    "F20": "triage:F20",
    "F21": "rule:tokenizer-mode triage:F21",
    "F22": "doc:lm_eval brings a transformers of its own",
    "F23": "rule:dspark-in-checkpoint rule:dspark-rocm preflight:model-files triage:F23",
    "F24": "rule:expert-padding",
    "F25": "rule:breakable-graphs",
    "F26": "rule:aiter-fp4bmm-off triage:F26",
    "F27": "triage:F27",
    "F28": "rule:aiter-jit-dir triage:F28",
    "F29": "preflight:load-time triage:F29",
    "F30": "preflight:gpu-devices",
    "F31": "rule:gpu-partition preflight:gpu-partition",
    "F32": "rule:unknown-card rule:mixed-cards",
    "F33": "rule:rollout-surge",
    "F34": "preflight:shared-memory",
    "F35": "rule:service-links rule:service-name triage:F35",
    "F36": "preflight:caches triage:F36",
    "F37": "chart:device plugin without GPUs",
    "F38": "rule:gpu-architecture rule:gpu-not-target triage:F38",
    "F39": "preflight:caches",
    "F40": "triage:F40 smoke:2100 and 4200 tokens",
    "F41": "rule:vllm-outside-window triage:F41",
    "F42": "smoke:needle with the pool filled",
    "F43": "smoke:soak of 5000 requests",
    "F44": "rule:speculation-gfx942 triage:F44",
    "F45": "rule:batched-tokens-long-context triage:F45",
    "F46": "rule:max-num-seqs",
    "F47": "rule:kv-offloading rule:shared-memory triage:F47",
    "F48": "rule:termination-grace",
    "F49": "rule:aiter-vskip triage:F49",
    "F50": "serve:warm-up with a short and a long prompt",
    "F51": "preflight:gpu-power",
    "F52": "smoke:speed floor",
    "F53": "rule:no-tuned-table",
    "F54": "rule:no-tuned-table triage:F54",
    "F55": "serve:progress while requests run",
    "F56": "rule:liveness-timeout",
    "F57": "serve:a canary only when idle",
    "F58": "rule:termination-grace",
    "F59": "rule:expert-parallel-pro rule:expert-parallel",
    "F60": "rule:memory-utilization rule:weights-fit",
    "F61": "preflight:driver-window triage:F61",
    "F62": "rule:scratch-reclaim",
    "F63": "rule:aiter-fp8bmm-off",
    "F64": "rule:graphs-v41 rule:breakable-graphs triage:F64",
    "F65": "rule:vllm-outside-window smoke:known answers",
    "F66": "patch:mhc smoke:arithmetic",
    "F67": "patch:fused_compress_quant_cache smoke:length sweep",
    "F68": "patch:fused_compress_quant_cache",
    "F69": "rule:aiter-on smoke:50 questions of GSM8K",
    "F70": "smoke:foreign-script characters in raw completions",
    "F71": "rule:vllm-outside-window smoke:eager against graphs",
    "F72": "rule:kv-offloading",
    "F73": "patch:parser_deepseek_v4",
    "F74": "patch:parser_deepseek_v4 patch:chat_completion",
    "F75": "smoke:reasoning and content apart",
    "F76": "preflight:port preflight:model-files triage:F76",
    "F77": "triage:F77",
    "F78": "smoke:captured once, replayed with other inputs",
    "F79": "smoke:AITER on, experts not AITER's",
    "F80": "rule:aiter-mhc-race patch:mhc",
    "F81": "rule:speculation-gfx942 rule:vllm-outside-window",
    "F82": "trait:q_head_norm",
    "W01": "rule:tp-divides",
    "W02": "rule:tp-divides",
    "W03": "rule:rocm-needs-gpus triage:W03",
    "W04": "rule:weights-fit rule:data-parallel-pro",
    "W05": "rule:block-size",
    "W06": "rule:kv-cache-dtype-auto",
    "W07": "rule:kv-cache-dtype triage:W07",
    "W08": "rule:moe-aiter-version rule:moe-aiter-parallel rule:moe-aiter-used",
    "W09": "rule:quantization-fp8",
    "W10": "rule:quantization-named",
    "W11": "rule:tokenizer-mode",
    "W12": "rule:reasoning-parser",
    "W13": "rule:tool-call-parser",
    "W14": "rule:indexer-dtype triage:W14",
    "W15": "rule:cache-fits",
    "W16": "rule:memory-utilization",
    "W17": "rule:enforce-eager",
    "W18": "rule:mtp-reuses-layer",
    "W19": "rule:dspark-in-checkpoint",
    "W20": "rule:mtp-in-checkpoint",
    "W21": "rule:image-cuda",
    "W22": "rule:image-tag",
    "W23": "rule:visibility-conflict rule:visibility triage:W23",
    "W24": "rule:shared-memory preflight:shared-memory",
    "W25": "rule:shared-memory preflight:shared-memory",
    "W26": "preflight:gpu-devices",
    "W27": "preflight:gpu-devices",
    "W28": "preflight:locked-memory",
    "W29": "preflight:numa-balancing",
    "W30": "rule:gpu-partition preflight:gpu-partition",
    "W31": "preflight:driver-window",
    "W32": "facts:checkpoint",
    "W33": "facts:checkpoint preflight:download",
    "W34": "rule:caches-writable preflight:download",
    "W35": "rule:gpu-resource",
    "W36": "rule:runtime-class",
    "W37": "rule:cluster-gpus",
    "W38": "rule:rollout-surge",
    "W39": "rule:weights-reachable preflight:download",
    "W40": "rule:liveness-timeout",
    "W41": "rule:startup-budget",
    "W42": "rule:termination-grace",
    "W43": "rule:memory-limit preflight:memory",
    "W44": "rule:service-name",
    "W45": "rule:aiter-on",
    "W46": "rule:aiter-fp4bmm-off",
    "W47": "rule:aiter-jit-dir",
    "W48": "rule:expert-parallel-pro rule:expert-parallel",
    "W49": "rule:kv-offloading",
    "W50": "rule:max-num-seqs",
    "W51": "rule:served-model-name",
    "W52": "preflight:port",
    "W53": "rule:fp8-experts",
    "W54": "rule:parsers-match",
}


def handlers(row: str) -> list[tuple[str, str]]:
    """(kind, name) of each, where a name may hold spaces."""
    found: list[list[str]] = []
    for word in HANDLED[row].split():
        kind, colon, name = word.partition(":")
        if colon:
            found.append([kind, name])
        else:
            found[-1][1] += f" {word}"
    return [(kind, name) for kind, name in found]


def test_every_row_is_there_and_no_other() -> None:
    wanted = [f"F{number:02}" for number in range(1, 83)] + [f"W{number:02}" for number in range(1, 55)]
    assert list(HANDLED) == wanted


@pytest.mark.parametrize("row", HANDLED)
def test_what_deals_with_a_row_exists_and_names_it(row: str) -> None:
    checks = "".join(path.read_text() for path in (ROOT / "dsv4_deploy/preflight").glob("*.py"))
    causes = {
        rule["id"] for rule in yaml.safe_load((ROOT / "dsv4_deploy/triage/rules.yaml").read_text())["rules"]
    }
    for kind, name in handlers(row):
        if kind == "rule":
            assert row in BY_ID[name].rows, f"rule {name} does not say that it covers {row}"
        elif kind == "preflight":
            assert name in NAMES
            assert f'"{row}"' in checks, f"no finding of preflight names {row}"
        elif kind == "triage":
            assert name == row
            assert name in causes
        elif kind == "patch":
            assert f'"{row}"' in (ROOT / "rocm_patches/patches" / f"{name}.py").read_text()
        elif kind == "facts":
            assert row in (ROOT / "dsv4_deploy/facts" / f"{name}.py").read_text()
        else:
            assert kind in ("serve", "chart", "smoke", "doc", "trait")
            assert name


def test_every_row_of_a_rule_is_in_the_list() -> None:
    for rule in RULES:
        for row in rule.rows:
            assert ("rule", rule.id) in handlers(row), f"{row} is missing for rule {rule.id}"


def test_every_wrong_input_has_a_verdict_before_anything_starts() -> None:
    for row in HANDLED:
        if row.startswith("W"):
            assert {kind for kind, _ in handlers(row)} & {"rule", "preflight", "facts"}, row


def test_every_rule_has_a_public_link_and_its_own_name() -> None:
    assert len(BY_ID) == len(RULES)
    for rule in RULES:
        assert rule.link.startswith("https://")
        assert rule.title
        assert rule.verdict in ("refuse", "set", "warn")


def test_the_page_is_the_one_that_the_rules_give() -> None:
    from dsv4_deploy.plan.show import rules_markdown

    page = ROOT / "docs/rules.md"
    assert page.read_text(encoding="utf-8") == rules_markdown(), (
        "run: dsv4-deploy rules --markdown > docs/rules.md"
    )
