"""Checks of the model: its files, how long they take to read, or whether they can be downloaded.

In: a Case. Out: findings. From a large checkpoint about a second's worth of bytes is read to learn the
speed; nothing is downloaded, and a model hub is asked for one small file's headers only.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

from dsv4_deploy.errors import DeployError
from dsv4_deploy.facts import checkpoint, storage
from dsv4_deploy.plan.rules.base import seconds
from dsv4_deploy.preflight.case import Case
from dsv4_deploy.preflight.finding import Finding, Level, fail, ok, warn

# Below this the load time does not matter, and neither does the disk.
LARGE_BYTES = 10**10
HUB = "https://huggingface.co"
HUB_TIMEOUT_S = 10.0
LOAD_LINK = "https://github.com/vllm-project/vllm/issues/40988"
DEFAULT_READY_TIMEOUT_S = 600
"""vLLM's own VLLM_ENGINE_READY_TIMEOUT_S."""


def planned(case: Case) -> Iterator[Finding]:
    """What planning said: the refusal, or each value that a rule changed and each of its warnings."""
    if case.refusal is not None:
        yield fail("plan", case.refusal.what, case.refusal.why, case.refusal.fix)
    for notice in case.plan.notices if case.plan else ():
        level: Level = "ok" if notice.verdict == "set" else "warn"
        yield Finding(notice.rule, level, notice.what, notice.why, notice.fix, notice.rows, notice.link)


def model_files(case: Case) -> Iterator[Finding]:
    """The checkpoint directory is complete and this user may read it."""
    found = case.checkpoint
    if found is None:
        return
    unreadable = [shard.name for shard in found.shards if not os.access(shard, os.R_OK)]
    if unreadable:
        yield fail(
            "model-files",
            f"user {case.host.uid} may not read {', '.join(unreadable[:3])}",
            "vLLM runs as this user.",
            "Make the files readable: chmod -R a+rX DIRECTORY",
            "F76",
        )
        return
    called = (
        f"sizes of {', '.join(found.catalog_names)}" if found.catalog_names else "sizes of no known model"
    )
    yield ok(
        "model-files",
        f"{len(found.shards)} whole shards, {found.weight_bytes / 1e9:.1f} GB, {called}, {found.expert_dtype} experts, "
        f"{found.draft or 'no'} draft module",
    )
    if found.draft_promised and not found.draft:
        yield warn(
            "model-files",
            f"config.json describes a draft module ({found.draft_promised}), and its tensors are not there",
            "Speculative decoding would fail while loading.",
            "Leave speculative decoding off, or download the complete release.",
            "F23",
            link="https://github.com/eugr/spark-vllm-docker/issues/304",
        )


def load_time(case: Case) -> Iterator[Finding]:
    """How long the weights take to read, measured, against the time that vLLM gives itself."""
    found = case.checkpoint
    if found is None or found.weight_bytes < LARGE_BYTES:
        return
    largest = max(found.shards, key=lambda shard: shard.stat().st_size)
    try:
        place = storage.describe(found.directory, case.root)
        speed = storage.read_speed(largest)
    except OSError as error:
        yield fail(
            "load-time",
            f"{largest.name} cannot be read: {error.strerror}",
            "vLLM would stop there.",
            "Check the file and its file system.",
            "F76",
        )
        return
    if speed is None:
        return
    needed = found.weight_bytes / speed.bytes_per_s
    given = seconds(case.variable("VLLM_ENGINE_READY_TIMEOUT_S") or "") or DEFAULT_READY_TIMEOUT_S
    text = (
        f"{found.weight_bytes / 1e9:.0f} GB from {place.kind} at {speed.bytes_per_s / 1e9:.2f} GB/s: "
        f"about {_minutes(needed)}"
    )
    fits_in_memory = case.host.memory.total > 1.1 * found.weight_bytes
    prefetch = case.flag("safetensors-load-strategy") == "prefetch"
    if needed > given / 2:
        level = fail if needed > given else warn
        yield level(
            "load-time",
            text,
            f"vLLM gives itself {_minutes(given)} (VLLM_ENGINE_READY_TIMEOUT_S), which loading, compiling and graph "
            "capture share.",
            f"Copy the model to local NVMe, or export VLLM_ENGINE_READY_TIMEOUT_S={int(2 * needed) + 1}.",
            "F15",
            "F29",
            link=LOAD_LINK,
        )
    elif place.is_network and fits_in_memory and not prefetch:
        yield warn(
            "load-time",
            text,
            "On a network file system every rank reads the same shards, and without reading ahead that took an hour "
            "for Pro.",
            "--set safetensors-load-strategy=prefetch",
            "F29",
            link=LOAD_LINK,
        )
    else:
        yield ok("load-time", text)


