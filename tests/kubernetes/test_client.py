"""The client against the real API server, and against a server that fails in chosen ways."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.kubernetes.api import access, client as api, depth
from dlrover.kubernetes.api.client import PODS, ApiError, Client
from dlrover.kubernetes.operator import certificates
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.manifests import CONFIG_MAPS


@contextlib.asynccontextmanager
async def connected(plane: ControlPlane) -> AsyncIterator[Client]:
    client = Client.from_config(str(plane.kubeconfig))
    try:
        yield client
    finally:
        await client.close()


def config_map(namespace: str, name: str, **data: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace, "labels": {"a": "b"}}, "data": data}


def test_objects_are_made_read_changed_and_deleted(
    control_plane: ControlPlane, namespace: str
) -> None:
    async def story() -> None:
        async with connected(control_plane) as client:
            made = await client.create(CONFIG_MAPS, config_map(namespace, "one", key="1"))
            assert made["metadata"]["uid"]
            patched = await client.patch(CONFIG_MAPS, namespace, "one", {"data": {"key": "2"}})
            assert patched["data"] == {"key": "2"}
            with pytest.raises(ApiError) as conflict:
                await client.replace(CONFIG_MAPS, made)
            assert (conflict.value.status, conflict.value.reason) == (409, "Conflict")
            replaced = await client.replace(CONFIG_MAPS, patched | {"data": {"key": "3"}})
            assert (await client.get(CONFIG_MAPS, namespace, "one")) == replaced
            with pytest.raises(ApiError) as exists:
                await client.create(CONFIG_MAPS, config_map(namespace, "one"))
            assert exists.value.reason == "AlreadyExists"
            await client.delete(CONFIG_MAPS, namespace, "one", uid="another")
            assert await client.get(CONFIG_MAPS, namespace, "one") == replaced
            await client.delete(CONFIG_MAPS, namespace, "one", uid=made["metadata"]["uid"])
            await client.delete(CONFIG_MAPS, namespace, "one")
            with pytest.raises(ApiError) as gone:
                await client.get(CONFIG_MAPS, namespace, "one")
            assert gone.value.status == 404

    asyncio.run(story())


def test_a_list_is_whole_however_many_pages_it_has(
    control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "PAGE", 3)

    async def story() -> None:
        async with connected(control_plane) as client:
            names = {f"map-{number}" for number in range(8)}
            for name in names:
                await client.create(CONFIG_MAPS, config_map(namespace, name))
            items, version = await client.list(CONFIG_MAPS, namespace, "a=b")
            assert {item["metadata"]["name"] for item in items} == names
            assert {item["kind"] for item in items} == {"ConfigMap"}
            assert int(version) > 0
            assert (await client.list(CONFIG_MAPS, namespace, "a=c"))[0] == []

    asyncio.run(story())


def test_a_cluster_without_a_definition_says_so(control_plane: ControlPlane) -> None:
    resource = api.Resource("elastic.iml.github.io", "v1alpha1", "marathons", "Marathon")

    async def story() -> None:
        async with Client.from_config(str(control_plane.kubeconfig)) as client:
            with pytest.raises(ApiError, match=r"does not know marathons of .*/v1alpha1: install"):
                await client.list(resource, "default")

    asyncio.run(story())


def test_a_watch_tells_what_happens_and_ends_in_time(
    control_plane: ControlPlane, namespace: str
) -> None:
    async def story() -> None:
        async with connected(control_plane) as client:
            _, version = await client.list(CONFIG_MAPS, namespace, "a=b")
            await client.create(CONFIG_MAPS, config_map(namespace, "one"))
            await client.delete(CONFIG_MAPS, namespace, "one")
            watch = client.watch(CONFIG_MAPS, namespace, version, "a=b", timeout=2)
            seen = [kind async for kind, _ in watch]
            assert seen[:3] == ["BOOKMARK", "ADDED", "DELETED"]
            assert set(seen[3:]) <= {"BOOKMARK"}

    asyncio.run(story())


def test_a_version_that_the_server_forgot_is_410(
    control_plane: ControlPlane, namespace: str
) -> None:
    async def story() -> None:
        async with connected(control_plane) as client:
            _, version = await client.list(CONFIG_MAPS, namespace)
            await client.create(CONFIG_MAPS, config_map(namespace, "one"))
            control_plane.compact()
            control_plane.restart_api_server()
            with pytest.raises(ApiError) as gone:
                async for _ in client.watch(CONFIG_MAPS, namespace, version, timeout=3):
                    pass
            assert gone.value.status == 410

    asyncio.run(story())


def test_a_server_that_another_authority_vouches_for_is_not_trusted(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    plain = json.loads(control_plane.kubeconfig.read_text())
    cluster = plain["clusters"][0]["cluster"]
    del cluster["insecure-skip-tls-verify"]
    good = control_plane.directory / "certificates" / "apiserver.crt"

    async def ask(authority: dict[str, str]) -> None:
        plain["clusters"][0]["cluster"] = cluster | authority
        (tmp_path / "config").write_text(json.dumps(plain))
        client = Client.from_config(str(tmp_path / "config"))
        try:
            await client.list(PODS, "default")
        finally:
            await client.close()

    asyncio.run(ask({"certificate-authority": str(good)}))
    with pytest.raises(InfrastructureError, match="CERTIFICATE_VERIFY_FAILED"):
        asyncio.run(ask({}))


class Server:
    """Answers each request with the next of its answers; ``None``: it closes the connection."""

    def __init__(self, *answers: tuple[int, str] | None) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[float, str, str]] = []

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        where = access.Access(f"http://127.0.0.1:{port}", "default", True, access.Token("secret"))  # type: ignore[arg-type]
        client = Client(where)
        try:
            yield client
        finally:
            await client.close()
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = [line for line in head.lower().splitlines() if line.startswith("content-length")]
        if length:
            await reader.readexactly(int(length[0].partition(":")[2]))
        self.requests.append((time.monotonic(), head.partition(" HTTP")[0], head))
        answer = self.answers.pop(0)
        if answer is not None:
            status, header = answer
            body = json.dumps({"metadata": {"name": "x"}, "message": "No.", "reason": "Because"})
            writer.write(
                f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
                f"{header}\r\n{body}".encode()
            )
            await writer.drain()
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("answer", [(503, ""), (500, ""), (429, ""), None])
def test_what_may_pass_is_tried_again(answer: tuple[int, str] | None) -> None:
    server = Server(answer, answer, (200, ""))

    async def story() -> None:
        async with server.client() as client:
            assert (await client.get(PODS, "n", "x"))["metadata"]["name"] == "x"

    asyncio.run(story())
    assert [request for _, request, _ in server.requests] == ["GET /api/v1/namespaces/n/pods/x"] * 3
    assert "authorization: bearer secret" in server.requests[0][2].lower()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("date", "ahead"),
    [
        ("Tue, 01 Jan 2030 00:00:00 GMT", 1893456000.0 - 1893459600.0),
        ("Tue, 01 Jan 2030 00:59:57 GMT", 0.0),
        ("Tue, 01 Jan 2030 02:00:00 GMT", 3600.0),
        ("no date", 0.0),
        ("Tue, 01 Jan 999999 00:00:00 GMT", 0.0),
    ],
)
def test_the_servers_clock_is_known_from_its_answers(
    date: str, ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = 1893459600.0
    monkeypatch.setattr(api.time, "time", lambda: own)
    server = Server((200, f"Date: {date}\r\n"))

    async def story() -> None:
        async with server.client() as client:
            assert client.server_time() == own
            await client.get(PODS, "n", "x")
            assert client.server_time() == own + ahead

    asyncio.run(story())


@pytest.mark.slow
def test_a_token_that_is_refused_is_read_again() -> None:
    server = Server((401, ""), (200, ""))

    async def story() -> None:
        async with server.client() as client:
            await client.get(PODS, "n", "x")

    asyncio.run(story())


@pytest.mark.slow
def test_credentials_that_are_refused_get_a_sentence() -> None:
    server = Server((401, ""), (401, ""))

    async def story() -> None:
        async with server.client() as client:
            with pytest.raises(
                ApiError, match=r"http://127\.0\.0\.1:\d+ refuses the credentials.*[^.]\.$"
            ):
                await client.get(PODS, "n", "x")

    asyncio.run(story())


@pytest.mark.slow
def test_retry_after_is_kept() -> None:
    server = Server((429, "Retry-After: 1\r\n"), (200, ""))

    async def story() -> None:
        async with server.client() as client:
            await client.create(PODS, {"metadata": {"generateName": "x-", "namespace": "n"}})

    asyncio.run(story())
    first, second = (when for when, _, _ in server.requests)
    assert second - first >= 1.0


@pytest.mark.slow
def test_what_is_refused_is_not_tried_again() -> None:
    server = Server((403, ""))

    async def story() -> None:
        async with server.client() as client:
            with pytest.raises(ApiError, match=r"No\.") as refused:
                await client.delete(PODS, "n", "x")
            assert (refused.value.status, refused.value.reason) == (403, "Because")

    asyncio.run(story())


@pytest.mark.slow
@pytest.mark.parametrize("answer", [(500, ""), None])
def test_an_object_with_a_generated_name_is_not_made_twice(answer: tuple[int, str] | None) -> None:
    server = Server(answer)

    async def story() -> None:
        async with server.client() as client:
            with pytest.raises(InfrastructureError):
                await client.create(PODS, {"metadata": {"generateName": "x-", "namespace": "n"}})

    asyncio.run(story())
    assert len(server.requests) == 1


def write(path: Path, **changes: Any) -> str:
    user = {"token": "t"} | changes.pop("user", {})
    cluster = {"server": "https://example.invalid:1"} | changes.pop("cluster", {})
    content = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "mine"}}],
        "clusters": [{"name": "k", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    } | changes
    path.write_text(json.dumps(content))
    return str(path)


def test_a_kubeconfig_names_server_namespace_and_token(tmp_path: Path) -> None:
    found = access.find_access(write(tmp_path / "config"))
    assert (found.server, found.namespace) == ("https://example.invalid:1", "mine")
    assert found.token.current() == "t"


def test_a_token_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("first\n")
    found = access.find_access(write(tmp_path / "config", user={"tokenFile": "token"}))
    assert found.token.current() is None
    assert found.token.renew() == found.token.current() == "first"
    (tmp_path / "token").write_text("second\n")
    assert found.token.current() == "first"
    assert found.token.renew() == "second"


@pytest.mark.slow
def test_a_credential_plugin_is_asked_for_the_token(tmp_path: Path) -> None:
    status = {"token": "minted", "expirationTimestamp": "2000-01-01T00:00:00Z"}
    plugin = {"command": "echo", "args": [json.dumps({"status": status})], "apiVersion": "v1"}
    found = access.find_access(write(tmp_path / "config", user={"exec": plugin}))
    assert found.token.renew() == "minted"
    assert found.token.current() is None, "it has expired"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"current-context": "other"}, "no context 'other'"),
        ({"users": []}, "no user 'u'"),
        ({"cluster": {"certificate-authority-data": "?"}}, "certificate-authority-data"),
        ({"clusters": [{"name": "k", "cluster": {}}]}, "'server' is missing"),
        ({"user": {"username": "me"}}, "it sets username, which is not supported"),
        ({"cluster": {"proxy-url": "http://p"}}, "it sets proxy-url"),
    ],
)
def test_a_wrong_kubeconfig_gets_a_sentence(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        access.find_access(write(tmp_path / "config", **changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    ["nothing", '{"status": {}}', '{"status": {"token": "t", "expirationTimestamp": "soon"}}'],
)
def test_a_credential_plugin_that_gives_no_token_is_named(tmp_path: Path, answer: str) -> None:
    plugin = {"command": "echo", "args": [answer], "apiVersion": "v1"}
    found = access.find_access(write(tmp_path / "config", user={"exec": plugin}))
    with pytest.raises(InfrastructureError, match="the credential plugin echo gave no token"):
        found.token.renew()


@pytest.mark.slow
def test_a_key_of_another_certificate_is_a_mistake(tmp_path: Path) -> None:
    """OpenSSL's number of this error is that of a stale file handle."""
    pairs = [certificates.make([name]) for name in ("a", "b")]
    user = {
        f"client-{name}-data": base64.b64encode(pair[f"tls.{end}"].encode()).decode()
        for name, end, pair in zip(("certificate", "key"), ("crt", "key"), pairs, strict=True)
    }
    with pytest.raises(ConfigurationError, match=r"cannot be used: .*key values mismatch"):
        access.find_access(write(tmp_path / "config", user=user))


