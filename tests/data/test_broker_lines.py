"""Brokers behind slow and silent lines, and streams that are made again while they are read."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import pytest

from dlrover.data import Message, Stream, feed
from dlrover.data.feed import Feed
from dlrover.data.records import Records
from dlrover.data.sources import rabbitmq
from dlrover.data.sources.redis import _offset
from dlrover.data.sources.stream import Bounds
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.spec.jobdir import TlsFiles
from dlrover.spec.requests.shards import Span
from tests.brokers import (
    TOPICS,
    Line,
    Topic,
    fresh,
    kafka_running,
    nats_topic,
    rabbitmq_topic,
    redis_running,
    redis_topic,
    running,
)
from tests.services import free_port, program
from tests.support import certificates

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(90),
    # A client that is broken off while it connects may leave its socket to the garbage collection.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def number(message: Message) -> int:
    """The number at the beginning of a message."""
    value = message.value["n"] if isinstance(message.value, dict) else message.value
    return int(value.split()[0])


@pytest.fixture
def read() -> Iterator:
    """Makes data sets of an address and closes them."""
    made = []

    def make(url: str, **options) -> Records[int]:
        made.append(Records(Stream(url, decode=number, **options)))
        return made[-1]

    yield make
    for data in made:
        data.close()


def by(url: str, port: int, other: int) -> str:
    """The address with another port."""
    return url.replace(f":{port}/", f":{other}/")


def with_jetstream(server: int | str, work) -> object:
    """Do something with a NATS server, of a port of this machine or of an address with a user."""
    import nats

    async def do() -> object:
        where = server if isinstance(server, str) else f"127.0.0.1:{server}"
        client = await nats.connect(f"nats://{where}")
        try:
            return await work(client.jetstream())
        finally:
            await client.close()

    return asyncio.run(do())


@pytest.mark.parametrize("kind", ["redis", "nats", "rabbitmq"])
def test_a_broker_that_accepts_and_does_not_answer_is_an_error(
    request, read, monkeypatch, kind: str
) -> None:
    port = request.getfixturevalue(f"{kind}_port")
    monkeypatch.setattr(feed, "PATIENCE", 1.0)
    module = sys.modules[Stream(TOPICS[kind](port).url).broker().__module__]
    monkeypatch.setattr(module, "TIMEOUT", 1.0)
    topic = TOPICS[kind](port)
    topic.send(range(1200))
    with contextlib.closing(Line(port)) as there:
        data = iter(read(by(topic.url, port, there.port)))
        got = [next(data) for _ in range(100)]
        there.silent = True
        began = time.monotonic()
        with pytest.raises(InfrastructureError, match="did not answer for 1 s"):
            got.extend(data)
        assert time.monotonic() - began < 30, "no call of a client waits for ever"
    assert got == list(range(len(got)))


def test_what_nats_sends_slowly_is_read(nats_port: int, read, monkeypatch) -> None:
    """Messages that come after the client's wait count as delivered on the server, which has no more to send."""
    from dlrover.data.sources import nats

    monkeypatch.setattr(nats, "_WAIT", 1.0)
    topic = nats_topic(nats_port)
    name = topic.url.rpartition("/")[2]

    async def send(jetstream) -> None:
        for at in range(50):
            await jetstream.publish(f"{name}.x", b"%d " % at + bytes(10_000))

    with_jetstream(nats_port, send)
    with contextlib.closing(Line(nats_port, 8192, 0.04)) as there:
        assert list(read(by(topic.url, nats_port, there.port), until="now")) == list(range(50))


def test_a_reader_that_nats_has_forgotten_in_a_pause_begins_again(nats_port: int, read) -> None:
    topic = nats_topic(nats_port)
    name = topic.url.rpartition("/")[2]
    topic.send(range(20))
    data = iter(read(topic.url))
    assert [next(data) for _ in range(20)] == list(range(20))

    async def forget(jetstream) -> int:
        known = await jetstream.consumers_info(name)
        for consumer in known:
            await jetstream.delete_consumer(name, consumer.name)
        return len(known)

    assert with_jetstream(nats_port, forget) == 1
    topic.send(range(20, 30))
    assert [next(data) for _ in range(10)] == list(range(20, 30))
    data.close()


