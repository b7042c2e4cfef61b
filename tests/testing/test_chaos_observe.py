"""What a run makes of the events, the incidents and the rows that it has seen."""

from __future__ import annotations

import msgspec
import pytest

from dlrover.spec import events
from dlrover.spec.events import Event
from dlrover.spec.failure import Failure, FailureKind, Origin, Verdict
from dlrover.spec.outcome import Goodput, IncidentCost
from dlrover.testing.chaos.report import ChaosReport, FaultRow, unmet
from dlrover.testing.chaos.strike import Sighting, sight, steps_lost
from dlrover.testing.chaos.watcher import EventLog

FAILED = events.WorkerFailed(
    Failure(id="1", kind=FailureKind.SIGNAL, node_id=1, rank=2, local_rank=0, round=1, signal=9),
    Verdict(title="rank 2 was killed by SIGKILL", origin=Origin.INFRASTRUCTURE),
)


def timeline(*bodies: tuple[float, events.EventBody]) -> list[Event]:
    return [Event(number, time, body) for number, (time, body) in enumerate(bodies, 1)]


def test_a_fault_that_nothing_tells_of_is_not_detected() -> None:
    assert sight(timeline((5.0, events.RoundOpened(2, "it grows", 4))), 1.0) == Sighting()


def test_a_killed_rank_is_seen_restarted_and_recovered_from() -> None:
    happened = timeline(
        (10.2, FAILED),
        (10.3, events.RestartDecided(1, "rank 2 was killed by SIGKILL")),
        (10.4, events.RoundCompleted(2, 4, 4, 0.1)),
        (11.5, events.Recovered(2, 1.3)),
    )
    seen = sight(happened, 10.0)
    assert seen.detected == pytest.approx(0.2)
    assert seen.recovered == pytest.approx(1.5)
    assert seen.restarted
    assert seen.verdict == "Restart 1: rank 2 was killed by SIGKILL."
    assert sight(happened[:1], 10.0).verdict == "rank 2 was killed by SIGKILL (infrastructure)."
    assert sight(happened[:3], 10.0).recovered is None


def test_a_lost_node_and_a_master_that_came_back_are_signs() -> None:
    lost = sight(timeline((3.0, events.NodeLost(1, "its agent ended"))), 1.0)
    assert lost == Sighting(2.0, False, None, "Node 1 is lost: its agent ended.")
    back = sight(timeline((3.0, events.MasterRecovered(7))), 1.0)
    assert (back.detected, back.restarted) == (2.0, False)
    assert "The master is back" in back.verdict


def test_a_second_interruption_counts_until_its_own_end() -> None:
    happened = timeline(
        (1.0, FAILED),
        (1.0, events.RestartDecided(1, "x")),
        (2.0, events.Recovered(2, 1.0)),
        (4.0, events.Recovered(3, 1.0)),
    )
    assert sight(happened, 0.0).recovered == 4.0


def incident(until: float, steps_lost: int) -> IncidentCost:
    return IncidentCost(
        since=until - 1.0, until=until, over=True, title="", node=0, round=1, seconds={},
        steps_lost=steps_lost,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("incidents", "lost"),
    [
        ([], 0),
        ([incident(9.0, 7)], 0),
        ([incident(20.0, 7)], 0),
        ([incident(11.0, 4)], 4),
        ([incident(11.0, 4), incident(15.0, 6)], 10),
        ([incident(11.0, 4), incident(15.0, -1)], None),
    ],
)
def test_steps_lost_are_those_of_the_ledger_between_two_faults(
    incidents: list[IncidentCost], lost: int | None
) -> None:
    assert steps_lost(incidents, 10.0, 20.0) == lost


def spent(ratio: float | None, unknown: int = 0) -> Goodput:
    return Goodput(
        goodput_ratio=ratio, wall_seconds=10.0, job_seconds=10.0, nodes=1, seconds={},
        rounds_without_first_step=unknown,
    )  # fmt: skip


def row(fault: str, again: float | None) -> FaultRow:
    return FaultRow(
        fault=fault,
        target="rank 1, pid 5",
        injected=1.0,
        detected=0.1,
        training_again=again,
        steps_lost=None,
        verdict="",
    )


REPORT = ChaosReport(
    job_dir="job", seed=0, exit_code=0, reason="", wall_seconds=10.0, start_up_seconds=1.0, steps=5,
    goodput=spent(0.6), faults=(row("kill-rank", 2.0), row("hang", 11.0), row("slow", 0.0)),
)  # fmt: skip


def test_assertions_that_hold_are_not_mentioned() -> None:
    assert unmet(REPORT, None, None) == ()
    assert unmet(REPORT, 11.0, 0.6) == ()


def test_assertions_that_do_not_hold_are_named() -> None:
    (sentence,) = unmet(REPORT, 10.0, None)
    assert sentence == "hang (rank 1, pid 5): training again after 11.00 s, --assert-recovery 10"
    (sentence,) = unmet(REPORT, None, 0.61)
    assert sentence == "goodput 60.0 %, --assert-goodput 0.61"


@pytest.mark.parametrize(
    ("goodput", "words"),
    [(None, "not measured"), (spent(None), "not measured"), (spent(0.5, 1), "at most 50.0 %")],
)
def test_a_goodput_that_was_not_measured_meets_no_assertion(
    goodput: Goodput | None, words: str
) -> None:
    report = msgspec.structs.replace(REPORT, goodput=goodput)
    assert unmet(report, None, None) == ()
    assert unmet(report, None, 0.6) == (f"goodput {words}, --assert-goodput 0.6",)


def test_a_job_that_never_trained_again_or_ended_early_meets_nothing() -> None:
    report = msgspec.structs.replace(
        REPORT, faults=(row("kill-rank", None),), not_injected=("kill-node",)
    )
    assert unmet(report, None, None) == ()
    never, missing = unmet(report, 100.0, None)
    assert "training again after never" in never
    assert missing == "kill-node was not injected: the job had ended"


def test_what_was_left_behind_is_always_named() -> None:
    report = msgspec.structs.replace(REPORT, left_behind=("12 python train.py",))
    assert unmet(report, None, None) == ("left behind: 12 python train.py",)


def test_events_are_read_as_they_are_written(tmp_path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    assert log.refresh() == []
    lines = [msgspec.json.encode(e) + b"\n" for e in timeline((1.0, FAILED), (2.0, FAILED))]
    with (tmp_path / "events.jsonl").open("ab", buffering=0) as file:
        file.write(lines[0] + lines[1][:10])
        assert [event.seq for event in log.refresh()] == [1]
        file.write(lines[1][10:])
    assert [event.seq for event in log.refresh()] == [1, 2]
