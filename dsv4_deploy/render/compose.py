"""Target `compose`: a file for `docker compose up` (https://docs.docker.com/reference/compose-file/)."""

from __future__ import annotations

from collections.abc import Iterable

from dsv4_deploy.render import quoting
from dsv4_deploy.render.container import ENTRYPOINT, SECRETS, TMPFS, VIDEO_GID, Container, container
from dsv4_deploy.render.source import Source, head

_GROUP = (
    "${RENDER_GID:?group of /dev/dri/renderD128 on the server, as stat -c %g /dev/dri/renderD128 prints it}"
)


def render(source: Source) -> str:
    """The file's text."""
    box = container(source)
    text = quoting.compose
    lines = head(source, "DeepSeek-V4 for docker compose.")
    lines += ["", f"name: {text(box.name)}", "services:", "  server:", f"    image: {text(box.image)}"]
    lines += [f"    entrypoint: [{text(ENTRYPOINT)}]", "    command:"]
    for words, reason in box.arguments:
        lines += quoting.comment(reason, "      ")
        lines += [f"      - {text(word)}" for word in words]
    lines.append("    environment:")
    for variable in box.variables:
        lines += [
            *quoting.comment(variable.reason, "      "),
            f"      {variable.name}: {text(variable.value)}",
        ]
    lines += quoting.comment(
        "Secrets: taken from your environment when they are set there, never written down.", "      "
    )
    lines += [f"      {name}:" for name in SECRETS]
    for key, value, reason in _keys(source, box):
        lines += quoting.comment(reason, "    ")
        lines += [f"    {key}: {value}"] if isinstance(value, str) else [f"    {key}:", *value]
    lines += ["volumes:", *_volumes(box)]
    return "\n".join(lines) + "\n"


def _keys(source: Source, box: Container) -> Iterable[tuple[str, str | list[str], str]]:
    text = quoting.compose
    if box.gpu:
        group = text(str(source.render_gid)) if source.render_gid is not None else quoting.yaml(_GROUP)
        yield (
            "devices",
            ['      - "/dev/kfd:/dev/kfd"', '      - "/dev/dri:/dev/dri"'],
            "The GPUs; none is hidden by a variable, filters would compose.",
        )
        yield (
            "group_add",
            [f"      - {text(str(VIDEO_GID))}", f"      - {group}"],
            "video, and the group of the render nodes, which differs from host to host.",
        )
    yield (
        "shm_size",
        text(f"{box.shm_bytes}b"),
        "The ranks talk through shared memory; the default of 64 MB ends in a bus error.",
    )
    yield (
        "ulimits",
        ["      memlock: -1", f"      nofile: {{soft: {box.open_files}, hard: {box.open_files}}}"],
        "Transfers pin memory, and the compile caches hold tens of thousands of files.",
    )
    yield "cap_drop", "[ALL]", "The server needs no privilege."
    yield "security_opt", '["no-new-privileges:true"]', "Nor may anything in it gain one."
    yield "read_only", "true", "What is written goes to the volumes and to /tmp."
    yield (
        "tmpfs",
        f"[{text(TMPFS)}]",
        "Compiled kernels are loaded from /tmp, so exec.",
    )
    mounts = []
    if box.model_directory:
        mounts += [
            "      - type: bind",
            f"        source: {text(box.model_directory)}",
            f"        target: {text(box.model_mount)}",
            "        read_only: true",
            "        bind: {create_host_path: false}",
        ]
    for name, target in box.volumes:
        mounts += ["      - type: volume", f"        source: {text(name)}", f"        target: {text(target)}"]
    yield "volumes", mounts, "The checkpoint, and what is kept when the container is replaced."
    yield (
        "ports",
        [
            f"      - {text(f'{box.address}:{box.port}:{box.port}')}",
            f"      - {text(f'127.0.0.1:{box.health_port}:{box.health_port}')}",
        ],
        "Who may send requests; probes and metrics are for this host only.",
    )
    yield (
        "stop_grace_period",
        text(f"{box.stop_timeout_s}s"),
        "Running requests, vLLM's shutdown and the GPUs have to fit; then it is killed.",
    )
    yield (
        "healthcheck",
        [
            f'      test: ["CMD", "dsv4-deploy", "probe", "ready", "--health-port", "{box.health_port}"]',
            "      interval: 10s",
            "      timeout: 5s",
            "      retries: 3",
            f"      start_period: {box.start_period_s}s",
        ],
        "Healthy when completions are answered; loading takes long.",
    )
    yield "restart", "unless-stopped", "The supervisor ends with vLLM, so that it is started afresh."


def _volumes(box: Container) -> list[str]:
    lines = []
    for name, _ in box.volumes:
        # Without a name of its own Compose would put the project's name in front of it.
        lines += [f"  {quoting.compose(name)}:", f"    name: {quoting.compose(name)}"]
    return lines
