"""What the master makes of heartbeats that tell what workers do: journal entries, and the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from dlrover.master.journal.file import FileJournal
from dlrover.master.journal.history import History
from dlrover.master.machine import inputs
from dlrover.master.machine.watches.activities import Activities
from dlrover.master.service import Master
from dlrover.master.streams import PROGRESS_JOURNAL_INTERVAL
from dlrover.rpc import messages
from dlrover.rpc.messages import Hello, Join, StopRequest
from dlrover.spec.activity import Activity
from dlrover.spec.job import JobSpec
from dlrover.spec.measurements import WorkerActivity
from dlrover.spec.world import Offer
from tests.simulation.clock import VirtualLoop


def worker(*seconds: float, steps: int = 0, first_step: int = -1) -> WorkerActivity:
    told = (*seconds, *(0.0,) * (len(Activity) - len(seconds)))
    return WorkerActivity(steps, Activity.STEP, 0.0, told, first_step=first_step)


class Job:
    """A master whose two nodes are in round 1, without a wire."""

    def __init__(self, path: Path) -> None:
        self.journal = FileJournal(path / "journal.sqlite")
        loop = asyncio.get_running_loop()
        self.master = Master(self.journal, History(path / "events.jsonl"), lambda _: loop.time)
        self.master.submit(inputs.Submitted(JobSpec(name="job", min_nodes=2, max_nodes=2)))
        for node in (0, 1):
            uid = f"agent {node}"
            self.master.streams._greeted[uid] = asyncio.Queue()
            self.master.submit(Hello(uid, -1, -1, "host", 0))
        for node in (0, 1):
            self.master.submit(inputs.Reported(node, Join(1, Offer(2, "host", 1))))
        # Nothing is due for a while.
        self.master.heartbeats._journalled = self.master.clock()

    def beat(self, node: int, steps: int, *workers: WorkerActivity, round_: int = 1) -> None:
        self.master.take(node, messages.Heartbeat(round_, steps, workers))

    @property
    def progressed(self) -> list[inputs.Progressed]:
        return [e for _, e in self.journal.entries() if isinstance(e, inputs.Progressed)]

    def close(self) -> None:
        self.master.close()
        self.journal.close()
        self.master._history.close()


def run(path: Path, test: Callable[[Job], Awaitable[None]]) -> None:
    async def main() -> None:
        job = Job(path)
        try:
            await test(job)
        finally:
            job.close()

    loop = VirtualLoop()
    loop.run_until_complete(main())
    loop.close()


# ---- what nodes told


def test_the_time_left_is_that_of_the_slowest_at_its_pace_since_its_first_step() -> None:
    latest = Activities()
    latest.note(0, messages.Heartbeat(1, 10, (worker(50.0, 20.0, steps=10),)), 0.0)
    assert latest.seconds_left() is None
    told = msgspec.structs.replace(worker(50.0, 20.0, steps=10), left=100)
    slower = msgspec.structs.replace(worker(50.0, 30.0, steps=10), left=100)
    latest.note(0, messages.Heartbeat(1, 10, (told, slower)), 0.0)
    assert latest.seconds_left() == 300.0
    latest.note(0, messages.Heartbeat(2, 0, (msgspec.structs.replace(told, steps=0),)), 0.0)
    assert latest.seconds_left() is None, "no pace without a step"
    assert latest.latest_seconds_left() == 300.0, "a strategy is chosen before a round's first step"
    latest.note(0, messages.Heartbeat(3, 0), 0.0)
    assert latest.latest_seconds_left() == 300.0


def test_two_reports_at_the_same_moment_tell_no_pace() -> None:
    latest = Activities()
    for node, steps in enumerate((2, 5)):
        latest.note(node, messages.Heartbeat(1, steps), 7.0)
    assert latest.rate(7.0) == 0.0


def test_the_mean_is_over_all_workers_of_the_round() -> None:
    latest = Activities()
    latest.note(
        0, messages.Heartbeat(3, 7, (worker(1.0, 6.0, first_step=4), worker(3.0, 4.0))), 0.0
    )
    latest.note(1, messages.Heartbeat(3, 6, (worker(5.0, 2.0, first_step=5),)), 0.0)
    assert latest.progress([0, 1], 0.0) == inputs.Progressed(
        3, 7, (3.0, 4.0, 0.0, 0.0, 0.0, 0.0), 5
    )
    latest.note(1, messages.Heartbeat(3, 8, (worker(5.0, 5.0),)), 0.0)
    assert latest.progress([0, 1], 0.0) == inputs.Progressed(
        3, 8, (3.0, 5.0, 0.0, 0.0, 0.0, 0.0), 4
    )


def test_a_mean_over_some_of_the_workers_is_left_out() -> None:
    latest = Activities()
    latest.note(1, messages.Heartbeat(3, 7, (worker(60.0, 40.0),)), 0.0)
    assert latest.progress([0, 1], 0.0) == inputs.Progressed(3, 7, (), -1)
    latest.note(0, messages.Heartbeat(3, 7, ()), 0.0)
    assert latest.progress([0, 1], 0.0).seconds[:2] == (60.0, 40.0), "node 0 reports no activities"


def in_step(since: float, step: float, **facts: object) -> WorkerActivity:
    """A worker in a step that has lasted a while."""
    return msgspec.structs.replace(worker(4.0, step), since=since, **facts)


def test_the_time_in_a_step_that_nobody_completes_is_left_out() -> None:
    latest = Activities()
    ended = in_step(1.0, 8.0, ended=True)
    latest.note(0, messages.Heartbeat(3, 7, (in_step(590.0, 600.0), ended)), 610.0)
    latest.note(1, messages.Heartbeat(3, 7, (in_step(580.0, 590.0),)), 610.0)
    told = latest.progress([0, 1], 612.0)
    assert (told.idle, told.ended) == (582.0, 0.0)
    assert told.seconds[:2] == (4.0, (20.0 + 8.0 + 10.0) / 3)
    waits = msgspec.structs.replace(worker(4.0, 10.0, 580.0), doing=Activity.DATA, since=580.0)
    latest.note(1, messages.Heartbeat(3, 7, (waits,)), 610.0)
    assert latest.progress([0, 1], 612.0).idle == 0.0, "one of them waits for data"


def test_the_age_of_workers_at_their_end_is_known_once_all_have_ended() -> None:
    latest = Activities()
    ended = in_step(1.0, 8.0, ended=True)
    latest.note(0, messages.Heartbeat(3, 7, (ended,)), 610.0)
    told = latest.progress([0, 1], 612.0)
    assert (told.idle, told.ended, told.seconds) == (0.0, 12.0, ())
    latest.note(1, messages.Heartbeat(3, 7, (in_step(1.0, 10.0, ended=True),)), 610.0)
    assert latest.progress([0, 1], 612.0).ended == 13.0
    latest.note(1, messages.Heartbeat(3, 7, (in_step(1.0, 10.0),)), 610.0)
    assert latest.progress([0, 1], 612.0).ended == 0.0


def test_a_new_round_forgets_the_last_one_and_old_news_is_left_out() -> None:
    latest = Activities()
    latest.note(0, messages.Heartbeat(3, 7, (worker(1.0, 6.0),)), 0.0)
    latest.note(1, messages.Heartbeat(4, 2, ()), 0.0)
    latest.note(0, messages.Heartbeat(3, 9, (worker(1.0, 9.0),)), 0.0)
    assert latest.progress([1], 0.0) == inputs.Progressed(4, 2)
    assert not latest.known


def test_workers_go_on_with_what_they_did_at_their_nodes_last_report() -> None:
    """Else the seconds since the oldest report would be missing, and the ledger would call them start-up."""
    latest = Activities()
    ended = msgspec.structs.replace(worker(4.0, 2.0), ended=True)
    latest.note(0, messages.Heartbeat(3, 7, (worker(4.0, 2.0), ended)), 10.0)
    latest.note(1, messages.Heartbeat(3, 7, (worker(4.0, 10.0), worker(4.0, 10.0))), 18.0)
    assert latest.progress([0, 1], 20.0).seconds == (4.0, 8.0, 0.0, 0.0, 0.0, 0.0), "until 18"
    fields = latest.progress([0, 1], 9.0).seconds
    assert fields == (4.0, 6.0, 0.0, 0.0, 0.0, 0.0), "a clock that ran backwards takes nothing away"


# ---- what is journalled


def test_the_first_step_is_journalled_at_once_with_what_workers_did(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        job.beat(1, 0)
        job.beat(0, 1, worker(2.0, 1.0, first_step=0), worker(4.0, 1.0))
        assert job.progressed == [inputs.Progressed(1, 1, (3.0, 1.0, 0.0, 0.0, 0.0, 0.0), 0)]
        job.beat(0, 2, worker(2.0, 2.0), worker(4.0, 2.0))
        assert len(job.progressed) == 1, "later steps wait"

    run(tmp_path, test)


def test_what_a_round_began_with_is_journalled_at_once_though_it_is_told_late(
    tmp_path: Path,
) -> None:
    """A master that dies right after would leave the next one without the steps that a fault undid."""

    async def test(job: Job) -> None:
        job.beat(1, 0)
        job.beat(0, 1, worker(2.0, 1.0))
        job.beat(0, 2, worker(2.0, 2.0, first_step=7))
        job.beat(0, 3, worker(2.0, 3.0, first_step=7))
        assert [(p.steps, p.first_step) for p in job.progressed] == [(1, -1), (2, 7)]
        job.master.submit(StopRequest("enough", 0))
        job.beat(0, 4, worker(2.0, 4.0, first_step=7))
        assert len(job.progressed) == 2, "nobody asks for the steps of an ended job"

    run(tmp_path, test)


def test_what_workers_do_is_journalled_without_a_new_step(
    tmp_path: Path,
) -> None:
    async def test(job: Job) -> None:
        job.beat(1, 0)
        job.beat(0, 0, worker(2.0, 0.0))
        assert job.progressed == []
        await asyncio.sleep(PROGRESS_JOURNAL_INTERVAL)
        told = inputs.Progressed(1, 0, (2.0, 0.0, 0.0, 0.0, 0.0, 0.0), -1, idle=5.0)
        assert job.progressed == [told]
        job.beat(0, 0)
        await asyncio.sleep(PROGRESS_JOURNAL_INTERVAL)
        assert len(job.progressed) == 1, "nothing new was told"

    run(tmp_path, test)


def test_steps_that_no_later_heartbeat_follows_are_journalled(
    tmp_path: Path,
) -> None:
    async def test(job: Job) -> None:
        job.beat(0, 1)
        job.beat(0, 5)
        assert [p.steps for p in job.progressed] == [1]
        await asyncio.sleep(PROGRESS_JOURNAL_INTERVAL)
        assert [p.steps for p in job.progressed] == [1, 5]

    run(tmp_path, test)


def test_what_ends_a_round_is_preceded_by_the_latest_activity(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        job.beat(1, 0)
        job.beat(0, 1, worker(2.0, 1.0))
        job.beat(0, 9, worker(2.0, 9.0))
        job.master.platform.on_node_exit(1, "killed")
        last, before = [entry for _, entry in job.journal.entries()][:-3:-1]
        assert isinstance(last, inputs.NodeExited)
        assert before == inputs.Progressed(1, 9, (2.0, 9.0, 0.0, 0.0, 0.0, 0.0), -1)

    run(tmp_path, test)


def test_thousands_of_ends_do_not_journal_thousands_of_activities(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        job.beat(0, 1, worker(2.0, 1.0))
        for _ in range(50):
            job.beat(0, 1, worker(2.0, 2.0))
            job.master.take(1, messages.Succeeded(9))
        assert len(job.progressed) == 1

    run(tmp_path, test)


def test_the_ledger_replays_to_the_same_report(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        job.beat(0, 1, worker(2.0, 1.0))
        await asyncio.sleep(1.0)
        job.master.submit(StopRequest("stopped", 5))
        again = Master(job.journal, job.master._history)
        last = [time for time, _ in job.journal.entries()][-1]
        assert again.ledger.goodput(last) == job.master.ledger.goodput(last)
        assert again.ledger.goodput(last).wall_seconds > 0

    run(tmp_path, test)
