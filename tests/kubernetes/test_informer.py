"""No event is lost: forgotten versions, cut and stalled watches, a server that restarts."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover.errors import InfrastructureError
from dlrover.kubernetes.api import client as api
from dlrover.kubernetes.api.access import Access, Token
from dlrover.kubernetes.api.client import ApiError, Client
from dlrover.kubernetes.api.informer import BLIND, RETRY, Informer
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.manifests import CONFIG_MAPS
from tests.kubernetes.memory import stop, until
from tests.support.proxy import Proxy


class Followed:
    """An informer behind a proxy, beside a client that has its own way to the server."""

    def __init__(self, informer: Informer, writer: Client, proxy: Proxy, keys: list[str]) -> None:
        self.informer = informer
        self.writer = writer
        self.proxy = proxy
        self.keys = keys

    async def until(self, condition: Callable[[], bool], timeout: float = 40.0) -> None:
        late = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < late, self.data()
            await asyncio.sleep(0.05)

    def data(self) -> dict[str, Any]:
        cache = self.informer.cache
        return {key.partition("/")[2]: obj["data"]["v"] for key, obj in cache.items()}


@contextlib.asynccontextmanager
async def followed(plane: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[Followed]:
    proxy = Proxy(plane.port)
    through = Client.from_config(str(plane.write_kubeconfig(tmp_path / "proxied", proxy.port)))
    writer = Client.from_config(str(plane.kubeconfig))
    keys: list[str] = []
    informer = Informer(through, CONFIG_MAPS, namespace, "a=b", keys.append, watch_timeout=5)
    running = asyncio.create_task(informer.run())
    try:
        await asyncio.wait_for(informer.synced.wait(), 20)
        yield Followed(informer, writer, proxy, keys)
        assert not running.done()
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await through.close()
        await writer.close()
        proxy.close()


async def write(client: Client, namespace: str, name: str, value: str) -> None:
    labels = {"a": "b"}
    obj = {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "data": {"v": value},
    }
    await client.create(CONFIG_MAPS, obj)


async def change_everything(client: Client, namespace: str) -> None:
    """What a follower must not miss: one object comes, one changes, one goes, one comes and goes."""
    await write(client, namespace, "new", "1")
    await client.patch(CONFIG_MAPS, namespace, "changing", {"data": {"v": "2"}})
    await client.delete(CONFIG_MAPS, namespace, "leaving")


async def prepare(one: Followed, namespace: str) -> None:
    await write(one.writer, namespace, "changing", "1")
    await write(one.writer, namespace, "leaving", "1")
    await one.until(lambda: one.data() == {"changing": "1", "leaving": "1"})
    one.keys.clear()


AFTER = {"new": "1", "changing": "2"}


def test_changes_reach_the_cache(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async def story() -> None:
        async with followed(control_plane, namespace, tmp_path) as one:
            await prepare(one, namespace)
            await change_everything(one.writer, namespace)
            await one.until(lambda: one.data() == AFTER)
            assert one.keys == [f"{namespace}/{name}" for name in ("new", "changing", "leaving")]

    asyncio.run(story())


def test_a_label_that_no_longer_fits_is_an_object_that_went(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async def story() -> None:
        async with followed(control_plane, namespace, tmp_path) as one:
            await prepare(one, namespace)
            patch = {"metadata": {"labels": {"a": "c"}}}
            await one.writer.patch(CONFIG_MAPS, namespace, "leaving", patch)
            await one.until(lambda: one.data() == {"changing": "1"})

    asyncio.run(story())


def test_nothing_is_lost_when_the_watch_is_cut(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async def story() -> None:
        async with followed(control_plane, namespace, tmp_path) as one:
            await prepare(one, namespace)
            one.proxy.cut()
            await change_everything(one.writer, namespace)
            await one.until(lambda: one.data() == AFTER)
            assert set(one.keys) == {f"{namespace}/{n}" for n in ("new", "changing", "leaving")}

    asyncio.run(story())


def test_nothing_is_lost_when_the_watch_stalls(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "STALL_GRACE", 1.0)

    async def story() -> None:
        async with followed(control_plane, namespace, tmp_path) as one:
            await prepare(one, namespace)
            one.proxy.stall()
            await change_everything(one.writer, namespace)
            await asyncio.sleep(0.5)
            assert one.data() != AFTER, "the proxy holds it back"
            await one.until(lambda: one.data() == AFTER)

    asyncio.run(story())


def test_nothing_is_lost_when_the_server_forgets_and_restarts(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async def story() -> None:
        async with followed(control_plane, namespace, tmp_path) as one:
            await prepare(one, namespace)
            one.proxy.stall()  # the informer does not hear of the changes before the restart
            await change_everything(one.writer, namespace)
            control_plane.compact()
            await asyncio.to_thread(control_plane.restart_api_server)
            one.proxy.cut()
            await one.until(lambda: one.data() == AFTER)
            assert f"{namespace}/leaving" in one.keys

    asyncio.run(story())


def test_everything_is_reported_again_now_and_then(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async def story() -> None:
        async with followed(control_plane, namespace, tmp_path) as one:
            await prepare(one, namespace)
            one.informer._resync = 1.0
            await one.until(lambda: one.keys.count(f"{namespace}/changing") >= 2)

    asyncio.run(story())


def test_a_server_that_is_back_and_forgot_the_version_is_listed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long the wait has become while the server was away."""
    away = [InfrastructureError("away")] * 8
    watched = iter([*away, ApiError(410, "Expired", "too old resource version"), *away])
    pauses: list[float] = []

    class Server:
        lists = 0

        async def list(self, *_: object) -> tuple[list[dict[str, Any]], str]:
            self.lists += 1
            return [], "1"

        async def watch(self, *_: object, **__: object) -> AsyncIterator[Any]:
            if len(pauses) == 9:
                raise asyncio.CancelledError
            raise next(watched)
            yield

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("dlrover.kubernetes.api.informer.asyncio.sleep", sleep)
    server = Server()
    informer = Informer(server, CONFIG_MAPS, "default", "", print)  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(informer.run())
    assert pauses[7] > 10 * RETRY[0]
    assert pauses[8] < 2 * RETRY[0]
    assert server.lists == 2


