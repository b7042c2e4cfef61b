"""The machine of a job of several roles: what starts, restarts and stops when, and when the job ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.errors import ExitCode
from dlrover.roles.coordinator.status import status_of
from dlrover.roles.machine import inputs
from dlrover.roles.machine.health import Stuck
from dlrover.roles.machine.job import Role, RolesMachine, RoleStatus
from dlrover.roles.machine.use import Use
from dlrover.roles.messages import MemberEnded, MemberPlace, MemberStarted, ServiceStatus
from dlrover.roles.spec import EntryForm, EntryPoint, Failover, RoleKind, RolesJob, RoleSpec
from dlrover.spec import events

SCRIPT = EntryPoint(EntryForm.SCRIPT, "/job/work.py")
OBJECT = EntryPoint(EntryForm.OBJECT, "work:Work")
GRPO = (
    RoleSpec(name="trainer", entry=SCRIPT, kind=RoleKind.ELASTIC, processes=2, depends_on={"reward": "wait"}),
    RoleSpec(name="rollout", entry=OBJECT, least=1, most=2),
    RoleSpec(name="reward", entry=OBJECT, failover=Failover.ROLE, most=2, least=2),
    RoleSpec(name="main", entry=SCRIPT, kind=RoleKind.DRIVER, depends_on={"trainer": "wait", "rollout": "wait"}),
)  # fmt: skip


class Driver:
    """A machine whose roles' jobs do what the test says; invariants are checked after every input."""

    def __init__(self, *roles: RoleSpec, **options: Any) -> None:
        self.machine = RolesMachine()
        self.now = 0.0
        self.seq = 0
        self.inputs: list[inputs.Input] = []
        self.commands: list[inputs.Command] = []
        self.give(inputs.Submitted(RolesJob(name="job", roles=roles or GRPO, **options)))

    def give(self, event: inputs.Input) -> list[inputs.Command]:
        self.now += 1.0
        self.inputs.append(event)
        commands = list(self.machine.handle(event, self.now))
        self.machine.validate()
        self.commands += commands
        return commands

    def status(self) -> dict[str, str]:
        return {name: role.status.value for name, role in self.machine.roles.items()}

    def role(self, name: str) -> Role:
        return self.machine.roles[name]

    def up(self, name: str, *indexes: int, round_: int = 0) -> list[inputs.Command]:
        role = self.role(name)
        every = indexes or range(role.spec.most * role.spec.processes)
        found = []
        for index in every:
            self.seq += 1
            found += self.give(inputs.InstanceUp(name, role.attempt, index, round_, self.seq))
        return found

    def down(self, name: str, index: int, reason: str = "killed") -> list[inputs.Command]:
        self.seq += 1
        return self.give(
            inputs.InstanceDown(name, self.role(name).attempt, index, reason, self.seq)
        )

    def exit(self, name: str, code: int = 0, **facts: Any) -> list[inputs.Command]:
        attempt = self.role(name).attempt
        return self.give(inputs.RoleExited(name, attempt, code, "It has ended.", **facts))

    def events(self, kind: type) -> list[Any]:
        emitted = [c.body for c in self.commands if isinstance(c, inputs.Emit)]
        return [body for body in emitted if isinstance(body, kind)]


def started(commands: list[inputs.Command]) -> list[str]:
    return [c.role for c in commands if isinstance(c, inputs.StartRole)]


def stopped(commands: list[inputs.Command]) -> list[str]:
    return [c.role for c in commands if isinstance(c, inputs.StopRole)]


def running(*roles: RoleSpec) -> Driver:
    driver = Driver(*roles)
    for _ in driver.machine.roles:
        for name, role in driver.machine.roles.items():
            if role.status is RoleStatus.RUNNING and not role.up:
                driver.up(name)
    return driver


