"""Requests that go into the journal together: none is answered before it is there, none is half there."""

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.errors import FencedError, InfrastructureError, ProtocolError
from dlrover.master import requests
from dlrover.master.journal.file import FileJournal
from dlrover.master.machine.inputs import NodePlaced
from dlrover.master.requests import Commits


class Log:
    """A journal that fails when it is told to, and what was done in which order."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.error: Exception | None = None
        self.commits = Commits(self._append, lambda: 7.0)

    def _append(self, entries, now):
        if self.error is not None:
            raise self.error
        self.done.append([entry.handle for entry in entries])

    def ask(self, key: str) -> asyncio.Task:
        def handle(now: float) -> str:
            if key == "bad":
                raise ProtocolError("It is bad.")
            self.done.append(key)
            return f"{key} at {now}"

        return asyncio.ensure_future(self.commits.commit(NodePlaced(0, key), handle))


def test_requests_that_come_together_are_one_append_and_handled_after_it_in_order():
    async def test() -> None:
        log = Log()
        replies = await asyncio.gather(*map(log.ask, "abc"))
        assert replies == ["a at 7.0", "b at 7.0", "c at 7.0"]
        assert log.done == [["a", "b", "c"], "a", "b", "c"]
        assert await log.ask("d") == "d at 7.0"
        assert log.done[-2:] == [["d"], "d"]

    asyncio.run(test())


def test_what_cannot_be_journalled_is_refused_and_changes_nothing():
    async def test() -> None:
        log = Log()
        log.error = InfrastructureError("The disk is full.")
        replies = await asyncio.gather(*map(log.ask, "ab"), return_exceptions=True)
        assert list(map(str, replies)) == ["The disk is full."] * 2
        assert log.done == []
        log.error = None
        assert await log.ask("c") == "c at 7.0"

    asyncio.run(test())


def test_a_request_that_is_refused_is_nobody_elses_trouble():
    async def test() -> None:
        log = Log()
        asked = [log.ask(key) for key in ("a", "bad", "c")]
        replies = await asyncio.gather(*asked, return_exceptions=True)
        assert list(map(str, replies)) == ["a at 7.0", "It is bad.", "c at 7.0"]

    asyncio.run(test())


def test_a_request_whose_caller_has_left_is_dropped():
    async def test() -> None:
        log = Log()
        left, stayed = log.ask("a"), log.ask("b")
        await asyncio.sleep(0)
        left.cancel()
        assert await stayed == "b at 7.0"
        assert log.done == [["b"], "b"]

    asyncio.run(test())


def test_a_commit_waits_for_as_many_requests_as_the_last_one_had(monkeypatch):
    async def test() -> None:
        log = Log()
        await asyncio.gather(*map(log.ask, "abc"))
        monkeypatch.setattr(requests, "WINDOW", 60.0)
        replies = []
        for key in "def":
            replies.append(log.ask(key))
            await asyncio.sleep(0.002)
        assert await asyncio.wait_for(asyncio.gather(*replies), 5.0) == [
            f"{key} at 7.0" for key in "def"
        ]
        assert [each for each in log.done if isinstance(each, list)] == [[*"abc"], [*"def"]]

    asyncio.run(test())


# ---- the file


ANSWERS = """
import asyncio, sys
from pathlib import Path
from dlrover.master.journal.file import FileJournal
from dlrover.master.requests import Commits
from dlrover.master.machine.inputs import NodePlaced

async def main():
    journal = FileJournal(Path(sys.argv[1]))
    commits = Commits(journal.append_all, lambda: 0.0)
    async def ask(partition):
        for number in range(10**9):
            key = f"{partition}-{number}"
            await commits.commit(NodePlaced(0, key), lambda now: None)
            print(key, flush=True)
    await asyncio.gather(*map(ask, range(5)))

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("answers", [1, 38, 200])
def test_whatever_was_answered_survives_a_master_that_is_killed(tmp_path, answers):
    path = tmp_path / "journal.sqlite"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", ANSWERS, str(path)], stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        told = [process.stdout.readline().strip() for _ in range(answers)]
        process.kill()
        told += [line.strip() for line in process.stdout if line.endswith("\n")]
    with contextlib.closing(FileJournal(path)) as journal:
        keys = [entry.handle for _, entry in journal.entries()]
    assert set(told) <= set(keys)
    assert len(keys) == len(set(keys)) <= len(told) + 5


def test_a_master_that_was_followed_adds_nothing_of_several_entries(tmp_path):
    path = tmp_path / "journal.sqlite"
    with contextlib.closing(FileJournal(path)) as first:
        first.append_all([NodePlaced(0, "a"), NodePlaced(0, "b")], 1.0)
        with contextlib.closing(FileJournal(path)) as second:
            with pytest.raises(FencedError):
                first.append_all([NodePlaced(0, "c"), NodePlaced(0, "d")], 2.0)
            assert [entry.handle for _, entry in second.entries()] == ["a", "b"]


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with contextlib.ExitStack() as stack:
        command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no disk can be mounted here: {error}")
        stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=True)
        yield disk


def seven_more(journal: FileJournal, number: int) -> str:
    """Add seven entries; what is wrong."""
    entries = [NodePlaced(each, f"{number} {1000 * 'x'}") for each in range(7)]
    try:
        journal.append_all(entries, float(number))
    except InfrastructureError as error:
        return str(error)
    return ""


def test_a_full_disk_takes_all_of_several_entries_or_none_and_later_takes_more(small_disk):
    filler = small_disk / "somebody else's"
    filler.write_bytes(bytes(100 << 10))
    with contextlib.closing(FileJournal(small_disk / "journal.sqlite")) as journal:
        taken, problem = 0, ""
        while not (problem := seven_more(journal, taken)):
            taken += 1
        assert "journal.sqlite cannot be written: " in problem
        assert taken >= 3
        assert len(list(journal.entries())) == 7 * taken
        filler.unlink()
        assert seven_more(journal, taken) == ""
        assert len(list(journal.entries())) == 7 * (taken + 1)
