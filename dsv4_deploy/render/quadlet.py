"""Target `quadlet`: a .container file, from which podman makes a systemd service.

Keys that only newer releases of podman know are written as PodmanArgs=, so that 4.6 is enough (Debian 12's 4.3
has no Quadlet at all): https://docs.podman.io/en/latest/markdown/podman-systemd.unit.5.html
"""

from __future__ import annotations

from collections.abc import Iterable

from dsv4_deploy.errors import refused
from dsv4_deploy.render import quoting
from dsv4_deploy.render.container import ENTRYPOINT, SECRETS, TMPFS, VIDEO_GID, Container, container
from dsv4_deploy.render.source import Source, head

# Pulling an image of tens of gigabytes is part of the start.
START_TIMEOUT_S = 3600


def render(source: Source) -> str:
    """The file's text. Raises DeployError when the render group is not known: nothing can be left open in a
    unit that starts by itself."""
    box = container(source)
    if box.gpu and source.render_gid is None:
        raise refused(
            "a unit needs the number of the group that may open the GPUs",
            why="It differs from host to host, and a service that starts at boot can ask nobody.",
            fix="Run `stat -c %g /dev/dri/renderD128` on the server, and add --render-gid NUMBER.",
        )
    word = quoting.systemd
    lines = head(source, "DeepSeek-V4 as a systemd service that podman runs.")
    lines += quoting.comment(
        f"Put it into /etc/containers/systemd/{box.name}.container, then: systemctl daemon-reload && systemctl start "
        f"{box.name}. Needs podman 4.6 or newer."
    )
    lines += quoting.comment(
        f"Secrets ({', '.join(SECRETS)}) go into /etc/dsv4-deploy/{box.name}.env, readable by root only."
    )
    lines += ["", "[Unit]", "Description=DeepSeek-V4 (dsv4-deploy)"]
    if box.model_directory:
        lines.append(f"RequiresMountsFor={quoting.systemd_path(box.model_directory)}")
    lines += ["", "[Container]"]
    lines += [f"ContainerName={box.name}", f"Image={box.image}"]
    for key, value, reason in _keys(source, box):
        lines += [*quoting.comment(reason), f"{key}={value}"]
    for variable in box.variables:
        lines += [
            *quoting.comment(variable.reason),
            f"Environment={word(f'{variable.name}={variable.value}')}",
        ]
    for words, reason in box.arguments:
        lines += quoting.comment(f"{' '.join(words)}: {reason}")
    lines.append("Exec=" + " \\\n  ".join(" ".join(word(one) for one in words) for words, _ in box.arguments))
    lines += [
        "",
        "[Service]",
        f"EnvironmentFile=-/etc/dsv4-deploy/{box.name}.env",
        *quoting.comment("The supervisor ends with vLLM, so that it is started afresh."),
        "Restart=always",
        "RestartSec=10",
        f"TimeoutStartSec={START_TIMEOUT_S}",
        *quoting.comment("Longer than podman waits before it kills."),
        f"TimeoutStopSec={box.stop_timeout_s + 20}",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def _keys(source: Source, box: Container) -> Iterable[tuple[str, str, str]]:
    yield "PodmanArgs", f"--entrypoint={ENTRYPOINT}", "What runs in the image."
    if box.gpu:
        yield "AddDevice", "/dev/kfd", "The GPUs; none is hidden by a variable, filters would compose."
        yield "AddDevice", "/dev/dri", "Their render nodes."
        groups = f"--group-add={VIDEO_GID} --group-add={source.render_gid}"
        yield "PodmanArgs", groups, "video, and the group of the render nodes."
    yield (
        "PodmanArgs",
        f"--shm-size={box.shm_bytes}",
        "The ranks talk through shared memory; the default of 64 MB ends in a bus error.",
    )
    yield (
        "PodmanArgs",
        f"--ulimit=memlock=-1:-1 --ulimit=nofile={box.open_files}:{box.open_files}",
        "Transfers pin memory, and the compile caches hold tens of thousands of files.",
    )
    yield "DropCapability", "all", "The server needs no privilege."
    yield "NoNewPrivileges", "true", "Nor may anything in it gain one."
    yield "ReadOnly", "true", "What is written goes to the volumes and to /tmp."
    yield "Tmpfs", TMPFS, "Compiled kernels are loaded from /tmp, so exec."
    if box.model_directory:
        mount = f"--mount=type=bind,source={box.model_directory},destination={box.model_mount},ro=true"
        # Not Mount=: for that Quadlet writes a RequiresMountsFor= of its own, which breaks at a space.
        yield "PodmanArgs", quoting.systemd(mount), "The checkpoint."
    for name, target in box.volumes:
        yield "Volume", f"{name}:{target}", "Kept when the container is replaced."
    yield "PublishPort", f"{box.address}:{box.port}:{box.port}", "Who may send requests."
    yield (
        "PublishPort",
        f"127.0.0.1:{box.health_port}:{box.health_port}",
        "Probes and metrics, for this host only.",
    )
    yield (
        "PodmanArgs",
        f"--stop-timeout={box.stop_timeout_s}",
        "Running requests, vLLM's shutdown and the GPUs have to fit; then it is killed.",
    )
    yield (
        "HealthCmd",
        f"dsv4-deploy probe ready --health-port {box.health_port}",
        "Healthy when completions are answered.",
    )
    yield "HealthInterval", "10s", "How often to look."
    yield "HealthRetries", "3", "Failures in a row that count."
    yield "HealthStartPeriod", f"{box.start_period_s}s", "Loading takes long."
    secrets = " ".join(f"--env={name}" for name in SECRETS)
    yield "PodmanArgs", secrets, "Secrets: passed on from the service's EnvironmentFile when they are there."
