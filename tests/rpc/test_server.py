"""Server and client over real sockets: who is served, what is refused, and how long anything takes."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError, ProtocolError
from dlrover.rpc import messages, wire
from dlrover.rpc.client import MasterClient
from dlrover.rpc.server import Server
from dlrover.spec.jobdir import TlsFiles
from dlrover.spec.outcome import Outcome

TOKEN = "right"
DISMISS = messages.Dismiss(Outcome(exit_code=0, reason="done"))


class Ask(msgspec.Struct, frozen=True):
    """A request that may wait, and may be large."""

    text: str = ""
    wait: float = 0.0


class Answer(msgspec.Struct, frozen=True):
    value: bytes


async def ask(client: MasterClient, request: Ask) -> bytes:
    reply: Answer = await client._call("Ask", request, Answer, request.wait)
    return reply.value


class Service:
    """Methods with the master's names, and what they were called with."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.hold = asyncio.Event()
        self.error: DLRoverError | None = None
        self.value = b"value"

    def register(self, server: Server) -> None:
        server.unary("Status", messages.StatusRequest, self.stop)
        server.unary("Stop", messages.StopRequest, self.stop)
        server.unary("Ask", Ask, self.ask)
        server.server_stream("Watch", messages.WatchRequest, self.watch)
        server.stream("Attend", messages.AgentMessage, self.attend)

    async def stop(self, request: msgspec.Struct) -> messages.Done:
        self.calls.append(request)
        if self.error is not None:
            raise self.error
        return messages.Done()

    async def ask(self, request: Ask) -> Answer:
        self.calls.append(request)
        await self.hold.wait()
        return Answer(self.value)

    async def watch(self, request: messages.WatchRequest) -> AsyncIterator[messages.Done]:
        self.calls.append(request)
        yield messages.Done()

    async def attend(self, incoming: AsyncIterator[Any]) -> AsyncIterator[messages.MasterMessage]:
        async for message in incoming:
            self.calls.append(message)
            if isinstance(message, messages.Succeeded):
                return
            yield DISMISS


@contextlib.asynccontextmanager
async def serving(
    tls: TlsFiles | None = None, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[tuple[Service, str]]:
    """A server in this process: its service, and its address."""
    service = Service()
    server = Server(TOKEN, tls)
    service.register(server)
    port = await server.start(host, port)
    try:
        yield service, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        service.hold.set()
        await server.stop(0.0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20.0))


async def says(*said: messages.AgentMessage) -> AsyncIterator[messages.AgentMessage]:
    for message in said:
        yield message
    await asyncio.Event().wait()


async def raw(address: str, method: str, data: bytes, token: str | None = TOKEN) -> tuple[str, str]:
    """Status and details of a unary call without our client."""
    metadata = () if token is None else ((wire.TOKEN_KEY, token),)
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(method)(data, metadata=metadata)
        return (await call.code()).name, await call.details()


# ---- who is served


@pytest.mark.parametrize("token", [None, "", "wrong", "righ", "right2", "RIGHT"])
@pytest.mark.parametrize("method", ["Stop", "Ask", "Watch", "Attend"])
def test_nothing_is_served_without_the_token(method: str, token: str | None) -> None:
    async def test() -> None:
        async with serving() as (service, address):
            data = wire.encode(messages.StopRequest("r", 1))
            code, details = await raw(address, f"/{wire.SERVICE}/{method}", data, token)
            assert code == "UNAUTHENTICATED"
            assert details == "The token is missing or is not this job's."
            assert not service.calls

    run(test)


def test_a_client_with_another_token_is_told_so_by_every_method() -> None:
    async def test() -> None:
        async with serving() as (service, address), MasterClient(address, "wrong") as client:
            for attempt in (
                client.status(),
                client.stop("r", 1),
                ask(client, Ask()),
                anext(client.watch()),
                anext(client.attend(says(messages.Hello("uid")))),
            ):
                with pytest.raises(ConfigurationError, match="refused the connection: The token"):
                    await attempt
            assert not service.calls

    run(test)


