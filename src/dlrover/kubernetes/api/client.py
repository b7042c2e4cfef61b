"""The Kubernetes API over HTTP: the only module that uses the HTTP library.

Objects cross this boundary as plain dictionaries in the form of their manifests.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import httpcore2
import httpx2
import msgspec

from dlrover._util import backoff, decoding
from dlrover.errors import InfrastructureError
from dlrover.kubernetes.api import depth
from dlrover.kubernetes.api.access import Access, find_access
from dlrover.kubernetes.resources import names
from dlrover.kubernetes.resources.types import Manifest

if TYPE_CHECKING:
    from typing_extensions import Self

CALL_TIMEOUT = 30.0
"""Seconds allowed for one call."""
CONNECT_TIMEOUT = 10.0
"""Seconds before a server that does not accept the connection counts as down."""
ATTEMPTS = 6
"""Attempts at a call before its failure is raised."""
CONFLICTS = 5
"""Attempts at an update that conflicts with other clients' changes."""
RETRY = 0.2, 10.0
"""Seconds before the second attempt, and maximum between two attempts, even if the server asks for more."""
CONFLICT_RETRY = 0.05, 0.05
"""First and maximum seconds before an object is read again after a conflict."""
WATCH_TIMEOUT = 60.0
"""Seconds after which the server ends a watch; bookmarks mark the position."""
STALL_GRACE = 10.0
"""Seconds after `WATCH_TIMEOUT` before a silent open watch counts as stalled."""
LOG_SILENCE = 300.0
"""Seconds without a new line after which a followed log ends, so that a lost connection is noticed."""
PAGE = 500
"""Objects per page of a list."""
CLOCK_NOISE = 5.0
"""Seconds by which an answer's date may differ from this machine's clock that agrees with the server's."""
CONNECTIONS = 64
"""Maximum concurrent connections to the server; each watch holds one."""


FORBIDDEN_GRACE = 30.0
"""Seconds for which what is forbidden is tried again: new rights and accounts, and a server that starts, take time."""


