"""The agent's part in memberships: who was stopped for too long, and what workers are told."""

import asyncio

import msgspec

from dlrover._util import framing
from dlrover.agent.workers.membership import MembersSocket, StoppedWatch
from dlrover.spec.requests.membership import Members


def watched(*steps: tuple[int, float]) -> StoppedWatch:
    watch = StoppedWatch()
    for count, now in steps:
        assert not watch.overdue(7, count, stopped=False, now=now)
    return watch


def test_a_worker_may_be_stopped_for_three_of_its_steps():
    watch = watched((0, 0.0), (1, 2.0), (2, 4.0))
    assert not watch.overdue(7, 2, stopped=True, now=5.0)
    assert not watch.overdue(7, 2, stopped=True, now=10.9)
    assert watch.overdue(7, 2, stopped=True, now=11.1)


def test_a_worker_with_quick_steps_may_be_stopped_for_half_a_second():
    watch = watched((0, 0.0), (100, 1.0))
    assert not watch.overdue(7, 100, stopped=True, now=1.0)
    assert not watch.overdue(7, 100, stopped=True, now=1.4)
    assert watch.overdue(7, 100, stopped=True, now=1.6)


def test_a_worker_without_steps_has_a_minute():
    watch = watched((0, 0.0))
    assert not watch.overdue(7, 0, stopped=True, now=1.0)
    assert not watch.overdue(7, 0, stopped=True, now=60.0)
    assert watch.overdue(7, 0, stopped=True, now=61.5)


def test_a_worker_that_continues_begins_anew():
    watch = watched((0, 0.0), (1, 0.1))
    assert not watch.overdue(7, 1, stopped=True, now=0.2)
    assert not watch.overdue(7, 1, stopped=False, now=0.6)
    assert not watch.overdue(7, 1, stopped=True, now=0.8)
    watch.forget([])
    assert not watch.overdue(7, 0, stopped=True, now=50.0)


def test_workers_are_told_who_trains_also_those_that_come_later():
    first, second = Members(1, 0, {0: 0, 1: 0}), Members(1, 1, {0: 0})

    async def told() -> list[Members]:
        async with MembersSocket() as server:
            server.publish(first)
            reader, writer = await asyncio.open_unix_connection(f"\0{server.address}")
            found = [msgspec.msgpack.decode(await framing.read(reader), type=Members)]
            server.publish(second)
            found.append(msgspec.msgpack.decode(await framing.read(reader), type=Members))
            writer.close()
            return found

    assert asyncio.run(told()) == [first, second]
