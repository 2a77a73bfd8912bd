"""`dsv4-deploy ... --target kubernetes` from end to end: real command, helm and HTTP; the cluster is scripted."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator

import pytest

from dsv4_deploy.k8s import api, rollout
from dsv4_deploy.k8s.release import Release
from tests.helm import chart
from tests.k8s import cluster
from tests.k8s.apiserver import ApiServer
from tests.k8s.conftest import Place, Scripted, User
from tests.serve.conftest import free_port


@pytest.fixture
def answering(place: Place) -> Iterator[None]:
    """A server like vLLM's behind the pods' port 8000, unless real pods have one."""
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
        "tiny",
    ]
    with subprocess.Popen([sys.executable, str(FAKE), *arguments], stdout=subprocess.DEVNULL) as process:
        import httpx

        def healthy() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
            except httpx.HTTPError:
                return False

        wait_for(healthy, "the stand-in server")
        place.serve(port)
        yield
        process.terminate()


def argument(deployment: dict, flag: str) -> str:
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    return str(arguments[arguments.index(flag) + 1])


@pytest.mark.usefixtures("answering")
@pytest.mark.parametrize("helm", chart.HELMS)
def test_up_status_and_down(place: Place, tmp_path: pathlib.Path, helm: str) -> None:
    user = User(tmp_path, place.kubeconfig, helm, place.namespace)
    place.play(cluster.ready)
    image = place.running_image()
    done = user.run_program("up", *image, "--tp", "2")
    assert done.returncode == 0, done.stderr
    assert f"helm: v4 in {place.namespace}, revision 1 (deployed)" in done.stderr
    assert "ready on " in done.stderr
    # The answer came from the pod, through the API server.
    assert json.loads(done.stdout.partition("\n\nCheck:")[0])["choices"]
    (deployment,) = place.deployments()
    assert argument(deployment, "--tp") == "2"

    status = user.run("status")
    assert status.returncode == 0, status.stdout + status.stderr
    assert "revision 1, deployed, Deployment/v4-dsv4, 1 of 1 ready" in status.stdout
    found = json.loads(user.run("status", "--json").stdout)
    assert found["view"]["pods"][0]["state"] == "ready"

    values = tmp_path / "mine.yaml"
    values.write_text("replicas: 2\n")
    again = user.run("up", *image, "--tp", "2", "--values", str(values))
    assert again.returncode == 0, again.stderr
    assert "revision 2" in again.stderr
    assert place.deployments()[0]["spec"]["replicas"] == 2

    for words in (f"Removed v4 from {place.namespace}", f"There is no release v4 in {place.namespace}"):
        down = user.run("down")
        assert (down.returncode, words in down.stderr) == (0, True), down.stderr
    assert not place.deployments()


def running_pod(server: ApiServer, name: str = "v4-dsv4-1") -> str:
    labels = {"app.kubernetes.io/instance": "v4", "app.kubernetes.io/component": "server"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ai", "labels": labels},
        "spec": {"nodeName": "gpu-1", "containers": []},
    }
    server.put({**pod, "status": cluster.ready(pod)[0]})
    return name


def test_logs(user: User, server: ApiServer) -> None:
    pod = running_pod(server)
    server.logs[pod] = "first\nsecond\nthird\n"
    server.logs[f"{pod}/previous"] = "before\n"
    assert user.run("logs", "--lines", "2").stdout == "second\nthird\n"
    assert user.run("logs", "--follow").stdout == "first\nsecond\nthird\n"
    assert user.run("logs", "--previous").stdout == "before\n"
    # One pod that gives none does not take away the others' lines, and its answer is no line of a log.
    server.no_logs[running_pod(server, "v4-dsv4-2")] = "container is waiting to start: ContainerCreating"
    done = user.run("logs", "--follow")
    assert done.returncode == 1
    assert done.stdout == "".join(f"{pod}  {line}\n" for line in ("first", "second", "third"))
    assert "waiting to start: ContainerCreating" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("answering")
def test_validate_goes_through_the_api_server(place: Place, tmp_path: pathlib.Path) -> None:
    user = User(tmp_path, place.kubeconfig, namespace=place.namespace)
    place.play(cluster.ready)
    assert user.run("up", *place.running_image()).returncode == 0
    done = user.run("validate", "--timeout", "5")
    # The stand-in answers completions only, and validate asks for more: what counts is that it was asked.
    assert "completion" in done.stdout.lower(), done.stderr
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


@dataclasses.dataclass(frozen=True)
class Failure:
    """A way to fail: how a scripted pod lives, values that bring the same about in a real cluster, what must be said in
    both, and what besides in the scripted one. `real` says why a real cluster cannot show it."""

    behaviour: cluster.Behaviour
    values: dict
    words: list[str]
    scripted: list[str] = dataclasses.field(default_factory=list)
    runs: bool = False
    real: str = ""


FAILURES = {
    "unschedulable": Failure(
        cluster.unschedulable(SCHEDULER),
        {"scheduling": {"nodeSelector": {"dsv4-test.example.com/no-node-has-this": "x"}}},
        ["no node takes the pod", "gpu.product chooses"],
        ["2 node(s): Insufficient amd.com/gpu", "never tolerate that"],
    ),
    "no claim": Failure(
        cluster.unschedulable('0/3 nodes are available: persistentvolumeclaim "weights" not found.'),
        {"model": {"source": {"type": "claim", "claim": "weights"}}},
        ["no node takes the pod", "model.source.claim names it"],
    ),
    "image": Failure(
        cluster.waiting("ImagePullBackOff", "Back-off pulling image", FAILED_PULL),
        {"image": {"repository": "localhost:1/dsv4-deploy", "tag": "none"}},
        ["cannot be pulled"],
        ["manifest unknown", "build it and push it"],
    ),
    "registry": Failure(
        cluster.waiting("ErrImagePull", "401 Unauthorized: authentication required"),
        {},
        ["cannot be pulled", "imagePullSecrets names it"],
        real="needs a registry that wants a password",
    ),
    "secret": Failure(
        cluster.waiting("CreateContainerConfigError", NO_SECRET),
        {"extraEnv": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "dsv4-key", "key": "k"}}}]},
        ["cannot be made", NO_SECRET, "Create that Secret"],
        runs=True,
    ),
    "volume": Failure(
        cluster.waiting("ContainerCreating", "", MOUNT),
        {"extraVolumes": [{"name": "x", "secret": {"secretName": "weights"}}]},
        ["a volume cannot be mounted", "does not exist"],
    ),
    "memory": Failure(
        cluster.ended(137, "OOMKilled"),
        {"resources": {"override": {"limits": {"memory": "128Mi"}}}},
        ["used more memory than its limit", "not of the GPU", "Raise resources.memoryPerGpuGiB"],
        runs=True,
    ),
    "probe": Failure(
        # The supervisor ends in good order when the kubelet kills it.
        cluster.ended(0, "Completed", "", UNHEALTHY, KILLED),
        {
            "probes": {"startup": {"budgetSeconds": 60, "periodSeconds": 10}},
            "resources": {"override": {"limits": {"cpu": "200m"}}},
        },
        ["because of its startup probe", "probes.startup.budgetSeconds"],
        ["statuscode: 503"],
        runs=True,
    ),
    "crash": Failure(
        cluster.ended(1, "Error", MESSAGE, restarts=3),
        {"settings": {"max-num-seqs": -1}},
        ["ended with exit code"],
        ["ended with exit code 1, 3 time(s)", "| F13: engine never became ready", "|   cause: kernels"],
        runs=True,
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_up_fails_with_the_cause(place: Place, tmp_path: pathlib.Path, name: str) -> None:
    failure = FAILURES[name]
    scripted = isinstance(place, Scripted)
    if failure.real and not scripted:
        pytest.skip(failure.real)
    user = User(tmp_path, place.kubeconfig, namespace=place.namespace)
    place.play(failure.behaviour)
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps(failure.values))
    image = place.running_image() if failure.runs else ["--device", "cpu"]
    done = user.run("up", *image, "--values", str(values), DSV4_PATIENCE=place.patience)
    assert done.returncode == 1, done.stderr
    report = done.stderr.partition("error: ")[2]
    for word in [*failure.words, *(failure.scripted if scripted else [])]:
        assert word in report, done.stderr
    assert "timed out" not in report
    # Nothing is taken away that somebody may want to look at.
    assert place.deployments()
    status = user.run("status")
    assert status.returncode == 1
    assert failure.words[0] in status.stdout


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
    done = user.run("up", "--timeout", "1")
    assert done.returncode == 1
    assert "0 of 1 pods" in done.stderr
    assert "Nothing has failed" in done.stderr
    assert "It goes on by itself" in done.stderr


def test_refusals_before_anything_is_installed(place: Place, tmp_path: pathlib.Path) -> None:
    user = User(tmp_path, place.kubeconfig, namespace=place.namespace)
    values = tmp_path / "values.yaml"

    def refused(text: str, *more: str) -> str:
        values.write_text(text)
        done = user.run("up", "--values", str(values), *more)
        assert done.returncode == 2, done.stderr
        return done.stderr

    key = "apiKey: {existingSecret: dsv4-key}\n"
    assert f"there is no Secret dsv4-key in {place.namespace}" in refused(key)
    place.secret("dsv4-key", token="x")
    assert "has no key api-key for the API key" in refused(key)
    assert "Set apiKey.key to one of them" in refused(key)
    named = "apiKey: {existingSecret: dsv4-key, key: token}\n"
    assert "Leave it empty" in refused(f"{named}scheduling: {{runtimeClassName: nvidia}}\n")
    typing_error = refused("tpyo: 1\n")
    assert "does not know these values" in typing_error
    assert "tpyo" in typing_error
    refused("", "--model", "deepseek-v4-pro", "--tp", "4")
    assert not place.deployments()


def test_nothing_secret_is_said_or_passed_on(user: User, server: ApiServer) -> None:
    cluster.Cluster(server, cluster.loading)
    secrets = {"VLLM_API_KEY": "key-of-the-user", "HF_TOKEN": "hf_of_the_user"}
    done = user.run("up", "--timeout", "1", **secrets)
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
