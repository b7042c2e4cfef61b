"""The savers of a node are found by their place, also where an earlier agent's end has made them another's children."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover._util import procs
from dlrover.agent import savers
from dlrover.agent.workers.logs import RunLogs
from dlrover.agent.workers.workers import Worker, WorkerGroup
from dlrover.checkpoint.saver import protocol
from dlrover.spec.job import Entry, LaunchSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def start(directory: Path, place: str, linger: float = 30.0) -> set[int]:
    """Start a saver, which is nobody's child."""
    before = procs.running(savers.SAVER, procs.pids())
    subprocess.run(
        [sys.executable, "-m", savers.SAVER, "--directory", directory, "--identity", "one",
         "--node", place, "--keep", "3", "--linger", str(linger)],
        check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return {
        pid
        for pid in procs.running(savers.SAVER, procs.pids()) - before
        if str(directory) in procs.command(pid)
    }


def test_a_saver_that_outlived_its_agent_obeys_the_next_one_at_its_place(tmp_path: Path) -> None:
    place, other = f"1 of {tmp_path}", f"2 of {tmp_path}"
    mine, others, nobodys = (start(tmp_path, name) for name in (place, other, ""))
    launch = LaunchSpec(entry=Entry.SCRIPT, target="train.py")

    async def story() -> None:
        group = WorkerGroup(launch, {}, RunLogs(launch, tmp_path), "host", None)
        group.orders.place = place
        (stored,) = await group.save_now("asked by a user")
        assert (stored.directory, stored.step) == (str(tmp_path), -1)
        await group.close()

    try:
        assert not savers.running("")
        assert len(mine) == 1
        assert savers.running(place) == mine
        asyncio.run(story())
        assert not savers.running(place)
        assert savers.running(other) == others
        assert procs.running(savers.SAVER, nobodys) == nobodys
    finally:
        procs.kill(mine | others | nobodys)


@pytest.mark.parametrize("again", [False, True])
def test_a_saver_stays_with_its_memory_as_long_as_its_node_waits_for_workers(
    tmp_path: Path, again: bool
) -> None:
    """An agent that takes another's place finds its savers there."""
    place = f"1 of {tmp_path}"
    (pid,) = start(tmp_path, place, linger=0.2)
    address = protocol.address(str(tmp_path), "one", place)
    launch = LaunchSpec(entry=Entry.SCRIPT, target="train.py")

    async def story() -> None:
        group = WorkerGroup(launch, {}, RunLogs(launch, tmp_path), "host", None)
        group.orders.place = place
        with protocol.new_socket() as worker:
            worker.connect(address)
            protocol.send(worker, protocol.Attach(0))
            protocol.receive_reply(worker)
            if again:
                group.prepare()
                await asyncio.gather(*group._holding)
            else:  # what `stop` begins with; the rest of it would end what this process has started for other tests
                await group._hold_savers()
        group._release_savers()
        await asyncio.sleep(1.0)
        assert procs.running(savers.SAVER, [pid])
        group._workers = {0: Worker(0, 0, 1)}  # it trains, and saves to another directory
        group._release_savers()
        await asyncio.wait_for(procs.ended(pid), 10.0)
        await group.close()

    try:
        asyncio.run(story())
    finally:
        procs.kill([pid])
