"""What the chart decides: what follows from the tensor-parallel size, where pods may go, how they are stopped, what
they may do; and what it refuses, with the remedy."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from dsv4_deploy import catalog
from dsv4_deploy.plan.watch import STOP_MARGIN_S, Watch, probes
from tests.helm import admission, chart, schemas

REVISION = "0123456789abcdef0123456789abcdef01234567"


def pod(values: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return chart.one(chart.template(values=values, **options), "Deployment")["spec"]["template"]["spec"]


def container(values: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return chart.server(chart.template(values=values, **options))


@pytest.mark.parametrize(
    ("tp", "shm", "memory"), [(1, 16, 164 + 16), (2, 16, 164 + 16), (4, 32, 288), (8, 32, 544)]
)
def test_the_tensor_parallel_size_drives_everything(tp: int, shm: int, memory: int) -> None:
    spec = pod({"tensorParallelSize": tp})
    server = spec["containers"][0]
    assert chart.argument(server, "--tp") == str(tp)
    for part in ("limits", "requests"):
        assert server["resources"][part]["amd.com/gpu"] == str(tp)
        assert server["resources"][part]["memory"] == f"{memory}Gi"
    assert server["resources"]["requests"]["cpu"] == f"{8000 * tp}m"
    assert "cpu" not in server["resources"]["limits"]
    volume = next(volume for volume in spec["volumes"] if volume["name"] == "shm")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{shm}Gi"}


def test_the_memory_limit_holds_the_weights_while_they_load() -> None:
    server = container({"model": {"name": "deepseek-v4-pro", "sizeGiB": 806}, "tensorParallelSize": 8})
    assert server["resources"]["limits"]["memory"] == f"{887 + 32}Gi"


def test_the_defaults_are_the_first_profile() -> None:
    """Reading values.yaml alone tells what a deployment of Flash on four MI300X gets."""
    assert chart.template() == chart.template(chart.CHART / "profiles" / "mi300x" / "flash-tp4.yaml")


def test_the_default_probes_are_the_supervisors() -> None:
    watch = Watch("", 0, 2, 10, 10, 60, 600, 90, 0, True)
    server = container()
    for name, field in (("startup", "startupProbe"), ("ready", "readinessProbe"), ("live", "livenessProbe")):
        wanted = probes(watch, 3600)[name]
        assert server[field] == {
            "httpGet": {"path": wanted.path, "port": "health"},
            "periodSeconds": wanted.period_s,
            "timeoutSeconds": wanted.timeout_s,
            "failureThreshold": wanted.failures,
        }


def test_the_grace_period_is_the_sum_of_what_stopping_takes() -> None:
    drain = {"preStopSeconds": 30, "timeoutSeconds": 900, "shutdownSeconds": 60}
    spec = pod({"drain": drain})
    assert spec["terminationGracePeriodSeconds"] == 30 + 900 + 60 + STOP_MARGIN_S
    server = spec["containers"][0]
    assert server["lifecycle"]["preStop"] == {"sleep": {"seconds": 30}}
    assert chart.argument(server, "--drain-timeout") == "900"
    assert "shutdown-timeout=60" in server["args"]
    assert "lifecycle" not in container({"drain": {"preStopSeconds": 0}})


def test_rollouts_start_nothing_on_top() -> None:
    deployment = chart.one(chart.template(), "Deployment")["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    # A rollout must not be called failed while a pod may still be loading.
    budget = container()["startupProbe"]
    assert deployment["progressDeadlineSeconds"] > budget["periodSeconds"] * budget["failureThreshold"]


@pytest.mark.parametrize(
    "card", [card for card in catalog.cards().values() if card.target], ids=lambda card: card.name
)
def test_nodes_are_chosen_by_device_id(card: catalog.Card) -> None:
    for virtual in (False, True):
        values = {"gpu": {"product": card.name.upper(), "virtualFunctions": virtual}}
        terms = pod(values)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        wanted = [*card.device_ids, *(card.vf_device_ids if virtual else ())]
        for node, fits in nodes(wanted[0]):
            assert matches(terms["nodeSelectorTerms"], node) is fits, node
        assert not matches(terms["nodeSelectorTerms"], {"amd.com/gpu.device-id": "75a0"})
        for identity in card.vf_device_ids:
            assert matches(terms["nodeSelectorTerms"], {"amd.com/gpu.device-id": identity}) is virtual


def nodes(identity: str) -> list[tuple[dict[str, str], bool]]:
    """Labels of nodes, and whether a pod may go there."""
    code, docs = "amd.com/gpu.compute-memory-partition", "amd.com/compute-memory-partition"
    return [
        ({"amd.com/gpu.device-id": identity}, True),
        ({"beta.amd.com/gpu.device-id": identity}, True),
        ({"amd.com/gpu.device-id": identity, code: "spx_nps1"}, True),
        ({"amd.com/gpu.device-id": identity, docs: "spx_nps1"}, True),
        ({"amd.com/gpu.device-id": identity, code: "cpx_nps4"}, False),
        ({"amd.com/gpu.device-id": identity, docs: "cpx_nps1"}, False),
        ({"beta.amd.com/gpu.device-id": identity, code: "spx_nps4"}, False),
        ({code: "spx_nps1"}, False),
        ({}, False),
    ]


def matches(terms: list[dict[str, Any]], labels: dict[str, str]) -> bool:
    """Kubernetes' rule: terms are alternatives, expressions of a term hold together."""

    def holds(expression: dict[str, Any]) -> bool:
        value = labels.get(expression["key"])
        wanted = expression.get("values", [])
        return {
            "In": value in wanted,
            "NotIn": value not in wanted,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }[expression["operator"]]

    return any(all(holds(expression) for expression in term["matchExpressions"]) for term in terms)


