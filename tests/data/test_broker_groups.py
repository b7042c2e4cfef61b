"""Consumer groups of real brokers show how far the stored checkpoints are."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Iterator

import pytest

from dlrover.data import Stream
from dlrover.data.records import Records
from dlrover.spec.requests.shards import Span
from tests.brokers import TOPICS, Topic, kafka_topic, nats_topic, redis_topic
from tests.data.shelf import without

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


@pytest.fixture(params=["redis", "nats", "kafka", "pulsar"])
def topic(request) -> Topic:
    return TOPICS[request.param](request.getfixturevalue(f"{request.param}_port"))


@contextlib.contextmanager
def reading(topic: Topic, **options) -> Iterator[Records]:
    with contextlib.closing(Records(Stream(topic.in_group("job"), **options))) as data:
        yield data


def commit_after(data: Records, count: int) -> None:
    samples = iter(data)
    for _ in range(count):
        next(samples)
    data.commit_rank_states([data.state_dict()])


def test_the_lag_is_what_the_checkpoint_does_not_contain(topic: Topic) -> None:
    topic.send(range(250))
    with reading(topic) as data:
        commit_after(data, 100)
        assert topic.lag("job") == 150
        commit_after(data, 60)
        assert topic.lag("job") == 90
        topic.send(range(250, 260))
        assert topic.lag("job") == 100
        commit_after(data, 100)
        assert topic.lag("job") == 0


def test_a_restore_of_an_older_checkpoint_moves_the_group_back(topic: Topic) -> None:
    topic.send(range(50))
    with reading(topic) as data:
        samples = iter(data)
        states = [[next(samples) for _ in range(20)] and data.state_dict() for _ in range(2)]
        for state in reversed(states):
            data.commit_rank_states([state])
        assert topic.lag("job") == 30


@pytest.mark.parametrize("kind", ["redis", "pulsar"])
def test_offsets_without_a_message_that_nobody_has_come_to_are_no_lag(request, kind: str) -> None:
    topic = TOPICS[kind](request.getfixturevalue(f"{kind}_port"))
    for first in (0, 20):
        topic.send(range(first, first + 20))
        time.sleep(0.01)
    with reading(topic, decode=lambda message: message.offset) as data:
        offsets = list(itertools.islice(data, 40))
        pause = Span(0, offsets[19] + 1, offsets[20])
        assert pause.start < pause.stop
        data.commit_rank_states([without(data.state_dict(), pause)])
    assert topic.lag("job") == 0


@pytest.mark.parametrize("kind", ["redis", "nats", "pulsar"])
def test_what_was_there_before_the_job_and_was_removed(request, kind: str) -> None:
    topic = TOPICS[kind](request.getfixturevalue(f"{kind}_port"))
    topic.send(range(300))
    topic.keep(200)
    with reading(topic) as data:
        commit_after(data, 50)
        topic.keep(160)
        commit_after(data, 50)
        assert topic.lag("job") == 100


def test_a_group_of_redis_that_somebody_reads_with_is_left_alone(redis_port: int, caplog) -> None:
    import redis

    caplog.set_level(logging.WARNING)
    topic = redis_topic(redis_port)
    topic.send(range(50))
    client, name = redis.Redis(port=redis_port), topic.url.rpartition("=")[2]
    client.xgroup_create(name, "job", "0")
    client.xreadgroup("job", "somebody", {name: ">"}, count=3)
    with reading(topic) as data:
        commit_after(data, 20)
    assert "The group job of redis://127.0.0.1" in caplog.text
    assert "has consumers; name a group without consumers" in caplog.text
    assert topic.lag("job") == 47


def test_entries_that_are_too_many_to_count_leave_the_lag_open(
    redis_port: int, monkeypatch
) -> None:
    from dlrover.data.sources import redis as source

    monkeypatch.setattr(source, "_PAGE", 10)
    monkeypatch.setattr(source, "_PAGES", 3)
    topic = redis_topic(redis_port)
    topic.send(range(200))
    with reading(topic) as data:
        commit_after(data, 25)
        assert topic.lag("job") == 175
        commit_after(data, 100)
        assert topic.lag("job") is None
        commit_after(data, 75)
        assert topic.lag("job") == 0


def test_a_consumer_of_nats_that_is_somebody_elses_is_left_alone(nats_port: int, caplog) -> None:
    import nats

    caplog.set_level(logging.WARNING)
    topic = nats_topic(nats_port)
    topic.send(range(50))
    name = topic.url.rpartition("/")[2]

    async def consume() -> None:
        client = await nats.connect(f"nats://127.0.0.1:{nats_port}")
        await client.jetstream().add_consumer(name, durable_name="job")
        await client.close()

    asyncio.run(consume())
    with reading(topic) as data:
        commit_after(data, 20)
    assert f"The consumer job of the stream {name}" in caplog.text
    assert "belongs to another program" in caplog.text
    assert topic.lag("job") == 50


def test_a_stream_of_nats_that_is_emptied_by_its_consumers_gets_none(
    nats_port: int, caplog
) -> None:
    import nats

    caplog.set_level(logging.WARNING)
    topic = nats_topic(nats_port)
    name = topic.url.rpartition("/")[2]

    async def make() -> None:
        client = await nats.connect(f"nats://127.0.0.1:{nats_port}")
        stream = client.jetstream()
        await stream.delete_stream(name)
        await stream.add_stream(name=name, subjects=[f"{name}.*"], retention="workqueue")
        for number in range(30):
            await stream.publish(f"{name}.x", str(number).encode())
        await client.close()

    asyncio.run(make())
    with reading(topic) as data:
        data.commit_rank_states([{**data.state_dict(), "begins": (1,)}])
    assert "keeps messages by its consumers (workqueue)" in caplog.text


def test_a_group_of_kafka_with_consumers_is_left_alone(kafka_port: int, caplog) -> None:
    import confluent_kafka as kafka

    caplog.set_level(logging.WARNING)
    topic = kafka_topic(kafka_port)
    topic.send(range(50))
    settings = {"bootstrap.servers": f"127.0.0.1:{kafka_port}", "group.id": "job"}
    with contextlib.closing(kafka.Consumer(settings)) as consumer:
        consumer.subscribe([topic.url.rpartition("/")[2]])
        while not consumer.assignment():
            consumer.poll(0.1)
        with reading(topic) as data:
            commit_after(data, 20)
    assert "to the group job of kafka://" in caplog.text
    assert "Unknown member" in caplog.text