def test_roles_start_in_the_order_in_which_they_depend_on_each_other() -> None:
    driver = Driver()
    assert started(driver.commands) == ["rollout", "reward"]
    assert driver.machine.waits_for(driver.role("main")) == ["trainer", "rollout"]
    assert started(driver.up("reward", 0)) == [], "one of its two instances"
    assert started(driver.up("reward", 1)) == ["trainer"]
    assert started(driver.up("trainer", 0)) == [], "one of its two workers"
    assert started(driver.up("rollout", 1)) == [], (
        "one instance is the least, but the trainer lacks one"
    )
    assert started(driver.up("trainer", 1)) == ["main"]


def test_the_time_of_instances_is_that_of_their_lives_and_that_between_them() -> None:
    driver = Driver(RoleSpec(name="rollout", entry=OBJECT))
    driver.up("rollout", 0)  # at 2 s
    driver.now += 9.0
    place = MemberPlace("rollout", 0, 1, 0)
    driver.give(inputs.Spent(place, 1.0, 1.0))
    driver.give(inputs.Spent(place, 6.0, 3.0))
    driver.down("rollout", 0)  # at 14 s
    driver.give(inputs.Spent(place, 100.0, 3.0))
    role = driver.role("rollout")
    assert role.use == Use(starting=3.0, working=6.0, idle=3.0)
    driver.now += 3.0
    empty = ServiceStatus({}, {}, {})
    assert status_of(driver.machine, empty, 20.0).roles[0].use == role.use
    now = status_of(driver.machine, empty, 20.0, {}, lambda _: None).roles[0].use
    assert now == Use(starting=3.0, working=6.0, idle=3.0, away=6.0), "it is to come again"
    driver.up("rollout", 0, round_=1)  # at 19 s
    assert role.use == Use(starting=3.0, working=6.0, idle=3.0, away=5.0)
    now = (
        status_of(driver.machine, empty, 29.0, {}, lambda one: (one.life[-1] * 7.0, 2.0))
        .roles[0]
        .use
    )
    assert now == Use(starting=4.0, working=13.0, idle=5.0, away=5.0)
    driver.exit("rollout")  # at 20 s
    driver.give(inputs.StopRequested("late", 5))
    assert role.use == Use(starting=4.0, working=6.0, idle=3.0, away=5.0)
    ended = status_of(driver.machine, empty, 90.0, {}, lambda _: None).roles[0].use
    assert ended == role.use
    assert ended.seconds == 18.0


def test_the_success_of_the_driver_ends_the_job_once_all_others_are_stopped() -> None:
    driver = running()
    assert stopped(driver.exit("main")) == ["trainer", "rollout", "reward"]
    driver.exit("trainer", ExitCode.SIGNAL_BASE + 15)
    driver.exit("rollout", ExitCode.SIGNAL_BASE + 15)
    assert driver.machine.ended_at is None
    (end,) = [c for c in driver.exit("reward", 143) if isinstance(c, inputs.EndJob)]
    assert (end.exit_code, end.role) == (0, "")
    assert driver.status()["main"] == "succeeded"


def test_without_a_driver_the_job_ends_with_all_roles_that_are_no_services() -> None:
    driver = running(
        RoleSpec(name="sft", entry=SCRIPT, kind=RoleKind.ELASTIC),
        RoleSpec(name="evaluation", entry=SCRIPT),
        RoleSpec(name="judge", entry=OBJECT),
    )
    assert stopped(driver.exit("sft")) == []
    assert stopped(driver.exit("evaluation")) == ["judge"]
    driver.exit("judge", 143)
    assert driver.machine.end.exit_code == 0


def test_an_instance_that_fails_disturbs_no_other_role() -> None:
    driver = running()
    for number in range(1, 4):  # the second death of the same role is handled as the first
        commands = driver.down("rollout", 1)
        assert not stopped(commands)
        assert not started(commands)
        told = [c for c in commands if isinstance(c, MemberEnded)]
        assert [(c.place.index, *c.place.life) for c in told] == [(1, 1, number - 1)]
        (joined,) = [
            c for c in driver.up("rollout", 1, round_=number) if isinstance(c, MemberStarted)
        ]
        assert joined.place.round == number
    assert driver.role("rollout").instance_restarts == 3


