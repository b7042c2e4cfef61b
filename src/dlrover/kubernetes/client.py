"""The Kubernetes API over HTTP: the one module that knows the HTTP library.

Objects cross this boundary as plain dictionaries, as their manifests are written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

import httpx2
import msgspec

from dlrover.errors import InfrastructureError
from dlrover.kubernetes.access import Access, find_access

logger = logging.getLogger(__name__)

Object = dict[str, Any]
"""A Kubernetes object."""

CALL_TIMEOUT = 30.0
"""Seconds that one call may take."""
CONNECT_TIMEOUT = 10.0
"""Seconds until a server that does not take the connection counts as away."""
ATTEMPTS = 6
"""How often a call is made until its failure is the caller's."""
CONFLICTS = 5
"""How often an object is read again that others changed in the meantime."""
FIRST_WAIT = 0.2
"""Seconds before the second attempt; each wait is about twice the last one."""
CONFLICT_WAIT = 0.05
"""Seconds before an object is read again that others changed."""
LONGEST_WAIT = 10.0
"""Seconds between two attempts, at most, whatever the server asks for."""
WATCH_TIMEOUT = 60.0
"""Seconds after which the server ends a watch, with a bookmark of where it was."""
STALL_GRACE = 10.0
"""Seconds beyond that after which a watch that neither speaks nor ends counts as stalled."""
PAGE = 500
"""Objects in one page of a list."""
CONNECTIONS = 64
"""Connections to the server at once; watches hold one each."""


