"""An API server in memory behind the client's own methods, for what may happen between two of its calls."""

from __future__ import annotations

import asyncio
import copy
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from dlrover.kubernetes.api.client import ApiError, Client, Resource
from dlrover.kubernetes.resources import times
from dlrover.kubernetes.resources.types import Manifest
from tests.kubernetes.world import START, merge


class MemoryServer(Client):
    """Objects with uids and resource versions; a patch with another version than the object's is a conflict.

    As the real server, it ignores the uid in a patch of a status.
    """

    def __init__(self) -> None:
        self.namespace = "default"
        self.now = START
        self.ahead = 0.0
        self.objects: dict[str, Manifest] = {}
        self.calls: list[tuple[str, str]] = []
        """The method and the path of each call."""
        self.before: Callable[[str, str], None] = lambda _method, _path: None
        """Called before each call is carried out: what others do meanwhile. It may raise `ApiError`."""
        self.silent = False
        """Watches say nothing yet of what happens."""
        self._log: list[tuple[str, str, Manifest]] = []
        self._news = asyncio.Event()

    # ---- for tests

    def put(self, resource: Resource, manifest: Manifest) -> Manifest:
        """Make an object, whoever asks for it."""
        return self._post(resource.path("default"), manifest)

    def remove(self, resource: Resource, name: str) -> None:
        """Delete an object, whoever asks for it."""
        self._delete(resource.path("default", name), {})

    def there(self, resource: Resource, name: str) -> Manifest:
        """An object as it is now."""
        return self.objects[resource.path("default", name)]

    def change(self, resource: Resource, name: str, **content: Any) -> None:
        """Merge something into an object, whoever asks for it."""
        path = resource.path("default", name)
        self._set(path, merge(self.objects[path], content), "MODIFIED")

    def speak(self) -> None:
        """Watches tell what has happened."""
        self.silent = False
        self._news.set()

    # ---- the client's own

    async def list(
        self, resource: Resource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> tuple[list[Manifest], str]:
        under = f"{resource.path(namespace)}/"
        found = [one for path, one in self.objects.items() if path.startswith(under)]
        return copy.deepcopy([one for one in found if _chosen(one, labels, fields)]), self._version

    async def watch(
        self,
        resource: Resource,
        namespace: str | None,
        resource_version: str,
        labels: str = "",
        fields: str = "",
        timeout: float = 0.0,
    ) -> AsyncIterator[tuple[str, Manifest]]:
        seen, last = 0, int(resource_version)
        known: set[str] = set()
        yield "BOOKMARK", {"metadata": {"resourceVersion": resource_version}}
        while True:
            while seen < len(self._log) and not (self.silent and seen >= last):
                kind, path, obj = self._log[seen]
                seen += 1
                if not path.startswith(f"{resource.path(namespace)}/"):
                    continue
                before = path in known
                chosen = kind != "DELETED" and _chosen(obj, labels, fields)
                (known.add if chosen else known.discard)(path)
                if seen > last and (
                    before or chosen
                ):  # one that is chosen no more is as if deleted
                    yield kind if chosen else "DELETED", copy.deepcopy(obj)
            if self._news.is_set():
                self._news = asyncio.Event()  # one for all watches, or only the last one would wake
            await self._news.wait()

    async def close(self) -> None:
        """Nothing is open."""

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        *,
        repeat: bool = True,
    ) -> Manifest:
        await asyncio.sleep(0)  # others work meanwhile
        self.calls.append((method, path))
        self.before(method, path)
        act = {
            "GET": self._get,
            "POST": self._post,
            "PUT": self._patch,  # of objects that lose no field
            "PATCH": self._patch,
            "DELETE": self._delete,
        }
        return copy.deepcopy(act[method](path, body or {}))

    def _get(self, path: str, _body: Manifest) -> Manifest:
        if path not in self.objects:
            raise ApiError(404, "NotFound", f"{path} is not found")
        return self.objects[path]

    def _post(self, under: str, body: Manifest) -> Manifest:
        number = len(self._log)
        metadata = {"namespace": "default", **body["metadata"], "uid": f"{number:08}-uid"}
        metadata.setdefault("name", f"{metadata.get('generateName', '')}{number}")
        metadata["creationTimestamp"] = times.written(self.now)
        path = f"{under}/{metadata['name']}"
        if path in self.objects:
            raise ApiError(409, "AlreadyExists", f"{path} exists")
        return self._set(path, {**copy.deepcopy(body), "metadata": metadata}, "ADDED")

    def _patch(self, path: str, body: Manifest) -> Manifest:
        of_status, of_scale = path.endswith("/status"), path.endswith("/scale")
        path = path.removesuffix("/status").removesuffix("/scale")
        before = self._get(path, body)
        version = (body.get("metadata") or {}).get("resourceVersion")
        if version not in (None, before["metadata"]["resourceVersion"]):
            raise ApiError(409, "Conflict", "the object has been modified")
        if of_status:
            body = {"status": body["status"]}
        elif of_scale:
            body = {"spec": {"replicaSpecs": {"worker": body["spec"]}}}
        return self._set(path, merge(before, body), "MODIFIED")

    def _delete(self, path: str, body: Manifest) -> Manifest:
        found = self._get(path, body)
        uid = (body.get("preconditions") or {}).get("uid")
        if uid not in (None, found["metadata"]["uid"]):
            raise ApiError(409, "Conflict", "Precondition failed: UID in precondition")
        return self._set(path, found, "DELETED")

    def _set(self, path: str, obj: Manifest, kind: str) -> Manifest:
        made = {**obj, "metadata": {**obj["metadata"], "resourceVersion": f"{len(self._log) + 1}"}}
        self._log.append((kind, path, made))
        self.objects[path] = made
        if kind == "DELETED":
            del self.objects[path]
        if not self.silent:
            self._news.set()
        return made

    @property
    def _version(self) -> str:
        return str(len(self._log))


def _chosen(obj: Manifest, labels: str, fields: str) -> bool:
    """Whether selectors take an object."""
    metadata = obj["metadata"]
    given = metadata.get("labels") or {}
    for label in filter(None, labels.split(",")):
        key, equals, value = label.partition("=")
        if key not in given or (equals and given[key] != value):
            return False
    for field in filter(None, fields.split(",")):
        path, _, value = field.partition("=")
        if functools.reduce(lambda at, key: at[key], path.split("."), obj) != value:
            return False
    return True


async def until(condition: Callable[[], Any]) -> None:
    """Let the others work until a condition holds."""
    late = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < late, "it does not become so"
        await asyncio.sleep(0.001)


async def stop(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end. Before Python 3.12 `asyncio.wait_for` may lose a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.01)
