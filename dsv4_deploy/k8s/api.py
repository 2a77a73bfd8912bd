"""The Kubernetes API as plain JSON, with errors for people.

In: a kubeconfig (KUBECONFIG, ~/.kube/config, or a pod's service account) and the name of a context. Out: dictionaries,
as `kubectl get -o json` prints them. The client library does authentication and TLS; its models are not used, so that
a field of a newer cluster is no error. https://github.com/kubernetes-client/python
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from dsv4_deploy.errors import DeployError, refused

Object = dict[str, Any]
# A cluster that takes longer for one answer is down for our purposes.
TIMEOUT_S = 30.0


class UnreachableError(DeployError):
    """The cluster gave no answer, or said that it cannot give one now. Asking again later may help."""


class Api:
    """One cluster. `context` is the kubeconfig's context in use, None inside a pod; `namespace` is that context's."""

    def __init__(self, client: Any, context: str | None, namespace: str) -> None:
        self.client = client
        self.context = context
        self.namespace = namespace

    def get(self, path: str, **query: str) -> Object | None:
        """One object or list, None when there is no such thing. Raises DeployError."""
        body = self._request("GET", path, query)
        return None if body is None else json.loads(body)

    def items(self, path: str, **query: str) -> list[Object]:
        """The objects of a list; empty when the kind is not served. Raises DeployError."""
        found = self.get(path, **query)
        return [] if found is None else list(found["items"])

    def text(self, path: str, **query: str) -> str | None:
        """A body that is no JSON: a log. Raises DeployError."""
        body = self._request("GET", path, query)
        return None if body is None else body.decode(errors="replace")

    def lines(self, path: str, **query: str) -> Iterator[str]:
        """The lines of a log as they come, until the other side ends it. Raises DeployError."""
        response = self._call("GET", path, query, None, None)
        if not 200 <= response.status < 300:
            raise _refusal("GET", path, response.status, response.read())
        rest = b""
        for chunk in response.response.stream(4096, decode_content=True):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace")
        if rest:
            yield rest.decode(errors="replace")

    def allowed(self, verb: str, resource: str, namespace: str, group: str = "") -> bool:
        """Whether this user may do that; `resource` may name a subresource ("pods/log")."""
        name, _, sub = resource.partition("/")
        attributes = {
            "verb": verb,
            "resource": name,
            "group": group,
            "namespace": namespace,
            "subresource": sub,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        body = self._request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", {}, review)
        return bool(json.loads(body or b"{}").get("status", {}).get("allowed"))

    def _request(
        self, method: str, path: str, query: Mapping[str, str], body: Object | None = None
    ) -> bytes | None:
        response = self._call(method, path, query, body, TIMEOUT_S)
        content: bytes = response.read()
        if response.status == 404:
            return None
        if not 200 <= response.status < 300:
            raise _refusal(method, path, response.status, content)
        return content

    def _call(
        self, method: str, path: str, query: Mapping[str, str], body: Object | None, timeout: float | None
    ) -> Any:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        headers = {"Accept": "application/json, */*", "Content-Type": "application/json"}
        request = self.client.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            return self.client.call_api(*request, _request_timeout=timeout)
        except (ApiException, HTTPError, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise UnreachableError(
                f"the cluster {self.client.configuration.host} does not answer",
                why=" ".join(str(reason).split())[:300],
                fix="Check the network, a VPN, and which context is in use: kubectl config current-context",
            ) from error


def connect(context: str | None = None) -> Api:
    """The cluster of a context (None: the current one, or the cluster that this runs in). Raises DeployError."""
    try:
        from kubernetes import config
    except ImportError as error:
        raise DeployError(
            "the Kubernetes client is not installed",
            why=f"It is an extra, because most hosts need none ({error}).",
            fix="pip install 'dsv4-deploy[kubernetes]'",
        ) from error
    # The client reads KUBECONFIG once, when it is imported.
    places = os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        contexts, current = config.list_kube_config_contexts(places)
    except (config.ConfigException, TypeError, OSError, ValueError) as error:
        return _in_cluster(error)
    names = [entry["name"] for entry in contexts]
    if context is not None and context not in names:
        raise refused(
            f"there is no context {context!r} in the kubeconfig",
            why=f"It has: {', '.join(names)}.",
            fix="Name one of them.",
        )
    chosen = next((entry for entry in contexts if entry["name"] == context), current)
    try:
        client = config.new_client_from_config(places, context=chosen["name"])
    except (config.ConfigException, OSError, ValueError) as error:
        raise DeployError(
            f"the context {chosen['name']} cannot be used",
            why=str(error),
            fix="`kubectl get nodes` should work first.",
        ) from error
    return Api(client, chosen["name"], chosen["context"].get("namespace") or "default")


def _in_cluster(no_kubeconfig: Exception) -> Api:
    from kubernetes import client, config

    configuration = client.Configuration()
    try:
        config.load_incluster_config(configuration)
    except config.ConfigException:
        raise DeployError(
            "there is no cluster to talk to",
            why=f"No kubeconfig was found: {' '.join(str(no_kubeconfig).split())[:200]}",
            fix="Set KUBECONFIG, or write ~/.kube/config as your cluster's documentation says.",
        ) from no_kubeconfig
    return Api(client.ApiClient(configuration), None, "default")


def _refusal(method: str, path: str, status: int, content: bytes) -> DeployError:
    try:
        message = str(json.loads(content).get("message", ""))
    except ValueError:
        message = content.decode(errors="replace")[:300]
    if status == 401:
        return DeployError(
            "the cluster does not know who you are",
            why=message or "It answered 401.",
            fix="Log in again; tokens in a kubeconfig expire.",
        )
    if status == 403:
        return DeployError(
            "you are not allowed to do this in the cluster",
            why=message,
            fix="Ask for that right. `dsv4-deploy preflight --target kubernetes` lists all that are missing.",
        )
    if status == 429 or status >= 500:
        return UnreachableError(
            f"the cluster cannot answer {method} {path} now: HTTP status {status}",
            why=message,
            fix="Try again; if it lasts, its control plane is in trouble.",
        )
    return DeployError(
        f"the cluster refused {method} {path} with HTTP status {status}",
        why=message,
        fix="Its own message above says more.",
    )
