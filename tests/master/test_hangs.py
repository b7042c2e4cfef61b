"""Whether a training hangs: what its ranks report, what their processes show, and what was learned."""

from __future__ import annotations

import pytest

from dlrover.master.machine.diagnosis.diagnosis import hang_verdict
from dlrover.master.machine.watches import hangs
from dlrover.master.machine.watches.hangs import (
    Hang,
    HangDetector,
    NodeActivities,
    SampleWorkers,
    Tick,
    WorkersSampled,
    WorldFormed,
)
from dlrover.spec.activity import Activity
from dlrover.spec.events import HangFound
from dlrover.spec.job import Limits
from dlrover.spec.measurements import WorkerActivity
from dlrover.spec.stacks import Frame, WorkerEvidence

STEP, EVAL, START = Activity.STEP, Activity.EVAL, Activity.START
WAITS = (Frame("all_reduce", "/x/site-packages/torch/distributed/distributed_c10d.py", 2800),)
READS = (Frame("__getitem__", "/home/me/data.py", 41), Frame("main", "/home/me/train.py", 9))
OTHER = (Frame("parse", "/home/me/data.py", 50), Frame("main", "/home/me/train.py", 9))


def doing(activity: Activity, since: float, steps: int = 10, ended: bool = False) -> WorkerActivity:
    return WorkerActivity(steps, activity, since, (0.0,) * 6, ended=ended)


def looks(rank: int, frames=WAITS, at: float = 0.0, cpu: float = 0.0, **more) -> WorkerEvidence:
    return WorkerEvidence(pid=100 + rank, rank=rank, time=at, frames=frames, cpu=cpu, **more)


class Job:
    """A detector, and what it has ordered."""

    def __init__(self, size: int = 4, *, stepped: bool = True, **limits) -> None:
        self.detector = HangDetector(Limits(**limits))
        self.now = 0.0
        self.do(WorldFormed(1, size, stepped))

    def do(self, event: hangs.Input) -> list:
        return self.detector.handle(event, self.now)

    def report(self, *workers: WorkerActivity, after: float = 15.0) -> list:
        self.now += after
        self.do(NodeActivities(1, dict(enumerate(workers))))
        return self.do(Tick())

    def look(self, *first: WorkerEvidence, second: tuple[WorkerEvidence, ...] = ()) -> list:
        """Both looks; the second is as the first, 5 s later, unless it is given."""
        assert self.do(WorkersSampled(1, first)) == []
        assert self.do(Tick()) == []
        self.now += 5
        assert self.do(Tick()) == [SampleWorkers(1)]
        later = [hangs.msgspec.structs.replace(one, time=one.time + 5) for one in first]
        return self.do(WorkersSampled(1, tuple(second or later)))


def all_doing(since: float, **more) -> list[WorkerActivity]:
    return [doing(STEP, since, **more)] * 4


def test_a_hang_is_found_and_names_the_rank_and_the_line():
    job = Job()
    assert job.report(*all_doing(0.1)) == []
    assert job.report(*all_doing(179)) == []
    assert job.report(*all_doing(181)) == [SampleWorkers(1)]
    (found,) = job.look(*(looks(rank) for rank in (0, 1, 2)), looks(3, READS))
    assert isinstance(found, Hang)
    assert found.restart
    assert found.hang.ranks == (3,)
    assert found.hang.place == "__getitem__ (data.py:41)"
    assert found.hang.sentence() == (
        "The training has been hanging for 181 s: 3 ranks in all_reduce (distributed_c10d.py:2800); "
        "rank 3 in __getitem__ (data.py:41)."
    )
    assert job.report(*all_doing(300)) == []  # it is said once


def test_one_rank_within_its_limit_is_what_the_others_wait_for():
    job = Job()
    assert job.report(doing(EVAL, 900), *[doing(STEP, 900)] * 3) == []
    assert job.report(doing(EVAL, 1801), *[doing(STEP, 1801)] * 3) == [SampleWorkers(1)]


