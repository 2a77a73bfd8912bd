"""vLLM's metrics text, in the form that vLLM 0.32.0 writes (checked against a real server in tests/e2e)."""

from __future__ import annotations

from dsv4_deploy.serve.counters import parse, patch_lines

TEXT = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a,engine=\\"9\\"} 7"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="tiny"} 7.0
vllm:iteration_tokens_total_count{engine="0",model_name="tiny"} 7.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 1e+06
# HELP dsv4_patch_info Patches of rocm_patches in vLLM's processes.
# TYPE dsv4_patch_info gauge
dsv4_patch_info{patch="a",state="applied",process="EngineCore"} 1.0
dsv4_requests_in_flight 9.0
dsv4_requests_accepted_total 123.0
dsv4_requests_accepted_created 1.79e+09
"""


def test_requests_and_positions_by_engine() -> None:
    counters = parse(TEXT)
    assert counters is not None
    assert set(counters.engines) == {"0", "1"}
    assert counters.engines["0"].pending == 5
    assert counters.engines["1"].pending == 1
    assert (counters.in_flight, counters.accepted) == (9, 123)
    assert counters.pending == 9


def test_any_counter_of_an_engine_moves_its_position() -> None:
    before = parse(TEXT)
    for old, new in (
        (b'perc{engine="0",model_name="tiny"} 0.25', b'perc{engine="0",model_name="tiny"} 0.26'),
        (b'count{engine="0",model_name="tiny"} 7.0', b'count{engine="0",model_name="tiny"} 8.0'),
        (b"1e+06", b"1000001.0"),
    ):
        assert old in TEXT
        after = parse(TEXT.replace(old, new))
        assert before is not None and after is not None
        assert after.engines["0"].position != before.engines["0"].position
        assert after.engines["1"].position == before.engines["1"].position


def test_without_admission_the_engines_are_counted() -> None:
    counters = parse(TEXT.replace(b"dsv4_requests", b"other_requests"))
    assert counters is not None
    assert counters.in_flight is None
    assert counters.pending == 6


def test_what_is_not_vllms_metrics() -> None:
    for text in (b"", b"<html>busy</html>", b"python_gc_objects_collected_total 3.0\n", b"\xff\x00"):
        assert parse(text) is None
    odd = parse(b"vllm:num_requests_running what\n")
    assert odd is not None and odd.pending == 0


def test_no_number_is_neither_work_nor_movement() -> None:
    """NaN differs from itself, and no request can be counted with it or with infinity."""
    text = b"vllm:num_requests_running %s\nvllm:generation_tokens_total %s\ndsv4_requests_in_flight %s\n"
    seen = []
    for number in (b"NaN", b"+Inf", b"1e999"):
        first, second = parse(text % ((number,) * 3)), parse(text % ((number,) * 3))
        assert first is not None and second is not None
        assert first.engines[""].position == second.engines[""].position
        seen.append((first.engines[""].pending, first.in_flight))
    assert seen == [(0, 0)] * 3
    assert parse(b'vllm:num_requests_running{engine="\xff"} 1\n') is not None


def test_patch_lines() -> None:
    assert patch_lines(TEXT).splitlines() == [
        b"# HELP dsv4_patch_info Patches of rocm_patches in vLLM's processes.",
        b"# TYPE dsv4_patch_info gauge",
        b'dsv4_patch_info{patch="a",state="applied",process="EngineCore"} 1.0',
    ]