def test_conditions_of_the_operator_are_added_to_every_alternative() -> None:
    values = {"scheduling": {"nodeMatchExpressions": [{"key": "pool", "operator": "In", "values": ["a"]}]}}
    terms = pod(values)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    for node, fits in nodes("74a1"):
        assert matches(terms["nodeSelectorTerms"], node) is False
        assert matches(terms["nodeSelectorTerms"], {**node, "pool": "a"}) is fits


def test_pods_may_do_nothing_that_they_need_not() -> None:
    for path in chart.ci_files():
        if path.name == "open-values.yaml":
            continue
        for item in chart.template(path):
            spec = (
                item["spec"].get("template", {}).get("spec")
                if item["kind"] in ("Deployment", "Job")
                else None
            )
            spec = item["spec"] if item["kind"] == "Pod" else spec
            if spec is None:
                continue
            assert spec["automountServiceAccountToken"] is False
            assert spec["enableServiceLinks"] is False
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["seccompProfile"]["type"] != "Unconfined"
            assert not {"hostNetwork", "hostIPC", "hostPID", "shareProcessNamespace"} & spec.keys()
            ours = {"server", "wait-for-weights", "download", "validate"}
            for one in [*spec["containers"], *spec.get("initContainers", [])]:
                if one["name"] not in ours:
                    continue
                security = one["securityContext"]
                assert security["capabilities"] == {"drop": ["ALL"]}
                assert (security["readOnlyRootFilesystem"], security["privileged"]) == (True, False)
                assert security["allowPrivilegeEscalation"] is False
                assert "limits" in one["resources"]