def test_a_rank_that_works_is_no_hang_and_the_next_suspicion_takes_longer():
    job = Job()
    job.report(*all_doing(181))
    first = (*(looks(rank) for rank in (0, 1, 2)), looks(3, READS, cpu=10))
    second = (*(looks(rank, at=5) for rank in (0, 1, 2)), looks(3, OTHER, at=5, cpu=14))
    assert job.look(*first, second=second) == []
    assert job.report(*all_doing(350)) == []
    assert job.report(*all_doing(361)) == [SampleWorkers(1)]


@pytest.mark.parametrize(
    ("second", "hangs_"),
    [
        (looks(3, READS, at=5, cpu=15), True),  # spins: the same calls
        (looks(3, OTHER, at=5, cpu=10.1), True),  # hardly uses a CPU
        (looks(3, OTHER, at=5, cpu=14), False),  # computes, and gets around
        (looks(3, READS, at=5, cpu=10, moved=50 << 20), False),  # writes a file
        (looks(3, (), at=5, cpu=14), False),  # no stacks, but it computes
        (looks(3, (), at=5, cpu=10), True),
    ],
)
def test_evidence(second: WorkerEvidence, hangs_: bool):
    job = Job()
    job.report(*all_doing(181))
    others = [looks(rank) for rank in (0, 1, 2)]
    first = looks(3, READS if second.frames else (), cpu=10)
    found = job.look(*others, first, second=(*others, second))
    assert bool(found) == hangs_


@pytest.mark.parametrize(
    ("busy", "moving", "hangs_"),
    [
        ([99, 98], [40, 35], False),  # computes
        ([100, 100], [0, 1], True),  # waits in a collective
        ([100, 100], [-1, -1], True),  # computes or waits: the tool does not tell
        ([0, 0], [0, 0], True),
        ([99, 0], [40, 0], True),  # has ended what it computed
    ],
)
def test_an_accelerator_that_computes_is_work_and_one_that_waits_is_not(busy, moving, hangs_):
    """The main thread waits for the device, without any CPU."""
    job = Job()
    job.report(*all_doing(181))
    others = [looks(rank, busy=100, moving=0) for rank in (0, 1, 2)]
    first, second = (looks(3, READS, at=5 * i, busy=busy[i], moving=moving[i]) for i in range(2))
    assert bool(job.look(*others, first, second=(*others, second))) == hangs_


def test_a_rank_whose_accelerator_idles_is_named_where_the_stacks_are_equal():
    job = Job()
    job.report(*all_doing(181))
    waiting = [looks(rank, busy=100, moving=0) for rank in (0, 1, 2)]
    (found,) = job.look(*waiting, looks(3, busy=0, moving=0))
    assert found.hang.ranks == (3,)


@pytest.mark.parametrize("busy", [(100, 100, 0, 0), (0, 0, 0, 0), (100, 100, 100, -1), (-1,) * 4])
def test_idle_accelerators_name_nobody_unless_most_others_are_busy(busy):
    job = Job()
    job.report(*all_doing(181))
    (found,) = job.look(*(looks(rank, busy=part) for rank, part in enumerate(busy)))
    assert found.hang.ranks == ()


def test_a_rank_that_works_in_a_step_for_longer_than_an_evaluation_hangs():
    """It spins from one function to another."""
    job = Job()
    job.detector.longest[STEP] = 500  # so that a step may take 2500 s
    job.report(*all_doing(2501))
    first = (*(looks(rank) for rank in (0, 1, 2)), looks(3, READS, cpu=10))
    second = (*(looks(rank, at=5) for rank in (0, 1, 2)), looks(3, OTHER, at=5, cpu=14))
    (found,) = job.look(*first, second=second)
    assert found.hang.ranks == (3,)


def test_progress_between_the_looks_ends_the_suspicion():
    job = Job()
    assert job.report(*all_doing(181)) == [SampleWorkers(1)]
    assert job.do(WorkersSampled(1, tuple(looks(rank) for rank in range(4)))) == []
    moved = looks(2, at=5, activity=doing(STEP, 0.1, steps=11))
    job.now += 5
    assert job.do(Tick()) == [SampleWorkers(1)]
    assert job.do(WorkersSampled(1, (looks(0), looks(1), moved, looks(3)))) == []
    assert job.detector.suspicion is None
    assert job.report(doing(STEP, 400), doing(STEP, 400), doing(STEP, 1), doing(STEP, 400)) == []


