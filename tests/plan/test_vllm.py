"""Real vLLM 0.32.0 takes what a plan gives it: its own parser the command line, its own list the variables.

One subprocess imports vLLM and checks every plan, because importing it takes longer than all plans together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dsv4_deploy import catalog
from dsv4_deploy.plan.plan import Plan
from dsv4_deploy.plan.profiles import PROFILES
from tests.plan.cases import plan

SPECULATION = {
    "mtp": '{"method":"mtp","num_speculative_tokens":1}',
    "dspark": '{"method":"dspark","num_speculative_tokens":5}',
}

CHECK = """
import json, sys
from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
answers = []
for argv in json.load(sys.stdin):
    assert argv[0] == "serve"
    parsed = parser.parse_args(argv[1:])
    answers.append({
        "tp": parsed.tensor_parallel_size, "model_tag": parsed.model_tag, "eager": parsed.enforce_eager,
        "length": parsed.max_model_len, "sequences": parsed.max_num_seqs,
        "kv_bytes": parsed.kv_cache_memory_bytes, "parser": parsed.tool_call_parser,
    })
print("ANSWER " + json.dumps({"parsed": answers, "variables": sorted(envs.environment_variables)}))
"""


def every_plan() -> dict[str, Plan]:
    """All profiles, models, TP sizes and cards of the catalog that a plan accepts, and both speculations."""
    plans = {"cpu": plan(device="cpu"), "cpu-tp4": plan(device="cpu", tp=4)}
    for profile in PROFILES:
        for tp in (4, 8):
            plans[f"flash-tp{tp}-{profile}"] = plan(profile=profile, tp=tp)
    for card in ("mi300x", "mi308x", "mi325x"):
        for name, model in catalog.models().items():
            if name == "tiny":
                continue
            plans[f"{name}-{card}"] = plan(model=name, gpu=card, gpu_count=8)
            setting = f"speculative-config={SPECULATION[model.traits.draft.kind]}"
            plans[f"{name}-{card}-draft"] = plan(setting, model=name, gpu=card, gpu_count=8)
            plans[f"{name}-{card}-0.32"] = plan(model=name, gpu=card, gpu_count=8, vllm="0.32.0")
    plans["one-card"] = plan(tp=1)
    plans["pro-on-four"] = plan(model="deepseek-v4-pro", tp=4, gpu="mi325x", gpu_count=4)
    plans["auto"] = plan(max_model_len="auto")
    return plans


@pytest.mark.vllm
def test_vllm_takes_every_plan() -> None:
    plans = every_plan()
    result = subprocess.run(
        [sys.executable, "-c", CHECK],
        input=json.dumps([made.argv for made in plans.values()]),
        env={**os.environ, "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith("ANSWER "))
    answer = json.loads(line.removeprefix("ANSWER "))
    for (name, made), parsed in zip(plans.items(), answer["parsed"], strict=True):
        flags = {flag.name: flag.value for flag in made.flags}
        assert parsed["model_tag"] == made.model, name
        assert parsed["tp"] == made.tp, name
        assert parsed["eager"] is (flags.get("enforce-eager") is True), name
        for key, flag in (
            ("length", "max-model-len"),
            ("sequences", "max-num-seqs"),
            ("kv_bytes", "kv-cache-memory-bytes"),
        ):
            assert parsed[key] == (int(str(flags[flag])) if flag in flags else None), (name, flag)
        known = {*answer["variables"], *catalog.other_variables()}
        assert set(made.environment) <= known, (name, set(made.environment) - known)
    # A name that vLLM has got itself must not be in our list of other people's variables.
    assert not set(catalog.other_variables()) & set(answer["variables"])