def test_a_trainers_fault_stops_no_rollout() -> None:
    driver = running()
    for index in (0, 1):
        assert not stopped(driver.down("trainer", index))
    assert set(driver.status().values()) == {"running"}


def restarts(driver: Driver, name: str) -> int:
    roles = status_of(driver.machine, ServiceStatus({}, {}, {}), driver.now).roles
    return next(role.restarts for role in roles if role.name == name)


def test_a_restart_of_a_world_counts_once_however_many_ranks_it_has() -> None:
    driver = running()
    for count in (1, 2):
        driver.seq += 1
        for index in (0, 1):  # one event of the role's own job says that its world has ended
            driver.give(inputs.InstanceDown("trainer", 1, index, "rank 1 was killed", driver.seq))
        assert restarts(driver, "trainer") == count
        driver.up("trainer", round_=count)
    driver.give(inputs.RoleExited("trainer", 1, 3, "It has died.", vanished=True))
    assert (driver.role("trainer").attempt, restarts(driver, "trainer")) == (2, 3)
    driver.seq = 0
    driver.up("trainer")
    driver.seq += 1
    for index in (0, 1):
        driver.give(inputs.InstanceDown("trainer", 2, index, "rank 0 was killed", driver.seq))
    assert restarts(driver, "trainer") == 4


def test_a_role_restarts_as_a_whole_where_its_failover_says_so_until_its_budget_is_used() -> None:
    spec = RoleSpec(
        name="reward", entry=SCRIPT, failover=Failover.ROLE, max_restarts=2, window=100.0
    )
    driver = running(spec, RoleSpec(name="other", entry=SCRIPT))
    for attempt in (2, 3):
        assert started(driver.exit("reward", 1)) == ["reward"]
        assert driver.role("reward").attempt == attempt
    commands = driver.exit("reward", 1)
    assert stopped(commands) == ["other"]
    driver.exit("other", 143)
    end = driver.commands[-1]
    assert (end.exit_code, end.role) == (1, "reward")
    assert "all 2 restarts within 100 s are used" in end.reason


def test_restarts_out_of_the_window_do_not_count() -> None:
    driver = running(
        RoleSpec(name="a", entry=SCRIPT, failover=Failover.ROLE, max_restarts=1, window=50.0)
    )
    for _ in range(5):
        assert started(driver.exit("a", 1)) == ["a"]
        driver.now += 60.0


def test_the_whole_job_restarts_with_a_role_whose_failover_says_so() -> None:
    driver = running(
        RoleSpec(name="actor", entry=SCRIPT, kind=RoleKind.ELASTIC, failover=Failover.JOB),
        RoleSpec(name="critic", entry=SCRIPT, depends_on={"actor": "wait"}),
    )
    commands = driver.exit("actor", 1)
    assert (started(commands), stopped(commands)) == (["actor"], ["critic"])
    assert started(driver.exit("critic", 143)) == [], "it waits for the actor again"
    assert started(driver.up("actor")) == ["critic"]


def test_a_role_restarts_with_one_it_depends_on_if_it_says_so() -> None:
    driver = running(
        RoleSpec(name="engine", entry=OBJECT, most=2),
        RoleSpec(name="router", entry=SCRIPT, depends_on={"engine": "restart"}),
        RoleSpec(name="main", entry=SCRIPT, depends_on={"engine": "wait"}),
    )
    assert stopped(driver.down("engine", 1)) == ["router"]
    assert stopped(driver.down("engine", 0)) == [], "it is on its way already"
    driver.up("engine", 0, 1, round_=1)
    assert started(driver.exit("router", 143)) == ["router"]
    assert driver.status()["main"] == "running"


def test_a_role_whose_own_budget_is_used_ends_the_job_with_its_root_cause() -> None:
    driver = running()
    commands = driver.exit("rollout", ExitCode.USER_CODE)
    assert stopped(commands) == ["trainer", "reward", "main"]
    for name in stopped(commands):
        driver.exit(name, 143)
    end = driver.commands[-1]
    assert (end.exit_code, end.role) == (1, "rollout")


