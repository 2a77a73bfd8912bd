"""Target `docker`: a POSIX script that starts the container with `docker run` (or podman)."""

from __future__ import annotations

from collections.abc import Iterable

from dsv4_deploy.render import quoting
from dsv4_deploy.render.container import ENTRYPOINT, SECRETS, TMPFS, VIDEO_GID, Container, container
from dsv4_deploy.render.source import Source, head


def render(source: Source) -> str:
    """The script's text."""
    box = container(source)
    lines = ["#!/bin/sh", *head(source, "Starts DeepSeek-V4 in a container.")]
    lines += quoting.comment(
        f"Stop it with: docker stop {box.name} (running requests are finished first). DOCKER=podman uses podman."
    )
    body = [
        "set -eu",
        "",
        "if [ $# -ne 0 ]; then",
        '    echo "error: this script takes no arguments; write it again with other options" >&2',
        "    exit 2",
        "fi",
        "",
    ]
    if box.gpu and source.render_gid is None:
        body += _find_render_group()
    body.append(f"set -- run --detach --name {quoting.shell(box.name)} --restart unless-stopped")
    for words, reason in [*_options(source, box), *_variables(box)]:
        body += [*quoting.comment(reason), f'set -- "$@" {words}']
    body += [
        *quoting.comment("The image and what runs in it."),
        f'set -- "$@" --entrypoint {ENTRYPOINT} {quoting.shell(box.image)}',
    ]
    for arguments, reason in box.arguments:
        body += [*quoting.comment(reason), f'set -- "$@" {_join(arguments)}']
    body += ["", 'exec "${DOCKER:-docker}" "$@"']
    return "\n".join([*lines, *quoting.shell_meant(body), *body]) + "\n"


def _find_render_group() -> list[str]:
    return [
        *quoting.comment("The group that may open the GPUs differs from host to host."),
        "set -- /dev/dri/renderD*",
        'if [ ! -e "$1" ]; then',
        '    echo "error: there is no /dev/dri/renderD* here: no AMD GPU, or no driver" >&2',
        "    exit 1",
        "fi",
        'render_gid=$(stat -c %g "$1")',
        "",
    ]


def _options(source: Source, box: Container) -> list[tuple[str, str]]:
    options = []
    if box.gpu:
        group = '"$render_gid"' if source.render_gid is None else str(source.render_gid)
        options += [
            (
                "--device /dev/kfd --device /dev/dri",
                "the GPUs; none is hidden by a variable, filters would compose",
            ),
            (f"--group-add {VIDEO_GID} --group-add {group}", "video, and the group of the render nodes"),
        ]
    options += [
        (
            f"--shm-size {box.shm_bytes}",
            "the ranks talk through shared memory; the default of 64 MB ends in a bus error",
        ),
        (
            f"--ulimit memlock=-1 --ulimit nofile={box.open_files}:{box.open_files}",
            "transfers pin memory, and the compile caches hold tens of thousands of files",
        ),
        ("--cap-drop ALL --security-opt no-new-privileges", "the server needs no privilege"),
        (
            f"--read-only --tmpfs {TMPFS}",
            "compiled kernels are loaded from /tmp, so exec",
        ),
    ]
    if box.model_directory:
        mount = f"type=bind,source={box.model_directory},target={box.model_mount},readonly"
        options.append((f"--mount {quoting.shell(mount)}", "the checkpoint"))
    for name, target in box.volumes:
        options.append(
            (f"--volume {quoting.shell(f'{name}:{target}')}", "kept when the container is replaced")
        )
    options += [
        (
            f"--publish {quoting.shell(f'{box.address}:{box.port}:{box.port}')}",
            "who may send requests",
        ),
        (
            f"--publish 127.0.0.1:{box.health_port}:{box.health_port}",
            "probes and metrics, for this host only",
        ),
        (
            f"--stop-timeout {box.stop_timeout_s}",
            "running requests, vLLM's shutdown and the GPUs have to fit; then it is killed",
        ),
        (
            f"--health-cmd 'dsv4-deploy probe ready --health-port {box.health_port}' --health-interval 10s "
            f"--health-timeout 5s --health-retries 3 --health-start-period {box.start_period_s}s",
            "healthy when completions are answered; loading takes long",
        ),
    ]
    return options


def _variables(box: Container) -> Iterable[tuple[str, str]]:
    for variable in box.variables:
        yield f"--env {quoting.shell(f'{variable.name}={variable.value}')}", variable.reason
    names = " ".join(f"--env {name}" for name in SECRETS)
    yield names, "secrets: taken from your environment when they are set there, never written down"


def _join(words: Iterable[str]) -> str:
    return " ".join(quoting.shell(word) for word in words)
