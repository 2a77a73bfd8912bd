"""`dsv4-deploy ... --target kubernetes` from end to end: real command, helm and HTTP; the cluster is scripted."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest

from dsv4_deploy.k8s import api, rollout
from dsv4_deploy.k8s.release import Release
from tests.helm import chart
from tests.k8s import cluster
from tests.k8s.apiserver import ApiServer, secret
from tests.k8s.conftest import User
from tests.serve.conftest import free_port


@pytest.fixture
def answering(server: ApiServer) -> Iterator[int]:
    """A server like vLLM's behind the pods' port 8000."""
    import subprocess
    import sys

    from tests.serve.conftest import FAKE, wait_for

    port = free_port()
    arguments = [
        "serve",
        "tiny",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        "deepseek-v4-flash",
    ]
    with subprocess.Popen([sys.executable, str(FAKE), *arguments], stdout=subprocess.DEVNULL) as process:
        import httpx

        def healthy() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
            except httpx.HTTPError:
                return False

        wait_for(healthy, "the stand-in server")
        server.forward_to[8000] = port
        yield port
        process.terminate()


@pytest.mark.parametrize("helm", chart.HELMS)
def test_up_status_logs_and_down(
    server: ApiServer, tmp_path: pathlib.Path, answering: int, helm: str
) -> None:
    user = User(tmp_path, server, helm)
    cluster.Cluster(server, cluster.ready)
    done = user.run("up", "--tp", "8")
    assert done.returncode == 0, done.stderr
    assert "helm: v4 in ai, revision 1 (deployed)" in done.stderr
    assert "ready on gpu-1" in done.stderr
    # The answer came from the pod, through the API server.
    assert json.loads(done.stdout.partition("\n\nCheck:")[0])["choices"]
    deployment = server.get("deployments", "v4-dsv4")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[arguments.index("--tp") + 1] == "8"

    status = user.run("status")
    assert status.returncode == 0, status.stdout + status.stderr
    assert "v4 in ai: revision 1, deployed, Deployment/v4-dsv4, 1 of 1 ready" in status.stdout
    found = json.loads(user.run("status", "--json").stdout)
    assert found["view"]["pods"][0]["state"] == "ready"

    pod = found["view"]["pods"][0]["name"]
    server.logs[pod] = "first\nsecond\nthird\n"
    server.logs[f"{pod}/previous"] = "before\n"
    assert user.run("logs", "--lines", "2").stdout == "second\nthird\n"
    assert user.run("logs", "--follow").stdout == "first\nsecond\nthird\n"
    assert user.run("logs", "--previous").stdout == "before\n"

    values = tmp_path / "mine.yaml"
    values.write_text("replicas: 2\n")
    again = user.run("up", "--tp", "8", "--values", str(values))
    assert again.returncode == 0, again.stderr
    assert "revision 2" in again.stderr
    assert len(server.all("pods")) == 2

    for words in ("Removed v4 from ai", "There is no release v4 in ai"):
        down = user.run("down")
        assert (down.returncode, words in down.stderr) == (0, True), down.stderr
    assert not server.all("deployments")


def test_validate_goes_through_the_api_server(user: User, server: ApiServer, answering: int) -> None:
    cluster.Cluster(server, cluster.ready)
    assert user.run("up").returncode == 0
    done = user.run("validate", "--timeout", "5")
    # The stand-in answers completions only, and validate asks for more: what counts is that it was asked.
    assert "completion" in done.stdout.lower(), done.stderr
    assert any(path.endswith("/portforward") for _, path in server.requests)
    nothing = user.run("validate", "--port", "9")
    assert (nothing.returncode, "means nothing with --target kubernetes" in nothing.stderr) == (2, True)


SCHEDULER = (
    "0/5 nodes are available: 1 node(s) had untolerated taint {amd-gpu-unhealthy: true}, 2 Insufficient amd.com/gpu, "
    "2 node(s) didn't match Pod's node affinity/selector. preemption: 0/5 nodes are available: 5 No victims found."
)
MESSAGE = (
    "F13: engine never became ready\n  line 212: TimeoutError\n  cause: kernels were compiled for too long\n"
)
KILLED = {"reason": "Killing", "message": "Container server failed startup probe, will be restarted"}
UNHEALTHY = {"reason": "Unhealthy", "message": "Startup probe failed: HTTP probe failed with statuscode: 503"}
FAILED_PULL = {
    "reason": "Failed",
    "message": 'Failed to pull image "registry/dsv4-deploy:1": not found: manifest unknown',
}
MOUNT = {
    "reason": "FailedMount",
    "message": 'MountVolume.SetUp failed: persistentvolumeclaim "weights" not found',
}
NO_SECRET = 'secret "dsv4-key" not found'

FAILURES = {
    "unschedulable": (
        cluster.unschedulable(SCHEDULER),
        [
            "no node takes the pod",
            "2 node(s): Insufficient amd.com/gpu",
            "never tolerate that",
            "gpu.product chooses",
        ],
    ),
    "no claim": (
        cluster.unschedulable('0/3 nodes are available: persistentvolumeclaim "weights" not found.'),
        ["no node takes the pod", "model.source.claim names it"],
    ),
    "image": (
        cluster.waiting("ImagePullBackOff", "Back-off pulling image", FAILED_PULL),
        ["cannot be pulled", "manifest unknown", "build it and push it"],
    ),
    "registry": (
        cluster.waiting("ErrImagePull", "401 Unauthorized: authentication required"),
        ["cannot be pulled", "imagePullSecrets names it"],
    ),
    "secret": (
        cluster.waiting("CreateContainerConfigError", NO_SECRET),
        ["cannot be made", NO_SECRET, "Create that Secret"],
    ),
    "volume": (
        cluster.waiting("ContainerCreating", "", MOUNT),
        ["a volume cannot be mounted", "does not exist"],
    ),
    "memory": (
        cluster.ended(137, "OOMKilled"),
        ["used more memory than its limit", "not of the GPU", "Raise resources.memoryPerGpuGiB"],
    ),
    "probe": (
        cluster.ended(137, "Error", "", UNHEALTHY, KILLED),
        ["because of its startup probe", "probes.startup.budgetSeconds", "statuscode: 503"],
    ),
    "crash": (
        cluster.ended(1, "Error", MESSAGE, restarts=3),
        ["ended with exit code 1, 3 time(s)", "| F13: engine never became ready", "|   cause: kernels"],
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_up_fails_with_the_cause(user: User, server: ApiServer, name: str) -> None:
    behaviour, words = FAILURES[name]
    cluster.Cluster(server, behaviour)
    done = user.run("up", DSV4_PATIENCE="0")
    assert done.returncode == 1, done.stderr
    report = done.stderr.partition("error: ")[2]
    for word in words:
        assert word in report, done.stderr
    assert "timed out" not in report
    # Nothing is taken away that somebody may want to look at.
    assert server.all("deployments")
    status = user.run("status")
    assert status.returncode == 1
    assert words[0] in status.stdout


def test_a_download_that_fails(user: User, server: ApiServer, tmp_path: pathlib.Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        "model: {source: {type: download}, download: {revision: 0123456789abcdef0123456789abcdef01234567}}\n"
    )

    def fail(verb: str, item: dict) -> None:
        if item.get("kind") != "Job" or "status" in item:
            return
        condition = {
            "type": "Failed",
            "status": "True",
            "reason": "BackoffLimitExceeded",
            "message": "10 attempts",
        }
        labels = item["spec"]["template"]["metadata"]["labels"]
        ended = {"terminated": {"exitCode": 1, "message": "error: the hub does not give it\n  fix: HF_TOKEN"}}
        server.put({**item, "status": {"failed": 11, "conditions": [condition]}})
        pod = {
            "kind": "Pod",
            "apiVersion": "v1",
            "metadata": {"name": "fetch-1", "namespace": "ai", "labels": labels},
        }
        status = {"phase": "Failed", "containerStatuses": [{"name": "download", "state": ended}]}
        server.put({**pod, "spec": {}, "status": status})

    server.on_change.append(fail)
    cluster.Cluster(server, cluster.loading)
    done = user.run("up", "--values", str(values))
    assert done.returncode == 1
    assert "the weights could not be fetched" in done.stderr
    assert "the hub does not give it" in done.stderr


def test_what_passes_by_itself_is_no_failure(
    server: ApiServer, user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that finds a node and gets ready after a while, as with an autoscaler."""
    monkeypatch.setenv("KUBECONFIG", user.env["KUBECONFIG"])
    cluster.Cluster(server, cluster.unschedulable(SCHEDULER))
    assert user.run("up", DSV4_PATIENCE="0").returncode == 1
    looks = 0
    said: list[str] = []

    def say(text: str) -> None:
        nonlocal looks
        looks += 1
        said.append(text)
        if looks == 1:
            pod = server.all("pods")[0]
            pod["spec"]["nodeName"] = "gpu-2"
            server.put({**pod, "status": cluster.ready(pod)[0]})
            deployment = server.get("deployments", "v4-dsv4")
            server.put({**deployment, "status": {**deployment["status"], "readyReplicas": 1}})

    view = rollout.wait(api.connect(), Release("v4", "ai"), 60, say, poll_s=0.01)
    assert view.complete
    assert "no node takes the pod" in said[0]
    assert "ready on gpu-2" in said[-1]


