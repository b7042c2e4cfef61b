"""Phases of instances: liveness is not progress."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

from dlrover.cli import roles
from dlrover.errors import ConfigurationError
from dlrover.master.journal.history import History
from dlrover.roles.builder import Job
from dlrover.roles.coordinator.journal import RolesJournal
from dlrover.roles.coordinator.shell import Coordinator
from dlrover.roles.machine import inputs
from dlrover.roles.machine.health import Health, Input, Looked
from dlrover.roles.machine.use import Use
from dlrover.roles.messages import IDLE, START, WORK, MemberEnded, MemberPlace, MemberStarted, Pulse
from dlrover.roles.runtime.phases import Awaited, Phases
from dlrover.roles.spec import EntryForm, EntryPoint, RolesConfig, RolesJob, RoleSpec, check
from dlrover.spec.jobdir import JobDir

A = MemberPlace("a", 0, 1, 1)
LIMITS = {"a": {START: 100.0, WORK: 10.0, "compile": 50.0}, "free": {}}


def looked(health: Health, *events: tuple[float, Input]) -> list[tuple[float, str]]:
    """Handle events at their times, and look each second between them; return when who was found stuck."""
    found = []
    now = 0.0
    for at, event in events:
        while now < at:
            found += [(now, stuck.phase) for stuck in health.handle(Looked(), now)]
            now += 1.0
        health.handle(event, at)
        health.validate()
    return found


def pulses(phase: str, first: int, last: int, *, moves: bool = False) -> list[tuple[float, Input]]:
    """Reports of an instance each second; one that ``moves`` makes progress all the time."""
    return [
        (float(at), Pulse(A, phase, at - first, 0.0 if moves else at - first))
        for at in range(first, last)
    ]


@pytest.mark.parametrize(
    ("phase", "found"), [(START, 101.0), (WORK, 11.0), ("compile", 51.0), (IDLE, None), ("own", None)]
)  # fmt: skip
def test_an_instance_that_answers_but_makes_no_progress_is_found_by_the_limit_of_its_phase(
    phase: str, found: float | None
) -> None:
    stuck = looked(Health(LIMITS), (0, MemberStarted(A)), *pulses(phase, 0, 300))
    assert stuck == ([(found, phase)] if found else []), "once, and never in a phase without limit"


def test_progress_begins_the_time_anew() -> None:
    health = Health(LIMITS)
    assert not looked(health, (0, MemberStarted(A)), *pulses(WORK, 0, 300, moves=True))


def test_one_that_never_reports_has_the_limit_of_its_start() -> None:
    assert looked(Health(LIMITS), (0, MemberStarted(A)), (300, Looked())) == [(101.0, START)]


def test_one_that_falls_silent_is_found_even_if_it_was_idle() -> None:
    last = (300, Looked())
    assert looked(Health(LIMITS), (0, MemberStarted(A)), (5, Pulse(A, IDLE, 5, 5)), last) == [
        (16.0, "")
    ]


def test_each_life_is_found_for_itself() -> None:
    health = Health(LIMITS)
    later = MemberPlace("a", 0, 1, 2)
    events = [
        (0, MemberStarted(A)),
        (120, MemberEnded(A, "why")),
        (120, MemberStarted(later)),
        (250, Looked()),
    ]
    assert looked(health, *events) == [(101.0, START), (221.0, START)]
    health.handle(Pulse(A, WORK, 500, 500), 251)
    assert health.lives["a", 0].place == later, "a late report changes nothing"


def test_nobody_is_blamed_for_the_time_in_which_the_coordinator_did_not_run() -> None:
    health = Health(LIMITS)
    looked(health, (0, MemberStarted(A)), *pulses(WORK, 0, 5))
    assert not health.handle(Looked(), 500.0)


def test_the_time_of_a_life_is_what_it_has_said_and_its_last_phase_since() -> None:
    health = Health(LIMITS)
    health.handle(MemberStarted(A), 0.0)
    assert health.spent(A, 5.0) is None
    for phase, spent in ((START, (7.0, 2.0)), (WORK, (10.0, 2.0)), (IDLE, (7.0, 5.0))):
        health.handle(Pulse(A, phase, 1.0, 1.0, 0, 7.0, 2.0), 20.0)
        assert health.spent(A, 23.0) == spent
    assert health.spent(MemberPlace("a", 0, 1, 2), 23.0) is None, "of another life"


def test_young_lives_report_often_so_that_little_of_their_time_is_unknown() -> None:
    free = MemberPlace("free", 0, 1, 1)
    paused = [
        Health(LIMITS).pause(Pulse(place, WORK, 0.0, 0.0, 0, worked, 2.0))
        for place in (free, A)
        for worked in (0.0, 18.0, 1000.0)
    ]
    assert paused == [1.0, 2.0, 10.0, 1.0, 2.0, 2.0], "a has a limit of 10 s"


LIVES = st.builds(
    MemberPlace,
    st.sampled_from(["a", "free", "none"]),
    st.integers(0, 1),
    st.integers(1, 2),
    st.integers(0, 1),
)
EVENTS = st.one_of(
    st.builds(MemberStarted, LIVES), st.builds(MemberEnded, LIVES, st.just("why")), st.builds(Looked),
    st.builds(Pulse, LIVES, st.sampled_from([START, WORK, IDLE, "own"]), st.floats(0, 200), st.floats(0, 300)),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), EVENTS), max_size=40))
def test_any_inputs_keep_the_invariants_and_each_life_is_found_once(
    given_: list[tuple[float, Input]],
) -> None:
    health, now = Health(LIMITS), 0.0
    living: dict[tuple[str, int], list[MemberPlace]] = {}
    for pause, event in given_:
        now += pause
        for stuck in health.handle(event, now):
            limit = LIMITS[stuck.place.role][stuck.phase or WORK]
            assert stuck.seconds > limit
            assert stuck.phase != IDLE
            known = health.lives[stuck.place.role, stuck.place.index]
            assert known.stuck
            assert known.place == stuck.place
            earlier = living.setdefault((stuck.place.role, stuck.place.index), [])
            assert stuck.place not in earlier
            earlier.append(stuck.place)
        if isinstance(event, MemberEnded):
            living.pop((event.place.role, event.place.index), None)
        health.validate()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_process_says_by_itself_what_it_does() -> None:
    clock = Clock()
    phases = Phases(clock)

    def said() -> tuple[str, float, float]:
        pulse = phases.pulse(A)
        return pulse.phase, pulse.seconds, pulse.still

    assert said()[0] == IDLE
    phases.set(START)
    clock.now = 5
    assert said() == (START, 5, 5)
    phases.set(WORK)
    clock.now = 9
    assert said() == (WORK, 4, 4)
    phases.progress()
    clock.now = 10
    assert said() == (WORK, 5, 1)
    with phases.waiting():  # for a call or a queue
        clock.now = 30
        assert said() == (IDLE, 20, 20)
    assert said() == (WORK, 0, 0), "a new piece of work"
    clock.now = 40
    with phases.waiting():
        clock.now = 40.5
    assert said() == (WORK, 10.5, 10.5), "who polls for ever is not idle"
    phases.leave()
    assert said()[0] == IDLE


def test_a_process_with_a_call_in_any_thread_works() -> None:
    phases = Phases()
    phases.set(IDLE)
    inside, out = threading.Event(), threading.Event()

    def call() -> None:
        with phases.entered(WORK):
            inside.set()
            out.wait()

    thread = threading.Thread(target=call)
    thread.start()
    inside.wait()
    assert phases.pulse(A).phase == WORK
    assert "out.wait()" in phases.stacks()
    out.set()
    thread.join()
    assert phases.pulse(A).phase == IDLE


def test_a_thread_that_has_ended_works_no_more() -> None:
    phases = Phases()
    thread = threading.Thread(target=phases.set, args=(WORK,))
    thread.start()
    thread.join()
    assert phases.pulse(A).phase == IDLE


def test_a_call_that_has_returned_is_progress_of_its_caller() -> None:
    phases = Phases()
    future = Awaited[int](phases)
    future.set_result(3)
    assert future.result() == 3
    assert phases.pulse(A).progress == 1


@pytest.mark.parametrize(
    ("health", "words"),
    [
        ({"idle": 5}, "health idle: 5: an idle instance waits"),
        ({"work": 0}, "health work: 0: must be the name of a phase with seconds above 0"),
        ({"a phase": 5}, "health a phase: 5: must be the name"),
        ({"work": float("inf")}, "health work: inf: must be"),
        ({"work": "soon"}, "health work soon: must be a number of seconds"),
        ({"work": True}, "health work True: must be a number of seconds"),
    ],
)
def test_limits_that_cannot_be(health: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check(Job("job", directory=".").role("a", "json.dumps", health=health).spec())


def test_the_seconds_of_each_phase_are_counted() -> None:
    clock = Clock()
    phases = Phases(clock)

    def spent() -> tuple[float, float]:
        pulse = phases.pulse(A)
        return pulse.worked, pulse.idled

    phases.set(START)
    clock.now = 5.0
    phases.set(WORK)
    clock.now = 8.0
    assert spent() == (3.0, 0.0)
    with phases.waiting():
        clock.now = 8.5
    assert spent() == (3.0, 0.5), "also of a short wait, which does not interrupt the phase"
    phases.set("compile")
    clock.now = 10.0
    with phases.waiting():
        clock.now = 20.0
        assert spent() == (4.5, 10.5)
    phases.leave()
    clock.now = 21.0
    assert spent() == (4.5, 11.5)


def test_what_an_instance_has_said_of_its_time_is_journalled_before_its_end(tmp_path: Path) -> None:
    entry = EntryPoint(EntryForm.SCRIPT, "/a.py")
    job = RolesJob(name="job", roles=(RoleSpec(name="a", entry=entry, max_restarts=0),))
    directory = JobDir(tmp_path)

    async def run() -> list[object]:
        first = RolesJournal(directory.journal)
        for known in (inputs.Submitted(job), inputs.InstanceUp("a", 1, 0, 1, 1)):
            first.append(known, 1.0)
        first.close()
        journal, history = RolesJournal(directory.journal), History(directory.events)
        coordinator = Coordinator(directory, RolesConfig(job=job), journal, history, {}, -1)
        await coordinator._health._pulse(Pulse(A, START, 1.0, 1.0, 0, 3.0, 2.0))
        coordinator._exited("a", 1, None, 1)
        entries: list[object] = [entry for _, entry in journal.entries()]
        for one in (coordinator, journal, history):
            one.close()
        return entries

    *_, spent, exited, _of_service = asyncio.run(run())
    assert spent == inputs.Spent(A, 3.0, 2.0)
    assert isinstance(exited, inputs.RoleExited)


def test_the_use_of_time_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"rollout": Use(10.0, 75.0, 5.0, 10.0), "main": Use(), "late": None}
    roles.render_goodput(dict(found), Console())
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [
        "rollout works 75.0 % of its instances' time 100.0 starting 10.0 s, away 10.0 s, idle 5.0 s",
        "main not known yet - -",
        "late not started - -",
    ]
