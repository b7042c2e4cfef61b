"""Whether a job goes on after a fault."""

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.errors import ExitCode
from dlrover.master.machine.restarts import Cause, Restart, RestartPolicy, Stop
from dlrover.spec.failure import Origin
from dlrover.spec.job import JobSpec, Limits

USER, INFRASTRUCTURE, UNKNOWN = Origin.USER, Origin.INFRASTRUCTURE, Origin.UNKNOWN


def policy(max_restarts: int = 0, **limits: float) -> RestartPolicy:
    return RestartPolicy(JobSpec(name="job", max_restarts=max_restarts, limits=Limits(**limits)))


def cause(origin: Origin = INFRASTRUCTURE, **facts: object) -> Cause:
    """An interruption, by default one after a long and useful round."""
    settings_of_cause = {
        "title": "it broke",
        "hopeless": False,
        "signature": f"{facts}",
        "steps": 100,
        "seconds": 1000.0,
    } | facts
    return Cause(origin=origin, **settings_of_cause)


def decisions(policy: RestartPolicy, *causes: Cause, every: float = 1.0) -> list[Restart | Stop]:
    decided = []
    for number, each in enumerate(causes):
        decided.append(policy.decide(each, number * every))
        policy.validate()
    return decided


def test_by_default_a_failure_of_the_program_ends_the_job():
    assert policy().decide(cause(USER), 0.0) == Stop(
        ExitCode.USER_CODE, "it broke; --max-restarts is 0."
    )


def test_failures_of_the_program_are_restarted_as_often_as_the_user_allowed():
    causes = [cause(USER, steps=step) for step in (10, 20, 30)]
    assert decisions(policy(2), *causes) == [
        Restart("it broke (1 of 2 restarts)"),
        Restart("it broke (2 of 2 restarts)"),
        Stop(ExitCode.USER_CODE, "it broke; all 2 restarts are used."),
    ]


@pytest.mark.parametrize("origin", [INFRASTRUCTURE, UNKNOWN])
def test_other_faults_do_not_use_up_what_the_user_allowed(origin):
    budgets = policy(1)
    assert (
        decisions(budgets, *[cause(origin, steps=step) for step in range(1, 6)])
        == [Restart("it broke")] * 5
    )
    assert (budgets.count, budgets.user_restarts) == (5, 0)
    assert isinstance(budgets.decide(cause(USER), 9.0), Restart)
    assert (budgets.count, budgets.user_restarts) == (6, 1)


def test_the_infrastructure_has_a_budget_in_a_sliding_window():
    budgets = policy(max_infrastructure_restarts=2, restart_window=100.0)
    assert isinstance(budgets.decide(cause(steps=1), 0.0), Restart)
    assert isinstance(budgets.decide(cause(steps=2), 60.0), Restart)
    assert budgets.decide(cause(steps=3), 99.0) == Stop(
        ExitCode.INFRASTRUCTURE, "it broke; 2 restarts within 100 s are used."
    )
    assert isinstance(budgets.decide(cause(steps=4), 101.0), Restart)
    assert budgets.infrastructure_times == [60.0, 101.0]


@pytest.mark.parametrize("origin", list(Origin))
def test_a_hopeless_failure_ends_the_job_whatever_is_left(origin):
    assert policy(10).decide(cause(origin, hopeless=True), 0.0) == Stop(
        ExitCode.USER_CODE, "it broke; a restart would fail in the same way."
    )


@pytest.mark.parametrize("origin", list(Origin))
def test_restarts_in_a_row_that_reach_no_step_end_the_job(origin):
    stuck = [cause(origin, steps=0, seconds=5.0) for _ in range(4)]
    assert decisions(policy(9), *stuck)[3] == Stop(
        ExitCode.NO_PROGRESS, "it broke; the last 3 restarts led to no new step."
    )
    assert not any(isinstance(d, Stop) for d in decisions(policy(9), *stuck[:3]))