@pytest.fixture
def behind(monkeypatch) -> dict[str, int]:
    """How often a server that reads a stream does not have its latest messages, as in a cluster with a slow line."""
    from nats.js.client import JetStreamContext

    left = {"times": 0}
    whole = JetStreamContext.PullSubscription.consumer_info

    async def consumer_info(self):
        found = await whole(self)
        if left["times"]:
            left["times"] -= 1
            found.num_pending = 0
        return found

    monkeypatch.setattr(JetStreamContext.PullSubscription, "consumer_info", consumer_info)
    return left


@pytest.mark.parametrize("filtered", [False, True])
def test_what_a_server_of_nats_does_not_have_yet_is_waited_for(
    nats_port: int, read, behind: dict[str, int], filtered: bool
) -> None:
    topic = nats_topic(nats_port)
    topic.send(range(20))
    only = f"?subject={topic.url.rpartition('/')[2]}.x" if filtered else ""
    data = iter(read(topic.url + only))
    assert [next(data) for _ in range(20)] == list(range(20))
    topic.send(range(20, 40))
    behind["times"] = 2
    assert [next(data) for _ in range(20)] == list(range(20, 40))
    data.close()
    assert not behind["times"]


def test_a_time_is_looked_up_where_all_messages_are(
    nats_port: int, read, behind: dict[str, int]
) -> None:
    topic = nats_topic(nats_port)
    topic.send(range(10))
    begin = datetime.now(timezone.utc)
    topic.send(range(10, 20))
    behind["times"] = 1
    assert list(read(topic.url, start=begin, until="now")) == list(range(10, 20))
    assert not behind["times"]


@pytest.fixture
def two_redis(tmp_path) -> Iterator[tuple[list[int], list[object]]]:
    """Ports of two servers, and a client of each."""
    redis = pytest.importorskip("redis")
    ports = [free_port(), free_port()]
    with contextlib.ExitStack() as stack:
        for port in ports:
            (tmp_path / str(port)).mkdir()
            stack.enter_context(redis_running(tmp_path / str(port), port))
        yield ports, [stack.enter_context(redis.Redis(port=port)) for port in ports]


@pytest.mark.parametrize(
    ("work", "lacks"),
    [
        *itertools.product(
            ["read", "read what is there", "look"], ["entries", "entries, trim", "trim"]
        ),
        ("read first", "entries"),
    ],
)
def test_what_a_replica_of_redis_does_not_have_yet_is_waited_for(
    two_redis, caplog, work: str, lacks: str
) -> None:
    """As one that a balancer reads from, or that has replaced its primary without the last entries."""
    ports, (primary, replica) = two_redis
    primary.config_set("repl-diskless-sync-delay", 0)
    both = 20 if "entries" in lacks else 40
    ids = [primary.xadd("s", {"n": at}) for at in range(both)]
    replica.replicaof("127.0.0.1", ports[0])
    until(lambda: replica.exists("s"))
    replica.replicaof("NO", "ONE")
    ids += [primary.xadd("s", {"n": at}) for at in range(both, 40)]
    if "trim" in lacks:
        primary.xtrim("s", minid=ids[19], approximate=False)
    with contextlib.ExitStack() as stack:
        balancer = stack.enter_context(contextlib.closing(Line(ports[0])))
        url = f"redis://127.0.0.1:{balancer.port}/0?stream=s"
        reader, another = [
            stack.enter_context(contextlib.closing(Feed(Stream(url)))) for _ in range(2)
        ]
        ((first, end),) = (another if work == "read first" else reader)._broker.bounds()
        reader.close()
        balancer.to = ports[1]
        if work == "read what is there":
            end = _offset(ids[19]) + 1
        with ThreadPoolExecutor(1) as thread:
            if work == "look":
                doing = thread.submit(reader.ends, (0,))
            else:
                doing = thread.submit(
                    lambda: list(reader.read(Span(0, first, end), lambda _: None))
                )
            until(lambda: doing.done() or "replica may be behind" in caplog.text)
            replica.replicaof("127.0.0.1", ports[0])
            result = doing.result()
    assert "replica may be behind" in caplog.text
    if work == "look":
        assert result == (end,)
    else:
        got = [number(message) for _, message in result if message is not None]
        assert got == list(
            range(19 if "trim" in lacks else 0, 20 if work == "read what is there" else 40)
        )