def test_limits_are_learned_from_what_has_ended():
    job = Job()
    job.report(*all_doing(100))
    assert job.detector.limit(STEP) == 180
    job.report(*all_doing(1, steps=11))
    assert job.detector.limit(STEP) == 500
    job.report(*all_doing(450, steps=11))
    assert job.detector.limit(STEP) == 500  # it has not ended
    assert job.report(*all_doing(501, steps=11)) == [SampleWorkers(1)]


def test_waiting_for_another_ranks_evaluation_teaches_nothing_about_steps():
    job = Job()
    job.report(doing(EVAL, 900), *[doing(STEP, 900)] * 3)
    job.report(*all_doing(0.1, steps=11))
    assert job.detector.limit(EVAL) == 900 + hangs.MARGIN
    assert job.detector.limit(STEP) == 180
    job.report(*all_doing(100, steps=11), after=200)
    job.report(*all_doing(1, steps=12))
    assert job.detector.limit(STEP) == 500


def test_what_was_learned_outlives_the_round_and_what_was_seen_does_not():
    """A long activity that a restart cut off must not look like a hang of the next round."""
    job = Job()
    job.report(*all_doing(100))
    job.report(*all_doing(1, steps=11))
    job.report(*all_doing(700, steps=11))
    job.do(WorldFormed(2, 4, True))
    assert job.do(Tick()) == []
    assert job.detector.suspicion is None
    assert job.detector.limit(STEP) == 500
    assert job.do(WorkersSampled(1, ())) == []  # an answer from the round before


def test_a_report_that_was_overtaken_changes_nothing():
    job = Job()
    late = WorkerActivity(10, STEP, 200.0, (0.0, 900.0, 0.0, 0.0, 0.0, 0.0))
    early = WorkerActivity(10, STEP, 190.0, (0.0, 890.0, 0.0, 0.0, 0.0, 0.0))
    assert job.report(*[late] * 4) == [SampleWorkers(1)]
    job.report(*[early] * 4)
    assert job.detector.suspicion is not None
    assert job.detector.limit(STEP) == 180


@pytest.mark.parametrize("seen", [True, False])
def test_a_rank_that_was_started_again_is_watched_at_once(seen):
    """Until it was older than the process before, it counted as ended: a hang was found half an hour later."""

    def aged(seconds: float, since: float = 1.0, **more: bool) -> WorkerActivity:
        return WorkerActivity(10, STEP, since, (0.0, seconds, 0.0, 0.0, 0.0, 0.0), **more)

    job, others = Job(), [aged(900)] * 3
    job.report(*others, aged(900, ended=seen))
    job.report(*others, aged(895 if seen else 1))
    assert not any(worker.ended for worker in job.detector.workers.values())
    assert job.detector.limit(STEP) == 180
    assert job.report(*[aged(1100, 181)] * 3, aged(895 if seen else 190, 181)) == [SampleWorkers(1)]


def test_before_all_ranks_have_reported_nothing_is_suspicious():
    job = Job()
    assert job.report(*[doing(STEP, 1000)] * 3) == []
    assert job.report(*[doing(STEP, 1000)] * 4) == [SampleWorkers(1)]


def test_ranks_that_have_ended_do_not_count():
    job = Job()
    ended = doing(STEP, 5000, ended=True)
    assert Job().report(*[ended] * 4) == []
    assert job.report(*[ended] * 3, doing(STEP, 100)) == []
    assert job.report(*[ended] * 3, doing(STEP, 1700)) == []  # it may put its results away
    assert job.report(*[ended] * 3, doing(STEP, 1801)) == [SampleWorkers(1)]
    (found,) = job.look(looks(3, READS))
    assert found.hang.ranks == (3,)
    assert found.hang.seconds == 1801