class ApiError(InfrastructureError):
    """The API server answered with an error."""

    def __init__(
        self, status: int, reason: str, message: str, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status."""
        self.reason = reason
        """The server's word for it: ``NotFound``, ``AlreadyExists``, ``Conflict``, ``Invalid``…"""
        self.message = message
        self.retry_after = retry_after
        """Seconds that the server asks to wait before another attempt; None: it does not say."""

    @property
    def passing(self) -> bool:
        """Whether the same call may well succeed later."""
        return self.status in (408, 429) or self.status >= 500

    @property
    def retriable(self) -> bool:
        """Whether another attempt is worthwhile, if only after a new look.

        409: others changed the object, or what admission writes, as a ResourceQuota; 401: the token was just exchanged.
        """
        return self.passing or self.status in (401, 409)


class Resource(NamedTuple):
    """A kind of object, and where the API has it."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """As in a manifest: ``apps/v1``, ``v1``."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """The path of one object, or of all of them; of all namespaces if that is None."""
        parts = ["/apis" if self.group else "/api", self.api_version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        parts += [self.plural, name, subresource]
        return "/".join(part for part in parts if part)


PODS = Resource("", "v1", "pods", "Pod")
SERVICES = Resource("", "v1", "services", "Service")
SECRETS = Resource("", "v1", "secrets", "Secret")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
EVENTS = Resource("", "v1", "events", "Event")
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")


class Client:
    """Calls to one API server, on one event loop.

    A call whose failure may pass (429, 5xx, a lost connection) is made again, after the time that the
    server asks for. `create` may so find the object of its own first attempt: ``AlreadyExists`` does not
    say who made it. A server that is away raises `InfrastructureError`, its error answers `ApiError`.
    """

    def __init__(self, access: Access) -> None:
        self.namespace = access.namespace
        """The one that is meant where none is named."""
        self.on_call: Callable[[str, str], None] = lambda _method, _code: None
        """Called after each attempt of a call with its method (``WATCH`` is one) and the HTTP status;
        the latter is empty if no answer came."""
        self._access = access
        self._http = httpx2.AsyncClient(
            base_url=access.server,
            verify=access.tls,
            timeout=httpx2.Timeout(CALL_TIMEOUT, connect=CONNECT_TIMEOUT),
            limits=httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=8),
            trust_env=False,
        )

    @classmethod
    def from_config(cls, kubeconfig: str | None = None) -> Client:
        """A client by a kubeconfig; without one, by the pod's service account or the user's file.

        Raises:
            ConfigurationError: there is no access to a server.
        """
        return cls(find_access(kubeconfig))

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """One object.

        Raises:
            ApiError: 404 if there is none.
        """
        return await self._call("GET", resource.path(namespace, name))

    async def list(
        self, resource: Resource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> tuple[list[Object], str]:
        """The objects that the selectors take, and the resource version of that state.

        Here and in `watch` they come without their ``managedFields``, which nobody here reads.
        """
        path = resource.path(namespace)
        query = _query(labelSelector=labels, fieldSelector=fields)
        items: list[Object] = []
        page = await self._call("GET", path, query | {"limit": str(PAGE)})
        items += page.get("items") or ()
        try:
            while following := page["metadata"].get("continue"):
                page = await self._call(
                    "GET", path, query | {"limit": str(PAGE), "continue": following}
                )
                items += page.get("items") or ()
        except ApiError as error:
            if error.status != 410:
                raise
            page = await self._call("GET", path, query)  # the pages' state is gone: all at once
            items = page.get("items") or []
        for item in items:  # the items of a list lack them
            item["metadata"].pop("managedFields", None)
            item.setdefault("apiVersion", resource.api_version)
            item.setdefault("kind", resource.kind)
        return items, page["metadata"]["resourceVersion"]

    async def watch(
        self,
        resource: Resource,
        namespace: str | None,
        resource_version: str,
        labels: str = "",
        fields: str = "",
        timeout: float = WATCH_TIMEOUT,
    ) -> AsyncIterator[tuple[str, Object]]:
        """What happens after ``resource_version``: ``ADDED``, ``MODIFIED``, ``DELETED``, ``BOOKMARK``.

        Ends after ``timeout`` seconds. A bookmark has nothing but a resource version.

        Raises:
            ApiError: 410 if the server does not go back that far: list again.
            InfrastructureError: the connection is cut, or nothing comes in time: it is stalled.
        """
        query = _query(
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=resource_version,
            timeoutSeconds=str(max(1, round(timeout))),
            labelSelector=labels,
            fieldSelector=fields,
        )
        wait = httpx2.Timeout(timeout + STALL_GRACE, connect=CONNECT_TIMEOUT, pool=CONNECT_TIMEOUT)
        headers = await self._headers()
        path = resource.path(namespace)
        with self._failures("WATCH", resource.plural):
            async with self._http.stream(
                "GET", path, params=query, headers=headers, timeout=wait
            ) as answer:
                self.on_call("WATCH", str(answer.status_code))
                if answer.status_code >= 400:
                    await answer.aread()
                    raise _error(answer)
                async for line in answer.aiter_lines():
                    if line.strip():
                        yield _event(line)

    async def create(self, resource: Resource, obj: Object) -> Object:
        """Make an object.

        Raises:
            ApiError: 409 ``AlreadyExists``; 422 ``Invalid``.
        """
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **obj}
        again = bool(obj["metadata"].get("name"))  # a generated name would be another object
        path = resource.path(obj["metadata"].get("namespace"))
        return await self._call("POST", path, body=body, repeat=again)

    async def replace(self, resource: Resource, obj: Object) -> Object:
        """Write a whole object; with its resource version, only if nobody else wrote it meanwhile.

        Raises:
            ApiError: 409 ``Conflict``: read it again.
        """
        metadata = obj["metadata"]
        path = resource.path(metadata.get("namespace"), metadata["name"])
        return await self._call("PUT", path, body=obj)

    async def patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        patch: Object,
        subresource: str = "",
    ) -> Object:
        """Merge ``patch`` into an object or its subresource (RFC 7386)."""
        path = resource.path(namespace, name, subresource)
        return await self._call("PATCH", path, body=patch)

    async def amend(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        uid: str,
        patch: Object,
        subresource: str = "",
    ) -> Object:
        """`patch` the object of this ``uid``, never another one of its name.

        The server ignores the uid in the patch of a status; so the patch has the version that was read.

        Raises:
            ApiError: 404 if the object is gone; 409 if others changed it at each of `CONFLICTS` attempts.
        """
        for attempt in range(1, CONFLICTS + 1):
            metadata = (await self.get(resource, namespace, name))["metadata"]
            if metadata["uid"] != uid:
                raise ApiError(404, "NotFound", f"Another {resource.kind} is called {name} now.")
            version = {"metadata": {"resourceVersion": metadata["resourceVersion"]}}
            try:
                return await self.patch(resource, namespace, name, patch | version, subresource)
            except ApiError as error:
                if error.status != 409 or attempt == CONFLICTS:
                    raise
            await asyncio.sleep(jitter(CONFLICT_WAIT))
        raise AssertionError("the last attempt returns or raises")

    async def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        uid: str = "",
        grace: float | None = None,
    ) -> None:
        """Delete an object, if there is one; only that of ``uid``. ``grace``: seconds for a pod to end."""
        options: Object = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace is not None:
            options["gracePeriodSeconds"] = int(grace)
        try:
            await self._call("DELETE", resource.path(namespace, name), body=options)
        except ApiError as error:
            if error.status == 404:
                return
            if not (uid and error.status == 409) or await self._has(resource, namespace, name, uid):
                raise

    async def _has(self, resource: Resource, namespace: str | None, name: str, uid: str) -> bool:
        """Whether there is the object of this uid."""
        try:
            return bool((await self.get(resource, namespace, name))["metadata"]["uid"] == uid)
        except ApiError as error:
            if error.status == 404:
                return False
            raise

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        *,
        repeat: bool = True,
    ) -> Object:
        """One call, as often as it takes; ``repeat``: also if the last one may have been carried out."""
        wait, renewed = FIRST_WAIT, False
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._once(method, path, query, body)
            except ApiError as error:
                if error.status == 401 and not renewed:
                    renewed = True
                    await asyncio.to_thread(self._access.token.renew)
                    continue
                refused = error.status == 429
                if not error.passing or not (repeat or refused) or attempt == ATTEMPTS:
                    raise
                pause = error.retry_after
            except InfrastructureError as error:
                unsent = isinstance(error.__cause__, httpx2.ConnectError | httpx2.ConnectTimeout)
                if not (repeat or unsent) or attempt == ATTEMPTS:
                    raise
                pause = None
            await asyncio.sleep(min(LONGEST_WAIT, jitter(wait) if pause is None else pause))
            wait *= 2
        raise AssertionError("the last attempt returns or raises")

    async def _once(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Object | None
    ) -> Object:
        headers = await self._headers()
        content = None
        if body is not None:
            kind = "merge-patch+json" if method == "PATCH" else "json"
            headers["Content-Type"] = f"application/{kind}"
            content = msgspec.json.encode(body)
        with self._failures(method, path):
            answer = await self._http.request(
                method, path, params=query, headers=headers, content=content
            )
            self.on_call(method, str(answer.status_code))
            if answer.status_code >= 400:
                raise _error(answer)
            return _decode(answer.content)

    async def _headers(self) -> dict[str, str]:
        token = self._access.token.current()
        if token is None:
            token = await asyncio.to_thread(self._access.token.renew)
        return {"Authorization": f"Bearer {token}"} if token else {}

    @contextlib.contextmanager
    def _failures(self, method: str, what: str) -> Any:
        try:
            yield
        except httpx2.HTTPError as error:
            self.on_call(method, "")
            raise InfrastructureError(
                f"The Kubernetes API server {self._access.server} does not answer to {method} {what}: "
                f"{type(error).__name__} {error}".rstrip()
                + "."
            ) from error


def jitter(seconds: float) -> float:
    """A time around ``seconds``, so that those who failed together do not come back together."""
    return seconds * random.uniform(0.75, 1.25)  # noqa: S311


def _query(**values: str) -> dict[str, str]:
    return {key: value for key, value in values.items() if value}


def _decode(content: bytes | str) -> Object:
    try:
        return msgspec.json.decode(content, type=Object)
    except msgspec.DecodeError as error:
        raise InfrastructureError(
            f"The Kubernetes API server sent what is not JSON: {error}."
        ) from error


def _event(line: str) -> tuple[str, Object]:
    event = _decode(line)
    kind, obj = event["type"], event["object"]
    obj.get("metadata", {}).pop("managedFields", None)
    if kind == "ERROR":
        raise ApiError(obj.get("code", 500), obj.get("reason", ""), obj.get("message", ""))
    return kind, obj


def _error(answer: httpx2.Response) -> ApiError:
    try:
        status = msgspec.json.decode(answer.content, type=Object)
    except msgspec.DecodeError:
        status = {"message": answer.text[:500].strip()}
    message = status.get("message") or f"The API server answered {answer.status_code}."
    after = answer.headers.get("Retry-After", "")
    return ApiError(
        answer.status_code,
        status.get("reason") or answer.reason_phrase,
        message,
        float(after) if after.isdecimal() else None,
    )