def test_what_is_hopeless_is_not_restarted() -> None:
    driver = running(RoleSpec(name="a", entry=SCRIPT, failover=Failover.ROLE))
    driver.exit("a", 1, hopeless=True)
    assert driver.commands[-1] == inputs.EndJob(1, "role a: It has ended.", "a")


def test_a_launcher_that_died_is_replaced_whatever_the_failover() -> None:
    driver = running()
    commands = driver.exit("rollout", 3, vanished=True)
    assert started(commands) == ["rollout"]
    assert {c.place.index for c in commands if isinstance(c, MemberEnded)} == {0, 1}
    assert driver.status()["main"] == "running"


def test_late_reports_of_an_earlier_attempt_change_nothing() -> None:
    driver = running(
        RoleSpec(name="a", entry=SCRIPT, failover=Failover.ROLE), RoleSpec(name="b", entry=SCRIPT)
    )
    driver.exit("a", 1)
    before = driver.status()
    for late in (
        inputs.RoleExited("a", 1, 0, "late"),
        inputs.InstanceUp("a", 1, 0, 5, 99),
        inputs.InstanceDown("a", 1, 0, "late", 99),
        inputs.RoleLaunched("a", 1, "1:2"),
    ):
        assert driver.give(late) == []
    assert driver.status() == before
    assert driver.role("a").handle == ""


def test_a_user_stops_the_job_and_the_first_reason_stays() -> None:
    driver = running()
    assert len(stopped(driver.give(inputs.StopRequested("enough", 5)))) == 4
    assert driver.give(inputs.StopRequested("again", 130)) == []
    for name in list(driver.machine.roles):
        driver.exit(name, 143)
    assert driver.commands[-1] == inputs.EndJob(5, "enough", "")


def test_another_coordinator_repeats_what_the_last_one_may_not_have_done() -> None:
    driver = running()
    driver.down("rollout", 1)
    driver.give(inputs.StopRequested("enough", 5))
    commands = driver.give(inputs.CoordinatorStarted(9))
    assert started(commands) == stopped(commands) == list(driver.machine.roles)
    told = [c for c in commands if isinstance(c, MemberEnded)]
    assert [(c.place.role, c.place.index) for c in told] == [("rollout", 1)]


def test_an_instance_without_progress_ends_as_after_any_failure_and_for_its_own_reason() -> None:
    driver = running()
    stuck = Stuck(MemberPlace("rollout", 1, 1, 0), "work", 61.0)
    (order,) = [c for c in driver.give(stuck) if isinstance(c, inputs.EndInstance)]
    why = "it had made no progress for 61 s in the phase work"
    assert order.place == MemberPlace("rollout", 1, 1, 0)
    assert order.reason == why
    assert driver.give(stuck) == [], "once"
    assert order in driver.give(inputs.CoordinatorStarted(9)), "another coordinator repeats it"
    seen = driver.role("rollout").seen
    driver.give(
        inputs.InstanceUp("rollout", 1, 1, 0, seen)
    )  # again, as another coordinator reads it
    (told,) = [c for c in driver.down("rollout", 1) if isinstance(c, MemberEnded)]
    assert told.reason == why
    assert driver.role("rollout").instance_restarts == 1
    assert driver.give(stuck) == [], "it is down"
    driver.up("rollout", 1, round_=1)
    assert driver.give(stuck) == [], "another life"
    again = Stuck(MemberPlace("rollout", 1, 1, 1), "", 61.0)
    assert [type(c) for c in driver.give(again)] == [inputs.Emit, inputs.EndInstance]
    assert set(driver.status().values()) == {"running"}, "no other role is disturbed"