def test_the_wait_for_a_rank_that_does_not_end_is_told_with_its_limit():
    job = Job()
    ended = doing(STEP, 0.1, ended=True)
    job.report(*[doing(STEP, 100)] * 4)
    assert job.detector.waiting_for(job.now) == "", "all train"
    job.report(*[ended] * 3, doing(STEP, 4))
    assert job.detector.waiting_for(job.now) == "", "a program takes a moment to end"
    job.report(*[ended] * 3, doing(STEP, 54))
    assert (
        job.detector.waiting_for(job.now)
        == "waiting for rank 3 to end: 54 s of 1800 s; 3 ranks ended"
    )
    assert "64 s of" in job.detector.waiting_for(job.now + 10)
    job.report(*[ended] * 4)
    assert job.detector.waiting_for(job.now) == ""
    words = "waiting for threads of programs that have ended: 9 s"
    assert job.detector.waiting_for(job.now + 9) == words


def test_ranks_without_an_answer_are_what_the_others_wait_for():
    job = Job()
    job.report(*all_doing(181))
    (found,) = job.look(looks(0), looks(1), looks(2))
    assert (found.missing, found.hang.ranks) == ((3,), (3,))
    assert found.hang.groups.endswith("; rank 3 did not answer")


def test_a_job_that_never_made_a_step_is_not_restarted():
    """It may be a server, which waits for requests."""
    job = Job(stepped=False)
    assert job.report(*[doing(START, 1700, steps=0)] * 4) == []
    assert job.report(*[doing(START, 1900, steps=0)] * 4) == [SampleWorkers(1)]
    (found,) = job.look(*(looks(rank) for rank in range(4)))
    assert not found.restart
    assert found.hang.ranks == ()
    assert found.hang.place == "all_reduce (distributed_c10d.py:2800)"


def test_a_job_that_stepped_before_is_restarted_when_it_hangs_at_its_start():
    job = Job(stepped=True)
    job.report(*[doing(START, 1900, steps=0)] * 4)
    (found,) = job.look(*(looks(rank) for rank in range(4)))
    assert found.restart


def test_settings():
    assert Job(hang_detection=False).report(*all_doing(9999)) == []
    job = Job(hang_action="report", hang_step_limit=10)
    assert job.report(*all_doing(11)) == [SampleWorkers(1)]
    (found,) = job.look(*(looks(rank) for rank in range(4)))
    assert not found.restart


THREAD_ERROR = """\
Exception in thread Thread-1 (feed):
Traceback (most recent call last):
  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner
    self.run()
  File "/home/me/train.py", line 18, in feed
    raise KeyError("shard 20")
KeyError: 'shard 20'
3/20 [####]
"""


def test_a_hang_names_the_exception_that_ended_a_thread_of_the_rank_that_the_others_wait_for():
    job = Job()
    job.report(*all_doing(181))
    others = (looks(0, thread_error="Exception in thread X:\nValueError: x\n"), looks(1), looks(2))
    (found,) = job.look(*others, looks(3, READS, thread_error=THREAD_ERROR))
    thread = "an exception had ended the thread Thread-1 (feed) of rank 3: KeyError: 'shard 20' (train.py:18)"
    assert found.hang.thread == thread
    assert f"; {thread}" in found.hang.sentence()
    verdict = hang_verdict(found.hang)
    assert verdict.evidence == thread
    assert "thread" in verdict.advice


def test_a_hang_of_one_place_has_a_verdict_that_says_where_the_stacks_are():
    found = HangFound(
        1, (3,), "read (data.py:9)", "3 ranks in x; rank 3 in y", 200, "evidence/1.txt"
    )
    verdict = hang_verdict(found)
    assert verdict.evidence == "3 ranks in x; rank 3 in y"
    assert "what rank 3 waited for" in verdict.advice
    for nodes, words in ((1,), "node 1"), ((1, 4), "nodes 1 and 4"), ((1, 2, 4), "3 nodes"):
        on_nodes = hang_verdict(hangs.msgspec.structs.replace(found, nodes=nodes))
        assert f"what rank 3 on {words} waited for" in on_nodes.advice
    assert "evidence/1.txt" in verdict.advice
    everywhere = hang_verdict(HangFound(1, (), "", "4 ranks without a stack", 200))
    assert "collectives" in everywhere.advice