def test_every_kind_of_method_works() -> None:
    async def test() -> None:
        async with serving() as (service, address), MasterClient(address, TOKEN) as client:
            service.hold.set()
            await client.stop("r", 1)
            assert await ask(client, Ask(wait=1.0)) == b"value"
            stream = client.attend(says(messages.Hello("uid"), messages.Heartbeat(1, 2)))
            assert [await anext(stream), await anext(stream)] == [DISMISS, DISMISS]
            await stream.aclose()
            assert service.calls == [
                messages.StopRequest("r", 1),
                Ask(wait=1.0),
                messages.Hello("uid"),
                messages.Heartbeat(1, 2),
            ]

    run(test)


# ---- what is refused


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80",
        msgspec.msgpack.encode({"reason": 1, "exit_code": 1}),
    ],
)
def test_an_unreadable_request_is_refused_in_one_sentence(data: bytes) -> None:
    async def test() -> None:
        async with serving() as (service, address):
            code, details = await raw(address, f"/{wire.SERVICE}/Stop", data)
            assert code == "INVALID_ARGUMENT"
            assert details.startswith("A message could not be read: ")
            assert details.endswith(".")
            assert "\n" not in details
            assert not service.calls

    run(test)


def test_an_unknown_method_is_refused() -> None:
    async def test() -> None:
        async with serving() as (_, address), MasterClient(address, TOKEN) as client:
            with pytest.raises(ProtocolError, match="did not understand a message"):
                await client._call("Dance", messages.StatusRequest(), messages.Done)

    run(test)


def test_a_message_that_is_too_large_is_refused() -> None:
    async def test() -> None:
        size = wire.MAX_MESSAGE_BYTES
        async with serving() as (service, address):
            code, _ = await raw(address, f"/{wire.SERVICE}/Ask", b"\x00" * (size + 1))
            assert code == "RESOURCE_EXHAUSTED"
            async with MasterClient(address, TOKEN) as client:
                with pytest.raises(ProtocolError, match="refused a message"):
                    await ask(client, Ask("x" * size))
                assert not service.calls
                await client.stop("the connection still works", 1)

    run(test)


def test_a_reply_may_list_what_came_in_many_messages() -> None:
    async def test() -> None:
        async with serving() as (service, address), MasterClient(address, TOKEN) as client:
            service.hold.set()
            service.value = b"x" * (5 * wire.MAX_MESSAGE_BYTES)
            assert await ask(client, Ask()) == service.value
            service.value = b"x" * wire.MAX_REPLY_BYTES
            with pytest.raises(ProtocolError, match="a reply of more than 64 MiB; ask for less"):
                await ask(client, Ask())

    run(test)


def test_what_a_method_raises_reaches_the_caller() -> None:
    async def test() -> None:
        async with serving() as (service, address), MasterClient(address, TOKEN) as client:
            service.error = ProtocolError("Key k holds no number.")
            with pytest.raises(ProtocolError, match=r"message: Key k holds no number\."):
                await client.stop("r", 1)
            service.error = InfrastructureError("The journal cannot be written.")
            with pytest.raises(
                InfrastructureError, match=r"failed: The journal cannot be written\."
            ):
                await client.stop("r", 1)

    run(test)


def test_bytes_of_other_protocols_and_silent_connections_harm_nobody() -> None:
    async def test() -> None:
        async with serving() as (_, address), MasterClient(address, TOKEN) as client:
            host, _, port = address.partition(":")
            open_ = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
            preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            sent = [
                b"",
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                b"\x16\x03\x01\x02\x00",
                b"\x00" * 999,
            ]
            sent += [preface, preface[:9], preface + b"\xff" * 500, b"\x80\x04\x95pickle"]
            for number, (_, writer) in enumerate(open_):
                writer.write(sent[number % len(sent)])
            await client.stop("while they are open", 1)
            for number, (_, writer) in enumerate(open_):
                if number % 2:
                    writer.transport.abort()
                else:
                    writer.close()
            await client.stop("afterwards", 1)

    run(test)


@pytest.mark.slow
def test_thousands_of_calls_at_once_are_all_served() -> None:
    async def test() -> None:
        async with serving() as (service, address), MasterClient(address, TOKEN) as client:
            service.hold.set()
            calls = [ask(client, Ask(str(i))) for i in range(4000)]
            assert await asyncio.gather(*calls) == [b"value"] * 4000

    run(test)


# ---- streams