def test_a_slow_script_of_another_client_of_redis_is_waited_for(redis_port: int, caplog) -> None:
    import redis

    topic = redis_topic(redis_port)
    topic.send(range(20))
    with (
        redis.Redis(port=redis_port) as slow,
        redis.Redis(port=redis_port) as client,
        ThreadPoolExecutor(3) as thread,
        contextlib.closing(Feed(Stream(topic.url))) as reader,
        contextlib.closing(Feed(Stream(topic.url))) as looker,
    ):

        def is_busy() -> bool:
            try:
                client.ping()
            except redis.ResponseError:
                return True
            return False

        ((first, end),) = reader._broker.bounds()
        limit = client.config_get("busy-reply-threshold")
        client.config_set("busy-reply-threshold", 1)
        script = thread.submit(slow.eval, "while true do end", 0)
        until(is_busy)
        try:
            span = Span(0, first, end)
            reading = thread.submit(lambda: list(reader.read(span, lambda _: None)))
            looking = thread.submit(looker.ends, (0,))
            until(lambda: caplog.text.count("busy running a script") == 2)
        finally:
            client.script_kill()
        assert isinstance(script.exception(), redis.ResponseError)
        got = [number(message) for _, message in reading.result() if message is not None]
        assert got == list(range(20))
        assert looking.result() == (end,)
        client.config_set(*limit.popitem())


def test_a_redis_whose_memory_is_full_is_read_by_a_user_who_may_only_read(redis_port: int) -> None:
    import redis

    topic = redis_topic(redis_port)
    topic.send(range(20))
    with contextlib.closing(redis.Redis(port=redis_port)) as client:
        client.acl_setuser("reader", enabled=True, passwords="+pw", keys="*", categories=["+@read"])
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(redis.OutOfMemoryError):
                client.set("x", 1)
            url = topic.url.replace("//", "//reader:pw@")
            with contextlib.closing(Records(Stream(url, decode=number, until="now"))) as data:
                assert list(data) == list(range(20))
        finally:
            client.config_set("maxmemory", 0)


def test_entries_of_redis_that_are_removed_while_they_are_fetched_are_named(redis_port) -> None:
    """Another client's command comes between two of a request."""
    topic = redis_topic(redis_port)
    topic.send(range(20))
    with contextlib.closing(Feed(Stream(topic.url, lost="skip"))) as reader:
        ((first, end),) = reader._broker.bounds()
        client, keep = reader._broker._redis, [15, 10]

        class Pipeline(contextlib.AbstractContextManager):
            def __init__(self, **_) -> None:
                self.answers = []

            def __exit__(self, *_) -> None: ...

            def xinfo_stream(self, *args) -> None:
                self.answers.append(client.xinfo_stream(*args))

            def xrange(self, *args) -> None:
                if keep:
                    topic.keep(keep.pop(0))
                self.answers.append(client.xrange(*args))

            def execute(self) -> list:
                return self.answers

        client.pipeline = Pipeline
        fetched = reader._broker.fetch(0, first, end, 100)
    assert [number(message) for message in fetched.messages] == list(range(10, 20))
    assert fetched.first == fetched.messages[0].offset


def test_a_password_that_redis_refuses_is_an_error_at_once(redis_port: int, read) -> None:
    import redis

    topic = redis_topic(redis_port)
    with contextlib.closing(redis.Redis(port=redis_port)) as client:
        before = client.info("stats")["total_connections_received"]
        with pytest.raises(InfrastructureError, match="cannot be read: AuthenticationError"):
            list(read(topic.url.replace("//", "//somebody:wrong@")))
        assert client.info("stats")["total_connections_received"] == before + 1


