"""What counts as an answer, and a curl line that survives any shell."""

from __future__ import annotations

import copy
import json
import shlex
from typing import Any

import pytest

from dsv4_deploy.errors import DeployError
from dsv4_deploy.validate import completion

GOOD: dict[str, Any] = {
    "object": "text_completion",
    "choices": [{"text": "In racks", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 100, "total_tokens": 109},
}


def changed(**changes: Any) -> dict[str, Any]:
    body = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *parents, last = path.split("__")
        target: Any = body
        for parent in parents:
            target = target[int(parent) if isinstance(target, list) else parent]
        target[last] = value
    return body


def test_a_good_answer() -> None:
    completion.check_shape(GOOD)
    completion.check_shape(changed(choices__0__finish_reason="stop", choices__0__text=""))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "object is None"),
        (changed(object="error"), "object is 'error'"),
        (changed(choices=[]), "exactly one choice"),
        (changed(choices=None), "exactly one choice"),
        (changed(choices__0__text=None), "exactly one choice"),
        (changed(choices__0__finish_reason="abort"), "finish_reason is 'abort'"),
        (changed(usage=None), "no token counts"),
        (changed(usage__total_tokens="109"), "no token counts"),
        (changed(usage__completion_tokens=0, usage__total_tokens=9), "do not fit"),
        (changed(usage__completion_tokens=101, usage__total_tokens=110), "do not fit"),
        (changed(usage__total_tokens=99), "do not fit"),
    ],
)
def test_answers_that_are_none(body: dict[str, Any], words: str) -> None:
    with pytest.raises(DeployError, match="not a completion") as raised:
        completion.check_shape(body)
    assert words in raised.value.what
    assert json.loads(raised.value.detail) == body


def test_curl_line() -> None:
    words = shlex.split(completion.curl_line("http://127.0.0.1:8000", with_key=False))
    assert words[:3] == ["curl", "-sS", "http://127.0.0.1:8000/v1/completions"]
    assert json.loads(words[-1]) == completion.REQUEST
    assert "Authorization: Bearer $VLLM_API_KEY" in completion.curl_line("http://[::1]:1", with_key=True)


def test_the_request_is_that_of_the_pull_request() -> None:
    assert completion.REQUEST == {
        "prompt": "Write me a poem about AMD and Deepseek",
        "max_tokens": 100,
        "temperature": 0.0,
    }
