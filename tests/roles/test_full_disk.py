"""A coordinator whose journal finds no room loses no end of a role, and makes none up; one that can do no more ends."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dlrover.errors import ExitCode, FencedError, InfrastructureError
from dlrover.master.journal.history import History
from dlrover.roles.coordinator.journal import RolesJournal
from dlrover.roles.coordinator.shell import Coordinator
from dlrover.roles.machine.inputs import RoleExited, StopRequested, Submitted
from dlrover.roles.messages import MemberPlace, MemberStarted
from dlrover.roles.spec import EntryForm, EntryPoint, RolesConfig, RolesJob, RoleSpec
from dlrover.spec.events import Event
from dlrover.spec.jobdir import JobDir
from dlrover.spec.outcome import Outcome

ROLE = RoleSpec(name="a", entry=EntryPoint(EntryForm.SCRIPT, "/a.py"), max_restarts=0)
JOB = RolesJob(name="job", roles=(ROLE,))
LONG = "x" * 10_000


def limit(journal: RolesJournal, pages: int) -> None:
    journal._file._db.execute(f"PRAGMA max_page_count={pages}")


def test_a_role_that_ends_while_the_disk_is_full_ends_and_is_journalled_later(
    tmp_path: Path,
) -> None:
    directory = JobDir(tmp_path)
    path = directory.journal

    async def run() -> Outcome:
        first = RolesJournal(path)
        first.append(Submitted(JOB), 1.0)
        first.close()
        journal = RolesJournal(path)
        history = History(directory.events)
        coordinator = Coordinator(directory, RolesConfig(job=JOB), journal, history, {}, -1)
        limit(journal, 1)
        coordinator._exited("a", 1, Outcome(exit_code=3, reason=LONG), 3)
        with pytest.raises(InfrastructureError, match="full"):
            coordinator.service.tell(MemberStarted(MemberPlace("a", 0, 1)))
        limit(journal, 1 << 20)
        coordinator.service.tell(MemberStarted(MemberPlace("a", 0, 1)))
        journal.close()
        history.close()
        return await coordinator.ended

    assert asyncio.run(run()).exit_code == ExitCode.INFRASTRUCTURE
    again = RolesJournal(path, read_only=True)
    entries = [entry for _, entry in again.entries()]
    again.close()
    assert isinstance(entries[1], RoleExited), "in the order in which they took effect"
    assert isinstance(entries[2], bytes)
    assert len(entries) == 3


def end_of(tmp_path: Path, begin: Callable[[Coordinator], None]) -> BaseException | None:
    """Run a coordinator until it ends, after ``begin``; return the error with which it ends."""
    directory = JobDir(tmp_path)

    async def run() -> BaseException | None:
        first = RolesJournal(directory.journal)
        first.append(Submitted(JOB), 1.0)
        first.close()
        journal, history = RolesJournal(directory.journal), History(directory.events)
        coordinator = Coordinator(directory, RolesConfig(job=JOB), journal, history, {}, -1)
        begin(coordinator)
        await asyncio.wait([coordinator.ended], timeout=30)
        journal.close()
        history.close()
        return coordinator.ended.exception()

    return asyncio.run(run())


def test_a_coordinator_that_another_one_has_fenced_off_ends(tmp_path: Path) -> None:
    def begin(coordinator: Coordinator) -> None:
        RolesJournal(JobDir(tmp_path).journal).close()
        with pytest.raises(FencedError):
            coordinator.service.tell(MemberStarted(MemberPlace("a", 0, 1)))

    assert isinstance(end_of(tmp_path, begin), FencedError)


def test_a_coordinator_that_can_no_longer_follow_a_role_ends_and_the_next_one_does(
    tmp_path: Path,
) -> None:
    async def broken(_: str) -> AsyncIterator[Event]:
        raise OSError(errno.EIO, "the disk fails")
        yield

    def begin(coordinator: Coordinator) -> None:
        coordinator._jobs.follow = broken
        coordinator._jobs.find = lambda _: f"{os.getpid()}:0"
        coordinator._jobs.watch = lambda *_: None
        coordinator._start("a", 1)

    error = end_of(tmp_path, begin)
    assert isinstance(error, OSError)
    assert error.errno == errno.EIO


def test_a_launcher_that_ends_with_the_command_is_no_failure_of_its_role(tmp_path: Path) -> None:
    directory = JobDir(tmp_path)

    async def run() -> list[object]:
        first = RolesJournal(directory.journal)
        first.append(Submitted(JOB), 1.0)
        first.close()
        journal, history = RolesJournal(directory.journal), History(directory.events)
        read_fd, write_fd = os.pipe()
        config = RolesConfig(job=JOB)
        coordinator = Coordinator(directory, config, journal, history, {}, read_fd)
        os.close(write_fd)  # the command, or the pod, dies
        coordinator._exited("a", 1, None, 3)
        entries: list[object] = [entry for _, entry in journal.entries()]
        for one in (coordinator, journal, history):
            one.close()
        os.close(read_fd)
        return entries

    assert asyncio.run(run()) == [Submitted(JOB)]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (-9, "its dlrover-run was killed by SIGKILL."),
        (-99, "its dlrover-run died."),
        (0, "its dlrover-run died."),  # an adopted one, whose status is unknown
        (2, "its dlrover-run refused to start, as shown above."),
    ],
)
def test_a_launcher_without_an_outcome_is_said_to_have_died_as_far_as_is_known(
    tmp_path: Path, code: int, reason: str
) -> None:
    directory = JobDir(tmp_path)

    async def run() -> list[object]:
        first = RolesJournal(directory.journal)
        first.append(Submitted(JOB), 1.0)
        first.close()
        journal, history = RolesJournal(directory.journal), History(directory.events)
        coordinator = Coordinator(directory, RolesConfig(job=JOB), journal, history, {}, -1)
        coordinator._exited("a", 1, None, code)
        entries: list[object] = [entry for _, entry in journal.entries()]
        for one in (coordinator, journal, history):
            one.close()
        return entries

    _, exited = asyncio.run(run())
    assert isinstance(exited, RoleExited)
    assert (exited.reason, exited.vanished, exited.hopeless) == (reason, True, code == 2)


def test_the_state_of_the_service_replaces_its_inputs_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = RolesJournal(path)
    for entry in (Submitted(JOB), b"a", b"b", StopRequested("x", 5)):
        journal.append(entry, 1.0)
    limit(journal, 1)
    with pytest.raises(InfrastructureError, match="full"):
        journal.replace(LONG.encode(), 2.0)
    limit(journal, 1 << 20)
    assert [entry for _, entry in journal.entries()][1:3] == [b"a", b"b"]
    journal.replace(b"state", 2.0)
    journal.append(b"c", 3.0)
    left = [Submitted(JOB), StopRequested("x", 5), b"state", b"c"]
    assert [entry for _, entry in journal.entries()] == left
    RolesJournal(path).close()
    with pytest.raises(InfrastructureError, match="Another master has taken over"):
        journal.replace(b"late", 4.0)
    assert [entry for _, entry in journal.entries()] == left
    journal.close()


def test_an_input_of_a_coordinator_that_was_replaced_is_not_kept(tmp_path: Path) -> None:
    old = RolesJournal(tmp_path / "journal")
    RolesJournal(tmp_path / "journal").close()
    with pytest.raises(InfrastructureError, match="Another master has taken over"):
        old.append_or_keep(StopRequested("x", 5), 1.0)
    old.close()
