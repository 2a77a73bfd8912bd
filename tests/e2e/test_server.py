"""Real clients against a real server: the openai package and curl, through every surface that users touch."""

from __future__ import annotations

import concurrent.futures
import json
import re
import shlex
import subprocess
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

POEM = "Write me a poem about AMD and Deepseek"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,  # or vLLM lets the constrained output leave out required parameters
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Berlin", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NO_THINKING: dict[str, Any] = {"chat_template_kwargs": {"thinking": False}}


@pytest.fixture(scope="module")
def first_up(deployment: Deployment) -> subprocess.CompletedProcess[str]:
    done = deployment.up()
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def client(deployment: Deployment, first_up: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", timeout=120, max_retries=0)


def printed_json(output: str) -> dict[str, Any]:
    answer, _ = json.JSONDecoder().raw_decode(output[output.index("{") :])
    assert isinstance(answer, dict)
    return answer


def test_up_prints_the_answer_to_the_original_request(first_up: Any) -> None:
    answer = printed_json(first_up.stdout)
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 100
    assert answer["system_fingerprint"].startswith("vllm-0.32.0")
    for label, unit in (("time to ready", " s"), ("time to first token", " s"), ("tokens per second", "")):
        assert re.search(rf"{label}: +\d+\.\d+{unit}\n", first_up.stdout), label
    for stage in (
        "process started",
        "plugin rocm_patches loaded",
        "weights loaded",
        "engine ready",
        "first token",
    ):
        assert stage in first_up.stderr
    assert "No AMD GPU here: serving on the CPU" in first_up.stderr


def test_the_printed_curl_line_repeats_the_answer(first_up: Any) -> None:
    line = next(line.strip() for line in first_up.stdout.splitlines() if line.strip().startswith("curl "))
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert printed_json(done.stdout)["choices"] == printed_json(first_up.stdout)["choices"]


def test_up_again_changes_nothing_and_asks_again(deployment: Deployment, first_up: Any) -> None:
    before = json.loads(deployment.run("status", "--json").stdout)
    again = deployment.up()
    assert again.returncode == 0, again.stderr
    assert "Already running" in again.stderr
    assert printed_json(again.stdout)["choices"] == printed_json(first_up.stdout)["choices"]
    after = json.loads(deployment.run("status", "--json").stdout)
    assert after[0]["pid"] == before[0]["pid"]
    assert after[0]["state"] == "ready"


def test_completion_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=POEM, max_tokens=8, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 8
    assert all(p is not None and -20 < p <= 0 for p in logprobs.token_logprobs)
    assert logprobs.top_logprobs is not None
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen == max(top.values()), "greedy decoding takes the most likely token"


def test_completion_stream_equals_the_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt=POEM, max_tokens=30, temperature=0)
    stream = client.completions.create(model="tiny", prompt=POEM, max_tokens=30, temperature=0, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert len(pieces) > 5
    assert "".join(pieces) == whole.choices[0].text


def test_chat_thinking_off_and_on(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    off = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0, extra_body=NO_THINKING
    )
    assert off.choices[0].message.content
    assert not getattr(off.choices[0].message, "reasoning", None)
    on = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=12,
        temperature=0,
        extra_body={"chat_template_kwargs": {"thinking": True}},
    )
    # The random model never closes its thoughts, so all of it is reasoning and none of it content.
    assert getattr(on.choices[0].message, "reasoning", None)
    assert not on.choices[0].message.content
    assert on.usage and off.usage and on.usage.prompt_tokens > off.usage.prompt_tokens


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Tell me a story"}],
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=NO_THINKING,
    )
    text, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text
    assert usage is not None and usage.completion_tokens == 20


@pytest.mark.parametrize("stream", [False, True])
def test_tool_definition_by_name_yields_valid_arguments(client: openai.OpenAI, stream: bool) -> None:
    """The model knows no tools; naming the function makes vLLM constrain the output to its schema."""
    request: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 400,
        "temperature": 0,
        "extra_body": NO_THINKING,
    }
    if stream:
        calls = [
            delta.function
            for chunk in client.chat.completions.create(**request, stream=True)
            for choice in chunk.choices
            for delta in choice.delta.tool_calls or []
            if delta.function
        ]
        name, arguments = "".join(c.name or "" for c in calls), "".join(c.arguments or "" for c in calls)
    else:
        (call,) = client.chat.completions.create(**request).choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
    assert name == "get_weather"
    assert json.loads(arguments)["city"] in ("Berlin", "Paris")


def test_tools_may_be_offered_without_being_called(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        tools=[WEATHER],  # type: ignore[list-item]
        max_tokens=8,
        temperature=0,
        extra_body=NO_THINKING,
    )
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


def test_structured_output(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Choose"}],
        max_tokens=30,
        temperature=0,
        extra_body={**NO_THINKING, "structured_outputs": {"choice": ["right", "fast", "boring"]}},
    )
    assert answer.choices[0].message.content in ("right", "fast", "boring")