def download(case: Case) -> Iterator[Finding]:
    """A model that vLLM would download: already there, room for it, and a hub that gives it."""
    repo = case.repo
    if repo is None or case.device == "cpu":
        return
    cache = _hub_cache(case)
    snapshot = _snapshot(cache, repo)
    if snapshot is not None:
        try:
            found = checkpoint.read(snapshot)
        except DeployError as problem:
            if _offline(case):
                yield fail("download", problem.what, problem.why, problem.fix, "W33", "W39")
            else:
                yield warn(
                    "download",
                    f"the download of {repo} in {snapshot} is not complete",
                    f"{problem.what}.",
                    "vLLM goes on with it at start, which takes as long as it takes; or finish it now: "
                    f"hf download {repo}",
                    "W33",
                )
            return
        yield ok("download", f"{repo} is in {snapshot} ({found.weight_bytes / 1e9:.1f} GB)")
        return
    if _offline(case):
        yield fail(
            "download",
            f"{repo} is not in {cache}, and HF_HUB_OFFLINE forbids to download it",
            "Nothing can bring it.",
            f"Download it where there is a network (hf download {repo}) and give the directory: --model DIR",
            "W39",
        )
        return
    yield from _room(case, cache, repo)
    yield from _hub(case, repo)


def _room(case: Case, cache: pathlib.Path, repo: str) -> Iterator[Finding]:
    weights = case.weight_bytes or 0
    place = storage.describe(cache, case.root)
    if not place.writable:
        yield fail(
            "download",
            f"{place.existing} is not writable for user {case.host.uid}",
            f"{repo} would be downloaded to {cache}.",
            "Set HF_HOME to a writable directory with room for it.",
            "W34",
        )
    elif place.free_bytes < weights:
        yield fail(
            "download",
            f"{place.free_bytes / 1e9:.0f} GB free in {place.existing}",
            f"{repo} has {weights / 1e9:.0f} GB.",
            "Set HF_HOME to a directory with room for it.",
        )
    else:
        yield ok(
            "download",
            f"{weights / 1e9:.0f} GB fit into {place.existing} ({place.free_bytes / 1e9:.0f} GB free)",
        )


def _hub(case: Case, repo: str) -> Iterator[Finding]:
    """Ask the hub for the headers of config.json, with the operator's token if there is one."""
    import httpx

    endpoint = (case.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    token = case.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.head(
            f"{endpoint}/{repo}/resolve/main/config.json",
            headers=headers,
            timeout=HUB_TIMEOUT_S,
            follow_redirects=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        yield fail(
            "hub",
            f"{endpoint} does not answer ({type(error).__name__})",
            f"{repo} is not on this machine and would have to be downloaded.",
            f"Allow egress to the hub, set HF_ENDPOINT to a mirror, or bring the directory: hf download {repo} "
            "elsewhere, then --model DIR",
            "W39",
        )
        return
    if answer.status_code in (401, 403):
        yield fail(
            "hub",
            f"{endpoint} answers {answer.status_code} for {repo}",
            "The hub does not give this repository to "
            + ("the token in HF_TOKEN." if token else "anonymous users, and HF_TOKEN is not set."),
            "Accept the model's terms on the hub, and export HF_TOKEN with a token that may read it.",
            "F76",
        )
    elif answer.status_code >= 400:
        yield fail(
            "hub",
            f"{endpoint} answers {answer.status_code} for {repo}",
            "It does not have the repository, or limits requests (429)."
            if answer.status_code == 429
            else "The repository is not there under that name.",
            "Check HF_ENDPOINT, try again later, or give a directory: --model DIR",
            "F76",
        )
    else:
        yield ok("hub", f"{endpoint} has {repo}")


def _offline(case: Case) -> bool:
    return (case.variable("HF_HUB_OFFLINE") or "").lower() in ("1", "true", "yes", "on")


def _hub_cache(case: Case) -> pathlib.Path:
    """Where the hub's client keeps models: https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables"""
    environ = case.environ
    if cache := environ.get("HF_HUB_CACHE"):
        return pathlib.Path(cache)
    if home := environ.get("HF_HOME"):
        return pathlib.Path(home) / "hub"
    base = environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else case.home / ".cache") / "huggingface" / "hub"


def _snapshot(cache: pathlib.Path, repo: str) -> pathlib.Path | None:
    snapshots = cache / f"models--{repo.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    return found[-1].parent if found else None


def _minutes(length: float) -> str:
    return f"{length:.0f} s" if length < 120 else f"{length / 60:.0f} min"
