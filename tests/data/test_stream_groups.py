"""What a consumer group gets of stored checkpoints."""

from __future__ import annotations

import logging

import pytest

from dlrover.data import services
from dlrover.data.records import Records
from dlrover.data.services import LocalService
from dlrover.spec.requests.shards import Span
from tests.data.shelf import Shelf, fast_and_clean, read, without

__all__ = ["fast_and_clean", "read"]
pytestmark = pytest.mark.usefixtures("fast_and_clean")


def take(data: Records, count: int) -> dict:
    samples = iter(data)
    for _ in range(count):
        next(samples)
    return data.state_dict()


def test_only_a_group_gets_offsets(read) -> None:
    shelf = Shelf()
    shelf.send(10)
    data = read(shelf)
    assert not data.commits
    data.commit_rank_states([take(data, 5)])
    assert shelf.committed == []


def test_what_a_checkpoint_contains_from_the_beginning_on_is_committed(read) -> None:
    shelf = Shelf(3)
    for partition in range(2):
        shelf.send(30, partition)
    data = read(shelf, "?group=g", shard=10, until="now")
    assert data.commits
    before = data.state_dict()
    early, late = take(data, 25), take(data, 35)
    for state in (before, late, early):
        data.commit_rank_states([state])
    assert shelf.committed[0] == [30, 30, 0]
    assert sum(shelf.committed[1]) == 25
    assert len(shelf.committed) == 2, "of nothing nothing is committed"


def test_the_first_gap_counts_whoever_has_read_behind_it(read, monkeypatch) -> None:
    shared = LocalService()
    monkeypatch.setattr(services, "connect", lambda: shared)
    shelf = Shelf()
    shelf.send(60)
    first, second = (read(shelf, "?group=g", shard=20) for _ in range(2))
    states = [take(first, 5), take(second, 7)]
    for number, state in enumerate(states):
        state |= {"rank": number, "world_size": 2}
    first.commit_rank_states(states)
    assert shelf.committed == [[5]]


def test_a_gap_without_a_message_does_not_hold_the_group_up(read) -> None:
    shelf = Shelf(gap=3)
    shelf.send(20)
    offsets = shelf.offsets[0]
    data = read(shelf, "?group=g")
    state = take(data, 20)
    gaps = [Span(0, offsets[at] + 1, offsets[at + 1]) for at in (4, 7)]
    data.commit_rank_states([without(state, *gaps)])
    data.commit_rank_states([without(state, *gaps, Span(0, offsets[10], offsets[10] + 1))])
    assert shelf.committed == [[offsets[-1] + 1], [offsets[10]]]


def test_what_is_skipped_does_not_hold_the_group_up(read) -> None:
    def decode(message) -> int:
        if message.offset == 4:
            raise ValueError("rotten")
        return message.offset

    shelf = Shelf()
    shelf.send(20)
    data = read(shelf, "?group=g", decode=decode, until="now")
    assert len(list(data)) == 19
    data.commit_rank_states([data.state_dict()])
    assert shelf.committed == [[20]]


def test_a_refusal_is_logged_once(read, caplog) -> None:
    caplog.set_level(logging.WARNING)
    shelf = Shelf()
    shelf.send(20)
    data = read(shelf, "?group=g")
    state = take(data, 5)
    shelf.refuses = "not for secret you"
    for _ in range(3):
        data.commit_rank_states([state])
    assert caplog.text.count("could not be committed to the group g of memory://host/topic") == 1
    assert "not for *** you" in caplog.text
    shelf.refuses = ""
    data.commit_rank_states([state])
    assert shelf.committed == [[5]]
    shelf.refuses = "not again"
    data.commit_rank_states([state])
    assert "not again" in caplog.text
