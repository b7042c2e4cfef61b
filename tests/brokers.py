"""Brokers that tests run for real, one of each for a session; a test takes streams of its own in them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pulsar.broker import ask
from tests.services import free_port, program

READY = 60.0
"""Seconds until a broker answers."""


@contextlib.contextmanager
def running(
    command: list[str], port: int, folder: Path, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A broker's process, from when it listens until the end of the block."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdout=log, stderr=log, cwd=folder, env={**os.environ, **env}, start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + READY
        while not _listens(port):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < end, f"{command[0]} does not listen"
            time.sleep(0.02)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dlrover-broker-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def redis_running(folder: Path, port: int) -> Iterator[int]:
    """A Redis, which keeps its streams in the folder."""
    command = [program("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with running([*command, "--appendonly", "yes"], port, folder):
        yield port


@contextlib.contextmanager
def nats_running(folder: Path, port: int) -> Iterator[int]:
    """A NATS server with JetStream, which keeps its streams in the folder."""
    command = [program("nats-server"), "-a", "127.0.0.1", "-p", str(port)]
    with running([*command, "-js", "-sd", str(folder / "data")], port, folder):
        yield port


@contextlib.contextmanager
def pulsar_running(folder: Path, port: int, token: str = "") -> Iterator[int]:
    """A stand-in for a Pulsar, which keeps its topics in the folder; `admin` is its second port."""
    (folder / "data").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.pulsar.broker", str(port), str(admin(port))]
    env = {"PYTHONPATH": str(Path(__file__).parents[1])}
    with running([*command, str(folder / "data"), token], admin(port), folder, **env):
        yield port


_admins: dict[int, int] = {}


def admin(port: int) -> int:
    """The port where the Pulsar of a port is told what to do."""
    return _admins.setdefault(port, free_port())


@contextlib.contextmanager
def rabbitmq_running() -> Iterator[int]:
    """The port of a RabbitMQ, with a port mapper of its own that ends with it."""
    program("rabbitmq-server")
    port, mapper, distribution = free_port(), free_port(), free_port()
    with _folder() as folder:
        env = {
            "ERL_EPMD_PORT": str(mapper),
            "HOME": str(folder),
            "RABBITMQ_NODENAME": f"dlrover{port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "logs"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(folder / "none"),
        }
        (folder / "mapper").mkdir()
        server = ["/usr/lib/rabbitmq/bin/rabbitmq-server"]  # the one in the path changes the user
        with (
            running(["epmd", "-port", str(mapper)], mapper, folder / "mapper"),
            running(server, port, folder, **env),
        ):
            yield port


@pytest.fixture(scope="session")
def redis_port() -> Iterator[int]:
    pytest.importorskip("redis")
    with _folder() as folder, redis_running(folder, free_port()) as port:
        yield port


@pytest.fixture(scope="session")
def nats_port() -> Iterator[int]:
    pytest.importorskip("nats")
    with _folder() as folder, nats_running(folder, free_port()) as port:
        yield port


@pytest.fixture(scope="session")
def rabbitmq_port() -> Iterator[int]:
    pytest.importorskip("pika")
    with rabbitmq_running() as port:
        yield port


@pytest.fixture(scope="session")
def pulsar_port() -> Iterator[int]:
    pytest.importorskip("pulsar")
    with _folder() as folder, pulsar_running(folder, free_port()) as port:
        yield port


@pytest.fixture(scope="session")
def kafka_port() -> Iterator[int]:
    """librdkafka's own mock of a Kafka, in a process of its own: no real broker."""
    pytest.importorskip("confluent_kafka")
    with kafka_running() as port:
        yield port