class ApiError(InfrastructureError):
    """An error response from the API server."""

    def __init__(
        self, status: int, reason: str, message: str, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status."""
        self.reason = reason
        """The server's reason: ``NotFound``, ``AlreadyExists``, ``Conflict``, ``Invalid``…"""
        self.message = message
        self.retry_after = retry_after
        """Seconds that the server asks to wait before another attempt; None if unspecified."""

    @property
    def passing(self) -> bool:
        """True if the same call may succeed later."""
        return self.status in (408, 429) or self.status >= 500

    @property
    def retriable(self) -> bool:
        """True if another attempt is worthwhile, possibly only after a new read.

        409: other clients changed the object, or one that admission updates, such as a ResourceQuota. 401:
        the token was just replaced.
        """
        return self.passing or self.status in (401, 409)


class Patience:
    """Which errors one waits out: an API server that has just started forbids for a moment what it allows later."""

    def __init__(self) -> None:
        self._forbidden: float | None = None
        """When the server forbade it first; None if it did not the last time."""

    def outwaits(self, error: InfrastructureError) -> bool:
        """Return whether another attempt is worthwhile after an error."""
        if not isinstance(error, ApiError) or error.status != 403:
            self._forbidden = None
            return not isinstance(error, ApiError) or error.retriable
        now = time.monotonic()
        self._forbidden = now if self._forbidden is None else self._forbidden
        return now - self._forbidden < FORBIDDEN_GRACE


class Resource(NamedTuple):
    """A kind of object and its location in the API."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The API version as in a manifest: ``apps/v1``, ``v1``."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Return the path of one object, or of all; None as ``namespace`` means all namespaces."""
        parts = ["/apis" if self.group else "/api", self.api_version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        parts += [self.plural, name, subresource]
        return "/".join(part for part in parts if part)


PODS = Resource("", "v1", "pods", "Pod")
SERVICES = Resource("", "v1", "services", "Service")
SECRETS = Resource("", "v1", "secrets", "Secret")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
EVENTS = Resource("", "v1", "events", "Event")
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
ELASTIC_JOBS = Resource(names.GROUP, names.VERSION, "elasticjobs", "ElasticJob")
SCALE_PLANS = Resource(names.GROUP, names.VERSION, "scaleplans", "ScalePlan")


class Client:
    """A client of one API server, for use on one event loop.

    It repeats a call after a transient failure (429, 5xx, a lost connection) and observes the server's
    requested delay. A repeated `create` may therefore find the object of its own first attempt:
    ``AlreadyExists`` does not identify the creator. An unreachable server raises `InfrastructureError`; an
    error response raises `ApiError`.
    """

    def __init__(self, access: Access) -> None:
        self.namespace = access.namespace
        """The default namespace."""
        self.on_call: Callable[[str, str], None] = lambda _method, _code: None
        """Callback after each attempt at a call, with its method (including ``WATCH``) and the HTTP status,
        which is empty without a response."""
        self.ahead = 0.0
        """Seconds by which the server's clock is ahead of this machine's."""
        self._access = access
        self._http = httpx2.AsyncClient(
            base_url=access.server,
            verify=access.tls,
            timeout=httpx2.Timeout(CALL_TIMEOUT, connect=CONNECT_TIMEOUT),
            limits=httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=8),
            trust_env=False,
        )

    @classmethod
    def from_config(cls, kubeconfig: str = "") -> Client:
        """Return a client for a kubeconfig, else for the pod's service account or the user's kubeconfig.

        Raises:
            ConfigurationError: there is no access to a server.
        """
        return cls(find_access(kubeconfig))

    def server_time(self) -> float:
        """Return the time by the server's clock, which sets the times of objects, in seconds since 1970."""
        return time.time() + self.ahead

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest:
        """Return one object.

        Raises:
            ApiError: 404 if there is none.
        """
        return await self._call("GET", resource.path(namespace, name))

    async def find(self, resource: Resource, namespace: str | None, name: str) -> Manifest | None:
        """Return one object, or None if there is none."""
        try:
            return await self.get(resource, namespace, name)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self, resource: Resource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> tuple[list[Manifest], str]:
        """Return the objects that match the selectors, and the resource version of that state.

        Objects from this method and from `watch` lack their ``managedFields``, which no caller reads.
        """
        path = resource.path(namespace)
        query = _query(labelSelector=labels, fieldSelector=fields)
        items: list[Manifest] = []
        try:
            page = await self._call("GET", path, query | {"limit": str(PAGE)})
        except ApiError as error:
            if error.status != 404:
                raise
            unknown = f"The cluster does not know {resource.plural} of {resource.api_version}: install their definition."
            raise ApiError(404, error.reason, unknown) from error
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
            page = await self._call("GET", path, query)  # expired pages: list all at once
            items = page.get("items") or []
        for item in items:  # list items lack their type
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
    ) -> AsyncIterator[tuple[str, Manifest]]:
        """Yield the events after ``resource_version``: ``ADDED``, ``MODIFIED``, ``DELETED``, ``BOOKMARK``.

        The first is a bookmark of ``resource_version`` itself: the server has accepted the watch, which may stay silent.
        The watch ends after ``timeout`` seconds. A bookmark contains only a resource version.

        Raises:
            ApiError: 410 if ``resource_version`` is too old: list again.
            InfrastructureError: the connection broke, or stalled without any data.
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
        path = resource.path(namespace)
        async with self._stream("WATCH", resource.plural, path, query, {}, wait) as answer:
            yield "BOOKMARK", {"metadata": {"resourceVersion": resource_version}}
            async for line in answer.aiter_lines():
                if line.strip():
                    yield _event(line)

    async def log(
        self, namespace: str, pod: str, container: str, lines: int
    ) -> AsyncGenerator[bytes, None]:
        """Yield the last ``lines`` lines of a container, and what it adds; end with it, or after `LOG_SILENCE`.

        The first piece is empty: the log is there.

        Raises:
            ApiError: 400 before the container has started; 403 without the right to ``pods/log``; 404 if there is
                no such pod.
            InfrastructureError: the connection broke.
        """
        query = {"container": container, "follow": "true", "tailLines": str(lines)}
        wait = httpx2.Timeout(LOG_SILENCE, connect=CONNECT_TIMEOUT, pool=CONNECT_TIMEOUT)
        path = PODS.path(namespace, pod, "log")
        async with self._stream("LOG", path, path, query, {}, wait) as answer:
            yield b""
            with contextlib.suppress(httpx2.ReadTimeout):
                async for piece in answer.aiter_bytes():
                    yield piece

    @contextlib.asynccontextmanager
    async def upgrade(
        self, path: str, query: Mapping[str, Sequence[str]], headers: Mapping[str, str]
    ) -> AsyncIterator[Any]:
        """Open a connection that speaks another protocol from then on; its stream has ``read`` and ``write``.

        Raises:
            ApiError: the server keeps to HTTP.
            InfrastructureError: the connection broke.
        """
        given = {**headers, "Connection": "Upgrade"}
        async with self._stream("CONNECT", path, path, query, given, None, 101) as answer:
            yield answer.extensions["network_stream"]

    @contextlib.asynccontextmanager
    async def _stream(
        self,
        kind: str,
        what: str,
        path: str,
        query: Mapping[str, Any],
        headers: Mapping[str, str],
        wait: httpx2.Timeout | None,
        wanted: int = 200,
    ) -> AsyncIterator[httpx2.Response]:
        """Open an answer that comes in pieces."""
        given = {**await self._headers(), **headers}
        timeout = wait or self._http.timeout
        with self._failures(kind, what):
            async with self._http.stream(
                "GET", path, params=query, headers=given, timeout=timeout
            ) as answer:
                self.on_call(kind, str(answer.status_code))
                if answer.status_code != wanted:
                    await answer.aread()
                    raise _error(answer)
                yield answer

    async def create(self, resource: Resource, obj: Manifest) -> Manifest:
        """Create an object.

        Raises:
            ApiError: 409 ``AlreadyExists``; 422 ``Invalid``.
        """
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **obj}
        again = bool(obj["metadata"].get("name"))  # else a retry would make a second object
        path = resource.path(obj["metadata"].get("namespace"))
        return await self._call("POST", path, body=body, repeat=again)

    async def ensure(self, resource: Resource, obj: Manifest) -> bool:
        """Create an object; return False if one of its name exists."""
        try:
            await self.create(resource, obj)
        except ApiError as error:
            if error.reason == "AlreadyExists":
                return False
            raise
        return True

    async def replace(self, resource: Resource, obj: Manifest) -> Manifest:
        """Replace an object; if it has a resource version, only if it is unchanged since then.

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
        patch: Manifest,
        subresource: str = "",
    ) -> Manifest:
        """Merge ``patch`` into an object or its subresource (RFC 7386)."""
        path = resource.path(namespace, name, subresource)
        return await self._call("PATCH", path, body=patch)

    async def amend(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        uid: str,
        patch: Manifest,
        subresource: str = "",
        still: Callable[[Manifest], bool] = lambda _: True,
    ) -> Manifest:
        """`patch` the object with this ``uid`` while ``still`` holds of it, never another with the same name.

        The server ignores the uid in a status patch, so the patch includes the version just read.

        Raises:
            ApiError: 404 if the object is gone; 409 if others changed it at each of `CONFLICTS` attempts.
        """
        delays = backoff.delays(*CONFLICT_RETRY)
        for attempt in range(1, CONFLICTS + 1):
            found = await self.get(resource, namespace, name)
            metadata = found["metadata"]
            if metadata["uid"] != uid:
                raise ApiError(404, "NotFound", f"Another {resource.kind} is called {name} now.")
            if not still(found):
                return found
            version = {"metadata": {"resourceVersion": metadata["resourceVersion"]}}
            try:
                return await self.patch(resource, namespace, name, patch | version, subresource)
            except ApiError as error:
                if error.status != 409 or attempt == CONFLICTS:
                    raise
            await asyncio.sleep(next(delays))
        raise AssertionError("the last attempt returns or raises")

    async def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        uid: str = "",
        grace: float | None = None,
    ) -> None:
        """Delete an object if it exists and has any given ``uid``. ``grace``: seconds for a pod to end."""
        options: Manifest = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace is not None:
            options["gracePeriodSeconds"] = int(grace)
        try:
            await self._call("DELETE", resource.path(namespace, name), body=options)
        except ApiError as error:
            if error.status == 404:
                return
            if not (uid and error.status == 409):
                raise
            found = await self.find(resource, namespace, name)
            if found is not None and found["metadata"]["uid"] == uid:
                raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        *,
        repeat: bool = True,
    ) -> Manifest:
        """Make a call, with retries. ``repeat``: retry even if the last attempt may have taken effect."""
        delays, renewed = backoff.delays(*RETRY), False
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
            await asyncio.sleep(next(delays) if pause is None else min(RETRY[1], pause))
        raise AssertionError("the last attempt returns or raises")

    async def _once(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Manifest | None
    ) -> Manifest:
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
            self._compare_clocks(answer.headers.get("Date", ""))
            if answer.status_code >= 400:
                raise _error(answer)
            return _decode(answer.content)

    def _compare_clocks(self, date: str) -> None:
        with contextlib.suppress(ValueError, OverflowError):
            ahead = email.utils.parsedate_to_datetime(date).timestamp() - time.time()
            self.ahead = ahead if abs(ahead) > CLOCK_NOISE else 0.0

    async def _headers(self) -> dict[str, str]:
        token = self._access.token.current()
        if token is None:
            token = await asyncio.to_thread(self._access.token.renew)
        return {"Authorization": f"Bearer {token}"} if token else {}

    @contextlib.contextmanager
    def _failures(self, method: str, what: str) -> Any:
        try:
            yield
        except (
            httpx2.HTTPError,
            httpcore2.NetworkError,  # these two: of an upgraded connection
            httpcore2.TimeoutException,
        ) as error:
            self.on_call(method, "")
            raise InfrastructureError(
                f"The Kubernetes API server {self._access.server} does not answer to {method} {what}: "
                f"{type(error).__name__} {error}".rstrip()
                + "."
            ) from error