def until(holds) -> None:
    """Wait until something holds."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_messages_that_nats_has_lost_are_not_taken_for_offsets_without_messages(
    nats_port: int, monkeypatch
) -> None:
    """As of a server that was restored from an earlier state."""
    monkeypatch.setattr(feed, "PATIENCE", 0.3)
    topic = nats_topic(nats_port)
    topic.send(range(20))
    missing = pytest.raises(InfrastructureError, match="does not have all of its messages")
    with contextlib.closing(Feed(Stream(topic.url))) as reader, missing:
        list(reader.read(Span(0, 1, 31), lambda _: None))


def made_again(topic: Topic, before: int, after: int, remove) -> None:
    """Look at a stream, remove and make it, and look again."""
    topic.send(range(before))
    with contextlib.closing(Feed(Stream(topic.url))) as reader:
        reader.ends((0,))
        remove()
        topic.send(range(after))
        with pytest.raises(InfrastructureError, match="was recreated or"):
            reader.ends((0,))


def recreate(topic: Topic, port: int) -> None:
    """Delete a stream of NATS, and create it."""
    name = topic.url.rpartition("/")[2]
    topic.delete()
    with_jetstream(port, lambda jetstream: jetstream.add_stream(name=name, subjects=[f"{name}.*"]))


def test_a_stream_of_nats_that_is_made_again_is_an_error_though_it_is_longer(
    nats_port: int, read
) -> None:
    topic = nats_topic(nats_port)
    topic.send(range(20))
    samples = iter(read(topic.url))
    assert [next(samples) for _ in range(20)] == list(range(20))
    recreate(topic, nats_port)
    topic.send(range(30))
    with pytest.raises(InfrastructureError, match="is not the one that the job has read"):
        next(samples)


@pytest.mark.parametrize("kind", ["nats", "redis"])
@pytest.mark.parametrize("trimmed", [False, True])
def test_a_stream_that_is_made_again_between_two_lives_of_a_job_is_an_error(
    request, read, caplog, kind: str, trimmed: bool
) -> None:
    port = request.getfixturevalue(f"{kind}_port")
    topic = TOPICS[kind](port)
    topic.send(range(20))
    if trimmed:
        topic.keep(15)
    first = read(topic.url)
    samples = iter(first)
    got = [next(samples) for _ in range(10)]
    first.close()
    topic.send(range(20, 30))
    topic.keep(22)
    again = read(topic.url, idle=0.5)
    again.load_state_dict(first.state_dict())
    rest = list(again)
    assert [*got, *rest] == list(range(got[0], 30))
    again.close()
    if kind == "nats":
        recreate(topic, port)
    else:
        topic.delete()
    topic.send(range(100, 150))
    for state in (first.state_dict(), again.state_dict()):
        other = read(topic.url)
        other.load_state_dict(state)
        with pytest.raises(InfrastructureError, match="is not the one that the job has read"):
            next(iter(other))
    copied = read(topic.url, until="now", lost="skip")
    copied.load_state_dict(again.state_dict())
    assert list(copied) == list(range(130 if kind == "nats" else 100, 150))
    assert "is not the one that the job has read" in caplog.text
    other = read(topic.url, until="now")
    other.load_state_dict(copied.state_dict())
    assert list(other) == []


@pytest.mark.parametrize("after", [10, 20, 30])
def test_a_stream_of_redis_that_is_made_again_is_an_error_though_its_ids_are_later(
    redis_port: int, after: int
) -> None:
    topic = redis_topic(redis_port)
    made_again(topic, 20, after, topic.delete)


def test_a_stream_of_redis_that_was_empty_for_a_while_is_the_same(redis_port: int) -> None:
    topic = redis_topic(redis_port)
    with contextlib.closing(Feed(Stream(topic.url))) as reader:
        ends = [0]
        for _ in range(3):
            topic.send(range(20))
            ends += reader.ends((0,))
            topic.keep(0)
            ends += reader.ends((0,))
    assert ends == sorted(ends)
    assert len(set(ends)) == 4


def test_a_queue_of_rabbitmq_that_is_made_again_is_an_error(rabbitmq_port: int) -> None:
    import pika

    topic = rabbitmq_topic(rabbitmq_port)

    def remove() -> None:
        parameters = pika.ConnectionParameters("127.0.0.1", rabbitmq_port)
        with contextlib.closing(pika.BlockingConnection(parameters)) as connection:
            connection.channel().queue_delete(topic.url.rpartition("/")[2])

    made_again(topic, 30, 20, remove)


def test_the_end_of_a_queue_that_comes_slowly_is_not_taken_for_an_earlier_one(
    rabbitmq_port: int, read
) -> None:
    import pika

    topic = rabbitmq_topic(rabbitmq_port)
    name = topic.url.rpartition("/")[2]
    parameters = pika.ConnectionParameters("127.0.0.1", rabbitmq_port)
    with contextlib.closing(pika.BlockingConnection(parameters)) as connection:
        channel = connection.channel()
        for at in range(400):
            channel.basic_publish("", name, b"%d " % at + bytes(1000))
        channel.confirm_delivery()
        channel.basic_publish("", name, b"400")
    with contextlib.closing(Line(rabbitmq_port, 8192, 0.1)) as there:
        got = list(read(by(topic.url, rabbitmq_port, there.port), until="now"))
    assert got == list(range(401))


@pytest.mark.parametrize(("piece", "every"), [(1 << 16, 0.1), (1 << 21, 0.4)])
def test_a_queue_whose_message_comes_slowly_is_not_taken_for_an_empty_one(
    rabbitmq_port: int, read, monkeypatch, piece: int, every: float
) -> None:
    import pika

    monkeypatch.setattr(rabbitmq, "_EMPTY", 0.1)
    monkeypatch.setattr(rabbitmq, "_FILLED", 1.0)
    topic = rabbitmq_topic(rabbitmq_port)
    name = topic.url.rpartition("/")[2]
    parameters = pika.ConnectionParameters("127.0.0.1", rabbitmq_port)
    with contextlib.closing(pika.BlockingConnection(parameters)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", name, b"7 " + bytes(1_500_000))
        until(lambda: channel.queue_declare(name, passive=True).method.message_count)
    with contextlib.closing(Line(rabbitmq_port, piece, every)) as there:
        got = list(read(by(topic.url, rabbitmq_port, there.port), until="now"))
    assert got == [7]


def test_kafka_may_take_longer_than_a_second(read) -> None:
    kafka = pytest.importorskip("confluent_kafka")
    with kafka_running(rtt=1200) as port:
        producer = kafka.Producer({"bootstrap.servers": f"127.0.0.1:{port}"})
        for at in range(30):
            producer.produce("slow", str(at).encode(), partition=0)
        assert producer.flush(60) == 0
        assert list(read(f"kafka://127.0.0.1:{port}/slow", until="now")) == list(range(30))


@pytest.mark.parametrize("before", [0, 30])
def test_what_kafka_has_removed_within_a_shard_is_named_and_can_be_skipped(
    kafka_port: int, before: int
) -> None:
    """The mock keeps 5 MiB of a partition."""
    import confluent_kafka as kafka

    name = fresh()
    producer = kafka.Producer(
        {"bootstrap.servers": f"127.0.0.1:{kafka_port}", "batch.num.messages": 5}
    )
    for at in range(150):
        producer.produce(name, bytes(50_000), partition=0)
        if at % 5 == 4:
            assert producer.flush(30) == 0
    url = f"kafka://127.0.0.1:{kafka_port}/{name}"
    with contextlib.closing(Feed(Stream(url))) as reader:
        (first, end), *_ = reader._broker.bounds()
        span = Span(0, first - 30, first + before)
        with pytest.raises(InfrastructureError, match="removed before they were read"):
            list(reader.read(span, lambda _: None))
    assert 30 < first < end == 150
    with contextlib.closing(Feed(Stream(url, lost="skip"))) as reader:
        read = list(reader.read(span, lambda _: None))
    got = [message.offset for _, message in read if message is not None]
    assert got == list(range(first, first + before))
    assert (read[0][0].start, read[-1][0].stop) == (span.start, span.stop)


def test_an_entry_of_redis_with_bytes_that_are_no_text_is_read(redis_port: int) -> None:
    import redis

    name = fresh()
    client = redis.Redis(port=redis_port)
    client.xadd(name, {b"\xff": b"\xfe", "n": ""})
    url = f"redis://127.0.0.1:{redis_port}/0?stream={name}"
    with contextlib.closing(Records(Stream(url, until="now"))) as data:
        assert list(data) == [{"\udcff": b"\xfe", "n": b""}]


@pytest.mark.parametrize("who", ["", "secret@", "me:secret@"])
def test_credentials_that_nats_refuses_are_an_error_at_once(tmp_path, read, who: str) -> None:
    pytest.importorskip("nats")
    port = free_port()
    command = [program("nats-server"), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", "data"]
    with running([*command, "--user", "me", "--pass", "another"], port, tmp_path):
        began = time.monotonic()
        with pytest.raises(InfrastructureError, match="AuthorizationError") as said:
            list(read(f"nats://{who}127.0.0.1:{port}/S"))
        assert time.monotonic() - began < 30, "it is not waited for"
    assert "secret" not in str(said.value)


def test_a_permission_that_nats_refuses_is_named(tmp_path, monkeypatch) -> None:
    pytest.importorskip("nats")
    from dlrover.data.sources import nats

    monkeypatch.setattr(nats, "TIMEOUT", 1.0)
    port = free_port()
    (tmp_path / "conf").write_text(
        f"""
        listen: "127.0.0.1:{port}"
        jetstream {{ store_dir: "{tmp_path}/data" }}
        authorization {{ users: [
          {{ user: all, password: x }}
          {{ user: some, password: x, permissions: {{ publish: {{ deny: "$JS.API.STREAM.MSG.GET.>" }} }} }}
        ] }}
        """
    )
    with running([program("nats-server"), "-c", "conf"], port, tmp_path):
        made = f"all:x@127.0.0.1:{port}"
        with_jetstream(made, lambda stream: stream.add_stream(name="S", subjects=["S.*"]))
        with_jetstream(made, lambda stream: stream.publish("S.x", b"0"))
        with contextlib.closing(Feed(Stream(f"nats://some:x@127.0.0.1:{port}/S"))) as reader:
            named = r"cannot be read: .*violation.* to .\$js\.api\.stream\.msg\.get\.s"
            with pytest.raises(InfrastructureError, match=f"(?i){named}"):
                list(reader.read(Span(0, 1, 10), lambda _: None))


def test_no_password_goes_to_a_server_of_nats_without_the_tls_that_its_address_demands(
    tmp_path, read
) -> None:
    pytest.importorskip("nats")
    port = free_port()
    command = [
        program("nats-server"),
        "-a",
        "127.0.0.1",
        "-p",
        str(port),
        "-js",
        "-sd",
        "data",
        "-DV",
    ]
    with running([*command, "--user", "me", "--pass", "secret"], port, tmp_path):
        with pytest.raises(ConfigurationError, match="does not use TLS"):
            list(read(f"tls://me:secret@127.0.0.1:{port}/S"))
        assert "CONNECT" not in (tmp_path / "log").read_text()


def authorities(folder: Path) -> list[TlsFiles]:
    """Two certificates for this machine, each of an authority of its own."""
    made = []
    for name in ("ours", "other"):
        (folder / name).mkdir()
        made.append(certificates.made(folder / name))
    return made


def test_why_the_tls_of_nats_fails_is_said(tmp_path, read, monkeypatch) -> None:
    pytest.importorskip("nats")
    monkeypatch.setattr(feed, "PATIENCE", 0.5)
    port, ours, other = free_port(), *authorities(tmp_path)
    command = [program("nats-server"), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", "data"]
    tls = ["--tls", "--tlscert", ours.cert, "--tlskey", ours.key]
    with running([*command, *tls], port, tmp_path):
        began = time.monotonic()
        monkeypatch.setenv("SSL_CERT_FILE", other.ca)
        with pytest.raises(InfrastructureError, match="certificate verify failed"):
            list(read(f"tls://127.0.0.1:{port}/S"))
        assert time.monotonic() - began < 15, "the client's close waits for ever"
        monkeypatch.setenv("SSL_CERT_FILE", ours.ca)
        with pytest.raises(InfrastructureError, match="stream not found"):
            list(read(f"tls://127.0.0.1:{port}/S"))


def test_a_connection_to_nats_that_does_not_answer_ends_in_a_moment(
    tmp_path, monkeypatch, caplog
) -> None:
    pytest.importorskip("nats")
    port, ours, _ = free_port(), *authorities(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", ours.ca)
    command = [program("nats-server"), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", "data"]
    tls = ["--tls", "--tlscert", ours.cert, "--tlskey", ours.key]
    with running([*command, *tls], port, tmp_path) as server:
        broker = Stream(f"tls://127.0.0.1:{port}/S").broker()
        with_jetstream(port, lambda stream: stream.add_stream(name="S", subjects=["S.*"]))
        with_jetstream(port, lambda stream: stream.publish("S.x", b"0"))
        assert len(broker.fetch(0, 1, 2, 10).messages) == 1
        server.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        broker.close()
        assert time.monotonic() - began < 10
    gc.collect()
    assert "Task was destroyed" not in caplog.text


@pytest.mark.parametrize("address", ["amqp://{}/q", "nats://{}/S", "redis://{}/0?stream=s"])
def test_why_a_broker_cannot_be_reached_is_said_and_its_client_logs_nothing(
    read, monkeypatch, caplog, address: str
) -> None:
    url = address.format(f"me:secret@127.0.0.1:{free_port()}")
    module = sys.modules[Stream(url).broker().__module__]
    monkeypatch.setattr(feed, "PATIENCE", 0.2)
    monkeypatch.setattr(module, "TIMEOUT", 1.0)
    with pytest.raises(InfrastructureError, match=r"[Cc]onnection refused|Connect call failed"):
        list(read(url))
    assert {record.name for record in caplog.records} <= {"dlrover.data.feed"}


def test_ctrl_c_ends_a_wait_for_nats() -> None:
    pytest.importorskip("nats")
    broker = Stream(f"nats://127.0.0.1:{free_port()}/S").broker()

    def interrupt() -> None:
        until(lambda: broker._cause)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with contextlib.closing(broker), ThreadPoolExecutor(1) as thread:
        thread.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            broker.bounds()


def test_why_kafka_cannot_be_asked_for_a_time_is_said(monkeypatch) -> None:
    pytest.importorskip("confluent_kafka")
    from dlrover.data.sources import kafka

    monkeypatch.setattr(kafka, "TIMEOUT", 1.0)
    broker = Stream(f"kafka://127.0.0.1:{free_port()}/topic").broker()
    with contextlib.closing(broker), pytest.raises(ConnectionError, match="Connection refused"):
        broker.offsets_at(datetime.now(timezone.utc), [Bounds(0, 5)])


def test_why_the_tls_of_kafka_fails_is_said_and_not_logged_again_and_again(
    tmp_path, read, monkeypatch, caplog
) -> None:
    pytest.importorskip("confluent_kafka")
    from dlrover.data.sources import kafka

    monkeypatch.setattr(feed, "PATIENCE", 0.5)
    monkeypatch.setattr(kafka, "TIMEOUT", 2.0)
    port, ours, other = free_port(), *authorities(tmp_path)
    tls = ["--tls-port", str(port), "--tls-cert-file", ours.cert, "--tls-key-file", ours.key]
    command = [program("redis-server"), "--port", "0", *tls, "--tls-ca-cert-file", ours.ca]
    options = f"security.protocol=SSL&ssl.ca.location={other.ca}"
    said = pytest.raises(InfrastructureError, match="certificate verify failed")
    with running(command, port, tmp_path), said:
        list(read(f"kafka://127.0.0.1:{port}/topic?{options}"))
    assert len(caplog.records) < 5
