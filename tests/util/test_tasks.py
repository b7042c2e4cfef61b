import asyncio
import contextlib
import logging

import pytest

from dlrover._util import tasks


async def fails() -> None:
    raise LookupError("no such pod")


def test_a_task_is_held_until_it_is_done_and_its_exception_is_logged(caplog):
    held: set[asyncio.Task[None]] = set()

    async def main() -> None:
        tasks.start(fails(), held)
        assert len(held) == 1
        waiting = tasks.start(asyncio.sleep(60), held)
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert held == set()
    (record,) = caplog.records
    assert record.message == "Defect in a background task"
    assert "no such pod" in str(record.exc_info)


def test_an_event_is_awaited_for_some_time():
    async def main() -> None:
        event = asyncio.Event()
        assert not await tasks.signalled(event, 0.01)
        assert not await tasks.signalled(event, -1.0)
        asyncio.get_running_loop().call_later(0.01, event.set)
        assert await tasks.signalled(event, 60)
        assert await tasks.signalled(event, 0.0)

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(6))
def test_no_cancellation_is_lost_that_comes_just_after_the_event(turns):
    async def follows(event: asyncio.Event) -> None:
        while True:
            await tasks.signalled(event, 60)
            event.clear()

    async def main() -> None:
        event = asyncio.Event()
        following = asyncio.create_task(follows(event))
        await asyncio.sleep(0.01)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        following.cancel()
        await asyncio.wait({following}, timeout=5)
        assert following.done()

    asyncio.run(main())


def test_a_task_that_loses_a_cancellation_is_cancelled_again(monkeypatch):
    monkeypatch.setattr(tasks, "AGAIN", 0.01)

    async def loses_one() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)

    async def main() -> None:
        stubborn, failing = asyncio.create_task(loses_one()), asyncio.create_task(fails())
        await asyncio.sleep(0.01)
        await tasks.stop([stubborn, failing])
        assert stubborn.cancelled()

    asyncio.run(main())


def test_a_task_that_loses_each_cancellation_is_left_behind(monkeypatch, caplog):
    monkeypatch.setattr(tasks, "AGAIN", 0.01)
    over = False

    async def loses_each() -> None:
        while not over:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    async def main() -> None:
        nonlocal over
        stubborn = asyncio.create_task(loses_each())
        await asyncio.sleep(0.01)
        await tasks.stop([stubborn])
        assert not stubborn.done()
        over = True
        await tasks.stop([stubborn])
        assert stubborn.done()

    asyncio.run(asyncio.wait_for(main(), 20))
    (record,) = caplog.records
    assert "loses_each" in record.message
