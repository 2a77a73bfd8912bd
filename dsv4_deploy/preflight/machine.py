"""Checks of memory, limits and kernel settings of the host or the container. In: a Case. Out: findings."""

# ruff: noqa: S108  (/dev/shm is what is checked; nothing is written there)
from __future__ import annotations

from collections.abc import Iterator

from dsv4_deploy.preflight.case import Case
from dsv4_deploy.preflight.finding import Finding, fail, ok, warn

GIB = 2**30

SHM_WANTED = 32 * GIB
SHM_LEAST = 16 * GIB
OPEN_FILES_WANTED = 65536
# vLLM maps the shards and the page cache counts against a container's limit, so it wants a little more than
# the checkpoint: https://github.com/vllm-project/vllm/issues/28923
RAM_PER_WEIGHT = 1.1
# V4.1 keeps its Engram tables in pinned host memory unless told otherwise:
# https://github.com/SemiAnalysisAI/InferenceX/pull/3246
ENGRAM_BYTES = 183 * GIB
# The no-GPU mode, measured here with the tiny model: one rank 2.7 GB, four 6.7 GB (docs/architecture.md).
CPU_BASE_BYTES = int(1.4e9)
CPU_RANK_BYTES = int(1.33e9)


def shared_memory(case: Case) -> Iterator[Finding]:
    """/dev/shm, through which the ranks talk to each other and to the API server."""
    if case.device == "cpu":
        return
    size, free = case.host.memory.shm, case.host.memory.shm_free
    how = {
        "docker": "Start the container with --shm-size 32g (or --ipc=host).",
        "podman": "Start the container with --shm-size 32g (or --ipc=host).",
        "kubernetes": "Mount an emptyDir with medium: Memory and sizeLimit: 32Gi at /dev/shm.",
    }.get(case.host.container or "", "mount -o remount,size=32G /dev/shm")
    if size is None:
        yield warn(
            "shared-memory",
            "/dev/shm is not mounted",
            "NCCL and vLLM pass data between the ranks through it.",
            how,
            "W24",
            link="https://docs.vllm.ai/en/latest/deployment/docker/",
        )
    elif size < SHM_LEAST:
        level = fail if size < GIB else warn
        yield level(
            "shared-memory",
            f"/dev/shm has {_size(size)}",
            "NCCL and vLLM pass data between the ranks through it; containers get 64 MiB by default, which ends in "
            "a bus error.",
            how,
            "W24",
            "W25",
            link="https://docs.vllm.ai/en/latest/deployment/docker/",
        )
    elif free is not None and free < SHM_LEAST:
        yield warn(
            "shared-memory",
            f"/dev/shm has {_size(free)} left of {_size(size)}",
            "A server that crashed leaves its segments behind, and they take memory until they are removed.",
            "Look with ls -l /dev/shm, and remove files whose process is gone (fuser FILE shows none).",
            "F34",
            link="https://github.com/llm-d/llm-d/issues/352",
        )
    else:
        yield ok("shared-memory", f"/dev/shm has {_size(size)}")


def open_files(case: Case) -> Iterator[Finding]:
    """The limit of open files; compile caches hold tens of thousands."""
    limit = case.host.limits.open_files
    if case.device == "cpu":
        return
    if limit is not None and limit < OPEN_FILES_WANTED:
        yield warn(
            "open-files",
            f"{limit} open files are allowed",
            "The compile caches alone hold tens of thousands of files; loading can end with 'Too many open files'.",
            "ulimit -n 65536 before the start; in a container --ulimit nofile=65536, in a systemd unit "
            "LimitNOFILE=65536.",
            "F19",
            link="https://github.com/vllm-project/vllm/pull/41834",
        )
    else:
        yield ok("open-files", "unlimited" if limit is None else str(limit))


def locked_memory(case: Case) -> Iterator[Finding]:
    """The limit of pinned memory, which RDMA and host-side KV caches need."""
    limit = case.host.limits.locked_memory
    if case.device == "cpu":
        return
    if limit is not None:
        yield warn(
            "locked-memory",
            f"{_size(limit)} may be pinned",
            "Transfers between GPU and host pin memory; RDMA and a KV cache in host memory fail without it.",
            "ulimit -l unlimited; in a container --ulimit memlock=-1, in a pod the capability IPC_LOCK, in a systemd "
            "unit LimitMEMLOCK=infinity.",
            "W28",
        )
    else:
        yield ok("locked-memory", "unlimited")


