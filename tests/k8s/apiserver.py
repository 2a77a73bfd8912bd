"""A Kubernetes API server for tests: real HTTP, in memory, good enough for the real helm and the real Python client.

It has discovery, create, read, list with selectors, update, patch (merge and server-side apply), delete, pod logs,
port-forward over a websocket, access reviews and an audit log. What a cluster does by itself (scheduling, kubelets)
is scripted: tests/k8s/cluster.py. It checks neither schemas nor admission; strict schemas are tests/helm's.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import dataclasses
import datetime
import json
import threading
import uuid
from collections.abc import Callable
from typing import Any

import yaml
from aiohttp import WSMsgType, web

from tests.k8s import protobuf

Object = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A resource type; `group` is empty for the core API."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


KINDS = (
    Kind("", "v1", "namespaces", "Namespace", namespaced=False),
    Kind("", "v1", "nodes", "Node", namespaced=False),
    Kind("", "v1", "pods", "Pod"),
    Kind("", "v1", "events", "Event"),
    Kind("", "v1", "services", "Service"),
    Kind("", "v1", "secrets", "Secret"),
    Kind("", "v1", "configmaps", "ConfigMap"),
    Kind("", "v1", "serviceaccounts", "ServiceAccount"),
    Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
    Kind("apps", "v1", "deployments", "Deployment"),
    Kind("apps", "v1", "replicasets", "ReplicaSet"),
    Kind("batch", "v1", "jobs", "Job"),
    Kind("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet"),
    Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Kind("networking.k8s.io", "v1", "ingresses", "Ingress"),
    Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    Kind("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler"),
    Kind("storage.k8s.io", "v1", "storageclasses", "StorageClass", namespaced=False),
)
TOKEN = "test-token-of-the-user"


class Status(web.HTTPException):
    """Kubernetes' way of saying no."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        self.status_code = code
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
        super().__init__(
            text=json.dumps({**body, "reason": reason, "message": message}), content_type="application/json"
        )


