"""--set: how a flag may be written, what is refused, and that the list of switches is vLLM's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_deploy import catalog
from dsv4_deploy.errors import DeployError
from dsv4_deploy.plan.overrides import parse


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("max-num-seqs=64", "max-num-seqs", "64"),
        ("--max-num-seqs=64", "max-num-seqs", "64"),
        ("max_num_seqs=64", "max-num-seqs", "64"),
        ("enforce-eager=true", "enforce-eager", True),
        ("enforce-eager", "enforce-eager", True),
        ("enforce-eager=false", "enforce-eager", False),
        ("no-enable-prefix-caching", "enable-prefix-caching", False),
        ("--no-enable-prefix-caching=true", "enable-prefix-caching", False),
        ("no-enable-prefix-caching=false", "enable-prefix-caching", True),
        ("disable-log-stats", "disable-log-stats", True),
        ("device-memory-utilization=0.8", "gpu-memory-utilization", "0.8"),
        ("cc={}", "compilation-config", "{}"),
        ('compilation-config={"mode": 0}', "compilation-config", '{"mode": 0}'),
        ("hf-overrides.some_key=1", "hf-overrides.some_key", "1"),
        ("cc.cudagraph_mode=NONE", "compilation-config.cudagraph_mode", "NONE"),
        ("seed=-1", "seed", "-1"),
        ("chat-template=a=b", "chat-template", "a=b"),
        ("served-model-name=true", "served-model-name", "true"),
        ("a-flag-of-a-newer-vllm=true", "a-flag-of-a-newer-vllm", True),
    ],
)
def test_spellings(setting: str, key: str, value: str | bool) -> None:
    assert parse([setting]) == {key: value}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model=x", "--model NAME|DIR"),
        ("port=1", "--port N"),
        ("tp=2", "--tp N"),
        ("tensor_parallel_size=2", "--tp N"),
        ("max-model-len=5", "--max-model-len N"),
        ("api-key=abc", "VLLM_API_KEY"),
        ("--api_key=abc", "VLLM_API_KEY"),
        ("hf-token=abc", "HF_TOKEN"),
        ("config=x.yaml", "Write each flag"),
        ("uds=/tmp/s", "Unix socket"),
        ("headless", "answers no requests"),
        ("max-num-seqs", "needs a value"),
        ("max-num-seqs=", "has no value"),
        ("=5", "does not name a flag"),
        ("", "does not name a flag"),
        ("a b=5", "does not name a flag"),
        ("--", "does not name a flag"),
        ("enforce-eager=5", "is a switch"),
        ("disable-log-stats=false", "no --no-disable-log-stats"),
        ("compilation-config={mode: 0}", "not valid JSON"),
    ],
)
def test_refused(setting: str, words: str) -> None:
    with pytest.raises(DeployError) as raised:
        parse([setting])
    assert raised.value.exit_code == 2
    assert words in f"{raised.value.what} {raised.value.why} {raised.value.fix}"
    assert "abc" not in f"{raised.value.what} {raised.value.why} {raised.value.fix}"


def test_twice() -> None:
    with pytest.raises(DeployError, match="given twice"):
        parse(["max-num-seqs=1", "--max_num_seqs=2"])


@given(st.text())
def test_any_text_is_parsed_or_refused_in_words(setting: str) -> None:
    try:
        (key,) = parse([setting])
    except DeployError as error:
        assert error.exit_code == 2
        assert error.why
        assert error.fix
    else:
        assert key == key.strip()
        assert not key.startswith("-")


LIST_FLAGS = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

found = {"with_no": [], "alone": [], "valued": [], "aliases": {}}
for action in make_arg_parser(FlexibleArgumentParser())._actions:
    names = [name for name in action.option_strings if not name.startswith("--no-")]
    long = [name for name in names if name.startswith("--")]
    if not long or action.dest == "help":
        continue
    if action.nargs == 0:
        has_no = any(name.startswith("--no-") for name in action.option_strings)
        found["with_no" if has_no else "alone"].append(long[0][2:])
    if action.nargs in (None, "+", "*"):
        found["valued"].append(long[0][2:])
    for name in names:
        if name != long[0]:
            found["aliases"][name.lstrip("-")] = long[0][2:]
print("FLAGS " + json.dumps(found))
"""


@pytest.mark.vllm
def test_the_flags_are_those_of_vllm() -> None:
    listed = subprocess.run(
        [sys.executable, "-c", LIST_FLAGS],
        env={**os.environ, "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    line = next(line for line in listed.splitlines() if line.startswith("FLAGS "))
    found = json.loads(line.removeprefix("FLAGS "))
    flags = catalog.vllm_flags()
    assert flags.switches_with_no_form == set(found["with_no"])
    assert flags.switches == set(found["alone"])
    assert flags.valued == set(found["valued"])
    assert flags.aliases == found["aliases"]