def test_memory_is_locked_only_when_asked_for_or_for_rdma() -> None:
    assert container({"podSecurity": {"lockMemory": True}})["securityContext"]["capabilities"]["add"] == [
        "IPC_LOCK"
    ]
    two = chart.one(chart.template(chart.CHART / "ci" / "two-nodes-values.yaml"), "LeaderWorkerSet")
    for role in ("leaderTemplate", "workerTemplate"):
        server = two["spec"]["leaderWorkerTemplate"][role]["spec"]["containers"][0]
        assert server["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert server["resources"]["limits"]["amd.com/vnic"] == "8"


def test_two_nodes_share_the_layers() -> None:
    group = chart.one(chart.template(chart.CHART / "ci" / "two-nodes-values.yaml"), "LeaderWorkerSet")["spec"]
    leader, worker = (
        group["leaderWorkerTemplate"][role]["spec"]["containers"][0]
        for role in ("leaderTemplate", "workerTemplate")
    )
    assert group["leaderWorkerTemplate"]["size"] == 2
    for one in (leader, worker):
        assert one["resources"]["limits"]["amd.com/gpu"] == "8"
        assert one["resources"]["limits"]["memory"] == f"{64 * 8 + 32}Gi"
        assert chart.argument(one, "--tp") == "8"
        for setting in ("pipeline-parallel-size=2", "nnodes=2", "node-rank=$(LWS_WORKER_INDEX)"):
            assert setting in one["args"]
        assert "master-addr=$(LWS_LEADER_ADDRESS)" in one["args"]
    assert (leader["args"][0], worker["args"][0]) == ("serve", "join")
    # The plan must be the same on all nodes, so the rest of the command line is.
    watching = {"--health-host", "--health-port", "8081", "--drain-timeout", "90"}
    assert set(leader["args"]) - set(worker["args"]) <= watching | {"serve"}
    assert "readinessProbe" in leader
    assert not {"startupProbe", "readinessProbe", "livenessProbe", "ports"} & worker.keys()
    # The leader finishes its requests with the workers' help, so they leave after its drain.
    assert worker["lifecycle"]["preStop"]["sleep"]["seconds"] == 15 + 90


def test_writable_places_are_volumes_and_caches_never_mix() -> None:
    server = container()
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in server["volumeMounts"]}
    assert mounts == {"/models": True, "/var/cache/dsv4": False, "/dev/shm": False, "/tmp": False}
    writable = [place for place, read_only in mounts.items() if not read_only]
    for name, value in chart.variables(server).items():
        if name.endswith(("_DIR", "_ROOT", "HOME")):
            assert value.startswith(tuple(writable)), name
    keys = {
        chart.variables(container(values))["TRITON_CACHE_DIR"]
        for values in ({}, {"image": {"tag": "2"}}, {"gpu": {"product": "MI308X"}})
    }
    assert len(keys) == 3