class ApiServer:
    """Runs in a thread of its own. `store` maps (plural, namespace, name) to objects; take `lock` to look into it.

    `forbidden` holds (verb, plural) pairs that the user may not do. `on_change` is called after each write with the
    verb and the object. `logs` maps pod names to text, `no_logs` to why there is none; `away` counts requests
    that get 503, `requests` is the audit log: (method, path).
    """

    def __init__(self) -> None:
        self.store: dict[tuple[str, str, str], Object] = {}
        self.lock = threading.RLock()
        self.forbidden: set[tuple[str, str]] = set()
        self.on_change: list[Callable[[str, Object], None]] = []
        self.logs: dict[str, str] = {}
        self.no_logs: dict[str, str] = {}
        self.away = 0
        self.requests: list[tuple[str, str]] = []
        self.forward_to: dict[int, int] = {}
        self._version = 100
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._ready.wait(30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kubeconfig(self) -> str:
        """The text of a kubeconfig with one context, `test`."""
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "contexts": [
                    {"name": "test", "context": {"cluster": "c", "user": "u", "namespace": "default"}}
                ],
                "clusters": [{"name": "c", "cluster": {"server": self.url}}],
                "users": [{"name": "u", "user": {"token": TOKEN}}],
            }
        )

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    # What tests and the scripted cluster use.

    def put(self, item: Object) -> Object:
        """Create or replace an object, whoever wrote it."""
        kind = next(one for one in KINDS if one.kind == item["kind"])
        with self.lock:
            return self._save(kind, item["metadata"].get("namespace", "") if kind.namespaced else "", item)

    def get(self, plural: str, name: str, namespace: str = "ai") -> Object:
        with self.lock:
            return self.store[plural, namespace, name]

    def all(self, plural: str) -> list[Object]:
        with self.lock:
            return [copy.deepcopy(item) for (one, _, _), item in self.store.items() if one == plural]

    def remove(self, plural: str, name: str, namespace: str = "ai") -> None:
        with self.lock:
            self.store.pop((plural, namespace, name), None)

    # HTTP

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        # Go's client sends no token over plain HTTP, Python's does.
        if request.headers.get("Authorization", f"Bearer {TOKEN}") != f"Bearer {TOKEN}":
            raise Status(401, "Unauthorized", "Unauthorized")
        if self.away > 0:
            self.away -= 1
            raise Status(503, "ServiceUnavailable", "the server is currently unable to handle the request")
        parts = [part for part in request.path.split("/") if part]
        if parts and parts[-1] == "portforward":
            return await self._port_forward(request)
        body = await request.read()
        with self.lock:
            return self._answer(request, parts, body)

    def _answer(self, request: web.Request, parts: list[str], body: bytes) -> web.Response:
        if parts == ["version"]:
            return web.json_response(
                {"major": "1", "minor": "35", "gitVersion": "v1.35.0", "platform": "linux/amd64"}
            )
        if parts in (["api"], ["apis"]):
            return web.json_response(_groups(parts[0]))
        if parts == ["openapi", "v2"]:
            # An empty protobuf document: clients find no schema for any kind, and check nothing.
            return web.Response(content_type="application/octet-stream")
        if parts == ["openapi", "v3"]:
            return web.json_response({"paths": {}})
        group, version, rest = (
            ("", parts[1], parts[2:]) if parts[0] == "api" else (parts[1], *_version(parts))
        )
        if not rest:
            return web.json_response(_resources(group, version))
        if rest[0] in ("selfsubjectaccessreviews", "selfsubjectrulesreviews"):
            return self._review(json.loads(body))
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        kind = next(
            (one for one in KINDS if (one.group, one.version, one.plural) == (group, version, rest[0])), None
        )
        if kind is None:
            raise Status(404, "NotFound", "the server could not find the requested resource")
        name = rest[1] if len(rest) > 1 else ""
        if rest[2:] == ["log"]:
            self._allow("get", kind, namespace)
            return web.Response(text=self._log(namespace, name, request))
        return self._resource(request, kind, namespace, name, body)

    def _resource(
        self, request: web.Request, kind: Kind, namespace: str, name: str, body: bytes
    ) -> web.Response:
        verb = {
            "GET": "get" if name else "list",
            "POST": "create",
            "PUT": "update",
            "PATCH": "patch",
            "DELETE": "delete",
        }[request.method]
        self._allow(verb, kind, namespace)
        key = (kind.plural, namespace, name)
        if verb == "list":
            return web.json_response(self._list(kind, namespace, request))
        if verb == "create":
            item = _read(body)
            name = item["metadata"]["name"]
            if (kind.plural, namespace, name) in self.store:
                raise Status(409, "AlreadyExists", f'{kind.plural} "{name}" already exists')
            return web.json_response(self._save(kind, namespace, item), status=201)
        if key not in self.store:
            if verb == "patch" and "apply" in request.content_type:
                return web.json_response(self._save(kind, namespace, _read(body)), status=201)
            raise Status(404, "NotFound", f'{kind.plural} "{name}" not found')
        if verb == "get":
            return web.json_response(self.store[key])
        if verb == "delete":
            item = self.store.pop(key)
            self._tell("delete", item)
            return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})
        change = _read(body)
        if verb == "patch":
            change = _merged(self.store[key], change)
        return web.json_response(self._save(kind, namespace, change))

    def _list(self, kind: Kind, namespace: str, request: web.Request) -> Object:
        wanted = _selector(request.query.get("labelSelector", ""))
        fields = _selector(request.query.get("fieldSelector", ""))
        items = [
            item
            for (plural, where, _), item in self.store.items()
            if plural == kind.plural
            and (not namespace or where == namespace)
            and all(
                item["metadata"].get("labels", {}).get(label) in values for label, values in wanted.items()
            )
            and all(str(_field(item, path)) in values for path, values in fields.items())
        ]
        return {
            "kind": f"{kind.kind}List",
            "apiVersion": kind.api_version,
            "metadata": {"resourceVersion": str(self._version)},
            "items": items,
        }

    def _save(self, kind: Kind, namespace: str, item: Object) -> Object:
        item = copy.deepcopy(item)
        metadata = item["metadata"]
        if text := item.pop("stringData", None):
            item["data"] = {**item.get("data", {}), **_encoded(text)}
        if kind.namespaced:
            metadata["namespace"] = namespace
        old = self.store.get((kind.plural, namespace, metadata["name"]))
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        metadata["uid"] = old["metadata"]["uid"] if old else str(uuid.uuid4())
        metadata.setdefault("creationTimestamp", now())
        changed = old is None or old.get("spec") != item.get("spec")
        metadata["generation"] = (old["metadata"]["generation"] if old else 0) + changed
        item.setdefault("apiVersion", kind.api_version)
        item.setdefault("kind", kind.kind)
        if old and "status" in old:
            item.setdefault("status", old["status"])
        self.store[kind.plural, namespace, metadata["name"]] = item
        self._tell("create" if old is None else "update", item)
        return item

    def _tell(self, verb: str, item: Object) -> None:
        for listener in self.on_change:
            listener(verb, copy.deepcopy(item))

    def _allow(self, verb: str, kind: Kind, namespace: str) -> None:
        if (verb, kind.plural) in self.forbidden:
            where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
            resource = f'{kind.plural} is forbidden: User "tester" cannot {verb} resource "{kind.plural}"'
            raise Status(403, "Forbidden", f'{resource} in API group "{kind.group}"{where}')

    def _review(self, review: Object) -> web.Response:
        asked = review["spec"]["resourceAttributes"]
        plural = asked["resource"] + (f"/{asked['subresource']}" if asked.get("subresource") else "")
        allowed = (asked["verb"], plural) not in self.forbidden
        return web.json_response({**review, "status": {"allowed": allowed}}, status=201)

    def _log(self, namespace: str, name: str, request: web.Request) -> str:
        if ("pods", namespace, name) not in self.store:
            raise Status(404, "NotFound", f'pods "{name}" not found')
        if name in self.no_logs:
            raise Status(400, "BadRequest", self.no_logs[name])
        suffix = "/previous" if request.query.get("previous") in ("true", "True") else ""
        lines = self.logs.get(name + suffix, "").splitlines(keepends=True)
        tail = request.query.get("tailLines")
        return "".join(lines[-int(tail) :] if tail else lines)

    async def _port_forward(self, request: web.Request) -> web.StreamResponse:
        """Two channels per port, data and error, each opened with the port's number: v4.channel.k8s.io."""
        ports = [int(port) for value in request.query.getall("ports") for port in value.split(",")]
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await socket.prepare(request)
        for index, port in enumerate(ports):
            for channel in (2 * index, 2 * index + 1):
                await socket.send_bytes(bytes([channel]) + port.to_bytes(2, "little"))
        reader, writer = await asyncio.open_connection("127.0.0.1", self.forward_to.get(ports[0], ports[0]))

        async def pump() -> None:
            while data := await reader.read(65536):
                await socket.send_bytes(b"\0" + data)
            await socket.close()

        pumping = asyncio.ensure_future(pump())
        async for message in socket:
            if message.type == WSMsgType.BINARY and message.data[:1] == b"\0":
                writer.write(message.data[1:])
                await writer.drain()
        writer.close()
        pumping.cancel()
        return socket


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def secret(name: str, namespace: str = "ai", **data: str) -> Object:
    return {
        "kind": "Secret",
        "apiVersion": "v1",
        "metadata": {"name": name, "namespace": namespace},
        "data": _encoded(data),
    }


