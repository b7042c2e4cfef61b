"""A machine whose clock is set back while a job of several roles runs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from dlrover.master.journal.history import History
from dlrover.roles.coordinator.journal import RolesJournal
from dlrover.roles.coordinator.shell import Coordinator
from dlrover.roles.coordinator.status import replayed
from dlrover.roles.machine.inputs import InstanceDown, InstanceUp, Submitted
from dlrover.roles.spec import RolesConfig
from dlrover.rpc.messages import StatusRequest
from dlrover.spec.jobdir import JobDir
from tests.roles.test_losses import JOB

DAY = 86400.0


def test_times_of_a_job_go_forward_when_the_clock_of_the_machine_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, began = JobDir(tmp_path), time.time()
    journal = RolesJournal(directory.journal)
    journal.append(Submitted(JOB), began)
    journal.close()

    async def run() -> None:
        # The clock is set back while a coordinator runs, and is still behind when the next one starts.
        for life in (1, 2):
            journal, history = RolesJournal(directory.journal), History(directory.events)
            coordinator = Coordinator(directory, RolesConfig(job=JOB), journal, history, {}, -1)
            coordinator.submit(InstanceUp("trainer", 1, 0, life, 2 * life))
            monkeypatch.setattr(time, "time", lambda: began - DAY)
            coordinator.submit(InstanceDown("trainer", 1, 0, "it died", 2 * life + 1))
            now = await coordinator._status(StatusRequest())
            for status in (now, replayed(directory.journal, time.time())):
                assert 0 <= status.seconds < 60
                use = status.roles[0].use
                assert min(use.starting, use.working, use.idle, use.away) >= 0
                assert use.seconds < 60
            assert all(event.time >= began for event in history.events)
            for one in (coordinator, journal, history):
                one.close()

    asyncio.run(run())