def numa_balancing(case: Case) -> Iterator[Finding]:
    """The kernel's automatic page migration, which stalls GPU transfers."""
    if case.device == "cpu":
        return
    if case.host.numa_balancing:
        yield warn(
            "numa-balancing",
            "kernel.numa_balancing is on",
            "The kernel then moves pages under running GPU transfers, which makes latency jump.",
            "sysctl -w kernel.numa_balancing=0 on the host",
            "W29",
            link="https://rocm.docs.amd.com/en/latest/how-to/system-optimization/mi300x.html",
        )
    else:
        yield ok("numa-balancing", "off")


def iommu(case: Case) -> Iterator[Finding]:
    """The IOMMU in pass-through mode, on real hardware only: a virtual machine has no say in it."""
    host = case.host
    if not host.gpus or host.hypervisor:
        return
    if "iommu=pt" in host.kernel_arguments or "amd_iommu=off" in host.kernel_arguments:
        yield ok("iommu", "pass-through or off")
    else:
        yield warn(
            "iommu",
            "the kernel runs without iommu=pt",
            "Every transfer between GPUs and host then goes through address translation; AMD's guide asks for "
            "pass-through.",
            "Add iommu=pt to the kernel's command line (GRUB_CMDLINE_LINUX) and reboot.",
            link="https://rocm.docs.amd.com/en/latest/how-to/system-optimization/mi300x.html",
        )


def memory(case: Case) -> Iterator[Finding]:
    """Main memory, and the limit of the control group, against the checkpoint."""
    if case.device == "cpu":
        yield from _cpu_memory(case)
        return
    have, limit, weights = case.host.memory, case.host.memory.limit, case.weight_bytes
    if weights is None:
        return
    wanted = int(weights * RAM_PER_WEIGHT)
    if limit is not None and limit < wanted:
        level = fail if limit < weights else warn
        yield level(
            "memory",
            f"a memory limit of {_size(limit)} for {_size(weights)} of weights",
            "The page cache of the shards counts against the limit; the kernel kills the server while it loads "
            "(exit code 137, nothing in vLLM's log).",
            f"Leave the limit out, or set at least {_size(wanted)}.",
            "F11",
            "W43",
            link="https://github.com/vllm-project/vllm/issues/28923",
        )
    elif have.total < wanted:
        yield warn(
            "memory",
            f"{_size(have.total)} of main memory for {_size(weights)} of weights",
            "The ranks read the same shards one after the other; what does not stay in memory is read from disk again.",
            "Expect a longer load, or use local NVMe.",
            "F29",
            link="https://github.com/vllm-project/vllm/issues/40988",
        )
    else:
        yield ok("memory", f"{_size(have.total)}, {_size(have.available)} available")
    yield from _engram(case)


def _engram(case: Case) -> Iterator[Finding]:
    in_host = '"cpu_offload":false' not in (case.flag("engram-config") or "").replace(" ", "")
    is_v41 = case.checkpoint is not None and case.checkpoint.model_type == "deepseek_v41"
    if is_v41 and in_host and case.host.memory.available < ENGRAM_BYTES:
        yield fail(
            "memory",
            f"{_size(case.host.memory.available)} of main memory available",
            f"V4.1 pins {_size(ENGRAM_BYTES)} of Engram tables in main memory.",
            "Put them on the GPUs: --set 'engram-config={\"cpu_offload\": false}'",
            link="https://github.com/SemiAnalysisAI/InferenceX/pull/3246",
        )


def _cpu_memory(case: Case) -> Iterator[Finding]:
    wanted = CPU_BASE_BYTES + CPU_RANK_BYTES * (case.tp or 1)
    have = min(case.host.memory.available, case.host.memory.limit or case.host.memory.available)
    if have < wanted:
        yield warn(
            "memory",
            f"{_size(have)} of main memory is available",
            f"The no-GPU mode takes about {_size(wanted)} with {case.tp or 1} rank(s).",
            "End other programs, or use fewer ranks.",
        )
    else:
        yield ok("memory", f"{_size(have)} available, about {_size(wanted)} needed")


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.0f} {unit}" if count >= 10 * size else f"{count / size:.1f} {unit}"
    return f"{count / 1024:.0f} KiB"
