"""`validate` against a small real HTTP server: a good one passes, each fault is found, none costs more time than
promised."""

from __future__ import annotations

import socket
import time

import pytest

from dsv4_deploy.validate.calls import calls
from dsv4_deploy.validate.run import Report, Result, validate
from tests.validate.openai_server import Server, serve

LIMIT_S = 1.0


def check(server: Server, model: str | None = None, limit: float = 20.0) -> Report:
    return validate(server.url, model=model, timeout_s=limit)


def failed(report: Report) -> dict[str, Result]:
    return {result.name: result for result in report.results if result.status == "fail"}


def test_a_good_server_passes_everything() -> None:
    with serve() as server:
        report = check(server)
    assert failed(report) == {}
    assert report.passed
    assert [result.status for result in report.results] == ["pass"] * len(calls())
    assert report.model == "tiny"
    assert report.to_dict()["passed"] is True
    text = "\n".join(report.lines())
    assert '"In racks of silver light"' in text
    assert 'get_weather({"city": "Berlin"})' in text


ALL_THAT_GENERATE = {call.name for call in calls() if call.body and call.kind != "refusal"}
STREAMS = {call.name for call in calls() if call.streams}
PLAIN = ALL_THAT_GENERATE - STREAMS
TEXT = {"completion", "completion-stream"}
TOOLS = {"tools", "tools-stream"}
CHAT = ALL_THAT_GENERATE - TEXT
WITHOUT_THINKING = {"chat", "chat-stream"}
THINKING = {"chat-thinking", "chat-thinking-stream"}


@pytest.mark.parametrize(
    ("quirk", "names", "words"),
    [
        ("http-500", ALL_THAT_GENERATE, "HTTP status 500: EngineCore encountered an issue."),
        ("no-template", CHAT, "F21: Start vLLM with --tokenizer-mode deepseek_v4"),
        ("not-json", PLAIN, "no JSON object: '<html>"),
        ("usage", ALL_THAT_GENERATE, "do not fit together"),
        ("abort", ALL_THAT_GENERATE - TOOLS, "finish_reason is 'abort'"),
        ("nan", {*TEXT, "chat"}, "4 of 4 log-probabilities are not finite numbers, the first is nan"),
        ("inf", {*TEXT, "chat"}, "the first is -inf"),
        ("null", {*TEXT, "chat"}, "the first is None"),
        ("positive", {*TEXT, "chat"}, "above zero"),
        ("few-logprobs", TEXT, "3 log-probabilities for 4 tokens"),
        ("empty", TEXT | WITHOUT_THINKING, "is empty"),
        ("leaks-thoughts", WITHOUT_THINKING, "thoughts although thinking is off"),
        ("no-thoughts", THINKING, "no thoughts although thinking is on"),
        ("bad-arguments", TOOLS, "are not JSON"),
        ("wrong-city", TOOLS, "'Rome', not one of"),
        ("no-city", TOOLS, "'city' is missing"),
        ("markup", TOOLS, "markup (DSML)"),
        ("stream-type", STREAMS, "not 'text/event-stream'"),
        ("stream-garbage", STREAMS, "an event is not JSON"),
        ("stream-error", STREAMS, "an error in the middle of the stream: {'message': 'EngineDeadError'}"),
        ("stream-cut", STREAMS, "ended without [DONE]"),
        ("stream-after-done", STREAMS, "something came after [DONE]"),
        ("stream-twice", STREAMS, "2 events with a finish_reason"),
        ("takes-anything", {"refusal"}, "HTTP status 200, not one of 400 to 499"),
        ("no-metrics", {"metrics"}, "vllm:num_requests_running"),
        ("no-models", {"models"}, "the list of models is empty"),
        ("unhealthy", {"health"}, "HTTP status 503"),
    ],
)  # fmt: skip
def test_each_fault_is_found_where_it_is_and_nowhere_else(quirk: str, names: set[str], words: str) -> None:
    with serve(quirk) as server:
        report = check(server)
    bad = failed(report)
    assert set(bad) == names
    assert not report.passed
    for result in bad.values():
        assert any(words in problem for problem in result.problems), result.problems
    assert all(result.status != "skip" for result in report.results)


def test_a_budget_that_ends_inside_the_thoughts_is_said_and_no_fault() -> None:
    with serve("budget") as server:
        report = check(server)
    assert report.passed
    assert any("ended inside the thoughts" in result.note for result in report.results)


@pytest.mark.parametrize(
    ("quirk", "words"),
    [
        ("hang", "no whole answer within 1 s"),
        ("drip", "no whole answer within 1 s"),
        ("closes-early", "the answer broke off"),
        ("garbage-http", "the answer broke off"),
        ("stream-aborts", "the answer broke off"),
        ("endless", "longer than 8 MiB"),
    ],
)
def test_a_server_that_never_ends_its_answer_costs_one_deadline(quirk: str, words: str) -> None:
    begun = time.monotonic()
    with serve(quirk) as server:
        report = check(server, limit=LIMIT_S if quirk in ("hang", "drip") else 20.0)
    assert time.monotonic() - begun < 15
    (bad,) = failed(report).values()
    assert bad.name == ("completion-stream" if quirk == "stream-aborts" else "completion")
    assert words in bad.problems[0]
    rest = report.results[[result.name for result in report.results].index(bad.name) + 1 :]
    assert rest
    assert {result.status for result in rest} == {"skip"}


def test_a_server_that_hangs_from_the_start_costs_one_deadline() -> None:
    begun = time.monotonic()
    with serve("hang-always") as server:
        report = check(server, limit=LIMIT_S)
        assert time.monotonic() - begun < 5
    assert set(failed(report)) == {"health"}
    assert not report.passed


def test_nothing_there() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        report = validate(url, model=None, timeout_s=5)
    assert "nothing answers there" in failed(report)["health"].problems[0]
    assert [result.status for result in report.results[1:]] == ["skip"] * (len(calls()) - 1)


def test_another_model_than_wanted() -> None:
    with serve() as server:
        report = check(server, model="flash")
    assert failed(report)["models"].problems == ("it serves tiny, not flash (F76)",)


def test_the_key_is_sent_to_the_api_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    with serve(key="sesame") as server:
        assert check(server).passed
        seen = server.seen  # type: ignore[attr-defined]
    assert {path for path, headers in seen if "Authorization" in headers} == {
        "/v1/models", "/v1/completions", "/v1/chat/completions",
    }  # fmt: skip


def test_a_wrong_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    with serve(key="sesame") as server:
        bad = failed(check(server))
    assert "wrong or missing key" in bad["models"].problems[0]
    assert "sesame" not in str(bad)