def _query(**values: str) -> dict[str, str]:
    return {key: value for key, value in values.items() if value}


def _decode(content: bytes | str) -> Manifest:
    text = content.encode() if isinstance(content, str) else content
    try:
        try:
            return decoding.json(text, Manifest)
        except RecursionError:  # one user's object must not hide those of the others
            return decoding.json(depth.cut(text), Manifest)
    except msgspec.DecodeError as error:
        raise InfrastructureError(
            f"The Kubernetes API server sent invalid JSON: {error}."
        ) from error


def _event(line: str) -> tuple[str, Manifest]:
    event = _decode(line)
    kind, obj = event["type"], event["object"]
    obj.get("metadata", {}).pop("managedFields", None)
    if kind == "ERROR":
        raise ApiError(obj.get("code", 500), obj.get("reason", ""), obj.get("message", ""))
    return kind, obj


def _error(answer: httpx2.Response) -> ApiError:
    try:
        status = decoding.json(answer.content, Manifest)
    except msgspec.DecodeError:
        status = {"message": answer.text[:500].strip()}
    message = status.get("message") or f"The API server answered {answer.status_code}."
    if answer.status_code == 401:
        where = f"{answer.url.scheme}://{answer.url.netloc.decode()}"
        message = f"The Kubernetes API server {where} refuses the credentials, which may have expired: {message.rstrip('.')}."
    after = answer.headers.get("Retry-After", "")
    return ApiError(
        answer.status_code,
        status.get("reason") or answer.reason_phrase,
        message,
        float(after) if after.isdecimal() else None,
    )