def test_as_many_useless_restarts_end_a_job_that_had_progressed_before():
    useful, stuck = cause(steps=100), cause(steps=0, seconds=5.0)
    decided = decisions(policy(no_progress_restarts=2), useful, stuck, stuck)
    assert [type(d) for d in decided] == [Restart, Restart, Stop]


def test_a_job_that_may_not_restart_without_progress_goes_on_while_it_progresses():
    useful, stuck = cause(steps=100), cause(steps=0, seconds=5.0)
    decided = decisions(policy(no_progress_restarts=0), useful, stuck)
    assert [type(d) for d in decided] == [Restart, Stop]


def test_the_same_failure_at_the_same_step_is_no_progress():
    same = cause(USER, signature="exception:ValueError:train.py:3", steps=17)
    decided = decisions(policy(9), same, same, same, same)
    assert [type(d) for d in decided] == [Restart, Restart, Restart, Stop]
    assert decided[3].exit_code == ExitCode.NO_PROGRESS


@pytest.mark.parametrize(
    "other",
    [
        cause(USER, signature="same", steps=18),
        cause(USER, signature="another", steps=17),
        cause(INFRASTRUCTURE, signature="signal:SIGKILL", steps=17),
    ],
    ids=["another step", "another failure", "a kill"],
)
def test_progress_lets_the_count_begin_anew(other):
    same = cause(USER, signature="same", steps=17)
    decided = decisions(policy(9, no_progress_restarts=2), same, same, other, same, same)
    assert all(isinstance(d, Restart) for d in decided)


def test_kills_that_strike_twice_at_one_step_are_chance():
    kill = cause(INFRASTRUCTURE, signature="signal:SIGKILL", steps=17)
    assert all(isinstance(d, Restart) for d in decisions(policy(), *[kill] * 20))


def test_a_program_that_reports_no_steps_has_progressed_when_it_ran_for_a_minute():
    long, short = cause(steps=0, seconds=60.0), cause(steps=0, seconds=59.0)
    assert all(isinstance(d, Restart) for d in decisions(policy(), *[long] * 9))
    assert isinstance(decisions(policy(), *[short] * 4)[3], Stop)


def test_a_refused_restart_is_not_counted():
    budgets = policy(1)
    assert [type(d) for d in decisions(budgets, *[cause(USER)] * 3)] == [Restart, Stop, Stop]
    assert budgets.count == 1


CAUSES = st.builds(
    cause,
    st.sampled_from(Origin),
    hopeless=st.sampled_from([False] * 9 + [True]),
    signature=st.sampled_from(["a", "b", ""]),
    steps=st.sampled_from([-1, 0, 0, 1, 17, 2**63]),
    seconds=st.sampled_from([-1.0, 0.0, 59.0, 60.0, 1e9]),
)


@pytest.mark.slow
@pytest.mark.timeout(120)
@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 3),
    st.lists(st.tuples(CAUSES, st.sampled_from([0.0, 1.0, 50.0, 101.0])), min_size=4, max_size=20),
)
def test_no_order_of_faults_overdraws_a_budget(user, infrastructure, useless, faults):
    budgets = policy(
        user,
        max_infrastructure_restarts=infrastructure,
        no_progress_restarts=useless,
        restart_window=100.0,
    )
    now, granted = 0.0, []
    for fault, pause in faults:
        now += pause
        decision = budgets.decide(fault, now)
        budgets.validate()
        assert decision.reason.startswith("it broke")
        if fault.hopeless:
            assert decision == Stop(ExitCode.USER_CODE, decision.reason)
        if isinstance(decision, Restart):
            granted.append((fault.origin is USER, now))
    assert budgets.count == len(granted)
    assert sum(by_user for by_user, _ in granted) <= user
    times = [time for by_user, time in granted if not by_user]
    assert all(sum(t - 100.0 < other <= t for other in times) <= infrastructure for t in times)