@contextlib.contextmanager
def kafka_running(rtt: int = 0) -> Iterator[int]:
    """The port of a mock of a Kafka, which takes ``rtt`` milliseconds for an answer."""
    with _folder() as folder:
        told = folder / "port"
        command = [sys.executable, "-c", MOCK_KAFKA, str(told), str(rtt)]
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], start_new_session=True
        )
        try:
            end = time.monotonic() + READY
            while not told.exists() or not told.read_text():
                assert process.poll() is None, "the mock has ended"
                assert time.monotonic() < end, "the mock does not start"
                time.sleep(0.02)
            yield int(told.read_text())
        finally:
            process.kill()
            process.wait()


MOCK_KAFKA = """
import sys, threading
from confluent_kafka import Producer
made = {"test.mock.num.brokers": 1, "log_level": 3, "test.mock.broker.rtt": int(sys.argv[2])}
producer = Producer(made)
(broker,) = producer.list_topics(timeout=30).brokers.values()
open(sys.argv[1], "w").write(str(broker.port))
threading.Event().wait()
"""


class Line:
    """A line to the broker at a port of this machine, by a port of its own; it may be slow or fall silent."""

    def __init__(self, to: int, piece: int = 1 << 16, every: float = 0.0) -> None:
        #: the broker's port for new connections
        self.to = to
        self._piece, self._every = piece, every
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        #: nothing more comes back
        self.silent = False
        self._over = threading.Event()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=work, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        while not self._over.is_set():
            if select.select([self._server], [], [], 0.05)[0]:
                near, far = (
                    self._server.accept()[0],
                    socket.create_connection(("127.0.0.1", self.to)),
                )
                self._ends += (near, far)
                self._start(self._copy, near, far, False)
                self._start(self._copy, far, near, True)

    def _copy(self, source: socket.socket, into: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            while not self._over.is_set():
                if back and self.silent:
                    self._over.wait(0.05)
                elif select.select([source], [], [], 0.05)[0]:
                    data = source.recv(self._piece if back else 1 << 16)
                    if not data:
                        break
                    self._over.wait(self._every if back else 0)
                    into.sendall(data)
        _hang_up(source, into)

    def close(self) -> None:
        """End it."""
        self._over.set()
        self._threads[0].join()
        _hang_up(*self._ends)
        for thread in self._threads:
            thread.join()
        for end in (self._server, *self._ends):
            end.close()


def _hang_up(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def fresh() -> str:
    """A name that no other test has."""
    return f"s{uuid.uuid4().hex[:10]}"


@dataclass
class Topic:
    """A stream of one broker."""

    url: str
    send: Callable[[Sequence[int]], None]
    #: remove the oldest messages until this many are left
    keep: Callable[[int], None]
    #: messages that a consumer group has not read, as the broker tells its own tools
    lag: Callable[[str], int | None] = lambda _: pytest.skip("this broker has no groups")
    delete: Callable[[], None] = lambda: pytest.skip("this broker cannot delete it")

    def in_group(self, group: str) -> str:
        """The address with a group."""
        return f"{self.url}{'&' if '?' in self.url else '?'}group={group}"


def redis_topic(port: int) -> Topic:
    import redis

    name = fresh()
    client = redis.Redis(port=port)

    def send(numbers: Sequence[int]) -> None:
        with client.pipeline() as pipe:
            for number in numbers:
                pipe.xadd(name, {"n": number})
            pipe.execute()

    def lag(group: str) -> int | None:
        return {g["name"].decode(): g["lag"] for g in client.xinfo_groups(name)}[group]

    url = f"redis://127.0.0.1:{port}/0?stream={name}"
    return Topic(
        url,
        send,
        lambda count: client.xtrim(name, maxlen=count, approximate=False),
        lag,
        lambda: client.delete(name),
    )


def nats_topic(port: int) -> Topic:
    import nats

    name = fresh()

    async def do(work):
        client = await nats.connect(f"nats://127.0.0.1:{port}")
        try:
            return await work(client.jetstream())
        finally:
            await client.close()

    def lag(group: str) -> int:
        return asyncio.run(do(lambda stream: stream.consumer_info(name, group))).num_pending

    def send(numbers: Sequence[int]) -> None:
        async def work(stream) -> None:
            for number in numbers:
                await stream.publish(f"{name}.x", str(number).encode())

        asyncio.run(do(work))

    asyncio.run(do(lambda stream: stream.add_stream(name=name, subjects=[f"{name}.*"])))
    return Topic(
        f"nats://127.0.0.1:{port}/{name}",
        send,
        lambda count: asyncio.run(do(lambda stream: stream.purge_stream(name, keep=count))),
        lag,
        lambda: asyncio.run(do(lambda stream: stream.delete_stream(name))),
    )


def rabbitmq_topic(port: int, **limits: int) -> Topic:
    """RabbitMQ removes by size and only whole segments: there is no ``keep``."""
    import pika

    name = fresh()
    parameters = pika.ConnectionParameters("127.0.0.1", port)
    arguments = {"x-queue-type": "stream", **limits}

    def send(numbers: Sequence[int]) -> None:
        with contextlib.closing(pika.BlockingConnection(parameters)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.queue_declare(name, durable=True, arguments=arguments)
            for number in numbers:
                channel.basic_publish("", name, str(number).encode())

    send([])
    return Topic(f"amqp://127.0.0.1:{port}/{name}", send, _cannot)


def kafka_topic(port: int) -> Topic:
    """The mock makes a topic of four partitions when somebody asks for it; one of them is used."""
    import confluent_kafka as kafka

    name = fresh()

    def send(numbers: Sequence[int]) -> None:
        producer = kafka.Producer({"bootstrap.servers": f"127.0.0.1:{port}"})
        for number in numbers:
            producer.produce(name, str(number).encode(), partition=0)
        assert producer.flush(30) == 0

    send([])
    producer = kafka.Producer({"bootstrap.servers": f"127.0.0.1:{port}"})
    assert producer.list_topics(name, timeout=30).topics[name].partitions

    def lag(group: str) -> int:
        place = kafka.TopicPartition(name, 0)
        with contextlib.closing(
            kafka.Consumer({"bootstrap.servers": f"127.0.0.1:{port}", "group.id": group})
        ) as consumer:
            (known,) = consumer.committed([place], timeout=30)
            return int(consumer.get_watermark_offsets(place, timeout=30)[1] - known.offset)

    return Topic(f"kafka://127.0.0.1:{port}/{name}", send, _cannot, lag)


def pulsar_topic(port: int, batch: int = 1, partitions: int = 0, **options: object) -> Topic:
    """Small ledgers of entries, which are messages or whole batches of them, by its stand-in."""
    import pulsar

    name = fresh()
    ask(admin(port), "make", name, **{"partitions": partitions, "entries": 20, **options})

    def send(numbers: Sequence[int]) -> None:
        logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        client = pulsar.Client(f"pulsar://127.0.0.1:{port}", logger=logger)
        producer = client.create_producer(
            name, batching_enabled=batch > 1, batching_max_messages=max(2, batch),
            batching_max_publish_delay_ms=60_000, block_if_queue_full=True,
        )  # fmt: skip
        results: list[object] = []
        for number in numbers:
            producer.send_async(str(number).encode(), lambda result, _: results.append(result))
        producer.flush()
        client.close()
        assert set(results) <= {pulsar.Result.Ok}, "all are sent"

    def lag(group: str) -> int:
        # The last message that a checkpoint contains is not acknowledged, so that its ledger is kept.
        return int(ask(admin(port), "backlog", name, subscription=group)) - 1

    return Topic(
        f"pulsar://127.0.0.1:{port}/{name}",
        send,
        lambda count: ask(admin(port), "keep", name, count=count),
        lag,
        lambda: ask(admin(port), "delete", name),
    )


def _cannot(count: int) -> None:
    pytest.skip("this broker cannot be told how many messages to keep")


TOPICS = {
    "redis": redis_topic,
    "nats": nats_topic,
    "rabbitmq": rabbitmq_topic,
    "kafka": kafka_topic,
    "pulsar": pulsar_topic,
}
