"""`dsv4-deploy join`: a worker becomes vLLM with the leader's command line and no API server."""

from __future__ import annotations

import json
import pathlib
import sys

from tests.serve.conftest import Deploy

ECHO = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getpid(), os.environ['VLLM_PLUGINS']]))"
GROUP = ["--set", "nnodes=2", "--set", "master-addr=10.0.0.1", "--set", "pipeline-parallel-size=2"]


def test_it_becomes_vllm_with_the_leaders_flags(deploy: Deploy) -> None:
    deploy.env["DSV4_VLLM_COMMAND"] = json.dumps([sys.executable, "-c", ECHO])
    arguments = ["--device", "cpu", "--model", str(deploy.model), "--port", str(deploy.port), *GROUP]
    process = deploy.start("join", *arguments, "--set", "node-rank=1")
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    argv, pid, plugins = json.loads(stdout.splitlines()[-1])
    # The same process: signals of a pod's life reach vLLM itself.
    assert pid == process.pid
    assert plugins == "rocm_patches"
    assert argv[:2] == ["serve", str(deploy.model)]
    assert argv[-1] == "--headless"
    for flag, value in (("--node-rank", "1"), ("--nnodes", "2"), ("--master-addr", "10.0.0.1")):
        assert argv[argv.index(flag) + 1] == value


def test_what_is_no_worker_is_refused(deploy: Deploy, tmp_path: pathlib.Path) -> None:
    arguments = ["join", "--device", "cpu", "--model", str(deploy.model)]
    alone = deploy.run(*arguments)
    assert alone.returncode == 2
    assert "--set nnodes=..., --set node-rank=..., --set master-addr=..." in alone.stderr
    leader = deploy.run(*arguments, *GROUP, "--set", "node-rank=0")
    assert leader.returncode == 2
    assert "Run `dsv4-deploy serve` there" in leader.stderr