async def refused() -> AsyncIterator[Any]:
    raise ApiError(403, "Forbidden", "cannot watch")
    yield


async def ended() -> AsyncIterator[Any]:
    yield "BOOKMARK", {"metadata": {"resourceVersion": "1"}}


async def broken() -> AsyncIterator[Any]:
    yield "BOOKMARK", {"metadata": {"resourceVersion": "1"}}
    raise InfrastructureError("broken")


@pytest.mark.parametrize("watch", [refused, ended, broken])
def test_watches_that_end_at_once_come_ever_later(
    monkeypatch: pytest.MonkeyPatch, watch: Callable[[], AsyncIterator[Any]]
) -> None:
    """Without the right to watch, each attempt lists everything; a proxy may cut what the server accepts."""
    pauses: list[float] = []

    class Server:
        async def list(self, *_: object) -> tuple[list[dict[str, Any]], str]:
            return [], "1"

        def watch(self, *_: object, **__: object) -> AsyncIterator[Any]:
            return watch()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 10:
            raise asyncio.CancelledError

    monkeypatch.setattr("dlrover.kubernetes.api.informer.asyncio.sleep", sleep)
    informer = Informer(Server(), CONFIG_MAPS, "default", "", print)  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(informer.run())
    assert pauses[-1] > RETRY[1] / 2


def test_objects_that_cannot_be_seen_any_more_are_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The right to see them is not there yet, and is withdrawn while they are watched."""
    now, allowed, refused = 1000.0, False, 0

    class Server:
        async def list(self, *_: object) -> tuple[list[dict[str, Any]], str]:
            nonlocal refused
            await asyncio.sleep(0)
            if not allowed:
                refused += 1
                raise ApiError(403, "Forbidden", "cannot list")
            return [], "1"

        async def watch(self, *_: object, **__: object) -> AsyncIterator[Any]:
            while allowed:
                await asyncio.sleep(0.001)
            raise ApiError(403, "Forbidden", "cannot watch")
            yield

    async def story() -> None:
        nonlocal now, allowed
        informer = Informer(Server(), CONFIG_MAPS, "default", "", print)  # type: ignore[arg-type]
        running = asyncio.create_task(informer.run())
        await until(lambda: refused)
        await until(
            lambda: informer.obstacle == "configmaps in default are not listed yet: cannot list"
        )
        allowed = True
        await until(informer.synced.is_set)
        before, allowed = refused, False
        await until(lambda: refused > before + 1)
        assert informer.obstacle == ""
        now += BLIND + 1.0
        assert informer.obstacle == "configmaps in default are unseen for 121 s: cannot list"
        allowed = True
        await until(lambda: informer.obstacle == "")
        await stop(running)

    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("dlrover.kubernetes.api.informer.time", clock)
    monkeypatch.setattr("dlrover.kubernetes.api.informer.RETRY", (0.001, 0.001))
    asyncio.run(story())


def test_a_silent_watch_that_a_proxy_cuts_is_an_answer_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, watches, pauses, pause = 1000.0, 0, [], asyncio.sleep

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal now, watches
        asked = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n")
        if b"watch=true" in asked:
            writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
            watches, now = watches + 1, now + 50.0
        else:
            writer.write(b'\r\n{"metadata": {"resourceVersion": "1"}, "items": []}')
        writer.close()
        await writer.wait_closed()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await pause(0.001)

    async def story() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        access = Access(
            f"http://127.0.0.1:{port}", "default", ssl.create_default_context(), Token("")
        )
        client = Client(access)
        informer = Informer(client, CONFIG_MAPS, "default", "", print)
        running = asyncio.create_task(informer.run())
        await until(lambda: watches == 8)
        assert informer.obstacle == ""
        assert max(pauses) < 2 * RETRY[0]
        await stop(running)
        await client.close()
        server.close()

    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("dlrover.kubernetes.api.informer.time", clock)
    monkeypatch.setattr("dlrover.kubernetes.api.informer.asyncio.sleep", sleep)
    asyncio.run(story())
