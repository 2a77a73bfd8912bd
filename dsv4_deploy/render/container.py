"""What a container needs around the server, worked out once for docker, Compose and Quadlet.

In: a Source. Out: a `Container`. Inside runs the supervisor (`dsv4-deploy serve`) with every flag of the plan
named, so that what was reviewed is what runs; it checks them again on the GPUs that it really got. The root
file system is read-only; compiled kernels, and weights that vLLM downloads, live on volumes.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import pathlib
import re

from dsv4_deploy.errors import refused
from dsv4_deploy.plan.plan import TINY
from dsv4_deploy.plan.watch import health_port, make_watch
from dsv4_deploy.render.source import Source, checked
from dsv4_deploy.spec import Deployment

IMAGE = "dsv4-deploy"
"""Repository of the image that this repository's Dockerfile makes. Nothing is published anywhere."""

ENTRYPOINT = "dsv4-deploy"
CACHE = "/var/cache/dsv4"
MODELS = "/models"
ALL_ADDRESSES = "0.0.0.0"  # noqa: S104  (inside the container; what is published is the operator's choice)
VIDEO_GID = 44
# In the container, where nothing else lives. Kernels that are compiled there are loaded from there, so exec.
STATE = "/tmp/dsv4-state"  # noqa: S108
TMPFS = "/tmp:rw,exec,nosuid,nodev,mode=1777"  # noqa: S108
# What the runtime waits beyond the supervisor's own bound before it kills: the supervisor has to win.
STOP_MARGIN_S = 20
SECRETS = ("VLLM_API_KEY", "HF_TOKEN")