def test_what_goes_to_many_nodes_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, encode = [], wire.encode

    def count(message: msgspec.Struct) -> bytes:
        encoded.append(message)
        return encode(message)

    async def test() -> None:
        async with serving() as (_, address), MasterClient(address, TOKEN) as client:
            streams = [client.attend(says(messages.Hello(f"uid {i}"))) for i in range(3)]
            assert [await anext(stream) for stream in streams] == [DISMISS] * 3

    monkeypatch.setattr(wire, "encode", count)
    run(test)
    assert encoded.count(DISMISS) == 1


def test_a_stream_that_the_server_ends_leaves_nothing_behind() -> None:
    async def test() -> None:
        async with serving() as (_, address), MasterClient(address, TOKEN) as client:
            outgoing: asyncio.Queue[messages.AgentMessage] = asyncio.Queue()
            ended = asyncio.Event()

            async def said() -> AsyncIterator[messages.AgentMessage]:
                try:
                    while True:
                        yield await outgoing.get()
                finally:
                    ended.set()

            outgoing.put_nowait(messages.Hello("uid"))
            stream = client.attend(said())
            assert await anext(stream) == DISMISS
            outgoing.put_nowait(messages.Succeeded(1))
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            await ended.wait()

    run(test)


def test_an_unreadable_message_on_a_stream_is_refused_in_one_sentence() -> None:
    async def test() -> None:
        async with serving() as (service, address):
            async with grpc.aio.insecure_channel(address) as channel:
                call = channel.stream_stream(f"/{wire.SERVICE}/Attend")(
                    metadata=((wire.TOKEN_KEY, TOKEN),)
                )
                await call.write(wire.encode(messages.Hello("uid")))
                await call.read()
                await call.write(b"\xc1")
                assert (await call.code()).name == "INVALID_ARGUMENT"
                assert (await call.details()).startswith("A message could not be read: ")
            assert service.calls == [messages.Hello("uid")]

    run(test)


# ---- ports, addresses and time


def test_a_taken_port_is_one_sentence() -> None:
    async def test() -> None:
        async with serving() as (_, address):
            port = int(address.rpartition(":")[2])
            with pytest.raises(InfrastructureError, match=rf"cannot listen on 127.0.0.1:{port}: "):
                await Server(TOKEN).start("127.0.0.1", port)
        with pytest.raises(InfrastructureError, match=r"cannot listen on 192\.0\.2\.1:0: "):
            await Server(TOKEN).start("192.0.2.1", 0)

    run(test)


def test_ipv6_addresses_work() -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))

        async def test() -> None:
            async with serving(host="::1") as (_, address), MasterClient(address, TOKEN) as client:
                await client.stop("r", 1)

        run(test)
        return
    pytest.skip("this machine has no IPv6 loopback")


def test_nobody_listening_is_told_at_once() -> None:
    async def test() -> None:
        async with serving() as (_, address):
            pass
        async with MasterClient(address, TOKEN) as client:
            began = time.monotonic()
            with pytest.raises(InfrastructureError, match=r"cannot be reached: .*refused"):
                await client.stop("r", 1)
            with pytest.raises(InfrastructureError, match="cannot be reached"):
                await anext(client.attend(says(messages.Hello("uid"))))
            assert time.monotonic() - began < 10.0

    run(test)


def test_a_listener_that_never_answers_is_given_up_in_time() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            async with MasterClient(address, TOKEN, timeout=0.2) as client:
                began = time.monotonic()
                with pytest.raises(InfrastructureError, match="cannot be reached"):
                    await client.stop("r", 1)
                assert 0.1 < time.monotonic() - began < 10.0

    run(test)


def test_a_request_that_is_not_answered_in_time_ends() -> None:
    async def test() -> None:
        async with (
            serving() as (_, address),
            MasterClient(address, TOKEN, timeout=0.1) as client,
        ):
            began = time.monotonic()
            with pytest.raises(InfrastructureError, match="reached: Deadline Exceeded"):
                await ask(client, Ask(wait=0.1))
            assert 0.2 <= time.monotonic() - began < 10.0

    run(test)


