"""Rules about what surrounds the server: the image, the container, the pod and its rollout."""

from __future__ import annotations

from dsv4_deploy.catalog import releases
from dsv4_deploy.catalog.release import split_image
from dsv4_deploy.plan.rules.base import Case, Change, Found, rule, seconds

GIB = 2**30
GPU_RESOURCE = "amd.com/gpu"
MIN_SHM_BYTES = 16 * GIB
SHM_BYTES = 32 * GIB
MIN_LIVENESS_TIMEOUT_S = 15
LOOSE_TAGS = ("latest", "nightly")
# Beside the files themselves, for the page cache of the shards that count against the limit.
MEMORY_FACTOR = 1.1
MARGIN_S = 20


@rule(
    "image-cuda",
    "refuse",
    "an image for NVIDIA on an AMD node",
    rows="W21",
    link="https://github.com/vllm-project/vllm/tree/v0.33.0",
)
def image_cuda(case: Case) -> Found | None:
    repository, tag = split_image(case.image)
    place, _, name = repository.rpartition("/")
    # vllm-openai itself and what is named after it (-cpu, -cu129, a mirror's copy), but not -rocm.
    if case.device != "rocm" or not name.startswith("vllm-openai") or "rocm" in name:
        return None
    return Found(
        f"the image {case.image} is built for {'CUDA' if name == 'vllm-openai' else 'something else than ROCm'}",
        "It holds no ROCm libraries and finds no GPU on an AMD node.",
        f"Use {place or 'vllm'}/vllm-openai-rocm:{tag or 'v' + releases().default}, by digest (@sha256:...).",
    )


@rule(
    "image-tag",
    "warn",
    "an image that may change under the same name",
    rows="W22",
    link="https://github.com/SemiAnalysisAI/InferenceX/pull/2522",
)
def image_tag(case: Case) -> Found | None:
    if "@sha256:" in case.image or not case.image:
        return None
    tag = split_image(case.image)[1] or "latest"
    if not tag.startswith(LOOSE_TAGS):
        return None
    return Found(
        f"the image {case.image} is not pinned",
        "Tomorrow the same name holds another vLLM, and old nightlies are deleted.",
        "Pin it by digest: IMAGE@sha256:...",
    )


@rule(
    "shared-memory",
    "set",
    "64 MB of /dev/shm are not enough for several ranks",
    rows="F47 W24 W25",
    link="https://github.com/Vercantez/deepseek-v4-flash-mi300x/blob/main/compose.tp2.yaml",
)
def shared_memory(case: Case) -> Found | None:
    size = case.deployment.shm_bytes
    if size is None or size >= MIN_SHM_BYTES:
        return None
    return Found(
        f"shared memory of {_size(size)} -> {_size(SHM_BYTES)}",
        "Ranks talk through shared memory; a container without --ipc=host or --shm-size has 64 MB.",
        f"Use {_size(SHM_BYTES)}, at least {_size(MIN_SHM_BYTES)}.",
        (Change("deployment", "shm_bytes", SHM_BYTES),),
    )


@rule(
    "gpu-resource",
    "refuse",
    "the pod must ask for AMD GPUs",
    rows="W35",
    link="https://github.com/ROCm/k8s-device-plugin",
)
def gpu_resource(case: Case) -> Found | None:
    value = case.deployment.gpu_resource
    if case.device != "rocm" or value is None or value.startswith("amd.com/"):
        return None
    return Found(
        f"the pod asks for {value}",
        "No AMD node has it, so the pod stays Pending.",
        f"Use {GPU_RESOURCE}.",
    )


@rule(
    "runtime-class",
    "refuse",
    "a runtime class for NVIDIA",
    rows="W36",
    link="https://github.com/vllm-project/production-stack",
)
def runtime_class(case: Case) -> Found | None:
    value = case.deployment.runtime_class
    if case.device != "rocm" or value is None or not value.startswith("nvidia"):
        return None
    return Found(
        f"runtimeClassName is {value}",
        "AMD needs no runtime class: the device plugin hands in /dev/kfd and /dev/dri.",
        "Remove it.",
    )


@rule(
    "cluster-gpus",
    "refuse",
    "more GPUs than the cluster has free",
    rows="W37",
    link="https://github.com/vllm-project/production-stack/issues/103",
)
def cluster_gpus(case: Case) -> Found | None:
    free = case.deployment.free_gpus
    each, replicas = case.world, case.deployment.replicas or 1
    if free is None or each * replicas <= free:
        return None
    return Found(
        f"{replicas} replica(s) of {each} GPUs need {each * replicas}, and {free} are free",
        "The pods that find none stay Pending.",
        f"Use {free // each} replica(s)." if free >= each else "Free GPUs, or use a smaller --tp.",
    )


@rule(
    "rollout-surge",
    "set",
    "a rollout that waits for GPUs that are not there",
    rows="F33 W38",
    link="https://github.com/vllm-project/production-stack/issues/103",
)
def rollout_surge(case: Case) -> Found | None:
    surge, free = case.deployment.max_surge, case.deployment.free_gpus
    each = case.world
    if not surge and case.deployment.max_unavailable == 0:
        return Found(
            "maxUnavailable 0 -> 1",
            "With maxSurge 0 as well no pod may be replaced, and Kubernetes refuses the Deployment.",
            "Leave it out.",
            (Change("deployment", "max_unavailable", 1),),
        )
    if not surge or (free is not None and free >= each * ((case.deployment.replicas or 1) + surge)):
        return None
    return Found(
        f"maxSurge {surge} -> 0, maxUnavailable -> 1",
        "The new pod needs GPUs that the old one holds, and the rollout never ends.",
        "Keep 0 unless spare GPUs are there (name them: free_gpus).",
        (Change("deployment", "max_surge", 0), Change("deployment", "max_unavailable", 1)),
    )


