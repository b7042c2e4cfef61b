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
from dlrover.agent.workers.workers import WorkerGroup
from dlrover.spec.job import Entry, LaunchSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def start(directory: Path, place: str) -> set[int]:
    """Start a saver, which is nobody's child."""
    before = procs.running(savers.SAVER, procs.pids())
    subprocess.run(
        [sys.executable, "-m", savers.SAVER, "--directory", directory, "--identity", "one",
         "--node", place, "--keep", "3", "--linger", "30"],
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
