"""Workers of a stream that wait for each other in each step, as in data-parallel training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.data import services
from dlrover.data.records import Records
from dlrover.data.services import LocalService
from dlrover.errors import InfrastructureError
from tests.data.shelf import MemoryStream, Shelf, quick

pytestmark = pytest.mark.slow
LIMIT = 20.0
"""Seconds after which workers that wait for each other are taken to do so for ever."""


def batches(data: Records, size: int, ahead: int) -> Iterator[list]:
    """Batches, ``ahead`` of which are read before the first is given, as with a loader's processes."""
    reading = data.read_ahead()
    drawn: deque[list] = deque()
    while True:
        while len(drawn) <= ahead and (batch := list(islice(reading, size))):
            drawn.append(batch)
        if not drawn:
            data.end_epoch()
            return
        batch = drawn.popleft()
        data.acknowledge([place for place, _ in batch])
        yield [sample for _, sample in batch]


def train(workers: list[Records], size: int, ahead: int, got: list[Any]) -> None:
    """Steps of all workers together, until none of them has a batch."""
    loops = [batches(worker, size, ahead) for worker in workers]
    while any(step := [next(loop, []) for loop in loops]):
        got += [sample for batch in step for sample in batch]


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 4),
    most=st.integers(1, 150),
    excess=st.sampled_from([0, 0, 1, 7, 100]),
    size=st.integers(1, 12),
    ahead=st.sampled_from([0, 0, 2]),
    shard=st.sampled_from([3, 20, 200]),
    gap=st.sampled_from([1, 4]),
    late=st.sampled_from([0, 0, 50]),
)
def test_all_workers_see_the_end(count, most, excess, size, ahead, shard, gap, late) -> None:
    """Of a stream with enough messages for ``max_samples``, the last ``late`` of which are sent while they wait."""
    shelf, got = Shelf(2, gap), []
    shelf.send((most + excess) * 2 // 3, 0)
    late = min(late, most + excess - len(shelf.sent))
    shelf.send(most + excess - late - len(shelf.sent), 1)
    shared = LocalService()
    with quick() as patch:
        patch.setattr(services, "connect", lambda: shared)
        workers = [
            Records(MemoryStream(shelf, max_samples=most), shard=shard) for _ in range(count)
        ]
        training = threading.Thread(target=train, args=(workers, size, ahead, got))
        training.start()
        if late:
            training.join(0.1)
            shelf.send(late, 1)
        training.join(LIMIT)
        hangs = training.is_alive()
        for worker in workers * hangs:
            worker._client.break_off(InfrastructureError("The workers wait for each other."))
        training.join()
        for worker in workers:
            worker.close()
    assert not hangs
    assert len(got) == len(set(got)) == most
