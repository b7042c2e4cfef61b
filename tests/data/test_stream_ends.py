"""Where streams begin and end for a job: at a time, or after so many messages."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from datetime import datetime, timezone

import pytest

from dlrover.data import Stream, services
from dlrover.data.records import Records, acknowledged
from dlrover.data.services import LocalService
from dlrover.errors import ConfigurationError
from dlrover.spec.requests.shards import Span
from tests.data.shelf import MemoryStream, Shelf, fast_and_clean, read

__all__ = ["fast_and_clean", "read"]
pytestmark = pytest.mark.usefixtures("fast_and_clean")


def at(second: float) -> datetime:
    return datetime.fromtimestamp(second, timezone.utc)


# ---- times


def test_a_stream_ends_before_the_first_message_from_a_time_on(read) -> None:
    shelf = Shelf(2, gap=3)
    for second in range(10):
        shelf.send(5, second % 2, at=second)
    assert Counter(read(shelf, until=at(6))) == Counter(shelf.sent[:30])
    assert list(read(shelf, until=at(0))) == []


def test_a_stream_begins_with_the_first_message_from_a_time_on(read) -> None:
    shelf = Shelf()
    for second in range(10):
        shelf.send(5, at=second)
    data = read(shelf, start=at(4), until=at(8))
    assert list(data) == shelf.sent[20:40]
    assert data.state_dict()["begins"] == (shelf.sent[20][1],)


def test_a_time_may_be_text(read) -> None:
    shelf = Shelf()
    for second in range(4):
        shelf.send(5, at=second)
    assert list(read(shelf, until="1970-01-01T01:00:02+01:00")) == shelf.sent[:10]


def test_a_restore_may_go_on_to_a_later_time(read) -> None:
    shelf = Shelf()
    for second in range(10):
        shelf.send(5, at=second)
    first = read(shelf, until=at(4))
    assert list(first) == shelf.sent[:20]
    again = read(shelf, until=at(7))
    again.load_state_dict(first.state_dict())
    assert list(again) == shelf.sent[20:35]
    earlier = read(shelf, until=at(2))
    earlier.load_state_dict(again.state_dict())
    assert list(earlier) == []


# ---- numbers


def test_a_stream_ends_after_so_many_messages(read) -> None:
    shelf = Shelf(3, gap=4)
    for partition in range(3):
        shelf.send(40, partition)
    data = read(shelf, shard=5, max_samples=70)
    got = list(data)
    assert len(got) == len(set(got)) == 70
    assert list(data) == [], "it stays at its end"


def test_a_stream_may_have_fewer(read) -> None:
    shelf = Shelf()
    shelf.send(40)
    assert list(read(shelf, until="now", max_samples=70)) == shelf.sent


def test_what_a_checkpoint_contains_counts(read) -> None:
    shelf = Shelf(2, gap=3)
    shelf.send(60, 0)
    shelf.send(60, 1)
    first = read(shelf, max_samples=70)
    samples = iter(first)
    got = [next(samples) for _ in range(30)]
    state = first.state_dict()
    for _ in range(20):
        next(samples)  # after the checkpoint
    again = read(shelf, max_samples=70)
    again.load_state_dict(state)
    got += again
    assert len(got) == len(set(got)) == 70


@pytest.mark.parametrize(("most", "more"), [(100, 60), (40, 0), (20, 0)])
def test_a_restore_may_have_another_number(read, most: int, more: int) -> None:
    shelf = Shelf()
    shelf.send(200)
    first = read(shelf, max_samples=40)
    got = list(first)
    again = read(shelf, max_samples=most)
    again.load_state_dict(first.state_dict())
    assert [*got, *again] == shelf.sent[: 40 + more]


def test_a_number_can_be_given_after_a_run_without(read) -> None:
    shelf = Shelf()
    shelf.send(200)
    first = read(shelf)
    samples = iter(first)
    got = [next(samples) for _ in range(50)]
    again = read(shelf, max_samples=80)
    again.load_state_dict(first.state_dict())
    assert [*got, *again] == shelf.sent[:80]


def test_messages_that_cannot_be_decoded_do_not_count(read) -> None:
    def decode(message) -> int:
        if message.offset % 10 == 3:
            raise ValueError("rotten")
        return message.offset

    shelf = Shelf()
    shelf.send(100)
    assert list(read(shelf, decode=decode, max_samples=45)) == [
        offset for offset in range(50) if offset % 10 != 3
    ]


def test_all_workers_together_get_so_many(read, monkeypatch) -> None:
    shared = LocalService()
    monkeypatch.setattr(services, "connect", lambda: shared)
    shelf = Shelf(2)
    shelf.send(500, 0)
    shelf.send(500, 1)
    workers = [read(shelf, max_samples=300) for _ in range(3)]
    turns = itertools.zip_longest(*workers)
    got = [place for turn in turns for place in turn if place is not None]
    assert len(got) == len(set(got)) == 300


def test_the_last_message_that_counts_is_not_followed_by_a_wait(read) -> None:
    shelf = Shelf()
    shelf.send(50)
    assert list(read(shelf, max_samples=50)) == shelf.sent


@pytest.fixture
def pair(read, monkeypatch) -> tuple[Shelf, list[Records]]:
    """Two workers of a job, and a stream of 120 messages, of which all count."""
    shared = LocalService()
    monkeypatch.setattr(services, "connect", lambda: shared)
    shelf = Shelf(2, gap=2)
    shelf.send(110, 0)
    shelf.send(10, 1)
    workers = [read(shelf, shard=20, max_samples=120, idle=0.02) for _ in range(2)]
    for worker in workers:
        while not worker._opened()._known:  # how far the stream is
            time.sleep(0.001)
    return shelf, workers


def check_states(shelf: Shelf, workers: list[Records]) -> None:
    """All is in a checkpoint, but for what is empty behind the last message."""
    states = [worker.state_dict() for worker in workers]
    for number, state in enumerate(states):
        state |= {"rank": number, "world_size": 2}
    assert sum(state["samples"] for state in states) == 120
    known = acknowledged(states)
    assert all(
        known.covers(Span(partition, offset, offset + 1)) for partition, offset in shelf.sent
    )


@pytest.mark.parametrize("seed", range(4))
def test_what_one_worker_may_not_read_any_more_another_reads(pair, seed: int) -> None:
    """In steps, as where workers wait for each other: one of them has what the others need in the end."""
    shelf, workers = pair
    rng = random.Random(seed)
    readers = [iter(worker) for worker in workers]
    got = []
    for turn in itertools.cycle([0, 1]):
        for _ in range(rng.choice([1, 9]) if turn else 1):
            sample = next(readers[turn], None)
            if sample is None:
                readers[turn] = iter(workers[turn])
                break
            got.append(sample)
        if len(got) >= 120:
            break
    assert Counter(got) == Counter(shelf.sent)
    assert [next(iter(worker), None) for worker in workers] == [None, None]
    check_states(shelf, workers)


def test_workers_that_do_not_wait_for_each_other_all_end(pair) -> None:
    shelf, workers = pair
    for worker in workers:
        worker.source.idle = None
    got: list[list] = [[], []]
    threads = [
        threading.Thread(target=lambda one=one, worker=worker: one.extend(worker))
        for one, worker in zip(got, workers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(got[0] + got[1]) == Counter(shelf.sent)
    check_states(shelf, workers)


@pytest.mark.torch
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_what_a_loader_has_read_ahead_does_not_count(fast_and_clean, num_workers: int) -> None:
    from dlrover.data.dataset import ElasticDataset

    shelf = Shelf()
    shelf.send(200)

    def made() -> ElasticDataset:
        return ElasticDataset(
            MemoryStream(shelf, max_samples=100, decode=lambda message: message.offset)
        )

    data = made()
    batches = iter(data.loader(8, num_workers=num_workers))
    got = [int(n) for _ in range(5) for n in next(batches)]
    batches.close()
    assert [int(n) for n in next(iter(data.loader(8)))] == list(range(40, 48)), "it was put back"
    state = data.state_dict()
    data.close()
    again = made()
    again.load_state_dict(state)
    rest = [int(n) for batch in again.loader(8, num_workers=num_workers) for n in batch]
    again.close()
    assert got + rest == [*range(40), *range(48, 100)]


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"until": "tomorrow"},
            "until is 'tomorrow'; accepted: 'now', or a time with its zone such",
        ),
        ({"until": "2026-01-01T00:00:00"}, "until is '2026-01-01T00:00:00'; accepted"),
        ({"until": datetime(2020, 1, 1)}, r"until is datetime.datetime\(2020, 1, 1"),
        ({"until": 1700000000}, "until is 1700000000; accepted"),
        ({"until": at(time.time() + 10_000)}, "which is still to come; a time that has passed"),
        ({"start": at(9), "until": at(9)}, "until is .*, which is not after start"),
        ({"max_samples": 0}, "max_samples is 0; it must be 1 or more"),
    ],
)
def test_wrong_ends_are_refused(options: dict, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Stream("redis://host/0?stream=a", **options)


def test_another_broker_without_times(monkeypatch, read) -> None:
    shelf = Shelf()
    shelf.send(3)
    data = Records(MemoryStream(shelf, until=at(5)))
    monkeypatch.delattr("tests.data.shelf.Memory.offsets_at")
    with pytest.raises(ConfigurationError, match="memory://host/topic keeps no times"):
        next(iter(data))


def test_where_the_model_is_after_the_end(read) -> None:
    shelf = Shelf(1, gap=2)
    shelf.send(50)
    data = read(shelf, shard=8, max_samples=33)
    got = list(data)
    assert acknowledged([data.state_dict()]).count == got[-1][1] + 1