@rule(
    "weights-reachable",
    "refuse",
    "no way to the weights",
    rows="W39",
    link="https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables",
)
def weights_reachable(case: Case) -> Found | None:
    if case.deployment.egress is not False or case.deployment.cached is not False:
        return None
    return Found(
        f"{case.model} is offline and not cached",
        "The network policy keeps the pod from the model hub, and the weights are not on its volume.",
        "Allow egress, or put the weights on the volume and name their path.",
    )


@rule(
    "liveness-timeout",
    "set",
    "a probe that kills busy servers",
    rows="F56 W40",
    link="https://github.com/vllm-project/vllm/issues/38157",
)
def liveness_timeout(case: Case) -> Found | None:
    value = case.deployment.liveness_timeout_s
    if value is None or value >= MIN_LIVENESS_TIMEOUT_S:
        return None
    return Found(
        f"liveness timeout {value} s -> {MIN_LIVENESS_TIMEOUT_S} s",
        "Under load /health answers late; with the default of one second pods were restarted 25 times an hour.",
        f"Use {MIN_LIVENESS_TIMEOUT_S} s or more.",
        (Change("deployment", "liveness_timeout_s", MIN_LIVENESS_TIMEOUT_S),),
    )


@rule(
    "startup-budget",
    "refuse",
    "the pod is killed before vLLM gives up",
    rows="F13 W41",
    link="https://github.com/vllm-project/aibrix/issues/772",
)
def startup_budget(case: Case) -> Found | None:
    budget = case.deployment.startup_budget_s
    ready = seconds(case.variable("VLLM_ENGINE_READY_TIMEOUT_S") or "")
    if budget is None or ready is None or budget >= ready:
        return None
    return Found(
        f"the startup budget is {budget} s and VLLM_ENGINE_READY_TIMEOUT_S is {ready} s",
        "The kubelet kills a loading pod (its log ends in `KeyboardInterrupt: terminated`), again and again.",
        f"Use a budget of {ready} s or more.",
    )


@rule(
    "termination-grace",
    "set",
    "the pod is killed while it drains",
    rows="F48 F58 W42",
    link="https://github.com/vllm-project/vllm/issues/24885",
)
def termination_grace(case: Case) -> Found | None:
    grace = case.deployment.grace_s
    parts = grace_parts(case)
    if grace is None or grace >= sum(parts):
        return None
    return Found(
        f"terminationGracePeriodSeconds {grace} -> {sum(parts)}",
        f"preStop {parts[0]} s, --shutdown-timeout {parts[1]} s and {parts[2]} s for the GPUs have to fit.",
        "Leave it out; it is computed.",
        (Change("deployment", "grace_s", sum(parts)),),
    )


@rule(
    "memory-limit",
    "refuse",
    "the pod's memory limit is smaller than the checkpoint",
    rows="F11 W43",
    link="https://github.com/vllm-project/vllm/issues/28923",
)
def memory_limit(case: Case) -> Found | None:
    limit = case.deployment.memory_limit_bytes
    if limit is None or limit >= case.weight_bytes:
        return None
    return Found(
        f"the memory limit is {_size(limit)} and the checkpoint has {_size(case.weight_bytes)}",
        "The page cache of the shards counts against the limit: the pod is OOMKilled (exit 137) while it loads, and "
        "vLLM's log says nothing.",
        f"Use {_size(int(case.weight_bytes * MEMORY_FACTOR))} or more, or no limit.",
    )


@rule(
    "memory-limit-tight",
    "warn",
    "the pod's memory limit leaves little beside the checkpoint",
    rows="F11",
    link="https://github.com/vllm-project/vllm/issues/28923",
)
def memory_limit_tight(case: Case) -> Found | None:
    limit = case.deployment.memory_limit_bytes
    if limit is None or not case.weight_bytes <= limit < case.weight_bytes * MEMORY_FACTOR:
        return None
    return Found(
        f"the memory limit is {_size(limit)}, {limit / case.weight_bytes:.2f} times the checkpoint",
        "Loading keeps the page cache of the shards and needs memory beside it.",
        f"Use {_size(int(case.weight_bytes * MEMORY_FACTOR))} or more, or no limit.",
    )


@rule(
    "service-name",
    "set",
    "a Service named vllm puts variables into the pod",
    rows="F35 W44",
    link="https://github.com/vllm-project/vllm/issues/34199",
)
def service_name(case: Case) -> Found | None:
    name = case.deployment.name or ""
    if not (name == "vllm" or name.startswith("vllm-")) or case.deployment.service_links is False:
        return None
    return Found(
        f"enableServiceLinks -> false, because the release is named {name}",
        "Kubernetes would set VLLM_PORT=tcp://..., which vLLM refuses.",
        "Keep it false, or use another name.",
        (Change("deployment", "service_links", False),),
    )


def grace_parts(case: Case) -> tuple[int, int, int]:
    """Seconds between the decision to end a pod and its end: preStop, vLLM's shutdown, and a margin."""
    pre_stop = 15 if case.deployment.pre_stop_s is None else case.deployment.pre_stop_s
    return pre_stop, case.number("shutdown-timeout", 0), MARGIN_S


def _size(count: int) -> str:
    return f"{count / GIB:.0f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