NAMES = [role.name for role in GRPO]
INPUTS = st.one_of(
    st.builds(inputs.InstanceUp, st.sampled_from(NAMES), st.integers(1, 3), st.integers(0, 1), st.integers(0, 2), st.integers(0, 50)),
    st.builds(inputs.InstanceDown, st.sampled_from(NAMES), st.integers(1, 3), st.integers(0, 1), st.just("killed"), st.integers(0, 50)),
    st.builds(Stuck, st.builds(MemberPlace, st.sampled_from(NAMES), st.integers(0, 1), st.integers(1, 3), st.integers(0, 2)), st.just("work"), st.just(9.0)),
    st.builds(inputs.RoleExited, st.sampled_from(NAMES), st.integers(1, 3), st.sampled_from([0, 1, 3, 143]), st.just("It ended."), st.booleans(), st.booleans()),
    st.builds(inputs.RoleLaunched, st.sampled_from(NAMES), st.integers(1, 3), st.just("1:1")),
    st.builds(inputs.CoordinatorStarted, st.just(1)),
    st.builds(inputs.StopRequested, st.just("enough"), st.just(5)),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(INPUTS, max_size=30), st.sampled_from(Failover), st.booleans())
def test_any_inputs_keep_the_invariants_and_every_job_can_end(
    given_: list[inputs.Input], failover: Failover, restart: bool
) -> None:
    on = {"rollout": "restart" if restart else "wait"}
    trainer = RoleSpec(
        name="trainer", entry=SCRIPT, kind=RoleKind.ELASTIC, failover=failover, max_restarts=2, depends_on=on
    )  # fmt: skip
    driver = Driver(trainer, *GRPO[1:])
    for event in given_:
        driver.give(event)
    twin = RolesMachine()
    driver.give(inputs.StopRequested("enough", 5))
    for name in NAMES:
        if driver.machine.ended_at is None:
            driver.exit(name, 143)
    assert driver.machine.ended_at is not None
    ends = [c for c in driver.commands if isinstance(c, inputs.EndJob)]
    assert len(ends) == 1
    for now, event in enumerate(driver.inputs, 1):
        twin.handle(event, float(now))
    assert twin == driver.machine, "the journal does not lead to the same state"


@pytest.mark.parametrize("code", [0, 1])
def test_a_role_ends_once(code: int) -> None:
    driver = running(RoleSpec(name="a", entry=SCRIPT), RoleSpec(name="b", entry=SCRIPT))
    driver.exit("a", code)
    driver.exit("a", code)
    assert len(driver.events(events.RoleEnded)) == 1


@pytest.mark.parametrize("kind", [RoleKind.SIMPLE, RoleKind.ELASTIC])
def test_a_number_that_comes_again_is_another_process_and_the_role_starts_again(
    kind: RoleKind,
) -> None:
    """The role's master was lost together with instances: it counts their starts from 1 again."""
    driver = Driver(RoleSpec(name="work", entry=SCRIPT, kind=kind, most=2))
    driver.up("work", round_=1)
    last = inputs.InstanceUp("work", 1, 1, 1, driver.seq)
    assert stopped(driver.give(last)) == [], "another coordinator hears of the last event again"
    assert stopped(driver.up("work", 1, round_=2)) == []
    assert stopped(driver.up("work", 1, round_=2)) == ["work"]
    assert started(driver.exit("work", 5)) == ["work"]
    assert driver.role("work").attempt == 2
    assert stopped(driver.up("work", round_=1)) == []


def test_a_role_whose_master_is_lost_with_instances_again_and_again_uses_up_its_budget() -> None:
    driver = Driver(RoleSpec(name="work", entry=SCRIPT, most=2, max_restarts=1))
    for attempt in (1, 2):
        assert driver.role("work").attempt == attempt
        driver.up("work", 0, 1, round_=1)
        driver.up("work", 0, 1, round_=1)  # both of them come again
        driver.exit("work", ExitCode.STOPPED)
    end = driver.machine.end
    assert end is not None
    assert end.exit_code == ExitCode.INFRASTRUCTURE
    assert end.reason == (
        "role work: its master was lost together with instances, and no longer knows them;"
        " all 1 restarts within 3600 s are used."
    )
    assert driver.status() == {"work": "stopped"}
