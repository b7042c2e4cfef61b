"""Streams that begin or end at a time, with real brokers."""

from __future__ import annotations

import contextlib
import time
from datetime import datetime, timezone

import pytest

from dlrover.data import Message, Stream
from dlrover.data.records import Records
from dlrover.errors import ConfigurationError
from tests.brokers import TOPICS, Topic, fresh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


def number(message: Message) -> int:
    value = message.value["n"] if isinstance(message.value, dict) else message.value
    return int(value)


def got(url: str, **options) -> list[int]:
    with contextlib.closing(Records(Stream(url, decode=number, **options))) as data:
        return list(data)


@pytest.fixture(params=["redis", "nats", "rabbitmq", "pulsar"])
def topic(request) -> Topic:
    return TOPICS[request.param](request.getfixturevalue(f"{request.param}_port"))


def test_between_two_times(topic: Topic) -> None:
    moments = [datetime.now(timezone.utc)]
    for first in (0, 100, 200):
        topic.send(range(first, first + 100))
        moment = time.time() + 0.01
        if topic.url.startswith("amqp"):
            moment = int(moment) + 1  # it knows whole seconds
        moments.append(datetime.fromtimestamp(moment, timezone.utc))
        time.sleep(max(0.0, moment - time.time()) + 0.01)
    assert got(topic.url, start=moments[1], until=moments[2]) == list(range(100, 200))
    assert got(topic.url, until=moments[2]) == list(range(200))
    assert got(topic.url, start=moments[1], until="now") == list(range(100, 300))
    assert got(topic.url, start=moments[3], until="now") == []
    assert got(topic.url, until=moments[3]) == list(range(300))
    before = datetime(2020, 1, 1, tzinfo=timezone.utc)
    assert got(topic.url, start=before, until="now") == list(range(300))
    assert got(topic.url, until=before) == []


@pytest.mark.parametrize("kind", ["redis", "nats", "rabbitmq", "pulsar"])
def test_an_empty_stream_has_no_times(request, kind: str) -> None:
    topic = TOPICS[kind](request.getfixturevalue(f"{kind}_port"))
    assert got(topic.url, until="2020-01-01T00:00:00+00:00") == []


def test_ids_that_somebody_has_chosen_are_no_times(redis_port: int) -> None:
    import redis

    name, client = fresh(), redis.Redis(port=redis_port)
    for entry in range(1, 20):
        client.xadd(name, {"n": entry}, id=f"{entry}-1")
    url = f"redis://127.0.0.1:{redis_port}/0?stream={name}"
    with pytest.raises(ConfigurationError, match="are no times, and start and until are"):
        got(url, until="2020-01-01T00:00:00+00:00")