def _encoded(data: dict[str, str]) -> dict[str, str]:
    return {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}


def _version(parts: list[str]) -> tuple[str, list[str]]:
    if len(parts) < 3:
        return "", []
    return parts[2], parts[3:]


def _groups(root: str) -> Object:
    if root == "api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    groups = []
    for name in dict.fromkeys(kind.group for kind in KINDS if kind.group):
        version = next(kind.version for kind in KINDS if kind.group == name)
        entry = {"groupVersion": f"{name}/{version}", "version": version}
        groups.append({"name": name, "versions": [entry], "preferredVersion": entry})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def _resources(group: str, version: str) -> Object:
    found = [
        {
            "name": kind.plural,
            "singularName": kind.kind.lower(),
            "namespaced": kind.namespaced,
            "kind": kind.kind,
            "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
        }
        for kind in KINDS
        if kind.group == group
    ]
    if not found:
        raise Status(404, "NotFound", "the server could not find the requested resource")
    api_version = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": found}


def _read(body: bytes) -> Object:
    """JSON or YAML, and protobuf where helm uses it."""
    if body.startswith(protobuf.MAGIC):
        return protobuf.secret(body)
    loaded: Object = yaml.safe_load(body)
    return loaded


def _merged(old: Any, change: Any) -> Any:
    """A JSON merge patch; lists are replaced."""
    if not isinstance(change, dict) or not isinstance(old, dict):
        return copy.deepcopy(change)
    merged = {key: value for key, value in old.items() if change.get(key, "") is not None}
    for key, value in change.items():
        if value is not None:
            merged[key] = _merged(old.get(key), value)
    return merged


def _selector(text: str) -> dict[str, set[str]]:
    """`a=b,c in (d,e)`: what helm and we use."""
    found: dict[str, set[str]] = {}
    depth, part = 0, ""
    for character in [*text, ","]:
        depth += (character == "(") - (character == ")")
        if character != "," or depth:
            part += character
            continue
        if " in " in part:
            key, _, values = part.partition(" in ")
            found[key.strip()] = {value.strip() for value in values.strip(" ()").split(",")}
        elif part:
            key, _, value = part.partition("=")
            found[key.strip()] = {value.lstrip("=").strip()}
        part = ""
    return found


def _field(item: Object, path: str) -> Any:
    for key in path.split("."):
        item = item.get(key, {})
    return item
