"""The goodput ledger: which cause each moment of a node goes to, and what an incident costs."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dlrover.errors import ExitCode
from dlrover.master.machine import inputs
from dlrover.master.machine.goodput.incidents import KEPT
from dlrover.master.machine.goodput.roundtime import RoundTime
from dlrover.rpc.messages import Hello, StopRequest, Succeeded
from dlrover.spec import events
from dlrover.spec.failure import FailureKind
from dlrover.spec.job import Limits
from dlrover.spec.outcome import IncidentKind
from dlrover.spec.requests.membership import JoinMembers
from tests.support.drivers import JobDriver


def progress(
    job: JobDriver, at: float, steps: int, *seconds: float, first_step: int = -1, **more: float
) -> None:
    """Steps and seconds by activity (start, step, data, compile, eval, checkpoint) of a round."""
    told = (*seconds, *(0.0,) * (6 - len(seconds))) if seconds else ()
    round_ = job.machine.rendezvous.round
    job.give(inputs.Progressed(round_, steps, told, first_step, **more), at=at)


def killed(job: JobDriver, node: int, at: float, **facts: object) -> None:
    job.fail(node, {"kind": FailureKind.SIGNAL, "signal": 9}, at=at, **facts)


@pytest.fixture
def job() -> JobDriver:
    """Two nodes that connected at 0, joined at 10, and run."""
    return JobDriver.running(2, 2, 2, max_restarts=1000)


# ---- one world


def test_time_goes_to_what_the_workers_did(job: JobDriver) -> None:
    progress(job, 20.0, 4, 2.0, 3.0, 1.0, 0.5, 2.5, 1.0)
    assert job.spent() == {
        "rendezvous": 20.0,
        "productive": 6.0,
        "data": 2.0,
        "eval": 5.0,
        "checkpoint_block": 2.0,
        "compile": 1.0,
        "start_up": 4.0,
    }
    progress(job, 25.0, 8, 2.0, 8.0, 1.0, 0.5, 2.5, 1.0)
    assert job.spent()["productive"] == 16.0
    assert job.ledger.goodput(25.0).goodput_ratio == 16 / 50
    assert job.ledger.goodput(25.0).wall_seconds == 50.0


def test_time_until_the_workers_processes_begin_is_start_up(job: JobDriver) -> None:
    progress(job, 20.0, 1, 3.0, 3.0)
    assert job.spent() == {"rendezvous": 20.0, "start_up": 14.0, "productive": 6.0}


def test_clocks_of_workers_that_run_fast_or_slow_only_divide_the_time(job: JobDriver) -> None:
    progress(job, 20.0, 1, 5.0, 5.0)
    progress(job, 30.0, 2, 5.0, 15.0, 10.0)
    assert job.spent() == {"rendezvous": 20.0, "start_up": 10.0, "productive": 20.0, "data": 10.0}


def test_what_workers_did_before_the_master_knew_of_their_round_is_left_out(job: JobDriver) -> None:
    progress(job, 20.0, 1, 30.0, 8.0, 2.0)
    assert job.spent() == {"rendezvous": 20.0, "productive": 16.0, "data": 4.0}


def test_a_first_report_of_activities_is_set_against_what_is_booked(job: JobDriver) -> None:
    progress(job, 18.0, 1)
    progress(job, 28.0, 9, 8.0, 8.0, 2.0)
    assert job.spent() == {"rendezvous": 20.0, "start_up": 16.0, "productive": 16.0, "data": 4.0}


def test_a_program_that_reports_nothing_is_not_measured(job: JobDriver) -> None:
    job.now = 50.0
    assert job.spent() == {"rendezvous": 20.0, "not_measured": 80.0}
    killed(job, 0, 60.0, time=60.0)
    job.join(0, 1, at=60.0)
    job.give(inputs.Reported(0, Succeeded(2)), at=70.0)
    job.give(inputs.Reported(1, Succeeded(2)), at=80.0)
    assert job.spent() == {"rendezvous": 20.0, "not_measured": 130.0, "shutdown": 10.0}
    assert job.ledger.goodput(80.0).goodput_ratio is None
    assert job.ledger.goodput(80.0).in_words() == "not measured"


def test_a_program_that_ends_well_without_a_step_was_not_starting(job: JobDriver) -> None:
    progress(job, 20.0, 0, 10.0)
    assert job.spent() == {"rendezvous": 20.0, "start_up": 20.0}
    assert job.ledger.goodput(20.0).goodput_ratio is None
    job.give(inputs.Reported(0, Succeeded(1)), inputs.Reported(1, Succeeded(1)), at=23.0)
    assert job.spent() == {"rendezvous": 20.0, "not_measured": 26.0}


def test_a_round_after_the_last_step_is_start_up(job: JobDriver) -> None:
    progress(job, 20.0, 10, 0.0, 10.0)
    killed(job, 0, 20.0, time=20.0)
    job.join(0, 1, at=20.0)
    progress(job, 25.0, 0, 5.0)
    job.give(inputs.Reported(0, Succeeded(2)), inputs.Reported(1, Succeeded(2)), at=30.0)
    assert job.spent() == {"rendezvous": 20.0, "productive": 20.0, "start_up": 20.0}


def test_a_start_that_fails_is_no_hang(job: JobDriver) -> None:
    progress(job, 12.0, 0, 1.0)
    failure = {"kind": FailureKind.EXCEPTION, "exception": "ModuleNotFoundError"}
    job.fail(0, failure, at=17.0, time=13.0)
    assert job.spent() == {"rendezvous": 20.0, "start_up": 14.0}


def test_a_program_that_tells_only_steps_is_starting_until_the_first(job: JobDriver) -> None:
    progress(job, 18.0, 1)
    progress(job, 28.0, 9)
    assert job.spent() == {"rendezvous": 20.0, "start_up": 16.0, "productive": 20.0}


def test_what_a_worker_does_after_its_last_step_is_shutdown(job: JobDriver) -> None:
    progress(job, 20.0, 5, 4.0, 6.0)
    progress(job, 22.0, 5, 4.0, 7.0, 0.0, 0.0, 0.0, 1.0)
    job.give(inputs.Reported(0, Succeeded(1)), inputs.Reported(1, Succeeded(1)), at=23.0)
    spent = job.spent()
    assert (spent["productive"], spent["shutdown"], spent["checkpoint_block"]) == (12.0, 4.0, 2.0)
    job.give(inputs.NodeDisconnected(0), at=24.0)
    job.give(inputs.NodeDisconnected(1), at=26.0)
    job.now = 100.0
    assert job.spent()["shutdown"] == 8.0
    assert job.ledger.goodput(100.0).job_seconds == 23.0


def test_starting_that_is_interrupted_stays_start_up(job: JobDriver) -> None:
    progress(job, 15.0, 0, 4.0)
    killed(job, 0, 17.0, time=17.0)
    assert job.spent() == {"rendezvous": 20.0, "start_up": 14.0}


# ---- before, between and beside worlds


def test_nodes_wait_for_resources_while_there_are_too_few() -> None:
    job = JobDriver(2, 3, managed_nodes=3)
    for node, at in enumerate((4.0, 6.0, 7.0)):
        job.give(inputs.NodePlaced(node, f"process {node}"), at=1.0 if node == 0 else job.now)
        job.now = at
        job.connect(node, claims=node)
    assert job.spent() == {"waiting_for_resources": 19.0, "rendezvous": 2.0}
    job.join(0, 1, 2, at=8.0)
    assert job.spent() == {"waiting_for_resources": 19.0, "rendezvous": 5.0}


def test_training_without_a_wanted_node_is_degraded() -> None:
    job = JobDriver.launched(1, 2)
    progress(job, 12.0, 1, 2.0, 0.0)
    job.give(inputs.NodeExited(1, "its pod was deleted"), at=20.0)
    job.join(0, at=21.0)
    assert job.machine.rendezvous.size.nodes == 1
    job.give(inputs.NodePlaced(2, "process 2"), at=41.0)
    assert job.spent()["degraded"] == 20.0, "node 2 is being started while node 0 trains"
    assert job.ledger.goodput(job.now).degraded_seconds == 20.0
    job.connect(2, claims=2)
    job.join(2, at=51.0)
    job.give(inputs.DeadlinePassed(), at=job.machine.deadline())
    before = job.now
    job.join(0, at=before + 1.0)
    assert job.machine.rendezvous.size.nodes == 2
    job.now = before + 100.0
    assert job.ledger.goodput(job.now).degraded_seconds == before - 21.0
    assert job.spent()["degraded"] == before - 21.0


def test_a_spare_is_idle_and_does_not_make_a_job_degraded() -> None:
    job = JobDriver(2, 2, managed_nodes=2, spares=1)
    for node in range(2):
        job.give(inputs.NodePlaced(node, f"process {node}"))
        job.connect(node, claims=node)
    job.join(0, 1, at=10.0)
    job.connect(2, claims=2)
    job.join(2, at=20.0)
    job.now = 50.0
    assert job.spent()["idle"] == 40.0, "since it connected"
    assert "degraded" not in job.spent()
    assert job.ledger.goodput(job.now).degraded_seconds == 0.0


def test_a_node_too_many_is_idle() -> None:
    job = JobDriver.running(2, 1, 2)
    progress(job, 12.0, 1, 2.0, 0.0)
    job.connect(2)
    job.join(2, at=13.0)
    job.now = 20.0
    assert job.spent()["idle"] == 8.0


def test_a_lost_node_costs_nothing_more() -> None:
    job = JobDriver.running(2, 1, 2)
    job.give(inputs.NodeSilent(1, 0.0), at=20.0)
    job.now = 90.0
    assert job.ledger.goodput(90.0).wall_seconds == 110.0
    assert 1 not in job.ledger.accounts


def test_a_node_that_is_gone_after_success_counts_again_when_it_returns(job: JobDriver) -> None:
    job.give(inputs.Reported(0, Succeeded(1)), at=20.0)
    job.give(inputs.NodeDisconnected(0), at=21.0)
    job.give(inputs.NodeExited(0, "left"), at=22.0)
    job.now = 30.0
    assert job.ledger.goodput(30.0).wall_seconds == 52.0
    job.connect(0, claims=0, runs=1)
    job.now = 35.0
    assert job.ledger.goodput(35.0).wall_seconds == 62.0


def test_nodes_of_an_ended_job_count_as_long_as_they_are_connected(job: JobDriver) -> None:
    job.give(StopRequest("stopped", ExitCode.STOPPED), at=20.0)
    job.give(inputs.MasterStarted(9), at=30.0)
    assert not job.ledger.accounts
    assert job.ledger.goodput(50.0).wall_seconds == 60.0
    job.now = 50.0
    job.connect(0, claims=0)
    job.give(inputs.NodeDisconnected(0), at=54.0)
    assert job.ledger.goodput(90.0).wall_seconds == 64.0


def test_a_step_that_the_user_ends_is_not_made_again(job: JobDriver) -> None:
    """As of a hang that somebody stops."""
    progress(job, 20.0, 1, 1.0, 1.0, first_step=1)
    job.give(StopRequest("stopped", ExitCode.STOPPED), at=80.0)
    seconds = job.ledger.goodput(80.0).seconds
    assert seconds["recomputed_steps"] == 0.0
    assert seconds["shutdown"] == 120.0


# ---- faults


def recover(job: JobDriver, at: float, first_step: int = -1) -> None:
    """Both nodes join the next round at a time; its first step is there two seconds later."""
    job.join(*(i for i in (0, 1)), at=at)
    progress(job, at + 2.0, 1, 1.0, 1.0, first_step=first_step)


def test_silence_that_ends_a_world_is_detection_as_far_as_no_step_was_made() -> None:
    job = JobDriver.running(2, 1, 2)
    progress(job, 20.0, 10, 0.0, 10.0, first_step=0)
    progress(job, 40.0, 20, 0.0, 30.0, first_step=0)
    job.give(inputs.NodeSilent(1, 60.0), at=100.0)
    spent = job.spent()
    assert (spent["productive"], spent["fault_detection"]) == (60.0, 120.0)
    (incident,) = job.ledger.goodput(job.now).incidents
    assert (incident.since, incident.node, incident.round) == (40.0, 1, 1)
    assert incident.title == "node 1 (host1) was lost: it sent no heartbeat for 60 s"
    assert incident.seconds == {"fault_detection": 120.0}


def test_silence_while_others_step_is_no_detection(job: JobDriver) -> None:
    progress(job, 99.0, 10, 0.0, 89.0)
    job.give(inputs.NodeSilent(1, 60.0), at=100.0)
    assert job.spent()["fault_detection"] == 2.0


def test_a_step_that_is_cut_off_is_lost_and_the_report_of_it_is_detection(job: JobDriver) -> None:
    progress(job, 20.0, 10, 0.0, 10.0)
    killed(job, 0, 23.0, time=22.5)
    spent = job.spent()
    assert (spent["fault_detection"], spent["recomputed_steps"]) == (1.0, 5.0)
    assert spent["productive"] == 20.0


def test_steps_that_only_the_failure_tells_of_count(job: JobDriver) -> None:
    progress(job, 20.0, 10, 0.0, 10.0)
    killed(job, 0, 23.0, time=23.0, steps=12)
    assert job.spent() == {"rendezvous": 20.0, "productive": 26.0}


@pytest.mark.parametrize("claimed", [-5.0, 0.0, 1e18, 24.0])
def test_a_clock_that_is_wrong_moves_no_fault_into_the_future(
    job: JobDriver, claimed: float
) -> None:
    progress(job, 20.0, 10, 0.0, 10.0)
    killed(job, 0, 23.0, time=claimed)
    assert "fault_detection" not in job.spent()


def test_a_broken_connection_is_the_first_sign(job: JobDriver) -> None:
    progress(job, 20.0, 10, 0.0, 10.0)
    job.give(inputs.NodeDisconnected(1), at=21.0)
    job.give(inputs.DeadlinePassed(), at=24.0)
    spent = job.spent()
    assert (spent["fault_detection"], spent["recomputed_steps"]) == (6.0, 2.0)


def test_a_connection_that_came_back_is_none(job: JobDriver) -> None:
    progress(job, 20.0, 10, 0.0, 10.0)
    job.give(inputs.NodeDisconnected(1), at=21.0)
    job.now = 22.0
    job.connect(1, claims=1, runs=1)
    job.give(inputs.NodeExited(1, "killed"), at=24.0)
    assert "fault_detection" not in job.spent()


def test_a_node_that_died_with_its_master_was_lost_when_that_was_last_there(job: JobDriver) -> None:
    progress(job, 20.0, 10, 0.0, 10.0)
    job.give(inputs.MasterStarted(7), at=40.0)
    job.connect(0, claims=0, runs=1)
    job.give(inputs.DeadlinePassed(), at=55.0)
    assert job.spent()["fault_detection"] == 70.0


# ---- the master's death


def test_a_masters_death_that_stops_nobody_is_an_incident_that_costs_nothing(
    job: JobDriver,
) -> None:
    progress(job, 20.0, 10, 0.0, 10.0)
    job.give(inputs.MasterStarted(7), at=26.0)
    job.connect(0, claims=0, runs=1)
    (incident,) = job.ledger.goodput(26.0).incidents
    assert not incident.over
    job.now = 27.0
    job.connect(1, claims=1, runs=1)
    progress(job, 28.0, 18, 0.0, 18.0)
    (incident,) = job.ledger.goodput(28.0).incidents
    assert (incident.kind, incident.since, incident.until) == (IncidentKind.MASTER, 20.0, 27.0)
    assert (incident.title, incident.over) == ("the master died; training went on", True)
    assert (incident.lost, incident.steps_lost, incident.node) == (0.0, 0, -1)
    assert job.ledger.incidents.count == 0, "training was not interrupted"
    assert job.spent() == {"rendezvous": 20.0, "productive": 36.0}


def test_a_master_that_dealt_shards_was_alive_at_that_time(job: JobDriver) -> None:
    progress(job, 20.0, 10, 0.0, 10.0)
    job.give(inputs.MasterStarted(7, last=25.5), at=26.0)
    for node in (0, 1):
        job.connect(node, claims=node, runs=1)
    (incident,) = job.ledger.goodput(26.0).incidents
    assert (incident.since, incident.until, incident.lost) == (25.5, 26.0, 0.0)


def test_nodes_that_wait_for_a_master_that_died_are_its_cost() -> None:
    job = JobDriver(2, 2)
    for node in (0, 1):
        job.connect(node)
    job.join(0, at=5.0)
    job.give(inputs.MasterStarted(4), at=15.0)
    for node in (0, 1):
        job.connect(node, claims=node)
    job.join(0, 1, at=16.0)
    (incident,) = job.ledger.goodput(16.0).incidents
    assert (incident.title, incident.since, incident.until) == ("the master died", 5.0, 15.0)
    assert incident.lost == 20.0


def test_a_fault_of_a_program_without_steps_does_not_cost_the_rest_of_the_job(
    job: JobDriver,
) -> None:
    killed(job, 1, 20.0, time=20.0)
    job.join(0, 1, at=22.0)
    job.give(inputs.Reported(0, Succeeded(2)), inputs.Reported(1, Succeeded(2)), at=1000.0)
    (incident,) = job.ledger.goodput(1000.0).incidents
    assert job.spent()["not_measured"] == 2 * (10.0 + 978.0)
    assert (incident.seconds, incident.lost) == ({"rendezvous": 4.0}, 4.0)


def test_a_fault_while_the_master_is_away_is_charged_once(job: JobDriver) -> None:
    progress(job, 20.0, 10, 0.0, 10.0)
    killed(job, 1, 20.0, time=20.0)
    job.give(inputs.MasterStarted(7), at=26.0)
    for node in (0, 1):
        job.connect(node, claims=node)
    recover(job, 27.0)
    fault, master = job.ledger.goodput(job.now).incidents
    assert (fault.kind, fault.lost) == (IncidentKind.TRAINING, 14.0 + 2.0)
    assert (master.kind, master.lost, master.title) == (IncidentKind.MASTER, 0.0, "the master died")


@pytest.fixture
def away(job: JobDriver) -> JobDriver:
    """The job, whose master was away from 20 to 620; its workers made steps until 30."""
    progress(job, 20.0, 10, 2.0, 8.0)
    job.give(inputs.MasterStarted(7), at=620.0)
    for node in (0, 1):
        job.connect(node, claims=node, runs=1)
    return job


@pytest.mark.parametrize("by_node", [False, True])
def test_workers_that_ended_while_the_master_was_away_did_not_train_until_its_return(
    away: JobDriver, by_node: bool
) -> None:
    if by_node:  # the mean of the seconds is known once both have reported
        progress(away, 620.5, 20, ended=20.0)
    progress(away, 621.0, 20, 2.0, 18.0, ended=20.0)
    away.give(inputs.Reported(0, Succeeded(1)), inputs.Reported(1, Succeeded(1)), at=621.0)
    assert away.spent() == {
        "rendezvous": 20.0,
        "start_up": 4.0,
        "productive": 36.0,
        "shutdown": 1182.0,
    }


@pytest.mark.parametrize(
    "others",
    [
        pytest.param({"ended": 20.0}, id="failed, too"),
        pytest.param({"idle": 590.5}, id="wait for the one that failed"),
    ],
)
def test_workers_that_failed_while_the_master_was_away_did_not_train_until_its_return(
    away: JobDriver, others: dict[str, float]
) -> None:
    progress(away, 620.5, 20, 2.0, 18.0, **others)
    killed(away, 0, 621.0, time=30.0, steps=20)
    fault = {"rendezvous": 20.0, "start_up": 4.0, "productive": 36.0, "fault_detection": 1182.0}
    assert away.spent() == fault
    incident = away.ledger.goodput(621.0).incidents[-1]
    assert (incident.since, incident.lost) == (30.0, 1182.0)


def test_workers_that_fail_before_their_first_report_did_not_train_until_the_masters_return(
    job: JobDriver,
) -> None:
    job.give(inputs.MasterStarted(7), at=620.0)
    killed(job, 0, 621.0, time=30.0, steps=20)
    assert job.spent() == {"rendezvous": 20.0, "start_up": 40.0, "fault_detection": 1182.0}


def test_steps_made_again_are_not_productive(job: JobDriver) -> None:
    progress(job, 20.0, 10, 0.0, 10.0, first_step=100)
    killed(job, 0, 20.0, time=20.0)
    recover(job, 25.0, first_step=106)
    assert job.spent()["recomputed_steps"] == 2.0
    progress(job, 33.0, 7, 1.0, 7.0, first_step=106)
    assert job.spent()["recomputed_steps"] == 2.0 + 2 * 6.0 * 3 / 6
    assert job.spent()["productive"] == 20.0 + 2 * 6.0 * 3 / 6
    (incident,) = job.ledger.goodput(job.now).incidents
    assert incident.steps_lost == 4
    assert incident.seconds == {"rendezvous": 10.0, "start_up": 2.0, "recomputed_steps": 8.0}
    assert incident.lost == 20.0
    progress(job, 43.0, 17, 1.0, 17.0, first_step=106)
    assert job.spent()["recomputed_steps"] == 8.0
    assert not job.ledger.goodput(job.now).rounds_without_first_step


def test_a_step_counts_as_lost_each_time_that_it_is_undone(job: JobDriver) -> None:
    progress(job, 20.0, 10, 0.0, 10.0, first_step=100)
    killed(job, 0, 20.0, time=20.0)
    recover(job, 25.0, first_step=106)
    progress(job, 29.0, 2, 1.0, 2.0, first_step=106)
    killed(job, 0, 30.0, time=30.0)  # 106 and 107 were made again, 108 and 109 were not
    recover(job, 35.0, first_step=106)
    progress(job, 55.0, 20, 1.0, 20.0, first_step=106)
    first, second = job.ledger.goodput(job.now).incidents
    assert (first.steps_lost, second.steps_lost) == (4, 2)
    undone = job.emitted(events.StepsUndone)
    assert [event.reached - event.first_step for event in undone] == [4, 2]


def test_a_fault_before_the_first_step_undoes_only_what_it_falls_back_by(job: JobDriver) -> None:
    progress(job, 20.0, 10, 0.0, 10.0, first_step=100)
    killed(job, 0, 20.0, time=20.0)
    job.join(0, 1, at=25.0)
    progress(job, 26.0, 0, 1.0, first_step=106)  # loaded
    killed(job, 0, 27.0, time=27.0)
    recover(job, 30.0, first_step=103)
    (incident,) = job.ledger.goodput(job.now).incidents
    assert incident.steps_lost == 7
    undone = job.emitted(events.StepsUndone)
    assert [event.reached - event.first_step for event in undone] == [4, 3]


def test_steps_lost_are_not_known_where_the_round_before_did_not_tell_of_its_steps(
    job: JobDriver,
) -> None:
    progress(job, 20.0, 10, 0.0, 10.0)
    killed(job, 0, 20.0, time=20.0)
    recover(job, 25.0, first_step=6)
    assert job.ledger.goodput(job.now).incidents[0].steps_lost == -1


def test_without_the_first_step_nothing_is_called_made_again(job: JobDriver) -> None:
    progress(job, 20.0, 10, 0.0, 10.0, first_step=100)
    killed(job, 0, 20.0, time=20.0)
    recover(job, 25.0)
    assert "recomputed_steps" not in job.spent()
    goodput = job.ledger.goodput(job.now)
    assert goodput.rounds_without_first_step == 1
    assert goodput.incidents[0].steps_lost == -1


def test_steps_that_a_planned_round_undoes_are_no_incidents_cost(job: JobDriver) -> None:
    progress(job, 20.0, 10, 0.0, 10.0, first_step=0)
    killed(job, 0, 20.0, time=20.0)
    recover(job, 25.0, first_step=10)
    job.give(Hello("agent 0", 0, -1, "host0", 99), at=30.0)  # asks for a new round
    recover(job, 30.0, first_step=5)
    (incident,) = job.ledger.goodput(job.now).incidents
    assert incident.steps_lost == 0
    assert job.spent()["recomputed_steps"] > 2.0
    assert "recomputed_steps" not in incident.seconds


# ---- incidents


def test_an_incident_lasts_to_the_first_new_step(job: JobDriver) -> None:
    progress(job, 20.0, 10, 0.0, 10.0)
    killed(job, 1, 20.0, time=20.0)
    job.now = 22.0
    (incident,) = job.ledger.goodput(22.0).incidents
    assert (incident.since, incident.until, incident.over) == (20.0, 22.0, False)
    recover(job, 25.0)
    job.now = 50.0
    (incident,) = job.ledger.goodput(50.0).incidents
    assert (incident.since, incident.until, incident.over) == (20.0, 27.0, True)
    assert incident.title == "rank 2 was killed by SIGKILL (signal 9) on node 1"
    assert incident.node == 1
    assert incident.seconds == {"rendezvous": 10.0, "start_up": 2.0}


def test_a_fault_before_the_first_step_prolongs_the_incident(job: JobDriver) -> None:
    progress(job, 20.0, 10, 0.0, 10.0)
    killed(job, 1, 20.0, time=20.0)
    job.join(0, 1, at=22.0)
    killed(job, 0, 24.0, time=24.0)
    recover(job, 26.0)
    (incident,) = job.ledger.goodput(job.now).incidents
    assert (incident.since, incident.until) == (20.0, 28.0)
    assert incident.lost == 14.0


def test_an_incident_that_ends_the_job_is_over() -> None:
    job = JobDriver.running(2, 2, 2)
    progress(job, 20.0, 10, 0.0, 10.0)
    job.fail(0, {"kind": FailureKind.EXCEPTION, "exception": "ValueError"}, at=21.0)
    assert job.machine.outcome is not None
    assert job.machine.outcome.exit_code == ExitCode.USER_CODE
    (incident,) = job.ledger.goodput(40.0).incidents
    assert (incident.until, incident.over, incident.node) == (21.0, True, 0)
    assert "ValueError" in incident.title
    assert job.spent()["recomputed_steps"] == 2.0


def test_the_memory_for_incidents_is_bounded() -> None:
    limits = Limits(max_infrastructure_restarts=1000, no_progress_restarts=1000)
    job, count = JobDriver.running(2, 2, 2, limits=limits), KEPT + 7
    at = 20.0
    for _ in range(count):
        progress(job, at, 10, 1.0, at)
        killed(job, 0, at + 1.0, time=at + 1.0)
        recover(job, at + 2.0)
        at += 10.0
    goodput = job.ledger.goodput(at)
    assert (len(goodput.incidents), goodput.earlier_incidents) == (KEPT, 7)
    assert job.ledger.incidents.count == count
    assert goodput.earlier_incident_seconds == pytest.approx(7 * goodput.incidents[0].lost)


def test_nodes_that_are_lost_are_folded_into_the_sums() -> None:
    job = JobDriver.launched(2, 2)
    for node in range(40):
        job.give(inputs.NodeExited(node + 1, "killed"), at=job.now + 1.0)
        job.connect(node + 2, claims=node + 2)
        job.join(0, node + 2, at=job.now + 1.0)
    assert len(job.ledger.accounts) == 2
    assert job.ledger.nodes == 42


# ---- one round's time


class TestRoundTime:
    @given(
        st.lists(
            st.tuples(
                st.integers(0, 10**9),
                st.one_of(st.just(()), st.tuples(*[st.floats()] * 6), st.tuples(st.floats())),
                st.integers(0, 100),
                st.integers(-1, 50),
                st.floats(0.0, 1e150),
            ),
            max_size=20,
        ),
        st.integers(0, 10**9),
    )
    def test_parts_add_up_whatever_is_reported(self, reports, detection) -> None:
        round_ = RoundTime(3, 5_000_000, furthest=30)
        now = round_.since
        certain = list(round_.spent)
        for wait, seconds, steps, first_step, age in reports:
            now += wait
            at = round_.within(round_.lived(age), now)
            round_.report(at, seconds, steps, first_step)
            assert sum(round_.so_far(now)) == now - round_.since
            assert all(new >= old for new, old in zip(round_.spent, certain, strict=True))
            certain = list(round_.spent)
        now += 7
        for last in (round_.done(now), round_.cut_off(now, detection)):
            assert min(last) >= 0
            assert sum(round_.spent) + sum(last) == now - round_.since


# ---- jobs that survive losses


def test_the_share_of_ranks_that_do_not_train_is_degraded() -> None:
    job = JobDriver.launched(2, 2, survive=True)
    progress(job, 20.0, 5, 2.0, 8.0)
    killed(job, 0, at=30.0, steps=6)
    job.now = 34.0
    assert job.spent()["degraded"] == 2.0, "one of the four ranks on two nodes"
    assert job.ledger.goodput(34.0).degraded_seconds == 4.0
    progress(job, 38.0, 9, 2.0, 26.0)
    job.give(inputs.MemberReported(JoinMembers(1, rank=0, attempt=1)), at=40.0)
    progress(job, 60.0, 20, 2.0, 48.0)
    assert job.spent()["degraded"] == 5.0
    assert job.spent()["productive"] == 2 * 48.0 - 5.0
    assert job.ledger.goodput(60.0).degraded_seconds == 10.0


def test_a_world_without_a_lost_nodes_ranks_is_degraded_until_its_successors_train() -> None:
    job = JobDriver.launched(2, 2, survive=True)
    progress(job, 20.0, 5, 2.0, 8.0)
    job.give(inputs.NodeExited(1, "its pod was deleted"), at=30.0)
    job.give(inputs.NodePlaced(2, "process 2"), at=35.0)
    job.connect(2, claims=2)
    job.join(2, at=50.0)
    for rank in (2, 3):
        job.give(inputs.MemberReported(JoinMembers(1, rank=rank, attempt=1)), at=55.0)
    progress(job, 60.0, 20, 2.0, 48.0)
    job.now = 65.0
    assert job.spent()["degraded"] == 25.0, "node 2, from its launch until its ranks train"
    assert job.ledger.goodput(job.now).degraded_seconds == 25.0
    assert len(job.emitted(events.RoundOpened)) == 1
