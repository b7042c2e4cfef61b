"""Streams of real brokers: every message once, wherever reading goes on, and no silence about what is gone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.data import Message, Stream
from dlrover.data.records import Records
from dlrover.errors import ConfigurationError, InfrastructureError
from tests.brokers import (
    TOPICS,
    Topic,
    fresh,
    nats_running,
    nats_topic,
    pulsar_running,
    pulsar_topic,
    rabbitmq_topic,
    redis_running,
    redis_topic,
)
from tests.services import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


@pytest.fixture(params=TOPICS)
def topic(request) -> Topic:
    return TOPICS[request.param](request.getfixturevalue(f"{request.param}_port"))


@pytest.fixture(params=["redis", "nats", "pulsar"])
def trimmed(request) -> Topic:
    """One that keeps as many messages as the test wants."""
    return TOPICS[request.param](request.getfixturevalue(f"{request.param}_port"))


def number(message: Message) -> int:
    """What `Topic.send` has sent."""
    value = message.value["n"] if isinstance(message.value, dict) else message.value
    return int(value)


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


def test_all_messages_in_order_and_then_those_that_come(topic: Topic, read) -> None:
    topic.send(range(1200))
    data = iter(read(topic.url))
    assert [next(data) for _ in range(1200)] == list(range(1200))
    sender = threading.Thread(target=topic.send, args=(range(1200, 1250),))
    sender.start()
    assert [next(data) for _ in range(50)] == list(range(1200, 1250))
    sender.join()
    data.close()


def test_a_restore_reads_on_from_the_offset_in_the_checkpoint(topic: Topic, read) -> None:
    topic.send(range(900))
    data = read(topic.url)
    samples = iter(data)
    got = [next(samples) for _ in range(333)]
    state = data.state_dict()
    for _ in range(100):
        next(samples)
    topic.send(range(900, 1000))
    again = read(topic.url, until="now")
    again.load_state_dict(state)
    assert [*got, *again] == list(range(1000))


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["redis", "pulsar"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_loader_has_read_ahead_does_not_count(request, kind: str, num_workers: int) -> None:
    from dlrover.data.dataset import ElasticDataset

    topic = TOPICS[kind](request.getfixturevalue(f"{kind}_port"))
    topic.send(range(500))
    data = ElasticDataset(Stream(topic.url, decode=number, until="now"))
    batches = iter(data.loader(8, num_workers=num_workers))
    got = [int(n) for _ in range(10) for n in next(batches)]
    state = data.state_dict()
    batches.close()
    data.close()
    again = ElasticDataset(Stream(topic.url, decode=number, until="now"))
    again.load_state_dict(state)
    got += [int(n) for batch in again.loader(8, num_workers=num_workers) for n in batch]
    again.close()
    assert got == list(range(500))


def test_a_job_can_begin_at_the_end(topic: Topic, read) -> None:
    topic.send(range(100))
    data = read(topic.url, start="latest", idle=1.0)
    assert list(data) == []
    topic.send(range(100, 120))
    assert list(data) == list(range(100, 120))


KEEPING = {
    "nats": (nats_running, nats_topic),
    "pulsar": (pulsar_running, pulsar_topic),
    "redis": (redis_running, redis_topic),
}
"""A RabbitMQ 3.10.8 that was killed does not start its streams again within a minute."""


@pytest.mark.parametrize("kind", KEEPING)
def test_a_broker_that_is_killed_and_comes_back_changes_nothing(
    tmp_path: Path, read, kind: str
) -> None:
    """While messages are read, and while somebody waits for further ones."""
    pytest.importorskip(kind)
    running, made = KEEPING[kind]
    port = free_port()
    back, over = threading.Event(), threading.Event()
    with running(tmp_path, port):
        topic = made(port)
        topic.send(range(1000))
        data = iter(read(topic.url))
        got = [next(data) for _ in range(100)]

    def bring_back() -> None:
        for numbers in (range(1000, 1010), range(1010, 1020)):
            time.sleep(1.0)
            with running(tmp_path, port):
                back.wait(60)
                back.clear()
                topic.send(numbers)
                if numbers.stop == 1020:
                    over.wait(60)

    server = threading.Thread(target=bring_back)
    server.start()
    try:
        back.set()
        got += [next(data) for _ in range(910)]
        back.set()  # it has died again, with nothing left to read
        got += [next(data) for _ in range(10)]
    finally:
        back.set()
        over.set()
        server.join()
        data.close()
    assert got == list(range(1020))


def test_what_the_broker_has_removed_is_named(trimmed: Topic, read) -> None:
    trimmed.send(range(2000))
    first = read(trimmed.url)
    samples = iter(first)
    got = [next(samples) for _ in range(10)]
    state = first.state_dict()
    first.close()
    trimmed.keep(300)
    failing = read(trimmed.url, until="now")
    failing.load_state_dict(state)
    with pytest.raises(InfrastructureError, match="were removed before they were read"):
        list(failing)
    skipping = read(trimmed.url, until="now", lost="skip")
    skipping.load_state_dict(state)
    assert [*got, *skipping] == [*range(10), *range(1700, 2000)]


def test_what_was_removed_before_the_job_began_is_no_loss(trimmed: Topic, read) -> None:
    trimmed.send(range(1000))
    trimmed.keep(100)
    assert list(read(trimmed.url, until="now")) == list(range(900, 1000))


def test_single_messages_that_somebody_deleted_are_no_loss(redis_port: int, read) -> None:
    import redis

    topic = redis_topic(redis_port)
    topic.send(range(500))
    name = topic.url.rpartition("=")[2]
    client = redis.Redis(port=redis_port)
    for entry, _ in client.xrange(name)[100:200:10]:
        client.xdel(name, entry)
    got = list(read(topic.url, until="now"))
    assert got == [n for n in range(500) if not (100 <= n < 200 and n % 10 == 0)]


def test_what_rabbitmq_has_removed_is_named(rabbitmq_port: int, read) -> None:
    limits = {"x-max-length-bytes": 20_000, "x-stream-max-segment-size-bytes": 10_000}
    topic = rabbitmq_topic(rabbitmq_port, **limits)
    topic.send(range(20))
    first = read(topic.url)
    samples = iter(first)
    got = [next(samples) for _ in range(10)]
    state = first.state_dict()
    first.close()
    topic.send(range(20, 1500))
    failing = read(topic.url, until="now")
    failing.load_state_dict(state)
    with pytest.raises(InfrastructureError, match="were removed before they were read"):
        list(failing)
    skipping = read(topic.url, until="now", lost="skip")
    skipping.load_state_dict(state)
    rest = list(skipping)
    assert got == list(range(10))
    assert rest == list(range(1500 - len(rest), 1500))


def test_a_queue_that_is_no_stream_is_refused(rabbitmq_port: int, read) -> None:
    import pika

    name = fresh()
    with contextlib.closing(
        pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", rabbitmq_port))
    ) as connection:
        connection.channel().queue_declare(name, durable=True)
    with pytest.raises(InfrastructureError, match="cannot be read"):
        list(read(f"amqp://127.0.0.1:{rabbitmq_port}/{name}"))


def test_keys_of_redis_are_partitions(redis_port: int, read) -> None:
    first, second = redis_topic(redis_port), redis_topic(redis_port)
    first.send(range(300))
    second.send(range(300, 500))
    url = f"{first.url}&stream={second.url.rpartition('=')[2]}"
    got = list(read(url, until="now"))
    assert sorted(got) == list(range(500))
    assert [n for n in got if n < 300] == list(range(300))


def test_a_subject_of_nats_is_a_part_of_its_stream(nats_port: int, read) -> None:
    import nats

    topic = nats_topic(nats_port)
    name = topic.url.rpartition("/")[2]

    async def send() -> None:
        client = await nats.connect(f"nats://127.0.0.1:{nats_port}")
        for number_ in range(400):
            await client.jetstream().publish(f"{name}.{number_ % 3}", str(number_).encode())
        await client.close()

    asyncio.run(send())
    assert list(read(f"{topic.url}?subject={name}.1", until="now")) == list(range(1, 400, 3))


def test_a_stream_of_redis_is_made_by_its_first_entry(redis_port: int, read) -> None:
    topic = redis_topic(redis_port)
    assert list(read(topic.url, idle=0.3)) == []
    data = iter(read(topic.url))
    sender = threading.Timer(0.3, topic.send, [range(3)])
    sender.start()
    assert [next(data) for _ in range(3)] == [0, 1, 2]
    sender.join()
    data.close()


@pytest.mark.parametrize(
    ("kind", "path", "said"),
    [
        ("nats", "nowhere", "cannot be read: NotFoundError"),
        ("rabbitmq", "nowhere", "cannot be read: ChannelClosedByBroker: .*no queue 'nowhere'"),
        ("rabbitmq", "a?vhost=nowhere", "cannot be read: .*vhost"),
        ("kafka", "nowhere-at-all", "cannot be read: Broker: Unknown topic or partition"),
        ("pulsar", "nowhere-at-all", "cannot be read: TopicNotFound"),
        (
            "kafka",
            "a?no.such.option=1",
            "librdkafka refuses the options of kafka://.*no.such.option",
        ),
    ],
)
def test_what_is_not_there_is_named_at_once(request, read, kind: str, path: str, said: str) -> None:
    scheme = "amqp" if kind == "rabbitmq" else kind
    port = request.getfixturevalue(f"{kind}_port")
    began = time.monotonic()
    wrong = "refuses the options" in said
    with pytest.raises(ConfigurationError if wrong else InfrastructureError, match=said):
        list(read(f"{scheme}://127.0.0.1:{port}/{path}"))
    assert time.monotonic() - began < 30, "it is not waited for"


def test_a_stream_of_nats_that_its_consumers_empty_is_refused(nats_port: int, read) -> None:
    import nats

    topic = nats_topic(nats_port)
    name = topic.url.rpartition("/")[2]
    topic.delete()

    async def make() -> None:
        client = await nats.connect(f"nats://127.0.0.1:{nats_port}")
        await client.jetstream().add_stream(
            name=name, subjects=[f"{name}.*"], retention="workqueue"
        )
        await client.close()

    asyncio.run(make())
    with pytest.raises(ConfigurationError, match="until a consumer acknowledges it"):
        list(read(topic.url))


def test_a_subject_that_a_stream_has_not_is_named(nats_port: int, read) -> None:
    topic = nats_topic(nats_port)
    topic.send(range(3))
    with pytest.raises(InfrastructureError, match=r"cannot be read: BadRequestError: .*subject"):
        list(read(f"{topic.url}?subject=elsewhere.x", until="now"))


def test_a_stream_that_is_deleted_meanwhile_is_named(trimmed: Topic, read) -> None:
    trimmed.send(range(20))
    data = iter(read(trimmed.url))
    assert [next(data) for _ in range(20)] == list(range(20))
    trimmed.delete()
    with pytest.raises(InfrastructureError, match=r"was recreated or has lost messages|NotFound"):
        next(data)


def test_a_key_that_holds_something_else_is_named(redis_port: int, read) -> None:
    import redis

    topic = redis_topic(redis_port)
    redis.Redis(port=redis_port).rpush(topic.url.rpartition("=")[2], "x")
    with pytest.raises(InfrastructureError, match=r"cannot be read: .*wrong kind of value"):
        list(read(topic.url))


def test_large_messages_are_read_a_few_at_a_time(redis_port: int) -> None:
    import redis

    topic = redis_topic(redis_port)
    client, name = redis.Redis(port=redis_port), topic.url.rpartition("=")[2]
    for at in range(60):
        client.xadd(name, {"n": at, "blob": bytes(1 << 20)})
    asked = []

    class Watching(Stream):
        def broker(self):
            made = super().broker()
            fetch = made.fetch
            made.fetch = lambda *args: (asked.append(args[-1]), fetch(*args))[1]
            return made

    with contextlib.closing(Records(Watching(topic.url, decode=number, until="now"))) as data:
        assert list(data) == list(range(60))
    client.delete(name)
    assert max(asked[1:]) <= 16, "after the first ones their size is known"