@contextlib.asynccontextmanager
async def slow_link(address: str, delay: float) -> AsyncIterator[str]:
    """An address from which all bytes go to ``address`` and back, ``delay`` seconds late."""
    host, _, port = address.partition(":")
    pumps: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(65536):
                await asyncio.sleep(delay)
                writer.write(data)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection(host, int(port))
        for pair in ((reader, to_writer), (to_reader, writer)):
            pumps.add(asyncio.create_task(pump(*pair)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


@pytest.mark.slow
def test_a_connection_over_a_slow_link_is_not_given_up() -> None:
    async def test() -> None:
        async with (
            serving() as (_, address),
            slow_link(address, 0.2) as slow,
            MasterClient(slow, TOKEN) as client,
        ):
            await client.stop("r", 1)

    run(test)


@pytest.mark.slow
def test_clients_find_a_server_that_is_back_within_seconds() -> None:
    async def test() -> None:
        async with serving() as (_, address):
            client = MasterClient(address, TOKEN)
            await client.stop("r", 1)
        for _ in range(10):  # so that it backs off
            with pytest.raises(InfrastructureError):
                await client.stop("r", 1)
            await asyncio.sleep(0.05)
        async with serving(port=int(address.rpartition(":")[2])):
            began = time.monotonic()
            while True:
                with contextlib.suppress(InfrastructureError):
                    await client.stop("r", 1)
                    break
                await asyncio.sleep(0.01)
            assert time.monotonic() - began < 3.0
        await client.close()

    run(test)


@pytest.mark.slow
def test_a_pause_ends_as_soon_as_the_connection_is_back() -> None:
    async def test() -> None:
        async with serving() as (_, address), MasterClient(address, TOKEN) as client:
            await client.stop("r", 1)
            began = time.monotonic()
            await client.pause(0.2)  # the connection is there: something else is wrong
            assert time.monotonic() - began >= 0.2
        async with MasterClient(address, TOKEN) as client:
            began = time.monotonic()
            await client.pause(0.2)
            assert 0.2 <= time.monotonic() - began < 30.0
            pausing = asyncio.create_task(client.pause(60.0))
            await asyncio.sleep(0.1)
            async with serving(port=int(address.rpartition(":")[2])):
                await asyncio.wait_for(pausing, 5.0)
                await client.stop("r", 1)

    run(test)


# ---- TLS


class Authority:
    """A certificate authority and one server certificate of it, as PEM files."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.name = path.name
        ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        self.ca = path / "ca.pem"
        self.ca.write_bytes(self._certificate(self.name, ca_key, ca_key))
        self.cert = path / "cert.pem"
        self.cert.write_bytes(self._certificate("127.0.0.1", key, ca_key))
        self.key = path / "key.pem"
        self.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )

    def _certificate(self, subject: str, key: Any, ca_key: Any) -> bytes:
        now = dt.datetime.now(dt.timezone.utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=key is ca_key, path_length=None), True)
        )
        if key is not ca_key:
            address = x509.IPAddress(ipaddress.ip_address(subject))
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), False)
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def server(self) -> TlsFiles:
        return TlsFiles(cert=str(self.cert), key=str(self.key))

    def client(self) -> TlsFiles:
        return TlsFiles(ca=str(self.ca))


@pytest.mark.slow
def test_tls_serves_those_who_trust_its_authority_and_nobody_else(tmp_path: Path) -> None:
    ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")

    async def refused(address: str, tls: TlsFiles | None, why: str) -> None:
        async with MasterClient(address, TOKEN, tls) as client:
            with pytest.raises(InfrastructureError, match=f"cannot be reached: .*{why}"):
                await client.stop("r", 1)

    async def test() -> None:
        async with serving(ours.server()) as (service, address):
            await refused(address, other.client(), "CERTIFICATE_VERIFY_FAILED")
            await refused(address, None, "")
            assert not service.calls
            async with MasterClient(address, TOKEN, ours.client()) as client:
                await client.stop("r", 1)
            async with MasterClient(address, "wrong", ours.client()) as client:
                with pytest.raises(ConfigurationError, match="The token"):
                    await client.stop("r", 1)
        async with serving() as (service, address):
            await refused(address, ours.client(), "")
            assert not service.calls

    run(test)


def test_a_key_that_belongs_to_another_certificate_is_named(tmp_path: Path) -> None:
    ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
    with pytest.raises(ConfigurationError, match=r"tls_key .*other/key.pem"):
        Server(TOKEN, TlsFiles(cert=str(ours.cert), key=str(other.key)))


def test_a_server_needs_a_token() -> None:
    with pytest.raises(ConfigurationError, match="token"):
        Server("")
