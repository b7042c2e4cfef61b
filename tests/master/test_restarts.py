"""Whether a job goes on after a fault."""

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.errors import ExitCode
from dlrover.master.machine.recovery.restarts import Restart, RestartCause, RestartPolicy, Stop
from dlrover.spec.failure import Origin
from dlrover.spec.job import JobSpec, Limits

USER, INFRASTRUCTURE, UNKNOWN = Origin.USER, Origin.INFRASTRUCTURE, Origin.UNKNOWN


def policy(max_restarts: int = 0, **limits: float) -> RestartPolicy:
    return RestartPolicy(JobSpec(name="job", max_restarts=max_restarts, limits=Limits(**limits)))


def cause(origin: Origin = INFRASTRUCTURE, **facts: object) -> RestartCause:
    """An interruption, by default one after a long and useful round."""
    settings_of_cause = {
        "title": "it broke",
        "hopeless": False,
        "signature": f"{facts}",
        "steps": 100,
        "seconds": 1000.0,
    } | facts
    return RestartCause(origin=origin, **settings_of_cause)


def decisions(
    policy: RestartPolicy, *causes: RestartCause, every: float = 1.0
) -> list[Restart | Stop]:
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
    machines = origin is Origin.INFRASTRUCTURE
    code = ExitCode.INFRASTRUCTURE if machines else ExitCode.USER_CODE
    assert policy(10).decide(cause(origin, hopeless=True), 0.0) == Stop(
        code, "it broke; a restart would fail in the same way."
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


def undetermined(
    node: int, step: int = 17, signature: str = "same", **facts: object
) -> RestartCause:
    """An undetermined failure, on a host of its own unless ``facts`` name one."""
    host = f"host{node}" if node >= 0 else ""
    return cause(
        UNKNOWN, **{"node": node, "host": host, "steps": step, "signature": signature, **facts}
    )


def test_a_node_that_took_anothers_place_on_the_same_host_is_no_other_host():
    """A pod that was launched again, or a local node: the host may be at fault as before."""
    decided = decisions(policy(), undetermined(1), undetermined(3, host="host1"))
    assert decided == [
        Restart("it broke"),
        Restart("it broke; it came back at step 17, and only on host host1", 3),
    ]
    decided = decisions(policy(), undetermined(1), undetermined(3, host="host1"), undetermined(2))
    assert isinstance(decided[2], Stop)
    assert "at step 17 on the hosts host1 and host2" in decided[2].reason


def test_where_all_nodes_are_on_one_host_none_is_suspect():
    budgets = RestartPolicy(JobSpec(name="job", one_host=True, limits=Limits()))
    same = [undetermined(node, host="here") for node in (0, 0, 1, 2)]
    decided = decisions(budgets, *same)
    assert decided[:3] == [Restart("it broke")] * 3
    assert decided[3].exit_code is ExitCode.NO_PROGRESS


def test_an_undetermined_failure_that_comes_back_on_another_host_is_the_programs():
    decided = decisions(policy(), undetermined(0), cause(signature="a kill"), undetermined(2))
    assert [type(d) for d in decided] == [Restart, Restart, Stop]
    assert decided[2] == Stop(
        ExitCode.USER_CODE,
        "it broke; it failed in the same way at step 17 on the hosts host0 and host2, so the program is the cause.",
    )


def test_an_undetermined_failure_that_comes_back_on_one_host_alone_makes_its_node_suspect():
    decided = decisions(policy(), undetermined(1), undetermined(1))
    assert decided == [
        Restart("it broke"),
        Restart("it broke; it came back at step 17, and only on host host1", 1),
    ]


@pytest.mark.parametrize(
    "other",
    [
        undetermined(2, step=18),
        undetermined(2, signature="another"),
        undetermined(-1),
        cause(UNKNOWN, node=2, steps=7, reached=18, signature="same"),
        cause(USER, node=2, steps=17, signature="same"),
    ],
    ids=["another step", "another failure", "an echo", "another step of the training", "a bug"],
)
def test_what_differs_is_no_repetition(other):
    assert not any(isinstance(d, Stop) for d in decisions(policy(9), undetermined(0), other))


def test_the_step_of_the_whole_training_counts_where_it_is_known():
    first, again = undetermined(0, step=130, reached=130), undetermined(1, step=30, reached=130)
    assert isinstance(decisions(policy(), first, again)[1], Stop)


def test_before_the_first_step_an_outage_looks_like_a_bug_so_one_more_restart_is_made():
    stuck = [undetermined(node, step=0, seconds=1.0) for node in (0, 1, 0)]
    assert [type(d) for d in decisions(policy(), *stuck)] == [Restart, Restart, Stop]


def test_before_the_first_new_step_after_a_checkpoint_one_more_restart_is_made_too():
    stuck = [undetermined(node, step=0, reached=1000, seconds=70.0) for node in (0, 1, 0)]
    assert [type(d) for d in decisions(policy(), *stuck)] == [Restart, Restart, Stop]


def test_a_node_is_not_suspect_where_the_failure_came_up_elsewhere_too():
    stuck = [undetermined(node, step=0, seconds=1.0) for node in (0, 1)]
    assert [d.suspect for d in decisions(policy(), *stuck)] == [-1, -1]


def test_without_steps_only_rounds_that_lasted_equally_long_are_compared():
    def crashed(*days):
        rounds = [
            undetermined(node, step=0, seconds=day * 86_400.0) for node, day in enumerate(days)
        ]
        return [type(d) for d in decisions(policy(), *rounds, every=86_400.0)]

    assert crashed(1, 5, 9) == [Restart] * 3
    assert crashed(1, 1.05, 1.01) == [Restart, Restart, Stop]


def test_without_steps_only_failures_within_the_window_are_compared():
    def crashed(every, step=0):
        rounds = [undetermined(node, step=step, seconds=70.0) for node in range(3)]
        return [type(d) for d in decisions(policy(restart_window=100.0), *rounds, every=every)]

    assert crashed(100.0) == [Restart, Restart, Stop]
    assert crashed(130.0) == [Restart] * 3
    assert crashed(130.0, step=17)[:2] == [Restart, Stop]


@pytest.mark.parametrize("origin", [UNKNOWN, INFRASTRUCTURE])
def test_a_time_out_of_a_collective_at_the_same_step_is_not_restarted_for_ever(origin):
    same = cause(origin, signature="signal:SIGABRT:collective_timeout", steps=17, echo=True)
    decided = decisions(policy(), *[same] * 4)
    assert [type(d) for d in decided] == [Restart, Restart, Restart, Stop]
    assert decided[3].exit_code == ExitCode.NO_PROGRESS


def test_without_steps_the_time_tells_whether_it_is_the_same_place():
    def hung(seconds):
        return undetermined(-1, step=0, seconds=seconds)

    decided = decisions(policy(), *map(hung, (1900.0, 1880.0, 1910.0, 1890.0)))
    assert isinstance(decided[-1], Stop)
    others = decisions(policy(), *map(hung, (1900.0, 3000.0, 9000.0, 1890.0, 4000.0)))
    assert not any(isinstance(d, Stop) for d in others)


def test_kills_that_strike_twice_at_one_step_are_chance():
    kill = cause(INFRASTRUCTURE, signature="signal:SIGKILL", steps=17)
    assert all(isinstance(d, Restart) for d in decisions(policy(), *[kill] * 9))


def test_failures_that_take_turns_at_one_step_are_no_progress():
    def turns(*reached, origin=UNKNOWN):
        causes = [
            cause(origin, signature=f"{number % 2}", steps=5, reached=step)
            for number, step in enumerate(reached)
        ]
        return decisions(policy(), *causes)

    decided = turns(1005, *[1005, 1003] * 5)
    assert not any(isinstance(d, Stop) for d in decided[:9])
    assert decided[9] == Stop(
        ExitCode.NO_PROGRESS, "it broke; the last 9 restarts did not come beyond step 1005."
    )
    assert not any(isinstance(d, Stop) for d in turns(*range(20)))
    assert not any(isinstance(d, Stop) for d in turns(*[9, 8] * 10, origin=INFRASTRUCTURE))


def test_nothing_strikes_at_one_step_for_ever():
    kill = cause(INFRASTRUCTURE, signature="signal:SIGKILL", steps=17)
    decided = decisions(policy(), *[kill] * 10)
    assert not any(isinstance(d, Stop) for d in decided[:-1])
    assert decided[-1] == Stop(
        ExitCode.NO_PROGRESS, "it broke; the last 9 restarts ended in the same way at step 17."
    )
    unknown = cause(INFRASTRUCTURE, signature="signal:SIGKILL", steps=0)
    assert all(isinstance(d, Restart) for d in decisions(policy(), *[unknown] * 20))


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
            machines = fault.origin is Origin.INFRASTRUCTURE
            code = ExitCode.INFRASTRUCTURE if machines else ExitCode.USER_CODE
            assert decision == Stop(code, decision.reason)
        if isinstance(decision, Restart):
            granted.append((fault.origin is USER, now))
    assert budgets.count == len(granted)
    assert sum(by_user for by_user, _ in granted) <= user
    times = [time for by_user, time in granted if not by_user]
    assert all(sum(t - 100.0 < other <= t for other in times) <= infrastructure for t in times)