_IMAGE = re.compile(
    r"[a-z0-9]+([._-]+[a-z0-9]+)*(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
_NAME = re.compile(r"[a-z0-9]([a-z0-9_.-]{0,48}[a-z0-9])?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Item:
    """Words, a variable or an option, and why it is there."""

    value: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Variable:
    """One environment variable."""

    name: str
    value: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Container:
    """`arguments` are those after the entry point, each with its reason; a flag and its value are two words.
    `model_directory` is a host directory to be mounted read-only at `model_mount`. `volumes` are (name, where).
    `address` is where the host publishes the ports. Sizes are in bytes, times in seconds."""

    name: str
    image: str
    arguments: tuple[tuple[tuple[str, ...], str], ...]
    variables: tuple[Variable, ...]
    model_directory: str | None
    model_mount: str
    volumes: tuple[tuple[str, str], ...]
    gpu: bool
    address: str
    port: int
    health_port: int
    shm_bytes: int
    open_files: int
    stop_timeout_s: int
    start_period_s: int


def container(source: Source) -> Container:
    """The container of a plan. Raises DeployError for what no container runtime can be told."""
    checked(source)
    plan = source.plan
    deployment: Deployment = plan.deployment
    name = _name(deployment.name or "dsv4")
    directory = plan.model if pathlib.PurePath(plan.model).is_absolute() and not _is_tiny(source) else None
    mount = f"{MODELS}/{pathlib.PurePath(plan.model).name}"
    if directory:
        _check_directory(directory)
    volumes = [(f"{name}-cache-{plan.vllm}", CACHE)]
    if not directory and not _is_tiny(source):
        volumes.append((f"{name}-models", MODELS))
    watch = make_watch(plan)
    return Container(
        name=name,
        image=_image(source),
        arguments=_arguments(source, mount if directory else None),
        variables=_variables(source),
        model_directory=directory,
        model_mount=mount,
        volumes=tuple(volumes),
        gpu=plan.device == "rocm",
        address=_address(plan.host),
        port=plan.port,
        health_port=health_port(plan.port),
        shm_bytes=deployment.shm_bytes or 2**30,
        open_files=65536,
        stop_timeout_s=math.ceil(watch.stop_bound_s(plan.shutdown_timeout_s)) + STOP_MARGIN_S,
        start_period_s=deployment.startup_budget_s or plan.ready_timeout_s,
    )


def _is_tiny(source: Source) -> bool:
    return source.plan.device == "cpu" and source.spec.model in (None, TINY)


def _arguments(source: Source, mounted: str | None) -> tuple[tuple[tuple[str, ...], str], ...]:
    """`dsv4-deploy serve` with the plan spelled out. A test plans from these words again and compares."""
    plan, spec = source.plan, source.spec
    model = mounted or (TINY if _is_tiny(source) else spec.model or plan.served_name)
    found: list[tuple[tuple[str, ...], str]] = [
        (("serve",), "the supervisor: starts vLLM, answers probes, drains when it is stopped"),
        (("--device", plan.device), "no guessing: without its GPUs the server must not start"),
        (("--model", model), "the mounted checkpoint" if mounted else "what is served"),
        (("--host", ALL_ADDRESSES), "inside the container; the published ports decide who gets in"),
        (("--port", str(plan.port)), "the port to listen on (--port)"),
    ]
    if plan.profile != "default":
        found.append((("--profile", plan.profile), "the plan's starting point"))
    owned = {"tensor-parallel-size": "--tp", "max-model-len": "--max-model-len"}
    for flag in plan.flags:
        if flag.name in ("host", "port"):
            continue
        if flag.name in owned:
            found.append(((owned[flag.name], str(flag.value)), flag.reason))
        elif flag.value is True and flag.name.startswith("no-"):
            found.append((("--set", f"{flag.name.removeprefix('no-')}=false"), flag.reason))
        else:
            value = "true" if flag.value is True else flag.value
            found.append((("--set", f"{flag.name}={value}"), flag.reason))
    found += [(("--allow", name), "let pass, as asked") for name in spec.allow]
    return tuple(found)


def _variables(source: Source) -> tuple[Variable, ...]:
    plan = source.plan
    planned = {setting.name for setting in plan.env}
    ours = [
        Variable("HOME", CACHE, "what vLLM, Triton and AITER compile is kept below it, on a volume"),
        Variable("TORCHINDUCTOR_CACHE_DIR", f"{CACHE}/inductor", "torch's compiler would use /tmp"),
        Variable("HF_HOME", f"{MODELS}/huggingface", "downloaded weights, on a volume of their own"),
        Variable("DSV4_STATE_DIR", STATE, "the supervisor's record and log end with the container"),
        Variable("DSV4_CACHE_DIR", f"{CACHE}/dsv4", "the tiny model of the no-GPU mode"),
    ]
    wanted = [Variable(setting.name, str(setting.value), setting.reason) for setting in plan.env]
    for variable in ours:
        if variable.name in planned:
            continue
        if variable.name == "HF_HOME" and "HF_HUB_OFFLINE" in planned:
            continue
        if variable.name == "DSV4_CACHE_DIR" and plan.device != "cpu":
            continue
        wanted.append(variable)
    return tuple(wanted)


def _image(source: Source) -> str:
    """The image that the operator names, else this bundle's own for the planned vLLM."""
    image = source.spec.image or f"{IMAGE}:v{source.plan.vllm}"
    if not _IMAGE.fullmatch(image):
        raise refused(
            f"{image!r} is not the name of an image",
            why="A name is a repository, then :TAG or @sha256:DIGEST.",
            fix="Write --image registry.example/dsv4-deploy@sha256:..., for example.",
        )
    return image


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise refused(
            f"{name!r} cannot name a container",
            why="A name is made of lower-case letters, digits, dots, dashes and underscores, at most 50.",
            fix="Write --deploy name=dsv4, for example.",
        )
    return name


def _address(host: str) -> str:
    """The address on which the host publishes the ports."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError as error:
        raise refused(
            f"--host {host} is a name, and ports are published on an address",
            why="The container runtime does not look names up.",
            fix="Write --host 127.0.0.1 (this machine), --host 0.0.0.0 (everybody), or an address of this host.",
        ) from error
    return f"[{address}]" if address.version == 6 else str(address)


def _check_directory(path: str) -> None:
    if re.search(r'[,":\n\r]', path) or not path.isprintable():
        raise refused(
            f"the model's path {path!r} cannot be mounted",
            why="Container runtimes separate the parts of a mount with commas, colons and quotes.",
            fix="Make a symbolic link with a plain name beside it and give that.",
        )
