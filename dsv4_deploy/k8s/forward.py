"""A pod's port on this machine, for as long as a block lasts: what `kubectl port-forward` does.

In: an Api, a pod and its port. Out: an address on 127.0.0.1. Each connection is a websocket of its own through the API
server, so no firewall has to be opened: https://kubernetes.io/docs/reference/kubectl/generated/kubectl_port-forward/
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from dsv4_deploy.errors import DeployError
from dsv4_deploy.k8s.api import Api
from dsv4_deploy.k8s.release import Release
from dsv4_deploy.k8s.view import look

BLOCK = 65536


@contextlib.contextmanager
def to_server(api: Api, release: Release, port: str = "http") -> Iterator[str]:
    """The URL of a ready pod of the release inside the block. `port` is the name of a container port.

    Raises DeployError when no pod is ready.
    """
    view = look(api, release)
    pod = next((one for one in view.pods if one.ready and not one.leaving), None)
    if pod is None:
        states = ", ".join(f"{one.name} is {one.state}" for one in view.pods) or "there is no pod"
        raise DeployError(
            f"no pod of {release.name} is ready",
            why=f"{states}.",
            fix=f"dsv4-deploy status {release.options} says what is wrong.",
        )
    found = api.get(f"/api/v1/namespaces/{release.namespace}/pods/{pod.name}") or {}
    ports = {
        one.get("name"): one["containerPort"]
        for container in found.get("spec", {}).get("containers", [])
        for one in container.get("ports", [])
    }
    with forward(api, release.namespace, pod.name, ports[port]) as number:
        yield f"http://127.0.0.1:{number}"


@contextlib.contextmanager
def forward(api: Api, namespace: str, pod: str, port: int) -> Iterator[int]:
    """A local port that leads to a pod's port inside the block."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(api, namespace, pod, port, listener), daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()


def _accept(api: Api, namespace: str, pod: str, port: int, listener: socket.socket) -> None:
    while True:
        try:
            here, _ = listener.accept()
        except OSError:  # closed: the block is over
            return
        threading.Thread(target=_connect, args=(api, namespace, pod, port, here), daemon=True).start()


def _connect(api: Api, namespace: str, pod: str, port: int, here: socket.socket) -> None:
    from kubernetes import client, stream

    with here:
        try:
            tunnel = stream.portforward(
                client.CoreV1Api(api.client).connect_get_namespaced_pod_portforward,
                pod,
                namespace,
                ports=str(port),
            )
            there = tunnel.socket(port)
            there.setblocking(True)
        except Exception:
            # Whoever connected sees the connection close, as with any server that is down.
            return
        back = threading.Thread(target=_pump, args=(there, here), daemon=True)
        back.start()
        _pump(here, there)
        back.join()
        tunnel.close()


def _pump(source: Any, target: Any) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(BLOCK):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