def test_secrets_are_only_named() -> None:
    values = {
        "apiKey": {"existingSecret": "key"},
        "huggingFaceToken": {"existingSecret": "hub"},
        "model": {"source": {"type": "download"}, "download": {"revision": REVISION}},
    }
    objects = chart.template(values=values)
    assert chart.variables(chart.server(objects))["VLLM_API_KEY"] == {
        "secretKeyRef": {"name": "key", "key": "api-key"}
    }
    # The token is for the download alone; the server is offline.
    assert "HF_TOKEN" not in chart.variables(chart.server(objects))
    job = chart.one(objects, "Job")["spec"]["template"]["spec"]["containers"][0]
    assert chart.variables(job)["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert not [item for item in objects if item["kind"] == "Secret"]


def test_the_download_has_a_name_of_its_own_for_each_pod() -> None:
    def job(**download: Any) -> str:
        values = {"model": {"source": {"type": "download"}, "download": {"revision": REVISION, **download}}}
        name: str = chart.one(chart.template(values=values), "Job")["metadata"]["name"]
        return name

    assert job() == job()
    # The API lets nobody change the pod of a Job, so whatever is in it makes another Job.
    assert job() != job(workers=2)
    assert job() != job(revision="f" * 40)
    assert job() != job(repository="deepseek-ai/DeepSeek-V4-Pro")


def test_the_pods_wait_for_what_the_download_writes() -> None:
    values = {"model": {"source": {"type": "download"}, "download": {"revision": REVISION}}}
    objects = chart.template(values=values)
    place = f"/models/deepseek-ai--DeepSeek-V4-Flash/{REVISION}"
    spec = chart.one(objects, "Deployment")["spec"]["template"]["spec"]
    assert spec["initContainers"][0]["command"] == ["dsv4-deploy", "download", "--wait", place]
    assert chart.one(objects, "Job")["spec"]["template"]["spec"]["containers"][0]["command"][-1] == place
    assert chart.argument(chart.server(objects), "--model") == place
    assert chart.one(objects, "PersistentVolumeClaim")["spec"]["resources"]["requests"]["storage"] == "187Gi"


def test_air_gapped_lets_nothing_out_but_names() -> None:
    objects = chart.template(chart.CHART / "ci" / "air-gapped-values.yaml")
    egress = chart.one(objects, "NetworkPolicy")["spec"]["egress"]
    assert egress == [{"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}]
    assert chart.variables(chart.server(objects))["HF_HUB_OFFLINE"] == "1"


def test_the_policy_denies_what_is_not_named() -> None:
    nobody = {"networkPolicy": {"ingressFrom": [], "metricsFrom": []}}
    policy = chart.one(chart.template(values={**nobody, "test": {"enabled": False}}), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert not policy["ingress"]
    objects = chart.template(values=nobody)
    (asking,) = chart.one(objects, "NetworkPolicy")["spec"]["ingress"]
    test_pod = chart.one(objects, "Pod")["metadata"]["labels"]
    assert asking["from"][0]["podSelector"]["matchLabels"].items() <= test_pod.items()
    assert asking["ports"] == [{"port": "http", "protocol": "TCP"}]
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "server"
    mirror = chart.template(chart.CHART / "ci" / "download-mirror-values.yaml")
    egress = chart.one(mirror, "NetworkPolicy", "v4-dsv4-download")["spec"]["egress"]
    assert egress[1] == {"ports": [{"port": 8090, "protocol": "TCP"}]}


def test_selectors_do_not_depend_on_what_may_change() -> None:
    def selector(values: dict[str, Any]) -> Any:
        return chart.one(chart.template(values=values), "Deployment")["spec"]["selector"]

    changed = {
        "image": {"tag": "9"},
        "podLabels": {"a": "b"},
        "nameOverride": "other",
        "fullnameOverride": "v4-dsv4",
        "commonLabels": {"app.kubernetes.io/name": "mine"},
    }
    assert selector({}) == selector(changed)
    template = chart.one(chart.template(values=changed), "Deployment")["spec"]["template"]
    assert selector({})["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_numbers_reach_vllm_as_they_were_written() -> None:
    server = chart.server(chart.template(chart.CHART / "ci" / "extras-values.yaml"))
    assert "kv-cache-memory-bytes=26000000000" in server["args"]
    assert "max-num-seqs=64" in server["args"]
    assert "enable-prefix-caching=true" in server["args"]
    assert chart.argument(server, "--max-model-len") == "131072"


def test_variables_of_the_operator_win_once() -> None:
    server = chart.server(chart.template(chart.CHART / "ci" / "extras-values.yaml"))
    names = [item["name"] for item in server["env"]]
    assert len(names) == len(set(names))
    assert chart.variables(server)["VLLM_CACHE_ROOT"] == "/scratch/vllm"
    assert chart.variables(container({"env": {"HOME": "/var/cache/dsv4/me"}}))["HOME"] == "/var/cache/dsv4/me"


def test_autoscaling_leaves_the_number_of_pods_alone() -> None:
    assert chart.one(chart.template(), "Deployment")["spec"]["replicas"] == 1
    assert (
        "replicas"
        not in chart.one(chart.template(values={"autoscaling": {"mode": "hpa"}}), "Deployment")["spec"]
    )


@pytest.mark.parametrize("kind", ["devicePlugin", "dra"])
def test_copies_of_data_parallelism_get_their_gpus(kind: str) -> None:
    values = {"settings": {"data-parallel-size": 2}, "gpu": {"allocation": kind}}
    objects = chart.template(values=values)
    server = chart.server(objects)
    assert "data-parallel-size=2" in server["args"]
    assert chart.argument(server, "--tp") == "4"
    assert server["resources"]["limits"]["memory"] == f"{64 * 8 + 32}Gi"
    if kind == "dra":
        requests = chart.one(objects, "ResourceClaimTemplate")["spec"]["spec"]["devices"]["requests"]
        assert requests[0]["exactly"]["count"] == 8
    else:
        assert server["resources"]["limits"]["amd.com/gpu"] == "8"


def test_devices_of_dra_are_chosen_by_the_claim_alone() -> None:
    """Where AMD's DRA driver runs, the labeller of the device plugin need not."""
    objects = chart.template(values={"gpu": {"allocation": "dra"}})
    assert "affinity" not in chart.one(objects, "Deployment")["spec"]["template"]["spec"]
    requests = chart.one(objects, "ResourceClaimTemplate")["spec"]["spec"]["devices"]["requests"]
    words = " ".join(one["cel"]["expression"] for one in requests[0]["exactly"]["selectors"])
    assert '.type == "amdgpu"' in words
    assert '"0x74a1"' in words


def test_limits_of_the_operator_bring_the_requests_along() -> None:
    def resources(**override: dict[str, str]) -> Any:
        return container({"resources": {"override": override}})["resources"]

    lower = resources(limits={"memory": "100Gi", "cpu": "96"})
    assert (lower["limits"]["memory"], lower["requests"]["memory"]) == ("100Gi", "100Gi")
    assert (lower["limits"]["cpu"], lower["requests"]["cpu"]) == ("96", "32000m")
    assert resources(limits={"memory": "1Ti"})["requests"]["memory"] == "288Gi"
    assert resources(requests={"x.y/nic": "2"})["limits"]["x.y/nic"] == "2"


LONG = "a" * 52


@pytest.mark.parametrize("release", [LONG + "b", "4flash", "v4.flash.ai", "a." * 26 + "b", "0"])
def test_every_name_that_helm_takes_gives_names_that_kubernetes_takes(release: str) -> None:
    values = {
        "model": {"source": {"type": "download"}, "download": {"revision": REVISION}},
        "cache": {"type": "claim"},
        "monitoring": {"dashboard": {"enabled": True}},
    }
    for more in ({}, {"multiNode": {"nodes": 2}}, {"nameOverride": "0" * 40}):
        admission.check(chart.template(values={**values, **more}, release=release))


def test_releases_of_a_namespace_never_share_names_or_pods() -> None:
    def names(release: str) -> set[tuple[str, str]]:
        return {(item["kind"], item["metadata"]["name"]) for item in chart.template(release=release)}

    assert not names(LONG + "b") & names(LONG + "c")
    assert not names("a.b") & names("a-b")
    scaling = {"autoscaling": {"mode": "keda", "keda": {"serverAddress": "http://p"}}}

    def pattern(**more: Any) -> str:
        objects = chart.template(values={**scaling, **more}, release="dsv4")
        query: str = chart.one(objects, "ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
        return query.partition('pod=~"')[2].partition('"')[0]

    one, several = pattern(), pattern(multiNode={"nodes": 2})
    # Names as the controllers make them; the second is a long one, whose last dash is cut off.
    assert re.fullmatch(one, "dsv4-6d4b9c7f8d-x2x5z")
    assert re.fullmatch(one.replace("dsv4", LONG[:48]), f"{LONG[:48]}-6d4b9c7f8x2x5z")
    assert re.fullmatch(several, "dsv4-0")
    assert re.fullmatch(several, "dsv4-11-1")
    for other in ("dsv4-pro-6d4b9c7f8d-x2x5z", "dsv4-pro-0-1", "dsv4-fetch-0a1b2c-x2x5z"):
        assert not re.fullmatch(one, other)
        assert not re.fullmatch(several, other)


@pytest.mark.parametrize("name", ["0", "true", "null", "1e3", "0x1f", "1.5"])
def test_names_that_yaml_would_read_as_something_else(name: str) -> None:
    """Kubernetes takes all of these as names; YAML takes them as numbers and the like unless they are quoted."""
    values = {
        "apiKey": {"existingSecret": name, "key": name},
        "cache": {"type": "claim", "storageClassName": name},
        "model": {"source": {"claim": name}},
        "serviceAccount": {"create": False, "name": name},
        "scheduling": {"priorityClassName": name, "schedulerName": name, "runtimeClassName": name},
        "ingress": {"enabled": True, "className": name, "tlsSecret": name},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": name, "namespace": name.replace(".", "-")}]},
        "inferencePool": {"enabled": True, "endpointPicker": name},
        "autoscaling": {"mode": "keda", "keda": {"serverAddress": "http://p", "authentication": name}},
    }
    for item in chart.template(values=values):
        schemas.check(item, chart.DEFAULT_KUBE)


def test_notes_say_how_to_ask() -> None:
    done = chart.run(chart.NEWEST, "install", "v4", str(chart.CHART), "--dry-run=client", "--namespace", "ai")
    notes = done.stdout.partition("NOTES:")[2]
    assert "kubectl -n ai port-forward svc/v4-dsv4 8000:8000" in notes
    assert "curl -s http://127.0.0.1:8000/v1/completions" in notes
    assert '"model": "deepseek-v4-flash"' in notes
    assert "no AMD hardware has confirmed" in notes


@pytest.mark.parametrize(
    ("name", "said"), [("deepseek-ai/DeepSeek-V4-Flash", None), ("'; touch /tmp/x; '", "NAME")]
)
def test_notes_ask_for_the_served_name(name: str, said: str | None, tmp_path: Any) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps({"settings": {"served-model-name": name}}))
    arguments = ["install", "v4", str(chart.CHART), "--dry-run=client", "--values", str(values)]
    notes = chart.run(chart.NEWEST, *arguments).stdout.partition("NOTES:")[2]
    assert f'"model": "{said or name}"' in notes


SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"model": {"source": {"type": "download"}}}, "Set model.download.revision to a commit"),
    (
        {"model": {"source": {"type": "hub"}, "download": {"repository": ""}}},
        "Set it to the model's repository",
    ),
    ({"model": {"source": {"claim": ""}}}, "Set model.source.claim"),
    ({"model": {"source": {"type": "hostPath"}}}, "Set model.source.hostPath"),
    ({"model": {"source": {"type": "image"}}}, "Set model.source.image.reference"),
    ({"model": {"source": {"type": "tiny"}}}, "Set gpu.product to none"),
    ({"airGapped": True, "model": {"source": {"type": "hub"}}}, "contradict each other"),
    (
        {"airGapped": True, "model": {"source": {"type": "hub"}, "download": {"endpoint": "http://hub"}}},
        "Use download with your mirror",
    ),
    ({"gpu": {"product": "none"}, "model": {"source": {"type": "tiny"}}}, "Set model.name to tiny"),
    ({"gpu": {"product": "none"}, "tensorParallelSize": 8}, "1, 2 or 4"),
    (
        {"gpu": {"product": "none"}, "multiNode": {"nodes": 2}, "tensorParallelSize": 2},
        "Set multiNode.nodes to 1",
    ),
    ({"model": {"name": "deepseek-v4-pro", "sizeGiB": 806}}, "202 GiB each, and MI300X has 192 GiB"),
    ({"settings": {"pipeline-parallel-size": 2}}, "Set multiNode.nodes"),
    ({"ports": {"health": 8000}}, "Give them different numbers"),
    ({"probes": {"startup": {"budgetSeconds": 60, "periodSeconds": 90}}}, "Raise it"),
    ({"cache": {"type": "hostPath"}}, "Set cache.hostPath"),
    ({"cache": {"mountPath": "/models/cache"}}, "Choose another"),
    ({"podSecurity": {"seccompProfile": "Localhost"}}, "podSecurity.seccompLocalhostProfile"),
    (
        {
            "model": {
                "source": {"type": "download"},
                "download": {"revision": REVISION, "persistence": {"accessModes": ["ReadWriteOncePod"]}},
            }
        },
        "Use ReadWriteMany",
    ),
    ({"scheduling": {"tolerations": [{"key": "amd-gpu-unhealthy", "operator": "Exists"}]}}, "Take it out"),
    ({"scheduling": {"tolerations": [{"key": "amd-dcm", "value": "up"}]}}, "Take it out"),
    ({"scheduling": {"tolerations": [{"operator": "Exists"}]}}, "Name the key"),
    ({"scheduling": {"runtimeClassName": "nvidia"}}, "Leave it empty"),
    ({"env": {"HIP_VISIBLE_DEVICES": "0"}}, "Take it out of env"),
    ({"extraEnv": [{"name": "ROCR_VISIBLE_DEVICES", "value": "0"}]}, "Take it out of env"),
    ({"env": {"HF_TOKEN": "hf_x"}}, "huggingFaceToken.existingSecret"),
    ({"extraEnv": [{"name": "VLLM_API_KEY", "value": "x"}]}, "Use valueFrom.secretKeyRef"),
    ({"settings": {"api-key": "x"}}, "Set apiKey.existingSecret"),
    ({"settings": {"shutdown-timeout": 9}}, "Set drain.shutdownSeconds"),
    ({"autoscaling": {"mode": "hpa", "minReplicas": 5}}, "greater than"),
    ({"autoscaling": {"mode": "keda"}}, "Set autoscaling.keda.serverAddress"),
    ({"inferencePool": {"enabled": True}}, "Set inferencePool.endpointPicker"),
    ({"httpRoute": {"enabled": True}}, "Set httpRoute.parentRefs"),
    (
        {"cache": {"type": "claim", "accessModes": ["ReadWriteOncePod"]}, "replicas": 3},
        "only one pod use the claim, and there may be 3",
    ),
    ({"extraVolumes": [{"name": "shm"}]}, "Choose another name"),
    ({"extraVolumeMounts": [{"name": "no", "mountPath": "/x"}]}, "Add it to extraVolumes"),
    (
        {
            "extraVolumes": [{"name": "a", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "a", "mountPath": "/tmp"}],
        },
        "Choose another mountPath",
    ),
    ({"extraContainers": [{"name": "server"}]}, "second container called server"),
    (
        {"extraContainers": [{"name": "a"}], "extraInitContainers": [{"name": "a"}]},
        "second container called a",
    ),
    ({"modelMountPath": "/tmp"}, "modelMountPath is /tmp"),
    ({"cache": {"mountPath": "/dev/shm"}}, "Choose another directory"),
    ({"settings": {"tensor-parallel-size": 8}}, "Set tensorParallelSize"),
    ({"settings": {"port": 9}}, "Set ports.http"),
    ({"extraArgs": ["--tp=8"]}, "Set tensorParallelSize"),
    ({"extraArgs": ["--drain-timeout", "900"]}, "Set drain.timeoutSeconds"),
    ({"extraArgs": ["--set", "api_key=x"]}, "Set apiKey.existingSecret"),
    ({"extraArgs": ["--set=data-parallel-size=2"]}, "Set settings.data-parallel-size"),
    ({"settings": {"data-parallel-size": 3}}, "Use 1, 2, 4 or 8"),
    ({"settings": {"data-parallel-size": 4}}, "more than the 8 GPUs of a node"),
    (
        {"settings": {"data-parallel-size": 2}, "multiNode": {"nodes": 2}},
        "data-parallel-size and multiNode.nodes do not go together",
    ),
    ({"resources": {"override": {"limits": {"amd.com/gpu": "8"}}}}, "Set tensorParallelSize for GPUs"),
    ({"resources": {"override": {"requests": {"memory": "900Gi"}}}}, "Raise the limit, or lower the request"),
    (
        {"resources": {"override": {"requests": {"x.y/z": "1"}, "limits": {"x.y/z": "2"}}}},
        "wants them alike",
    ),
    (
        {"model": {"download": {"resources": {"limits": {"memory": "4Gi"}}}}},
        "model.download.resources asks for 8Gi of memory, more than the limit of 4Gi",
    ),
    ({"extraEnv": [{"name": "A"}, {"name": "A"}]}, "extraEnv has A twice"),
    ({"extraEnv": [{"name": "A", "value": "x", "valueFrom": {"fieldRef": {}}}]}, "a value and a valueFrom"),
    (
        {"apiKey": {"existingSecret": "k"}, "extraEnv": [{"name": "VLLM_API_KEY", "valueFrom": {}}]},
        "VLLM_API_KEY comes from apiKey.existingSecret and from extraEnv",
    ),
    ({"scheduling": {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}}, "or use Equal"),
    ({"scheduling": {"tolerations": [{"key": "a", "tolerationSeconds": 5}]}}, "the effect NoExecute"),
    ({"scheduling": {"nodeMatchExpressions": [{"key": "a", "operator": "In"}]}}, "List them"),
    (
        {"scheduling": {"nodeMatchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]}},
        "takes no values",
    ),
    (
        {"scheduling": {"nodeMatchExpressions": [{"key": "a", "operator": "Gt", "values": ["b"]}]}},
        "one whole number",
    ),
    ({"scheduling": {"topologySpreadConstraints": [SPREAD, SPREAD]}}, "has zone ScheduleAnyway twice"),
    (
        {"scheduling": {"topologySpreadConstraints": [{**SPREAD, "minDomains": 2}]}},
        "needs whenUnsatisfiable DoNotSchedule",
    ),
    ({"networkPolicy": None}, "networkPolicy has no value: it was set to null"),
    ({"drain": {"timeoutSeconds": None}}, "drain.timeoutSeconds has no value"),
    ({"image": None}, "image has no value"),
    ({"probes": {"startup": None}}, "upgrade with --reset-then-reuse-values"),
    ({"gpu": {"resourceName": "amd.com/cpx_nps4"}}, "is a partition of a GPU"),
    ({"multiNode": {"rdma": {"resourceName": "amd.com/gpu"}}}, "Name the network's resource"),
    ({"multiNode": {"nodes": 2, "rendezvousPort": 8081}}, "Give it a number of its own"),
    ({"monitoring": {"prometheusRule": {"disabled": ["DSV4GpuHot"]}}}, "Use one of DSV4AdmissionRejected"),
]


@pytest.mark.parametrize(("values", "remedy"), REFUSALS, ids=[remedy for _, remedy in REFUSALS])
def test_what_cannot_work_is_refused_with_the_remedy(values: dict[str, Any], remedy: str) -> None:
    with pytest.raises(chart.RefusedError) as refusal:
        chart.template(values=values)
    assert "dsv4: " in str(refusal.value)
    assert remedy in " ".join(str(refusal.value).split())


def test_every_refusal_of_the_chart_is_tested() -> None:
    texts = [path.read_text() for path in (chart.CHART / "templates").glob("_validate*.tpl")]
    written = sum(len(re.findall(r'include "dsv4\.refuse"', text)) for text in texts)
    # Two more concern the release of Kubernetes: test_valid.py.
    assert len(REFUSALS) + 2 >= written


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"modle": {}}, "modle"),
        ({"model": {"source": {"tpye": "claim"}}}, "tpye"),
        ({"tensorParallelSize": 16}, "tensorParallelSize"),
        ({"tensorParallelSize": "4"}, "tensorParallelSize"),
        ({"image": {"digest": "sha256:1"}}, "digest"),
        ({"model": {"download": {"revision": "main"}}}, "revision"),
        ({"huggingFaceToken": {"existingSecret": "hf_ABC"}}, "existingSecret"),
        ({"cache": {"mountPath": "relative"}}, "mountPath"),
        (
            {"monitoring": {"prometheusRule": {"thresholds": {"interTokenSeconds": 0.25}}}},
            "interTokenSeconds",
        ),
        ({"gpu": {"product": "H100"}}, "product"),
        ({"rollout": {"maxUnavailable": "0%"}}, "maxUnavailable"),
        ({"model": {"download": {"endpoint": "http://hub:99999"}}}, "endpoint"),
        ({"model": {"download": {"endpoint": "http://me:secret@hub"}}}, "endpoint"),
        ({"podSecurity": {"seccompLocalhostProfile": "a/../b"}}, "seccompLocalhostProfile"),
        ({"monitoring": {"prometheusRule": {"alertLabels": {"a.b/c": "d"}}}}, "a.b/c"),
    ],
    ids=json.dumps,
)
def test_the_schema_refuses_typing_errors(values: dict[str, Any], words: str) -> None:
    for helm in chart.HELMS:
        with pytest.raises(chart.RefusedError, match=words):
            chart.template(values=values, helm=helm)