def test_a_kubeconfig_that_is_not_there_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        access.find_access(str(tmp_path / "none"))


def test_the_service_account_of_a_pod_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control_plane: ControlPlane
) -> None:
    certificate = control_plane.directory / "certificates" / "apiserver.crt"
    (tmp_path / "ca.crt").write_bytes(certificate.read_bytes())
    (tmp_path / "namespace").write_text("mine")
    (tmp_path / "token").write_text("t")
    monkeypatch.setattr(access, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    found = access.find_access()
    assert (found.server, found.namespace) == ("https://[::1]:6443", "mine")
    assert base64.b64encode(found.token.renew().encode()) == b"dA=="


def test_what_is_nested_too_deeply_is_cut_and_the_rest_is_kept() -> None:
    nested = '{"a": [' * 1000 + '"]}"' + "]}" * 1000
    text = f'{{"before": "[\\"", "deep": {nested}, "after": [{{}}]}}'.encode()
    found = msgspec.json.decode(depth.cut(text))
    assert (found["before"], found["after"]) == ('["', [{}])
    shallow = b'{"a": [[{"b": "\\\\"}], 2]}'
    assert depth.cut(shallow) == shallow


def test_a_deep_text_that_is_cut_short_takes_no_time() -> None:
    """Its end may be within a text that has many quotes."""
    short = b'"' + b'\\"' * 8000
    before = time.process_time()
    assert depth.cut(short) == short
    assert time.process_time() - before < 0.2