def test_a_pod_that_only_loads_is_told_and_not_blamed(server: ApiServer, user: User) -> None:
    cluster.Cluster(server, cluster.loading)
    done = user.run("up", "--timeout", "3")
    assert done.returncode == 1
    assert "0 of 1 pods" in done.stderr
    assert "Nothing has failed" in done.stderr
    assert "It goes on by itself" in done.stderr


def test_refusals_before_anything_is_installed(user: User, server: ApiServer, tmp_path: pathlib.Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("apiKey: {existingSecret: dsv4-key}\n")
    missing = user.run("up", "--values", str(values))
    assert missing.returncode == 2
    assert "there is no Secret dsv4-key in ai" in missing.stderr
    server.put(secret("dsv4-key", token="x"))
    values.write_text("apiKey: {existingSecret: dsv4-key}\nscheduling: {runtimeClassName: nvidia}\n")
    refused = user.run("up", "--values", str(values))
    assert refused.returncode == 2
    assert "Leave it empty" in refused.stderr
    values.write_text("tpyo: 1\n")
    typing_error = user.run("up", "--values", str(values))
    assert typing_error.returncode == 2
    assert "does not know these values" in typing_error.stderr
    assert "tpyo" in typing_error.stderr
    too_large = user.run("up", "--model", "deepseek-v4-pro", "--tp", "4")
    assert too_large.returncode == 2
    assert not server.all("deployments")


def test_nothing_secret_is_said_or_passed_on(user: User, server: ApiServer) -> None:
    cluster.Cluster(server, cluster.loading)
    secrets = {"VLLM_API_KEY": "key-of-the-user", "HF_TOKEN": "hf_of_the_user"}
    done = user.run("up", "--timeout", "2", **secrets)
    stored = json.dumps(server.all("deployments"))
    for value in secrets.values():
        assert value not in done.stdout + done.stderr + stored


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--port", "9000"], "means nothing with --target kubernetes"),
        (["up", "--stall-timeout", "9"], "means nothing with --target kubernetes"),
        (["status", "--release", "Not_A_Name"], "is no name that Kubernetes takes"),
        (["up", "--context", "nowhere"], "there is no context 'nowhere'"),
        (["up", "--gpu", "h100"], "no GPU called 'h100'"),
    ],
)
def test_wrong_usage(user: User, arguments: list[str], words: str) -> None:
    done = user.run(*arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr


def test_options_of_the_cluster_need_the_target(user: User) -> None:
    import subprocess
    import sys

    for arguments in (["status", "--namespace", "ai"], ["up", "--values", __file__], ["logs", "--previous"]):
        done = subprocess.run(
            [sys.executable, "-m", "dsv4_deploy", *arguments], env=user.env, capture_output=True, text=True
        )
        assert (done.returncode, "needs --target kubernetes" in done.stderr) == (2, True), done.stderr


def test_a_cluster_that_does_not_answer_or_know_you(
    user: User, server: ApiServer, tmp_path: pathlib.Path
) -> None:
    stranger = tmp_path / "stranger"
    stranger.write_text(server.kubeconfig().replace("test-token-of-the-user", "old-token"))
    done = user.run("logs", KUBECONFIG=str(stranger))
    assert (done.returncode, "does not know who you are" in done.stderr) == (1, True), done.stderr
    assert "old-token" not in done.stderr
    assert user.run("logs").returncode == 1
    server.forbidden = {("list", "pods")}
    forbidden = user.run("logs")
    assert "you are not allowed" in forbidden.stderr
    nobody = tmp_path / "nobody"
    nobody.write_text(server.kubeconfig().replace(str(server.port), str(free_port())))
    silent = user.run("logs", KUBECONFIG=str(nobody))
    assert (silent.returncode, "does not answer" in silent.stderr) == (1, True), silent.stderr
    none = user.run("logs", KUBECONFIG=str(tmp_path / "none"), HOME=str(tmp_path))
    assert "there is no cluster to talk to" in none.stderr
