import asyncio
import logging

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
