"""up, down, status and logs as a user runs them: real processes, a real port, a stand-in for vLLM only."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import time

import pytest

from tests.serve.conftest import Deploy, collect, free_port, wait_for


def answer_of(stdout: str) -> dict[str, object]:
    body, _ = json.JSONDecoder().raw_decode(stdout)
    assert isinstance(body, dict)
    return body


def test_up_prints_stages_answer_and_figures(deploy: Deploy) -> None:
    result = deploy.up()
    assert result.returncode == 0, result.stderr
    assert answer_of(result.stdout)["object"] == "text_completion"
    for figure in ("time to ready:", "time to first token:", "tokens per second:"):
        assert figure in result.stdout
    assert f"dsv4-deploy down --port {deploy.port}" in result.stdout
    stages = [
        "process started",
        "plugin rocm_patches",
        "loading weights",
        "weights loaded",
        "KV cache for 51,500 tokens",
        "server listening",
        "server ready",
        "first token",
    ]
    positions = [result.stderr.index(stage) for stage in stages]
    assert positions == sorted(positions)
    assert deploy.rows()[0]["state"] == "ready"


def test_the_curl_line_repeats_the_request(deploy: Deploy) -> None:
    stdout = deploy.up().stdout
    line = next(line for line in stdout.splitlines() if line.strip().startswith("curl "))
    repeated = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True, timeout=30)
    assert json.loads(repeated.stdout) == answer_of(stdout)


def test_the_same_again_changes_nothing_and_asks_again(deploy: Deploy) -> None:
    first = deploy.up()
    pid = deploy.state()["pid"]
    second = deploy.up()
    assert second.returncode == 0
    assert "Already running" in second.stderr
    assert answer_of(second.stdout) == answer_of(first.stdout)
    assert deploy.state()["pid"] == pid


def test_another_tp_replaces_the_server(deploy: Deploy) -> None:
    deploy.up()
    pid = deploy.state()["pid"]
    assert len(deploy.servers()) == 3  # API server, engine, one worker
    result = deploy.up("--tp", "4")
    assert result.returncode == 0, result.stderr
    assert "tensor-parallel-size 1 -> 4" in result.stderr
    assert deploy.state()["pid"] != pid
    assert len(deploy.servers()) == 6
    assert (deploy.state_dir / str(deploy.port) / "vllm.log.1").exists()


def test_running_requests_finish_before_a_replacement(deploy: Deploy) -> None:
    deploy.up(quirks="busy=3")
    result = deploy.up("--tp", "2")
    assert result.returncode == 0
    assert "for 3 running request(s)" in result.stderr


def test_down_stops_everything_and_is_idempotent(deploy: Deploy) -> None:
    deploy.up("--tp", "2")
    first = deploy.down()
    assert (first.returncode, first.stderr) == (0, f"Stopped the server on port {deploy.port}.\n")
    assert deploy.servers() == []
    assert not deploy.state_file.exists()
    again = deploy.down()
    assert again.returncode == 0
    assert f"Nothing is running on port {deploy.port}." in again.stderr


def test_down_names_the_other_port(deploy: Deploy) -> None:
    deploy.up()
    other = deploy.run("down", "--port", str(free_port()))
    assert other.returncode == 0
    assert f"There is a server on port {deploy.port}" in other.stderr
    assert len(deploy.servers()) == 3


def test_down_all(deploy: Deploy) -> None:
    deploy.up()
    deploy.port, deploy.health_port = free_port(), free_port()
    deploy.up()
    assert len(deploy.rows()) == 2
    assert deploy.run("down", "--all").returncode == 0
    assert deploy.rows() == []
    assert deploy.servers() == []
    assert "Nothing is running" in deploy.run("down", "--all").stderr


def test_a_server_that_ignores_sigterm_is_killed_after_the_timeout(deploy: Deploy) -> None:
    deploy.up(quirks="deaf,deaf-engine")
    result = deploy.down("--timeout", "1")
    assert result.returncode == 0
    assert "4 process(es) had to be killed" in result.stderr
    assert deploy.servers() == []


@pytest.mark.parametrize("quirks", ["deaf-engine", "deaf-engine,titled"])
def test_children_of_a_killed_server_are_found_and_ended(deploy: Deploy, quirks: str) -> None:
    deploy.up(quirks=quirks)
    os.kill(deploy.state()["pid"], signal.SIGKILL)
    wait_for(lambda: len(deploy.servers()) == 2, "the API server's end")
    status = deploy.run("status")
    assert status.returncode == 1
    assert "dead" in status.stdout
    result = deploy.down()
    assert result.returncode == 0
    assert "had already died; ended 2 process(es)" in result.stderr
    assert deploy.servers() == []


def test_up_after_a_crash_cleans_up_and_starts_again(deploy: Deploy) -> None:
    deploy.up(quirks="deaf-engine")
    os.kill(deploy.state()["pid"], signal.SIGKILL)
    wait_for(lambda: len(deploy.servers()) == 2, "the API server's end")
    result = deploy.up()
    assert result.returncode == 0, result.stderr
    assert "has died; ending 2 of its processes" in result.stderr
    assert len(deploy.servers()) == 3


def test_a_port_of_somebody_else_is_left_alone(deploy: Deploy) -> None:
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", deploy.port))
        foreign.listen()
        result = deploy.up()
        assert result.returncode == 1
        assert f"port {deploy.port} is in use by" in result.stderr
        assert f"(pid {os.getpid()})" in result.stderr
        assert "fix: Use another port: --port N." in result.stderr
    assert not deploy.state_file.exists()
    assert deploy.servers() == []


def test_a_foreign_address_is_refused(deploy: Deploy) -> None:
    result = deploy.up("--host", "192.0.2.77")
    assert result.returncode == 1
    assert "cannot listen on 192.0.2.77" in result.stderr
    assert deploy.up("--host", "not an address").returncode == 2


def test_the_first_error_of_a_server_that_fails_to_start(deploy: Deploy) -> None:
    result = deploy.up(quirks="fail")
    assert result.returncode == 1
    assert "vLLM died: it ended with exit code 1" in result.stderr
    assert "ValueError: the true cause" in result.stderr
    assert "Engine core initialization failed" not in result.stderr
    assert str(deploy.state_dir / str(deploy.port) / "vllm.log") in result.stderr
    assert not deploy.state_file.exists()
    wait_for(lambda: deploy.servers() == [], "the children's end", timeout=20)


def test_a_flag_that_vllm_refuses(deploy: Deploy) -> None:
    result = deploy.up("--set", "nonsense=1", quirks="usage")
    assert result.returncode == 1
    assert "unrecognized arguments: --nonsense" in result.stderr


def test_a_server_that_is_killed_while_up_waits(deploy: Deploy) -> None:
    up = deploy.start(*deploy.up_arguments(), quirks="hang,deaf-engine")
    wait_for(lambda: len(deploy.servers()) == 3, "the server's processes")
    os.kill(deploy.api_server(), signal.SIGKILL)
    _, stderr = up.communicate(timeout=60)
    assert up.returncode == 1
    assert "it was killed by SIGKILL" in stderr
    assert deploy.servers() == []
    assert not deploy.state_file.exists()


def test_a_supervisor_that_is_killed_while_up_waits(deploy: Deploy) -> None:
    up = deploy.start(*deploy.up_arguments(), quirks="hang,deaf-engine")
    wait_for(lambda: len(deploy.servers()) == 3, "the server's processes")
    os.kill(deploy.state()["pid"], signal.SIGKILL)
    _, stderr = up.communicate(timeout=60)
    assert up.returncode == 1
    assert "the supervisor ended without a word" in stderr
    assert deploy.servers() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_loading_leaves_nothing(deploy: Deploy, number: signal.Signals, code: int) -> None:
    up = deploy.start(*deploy.up_arguments("--tp", "2"), quirks="hang")
    wait_for(lambda: len(deploy.servers()) == 4, "the server's processes")
    up.send_signal(number)
    up.communicate(timeout=30)
    assert up.returncode == code
    assert deploy.servers() == []
    assert not deploy.state_file.exists()


def test_a_second_signal_does_not_wait_for_a_deaf_server(deploy: Deploy) -> None:
    up = deploy.start(*deploy.up_arguments(), quirks="hang,deaf,deaf-engine")
    wait_for(lambda: len(deploy.servers()) == 3, "the server's processes")
    up.send_signal(signal.SIGINT)
    time.sleep(0.5)
    begun = time.monotonic()
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=30)
    assert time.monotonic() - begun < 3
    assert up.returncode == 130
    assert deploy.servers() == []


def test_an_up_that_is_killed_leaves_a_server_that_the_next_one_finds(deploy: Deploy) -> None:
    up = deploy.start(*deploy.up_arguments(), quirks="slow")
    wait_for(lambda: len(deploy.servers()) == 3, "the server's processes")
    up.kill()
    up.communicate()
    assert deploy.rows()[0]["state"] == "loading"
    result = deploy.up(quirks="slow")
    assert result.returncode == 0, result.stderr
    assert "Already running" in result.stderr
    assert len(deploy.servers()) == 3


def test_down_while_up_waits(deploy: Deploy) -> None:
    up = deploy.start(*deploy.up_arguments(), quirks="hang")
    wait_for(lambda: len(deploy.servers()) == 3, "the server's processes")
    result = deploy.down()
    _, stderr = up.communicate(timeout=30)
    assert result.returncode == 0
    assert up.returncode == 1
    assert "was stopped while it was loading" in stderr
    assert deploy.servers() == []
    assert not deploy.state_file.exists()


def test_two_at_once_start_one_server(deploy: Deploy) -> None:
    both = [deploy.start(*deploy.up_arguments(), quirks="slow") for _ in range(2)]
    notes = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], notes
    assert sum("Already running" in note for note in notes) == 1
    assert len(deploy.servers()) == 3


def test_not_ready_in_time(deploy: Deploy) -> None:
    result = deploy.up("--timeout", "8", quirks="hang")
    assert result.returncode == 1
    assert "not ready in time; it came as far as: loading" in result.stderr
    assert deploy.servers() == []


def test_a_server_with_another_model_name_is_not_ready(deploy: Deploy) -> None:
    result = deploy.up("--timeout", "8", quirks="wrong-name")
    assert result.returncode == 1
    assert "/v1/models lists ['other'], not small-v4" in result.stderr


def test_a_healthy_server_that_cannot_answer(deploy: Deploy) -> None:
    result = deploy.up(quirks="no-engine")
    assert result.returncode == 1
    assert "HTTP status 500" in result.stderr
    assert "EngineCore encountered an issue" in result.stderr
    assert deploy.servers() == []


def test_a_server_that_dies_while_it_answers(deploy: Deploy) -> None:
    result = deploy.up(quirks="die-answering")
    assert result.returncode == 1
    assert "EngineCore encountered a fatal error: out of ideas" in result.stderr
    assert deploy.servers() == []
    assert not deploy.state_file.exists()


def test_the_api_key_is_used_and_never_shown(deploy: Deploy) -> None:
    deploy.env["VLLM_API_KEY"] = "sesame-1234"
    result = deploy.up(quirks="key=sesame-1234")
    assert result.returncode == 0, result.stderr
    assert '-H "Authorization: Bearer $VLLM_API_KEY"' in result.stdout
    written = [path.read_text(errors="replace") for path in deploy.state_dir.rglob("*") if path.is_file()]
    assert "sesame-1234" not in "".join([result.stdout, result.stderr, *written])
    command = pathlib.Path(f"/proc/{deploy.state()['pid']}/cmdline").read_text()
    assert "sesame-1234" not in command
    deploy.env["VLLM_API_KEY"] = "wrong"
    refused = deploy.up(quirks="key=sesame-1234")
    assert refused.returncode == 1
    assert "API key" in refused.stderr
    assert len(deploy.servers()) == 3  # it was not ours to end


def test_a_stale_pid_is_never_signalled(deploy: Deploy) -> None:
    deploy.up()
    content = deploy.state()
    deploy.down()
    with subprocess.Popen(["sleep", "60"]) as bystander:
        content["pid"] = bystander.pid
        deploy.state_file.write_text(json.dumps(content))
        assert deploy.rows()[0]["state"] == "stale"
        assert deploy.run("status").returncode == 1
        result = deploy.down()
        assert result.returncode == 0
        assert "belongs to something else now" in result.stderr
        assert bystander.poll() is None
        deploy.state_file.write_text(json.dumps(content))
        assert deploy.up().returncode == 0
        assert bystander.poll() is None
        bystander.kill()


def test_a_record_of_before_the_reboot_is_stale(deploy: Deploy) -> None:
    deploy.up()
    content = {**deploy.state(), "boot_id": "another-boot"}
    deploy.down()
    with subprocess.Popen(["sleep", "60"]) as bystander:
        content["pid"] = bystander.pid
        deploy.state_file.write_text(json.dumps(content))
        assert deploy.rows()[0]["state"] == "stale"
        assert "left alone" in deploy.down().stderr
        assert bystander.poll() is None
        bystander.kill()
    assert not deploy.state_file.exists()


@pytest.mark.parametrize("text", ["{half", "[]", '{"schema": 99}', '{"schema": 1}', "\x00\x00"])
def test_an_unreadable_state_file_is_moved_aside(deploy: Deploy, text: str) -> None:
    deploy.state_file.parent.mkdir(parents=True)
    deploy.state_file.write_text(text)
    result = deploy.run("status")
    assert result.returncode == 0
    assert f"the state file of port {deploy.port} cannot be understood" in result.stderr
    assert "Traceback" not in result.stderr
    aside = list(deploy.state_file.parent.glob("state.json.unreadable-*"))
    assert [path.read_text() for path in aside] == [text]
    assert deploy.up().returncode == 0


def test_state_is_private_and_atomic(deploy: Deploy) -> None:
    deploy.up()
    directory = deploy.state_file.parent
    assert directory.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in directory.iterdir())
    assert not list(directory.glob(".state.*"))


def test_an_unwritable_state_directory(deploy: Deploy, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    deploy.env["DSV4_STATE_DIR"] = str(tmp_path / "file" / "state")
    result = deploy.up()
    assert result.returncode == 1
    assert "cannot write" in result.stderr
    assert "DSV4_STATE_DIR" in result.stderr
    assert deploy.servers() == []


def test_foreground_follows_the_log_and_ctrl_c_stops_the_server(deploy: Deploy) -> None:
    up = deploy.start(*deploy.up_arguments("--foreground"))
    lines = collect(up)
    wait_for(lambda: deploy.state_file.exists() and deploy.state()["ready"], "the server")
    wait_for(lambda: deploy.write_log("a line for those who follow\n", lines), "the line")
    up.send_signal(signal.SIGINT)
    assert up.wait(timeout=30) == 130
    assert deploy.servers() == []
    assert not deploy.state_file.exists()


def test_foreground_ends_when_the_server_is_taken_down_elsewhere(deploy: Deploy) -> None:
    up = deploy.start(*deploy.up_arguments("--foreground"))
    wait_for(lambda: deploy.state_file.exists() and deploy.state()["ready"], "the server")
    time.sleep(0.7)
    assert deploy.down().returncode == 0
    _, stderr = up.communicate(timeout=30)
    assert up.returncode == 0, stderr


def test_foreground_reports_a_server_that_dies(deploy: Deploy) -> None:
    up = deploy.start(*deploy.up_arguments("--foreground"), quirks="deaf-engine")
    wait_for(lambda: deploy.state_file.exists() and deploy.state()["ready"], "the server")
    time.sleep(0.7)
    os.kill(deploy.api_server(), signal.SIGKILL)
    _, stderr = up.communicate(timeout=60)
    assert up.returncode == 1
    assert "vLLM died" in stderr
    assert deploy.servers() == []


def test_logs_after_the_end_and_while_following(deploy: Deploy) -> None:
    nothing = deploy.run("logs", "--port", str(deploy.port))
    assert nothing.returncode == 1
    assert "there is no log" in nothing.stderr
    deploy.up()
    follower = deploy.start("logs", "-f", "--port", str(deploy.port), "-n", "4")
    lines = collect(follower)
    wait_for(lambda: any("Starting vLLM server on" in line for line in lines), "the last lines")
    wait_for(lambda: deploy.write_log("one more line\n", lines), "the line that came after")
    deploy.down()
    assert follower.wait(timeout=20) == 0
    after = deploy.run("logs", "--port", str(deploy.port), "-n", "2")
    assert after.returncode == 0
    assert len(after.stdout.splitlines()) == 2


def test_dry_run_starts_and_writes_nothing(deploy: Deploy) -> None:
    result = deploy.up("--dry-run")
    assert result.returncode == 0
    command = result.stdout.splitlines()[-1]
    assert shlex.split(command)[2:4] == ["serve", str(deploy.model)]
    assert "VLLM_PLUGINS=rocm_patches" in result.stdout
    assert not deploy.state_dir.exists()
    assert deploy.servers() == []
    tiny = deploy.run("up", "--device", "cpu", "--dry-run")
    assert tiny.returncode == 0
    assert not pathlib.Path(deploy.env["DSV4_CACHE_DIR"]).exists()


def test_the_operators_environment_wins_and_is_named(deploy: Deploy) -> None:
    deploy.env["OMP_NUM_THREADS"] = "3"
    result = deploy.up()
    assert "OMP_NUM_THREADS=3 from your environment" in result.stderr
    environ = pathlib.Path(f"/proc/{deploy.api_server()}/environ").read_bytes().split(b"\0")
    assert b"OMP_NUM_THREADS=3" in environ
    assert b"VLLM_CPU_KVCACHE_SPACE=1" in environ