def test_curl_streams_server_sent_events(deployment: Deployment, first_up: Any) -> None:
    body = json.dumps({"prompt": POEM, "max_tokens": 5, "temperature": 0, "stream": True})
    done = subprocess.run(
        [
            "curl",
            "-sSN",
            f"{deployment.url}/v1/completions",
            "-H",
            "Content-Type: application/json",
            "-d",
            body,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    events = [line for line in done.stdout.splitlines() if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert len(events) == 6


def test_validate_finds_nothing_wrong_and_a_printed_line_works(deployment: Deployment, first_up: Any) -> None:
    validated = deployment.run("validate", deployment.url, "--json")
    report = json.loads(validated.stdout)
    assert validated.returncode == 0, report
    assert {result["status"] for result in report["results"]} == {"pass"}
    assert report["model"] == "tiny"
    printed = deployment.run("curl", deployment.url).stdout.splitlines()
    line = printed[next(at for at, text in enumerate(printed) if text.startswith("# tools:")) + 1]
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)["choices"][0]["message"]["tool_calls"], done.stderr


def test_triage_finds_no_failure_in_the_log_of_a_healthy_server(
    deployment: Deployment, first_up: Any
) -> None:
    triage = deployment.run("triage", "--port", str(deployment.port), "--json")
    assert triage.returncode == 0
    assert json.loads(triage.stdout)["verdict"] == "healthy"


def test_mixed_lengths_at_once_answer_as_alone(client: openai.OpenAI) -> None:
    """Continuous batching across the window, page and first-entry edges, in tokens 3 to 1,300."""
    prompts = [[0, *range(20, 20 + n)] for n in (2, 3, 4, 126, 127, 128, 255, 600)] + [
        [0, *range(20, 670)] * 2
    ]

    def ask(prompt: list[int]) -> str:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0)
        return answer.choices[0].text

    alone = [ask(prompt) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, prompts)) == alone


def test_a_prompt_past_the_limit_is_refused_and_the_server_lives(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=[20] * 5000, max_tokens=1)
    assert client.completions.create(model="tiny", prompt="hi", max_tokens=1).choices


def cache_is_as_planned(deployment: Deployment, *options: str) -> None:
    """What the engine logged last about its cache is what `dsv4-deploy plan` says, to the last digit."""
    planned = json.loads(deployment.run("plan", "--json", *options).stdout)["memory"]
    log = deployment.run("logs", "--port", str(deployment.port), "-n", "100000").stdout
    tokens, times = re.findall(r"KV cache size: ([\d,]+) tokens, Maximum concurrency .*: ([\d.]+)x", log)[-1]
    assert int(tokens.replace(",", "")) == planned["logged_tokens"]
    assert times == f"{planned['concurrency']:.2f}"


def test_the_engine_has_the_cache_that_the_plan_said(deployment: Deployment, first_up: Any) -> None:
    cache_is_as_planned(deployment)


def test_every_vllm_process_loaded_the_plugin(deployment: Deployment, first_up: Any) -> None:
    log = deployment.run("logs", "--port", str(deployment.port), "-n", "100000").stdout
    owners = re.findall(r"rocm_patches active in process (\d+), (\w+)", log)
    # The API server, the engine core and the worker, each by its own pid.
    assert len({pid for pid, _ in owners}) >= 3
    (api_server,) = set(re.findall(r"\(APIServer pid=(\d+)\)", log))
    assert api_server in {pid for pid, _ in owners}, "the API server loads it too"


def test_tp_4_replaces_it_and_agrees(deployment: Deployment, first_up: Any) -> None:
    replaced = deployment.up("--tp", "4")
    assert replaced.returncode == 0, replaced.stderr
    assert "replacing it" in replaced.stderr
    answer = printed_json(replaced.stdout)
    assert "-tp4-" in answer["system_fingerprint"]
    assert answer["usage"]["completion_tokens"] == 100
    (row,) = json.loads(deployment.run("status", "--json").stdout)
    assert (row["tp"], row["state"]) == (4, "ready")
    text, whole = answer["choices"][0]["text"], printed_json(first_up.stdout)["choices"][0]["text"]
    # Sums in another order may flip a token sooner or later; the beginning has clear winners.
    assert text[:20] == whole[:20]
    cache_is_as_planned(deployment, "--tp", "4")


def test_patches_status_shows_every_process_of_tp_4(deployment: Deployment, first_up: Any) -> None:
    shown = deployment.run("patches", "status", deployment.url)
    assert shown.returncode == 0, shown.stderr
    release, header, *rows = shown.stdout.splitlines()
    assert release == "vLLM 0.32.0, platform cpu"
    assert re.findall(r"\S+(?= \(\d+\))", header) == [
        "EngineCore", "MainProcess", *(f"VllmWorker-{rank}" for rank in range(4))
    ]  # fmt: skip
    states = dict(row.split(maxsplit=1) for row in rows)
    # The API server has loaded what the patch changes, the others have not.
    assert states["patches-in-metrics"].split() == ["armed", "active", *["armed"] * 4]


def test_down_leaves_nothing_and_can_be_repeated(deployment: Deployment, first_up: Any) -> None:
    assert deployment.down().returncode == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{deployment.url}/health")
    again = deployment.down()
    assert again.returncode == 0
    assert f"othing is running on port {deployment.port}" in again.stdout + again.stderr
