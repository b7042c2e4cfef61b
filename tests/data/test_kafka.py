"""Logs of Kafka with gaps: compaction, transactions, and their ends."""

from __future__ import annotations

import contextlib
import random

import pytest

from dlrover.data import Stream, feed
from dlrover.data.records import Records
from dlrover.data.sources import kafka
from dlrover.errors import InfrastructureError
from tests.kafka import Kafka, Log
from tests.services import free_port

pytest.importorskip("confluent_kafka")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def of(log: Log) -> tuple[list[int], int]:
    """What a job reads until now, and the fetches that it takes."""
    with contextlib.closing(Kafka(log)) as server:
        stream = Stream(f"kafka://127.0.0.1:{server.port}/t", until="now")
        with contextlib.closing(Records(stream)) as data:
            return list(map(int, data)), server.fetches


def test_offsets_that_a_compaction_has_removed_take_no_time() -> None:
    log = Log()
    offsets = sorted(random.Random(1).sample(range(100_000), 300))
    log.add([*offsets, 3_000_000])
    got, fetches = of(log)
    assert got == [*offsets, 3_000_000]
    assert fetches < 100


@pytest.mark.parametrize("length", [9, 99, 100, 150])
def test_transactions_are_read_once_they_are_committed(length: int) -> None:
    log, committed = Log(), []
    for commit in (True, False, True, False, False, True, True):
        begin = log.end
        offsets = range(begin, begin + length)
        log.add(offsets, in_transaction=True)
        log.end_transaction(begin, commit=commit)
        committed += offsets if commit else []
    log.stable = log.end
    log.add(range(log.end, log.end + length), in_transaction=True)
    assert of(log)[0] == committed


def test_a_log_whose_last_transactions_are_aborted_ends() -> None:
    log = Log()
    log.add(range(30))
    for _ in range(2):
        begin = log.end
        log.add(range(begin, begin + 130), in_transaction=True)
        log.end_transaction(begin, commit=False)
    assert of(log)[0] == list(range(30))


def test_what_was_removed_is_said_in_a_few_sentences_however_much_it_is(caplog) -> None:
    log = Log()
    log.add([*range(300), 5000, *range(20_000, 20_050)])
    with contextlib.closing(Kafka(log)) as server:
        one_fetch = "queued.min.messages=1&fetch.queue.backoff.ms=1"
        url = f"kafka://127.0.0.1:{server.port}/t?{one_fetch}"
        stream = Stream(url, until="now", lost="skip")
        with contextlib.closing(Records(stream)) as data:
            samples = iter(data)
            got = [int(next(samples))]
            log.first = 20_000
            got += map(int, samples)
    assert got == [*range(got.index(20_000)), *range(20_000, 20_050)]
    assert "to 19999 of partition 0" in caplog.text
    assert caplog.text.count("they are skipped") < 20


def test_a_topic_that_is_made_again_with_fewer_messages_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(feed, "PATIENCE", 1.0)
    log = Log()
    log.add(range(5000))
    with contextlib.closing(Kafka(log)) as server:
        stream = Stream(f"kafka://127.0.0.1:{server.port}/t", until="now", lost="skip")
        with contextlib.closing(Records(stream)) as data:
            samples = iter(data)
            next(samples)
            server.logs = (Log(),)
            with pytest.raises(
                InfrastructureError, match="ends at offset 0, and the job reads from"
            ):
                list(samples)


def test_a_topic_that_is_made_again_with_more_messages_is_an_error() -> None:
    """Between two lives of a job, and while it is read."""
    log, longer = Log(), Log()
    log.add(range(30))
    longer.add(range(50))
    with contextlib.closing(Kafka(log)) as server:
        server.topic_id = bytes(15) + b"a"
        stream = Stream(f"kafka://127.0.0.1:{server.port}/t")
        with contextlib.closing(Records(stream)) as data:
            samples = iter(data)
            got = [int(next(samples)) for _ in range(30)]
            state = data.state_dict()
            server.logs, server.topic_id = (longer,), bytes(15) + b"b"
            said = "t of kafka://.* is not the one that the job has read: that was deleted"
            with pytest.raises(InfrastructureError, match=said):
                next(samples)
        with contextlib.closing(Records(stream)) as data:
            data.load_state_dict(state)
            with pytest.raises(InfrastructureError, match=said):
                next(iter(data))
    assert got == list(range(30))


def test_a_topic_of_a_kafka_without_ids_is_read_on() -> None:
    log = Log()
    log.add(range(30))
    with contextlib.closing(Kafka(log)) as server:
        stream = Stream(f"kafka://127.0.0.1:{server.port}/t", until="now")
        with contextlib.closing(Records(stream)) as data:
            state = data.state_dict()
            assert len(list(data)) == 30
            assert data.state_dict()["source_ids"] == {}
        server.topic_id = bytes(15) + b"a"
        with contextlib.closing(Records(stream)) as data:
            data.load_state_dict(state)
            assert len(list(data)) == 30
            assert data.state_dict()["source_ids"] == {"t": "AAAAAAAAAAAAAAAAAAAAYQ"}


def test_a_topic_is_read_where_the_controller_cannot_be_reached(monkeypatch, caplog) -> None:
    """Only the controller tells the topic's id."""
    monkeypatch.setattr(kafka, "TIMEOUT", 1.0)
    monkeypatch.setattr(feed, "PATIENCE", 2.0)
    log = Log()
    log.add(range(30))
    with contextlib.closing(Kafka(log)) as server:
        server.controller = free_port()
        stream = Stream(f"kafka://127.0.0.1:{server.port}/t", until="now")
        with contextlib.closing(Records(stream)) as data:
            assert len(list(data)) == 30
            assert data.state_dict()["source_ids"] == {}
    assert "tells no id of its topic" in caplog.text
    assert "does not answer" not in caplog.text
