"""Events of versions of weights that are lost with the processes that kept them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from dlrover.master.journal.history import History
from dlrover.roles.coordinator.journal import RolesJournal
from dlrover.roles.coordinator.shell import Coordinator
from dlrover.roles.coordinator.status import replayed
from dlrover.roles.machine.health import Stuck
from dlrover.roles.machine.inputs import Input, Submitted
from dlrover.roles.messages import (
    HOLDER,
    CallAddress,
    JoinRole,
    MemberEnded,
    MemberPlace,
    MemberStarted,
    PublishPart,
)
from dlrover.roles.runtime import holder
from dlrover.roles.spec import EntryForm, EntryPoint, RoleKind, RolesConfig, RolesJob, RoleSpec
from dlrover.spec import events
from dlrover.spec.jobdir import JobDir

SCRIPT = EntryPoint(EntryForm.SCRIPT, "/a.py")
JOB = RolesJob(
    name="job", roles=(RoleSpec(name="trainer", entry=SCRIPT, kind=RoleKind.ELASTIC, processes=2),)
)
KEEPER = MemberPlace(HOLDER, 0, 1)
TRAINERS = MemberPlace("trainer", 0, 1, 1), MemberPlace("trainer", 1, 1, 1)


def said(tmp_path: Path, what: Callable[[Coordinator], None], pid: int = 7) -> list[str]:
    """Return the sentences about keepers, which another coordinator makes of the journal, too."""
    directory = JobDir(tmp_path)

    def kept(history: History) -> list[str]:
        return [e.sentence() for e in history.events if isinstance(e.body, events.KeeperEnded)]

    async def run() -> list[str]:
        first = RolesJournal(directory.journal)
        first.append(Submitted(JOB), 1.0)
        first.close()
        found = []
        for _ in range(2):
            journal, history = RolesJournal(directory.journal), History(directory.events)
            coordinator = Coordinator(directory, RolesConfig(job=JOB), journal, history, {}, -1)
            if not found:
                for place in (KEEPER, *TRAINERS):
                    coordinator.service.tell(MemberStarted(place))
                    join = JoinRole(place, CallAddress("a", 1), {}, pid, 1, True)
                    coordinator.service._submit(join)
                what(coordinator)
            found.append(kept(history))
            for one in (coordinator, journal, history):
                one.close()
        assert found[0] == found[1]
        return found[0]

    return asyncio.run(run())


def publish(coordinator: Coordinator, name: str, step: int, *holders: MemberPlace) -> None:
    for rank, keeper in enumerate(holders):
        key = f"{name}{step}{rank}"
        coordinator.service._submit(
            PublishPart(TRAINERS[rank], name, step, rank, len(holders), keeper, key, 8)
        )


def test_one_event_says_what_was_lost_with_the_keeper_of_weights_and_that_another_one_comes(
    tmp_path: Path,
) -> None:
    def dies(coordinator: Coordinator) -> None:
        publish(coordinator, "weights", 6, KEEPER)
        publish(coordinator, "weights", 7, KEEPER)
        publish(coordinator, "critic", 2, TRAINERS[0])
        publish(coordinator, "critic", 3, KEEPER)
        coordinator.service.tell(MemberEnded(KEEPER, "it was killed by SIGKILL"))

    assert said(tmp_path, dies) == [
        "The keeper of weights has ended: it was killed by SIGKILL; another one takes its place; version 7 of weights is"
        " lost, and readers wait for the next one; version 3 of critic is lost, readers take version 2."
    ]
    status = replayed(JobDir(tmp_path).journal, 5.0)
    assert [(one.name, one.version, one.lost) for one in status.weights] == [
        ("critic", "2", "3"),
        ("weights", "", "7"),
    ]


def test_a_silent_keeper_is_killed_and_a_silent_instance_is_left_to_its_role(
    tmp_path: Path,
) -> None:
    stuck: list[MemberPlace] = []

    def is_silent(coordinator: Coordinator) -> None:
        publish(coordinator, "weights", 6, KEEPER)
        submit = coordinator.submit

        def noted(event: Input) -> None:
            if isinstance(event, Stuck):
                stuck.append(event.place)
            else:
                submit(event)

        coordinator.submit = noted  # type: ignore[method-assign]
        for place in (KEEPER, TRAINERS[0], KEEPER):  # the keeper twice
            coordinator._stuck(Stuck(place, "", 60.0))

    sleeps = [sys.executable, "-c", "import time; time.sleep(60)", holder.MODULE]
    with subprocess.Popen(sleeps) as keeper:
        assert said(tmp_path, is_silent, keeper.pid) == [
            "The keeper of weights has ended: it has not reported for 60 s; another one takes its place; version 6 of weights"
            " is lost, and readers wait for the next one."
        ]
        assert keeper.wait(10) == -signal.SIGKILL
    assert stuck == [TRAINERS[0]]


def test_a_keeper_of_nothing_takes_nothing_along(tmp_path: Path) -> None:
    def dies(coordinator: Coordinator) -> None:
        coordinator.service.tell(MemberEnded(KEEPER, "it died"))
        coordinator.service.tell(MemberEnded(TRAINERS[0], "it was killed by SIGKILL"))

    assert said(tmp_path, dies) == [
        "The keeper of weights has ended: it died; another one takes its place; no current version is lost."
    ]


def test_weights_that_an_instance_kept_itself_are_lost_with_it(tmp_path: Path) -> None:
    def dies(coordinator: Coordinator) -> None:
        publish(coordinator, "policy", 7, *TRAINERS)
        for place in TRAINERS:
            coordinator.service.tell(MemberEnded(place, "rank 0 was killed"))

    assert said(tmp_path, dies) == [
        "trainer 0, which kept weights, has ended: rank 0 was killed; version 7 of policy is lost, and readers wait for"
        " the next one."
    ]
