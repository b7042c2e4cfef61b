"""Thousands of workers that fail at once with long texts: little is kept, and the right one is blamed."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from dlrover.errors import ExitCode
from dlrover.master.diagnosis_rules import table
from dlrover.master.journal import history
from dlrover.master.journal.file import FileJournal
from dlrover.master.journal.history import OLD_TEXT, RECENT_TEXT, History
from dlrover.master.machine.recovery.incident import CAUSE_TEXTS, FIRST_TEXTS, LATER_TEXT, Incident
from dlrover.spec import events
from dlrover.spec.failure import NAME_LIMIT, TEXT_LIMIT, Failure, FailureKind
from tests.support.drivers import JobDriver

MIB = 2**20
COUNT = 4_000
ENOUGH = 24 * MIB + COUNT * 5 * 1024
"""Bytes that a master needs for the failures of an incident and their events."""
WHOLE = FIRST_TEXTS + CAUSE_TEXTS


def failure(number: int, time: float, *, round_: int = 1, echo: bool = False) -> Failure:
    """A failure with three texts of the largest size."""
    reason = "Connection closed by peer [10.0.0.1]:40404" if echo else f"bad value {number}"
    name = "RuntimeError" if echo else "ValueError"
    call = "all_reduce(grads)" if echo else f'raise {name}("x")'
    frame = f'  File "/home/me/train.py", line {number}, in step\n    {call}\n'
    body = "Traceback (most recent call last):\n" + frame * (TEXT_LIMIT // len(frame) + 1)
    traceback = body[: TEXT_LIMIT - 200] + f"\n{frame}{name}: {reason}"
    return Failure(
        id=f"failure {number} of round {round_}",
        kind=FailureKind.EXCEPTION,
        node_id=number % 3,
        rank=number,
        local_rank=0,
        round=round_,
        time=time,
        exit_code=1,
        exception=name,
        message=f"{number:.<{TEXT_LIMIT - 100}}{reason}",
        traceback=traceback[-TEXT_LIMIT:],
        stderr_tail=f"{number}: line\n" * (TEXT_LIMIT // 12),
    )


def size(record: Failure) -> int:
    return len(record.message) + len(record.traceback) + len(record.stderr_tail)


def reported(driver: JobDriver, failures: Iterable[Failure]) -> Iterator[events.WorkerFailed]:
    """What the master's shell makes of reports."""
    for report in failures:
        admitted = driver.machine.recovery.admitted(report)
        if admitted is not None:
            driver.give(admitted)
            yield admitted


def failures_of(driver: JobDriver) -> list[Failure]:
    assert driver.machine.incident is not None
    return [report.failure for report in driver.machine.incident.reports]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> JobDriver:
    driver = JobDriver.running(max_restarts=0)
    monkeypatch.setattr(driver.machine, "validate", lambda: None)  # it takes long with so many
    return driver


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_machine_and_the_history_stay_small_and_the_last_report_is_the_cause(
    driver: JobDriver, tmp_path: Path
) -> None:
    echoes = (failure(n, 100.0 + n * 1e-4, echo=True) for n in range(COUNT - 1))
    cause = failure(COUNT, 99.5)

    def all_of_them() -> Iterator[Failure]:
        yield from echoes
        yield cause

    with contextlib.closing(History(tmp_path / "events.jsonl")) as recorded:
        tracemalloc.start()
        try:
            for _ in reported(driver, all_of_them()):
                for body in driver.events:
                    recorded.add(body, driver.now)
                driver.events.clear()
            kept, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert kept <= peak < ENOUGH, f"{peak / MIB:.0f} MiB"
        assert sum(isinstance(e.body, events.WorkerFailed) for e in recorded.events) == COUNT
    assert len(failures_of(driver)) == COUNT
    assert sum(size(f) for f in failures_of(driver)) < (
        3 * WHOLE * TEXT_LIMIT + 3 * COUNT * LATER_TEXT
    )
    outcome = driver.machine.outcome
    assert outcome is not None
    assert outcome.exit_code == ExitCode.USER_CODE
    assert outcome.failure == cause.bounded()
    assert size(outcome.failure) > 2.5 * TEXT_LIMIT
    assert outcome.others[-1] == f"and {COUNT - 1 - 8} more"


def test_the_first_failures_and_those_that_may_be_the_cause_keep_their_texts(
    driver: JobDriver,
) -> None:
    first = [failure(n, 100.0 + n, echo=True) for n in range(FIRST_TEXTS)]
    later = failure(1000, 105.0, echo=True)
    cause = failure(1001, 90.0)
    list(reported(driver, [*first, later, cause]))
    whole = [size(f) > 2.5 * TEXT_LIMIT for f in failures_of(driver)]
    assert whole == [True] * FIRST_TEXTS + [False, True]
    assert size(failures_of(driver)[FIRST_TEXTS]) <= 3 * LATER_TEXT


def test_reports_that_come_backwards_in_time_are_bounded_too() -> None:
    incident = Incident(since=0.0, round=1)
    for n in range(500):
        incident.add(incident.admit(failure(n, 1000.0 - n), table()))
    failures = [report.failure for report in incident.reports]
    whole = sum(size(f) > 3 * LATER_TEXT for f in failures)
    assert whole == WHOLE


def test_a_report_that_is_repeated_is_not_journalled_again(driver: JobDriver) -> None:
    reports = [failure(n, 100.0 + n, echo=True) for n in range(5)]
    assert len(list(reported(driver, reports))) == 5
    assert list(reported(driver, reports)) == []
    old = failure(9, 100.0, round_=0)
    assert list(reported(driver, [old])) == []


def test_the_names_of_a_record_are_bounded(driver: JobDriver) -> None:
    huge = "x" * MIB
    report = msgspec.structs.replace(
        failure(1, 1.0), id=huge, exception=huge, log_path=huge, hostname=huge
    )
    (event,) = reported(driver, [report])
    names = [event.failure.id, event.failure.exception, event.failure.log_path]
    assert {len(name) for name in [*names, event.failure.hostname]} == {NAME_LIMIT}


@pytest.mark.slow
def test_the_journal_of_an_incident_is_bounded(driver: JobDriver, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    count = 2000
    with contextlib.closing(FileJournal(path)) as journal:
        for _ in range(3):  # as after two reconnections
            reports = (failure(n, 100.0 + n * 1e-3, echo=True) for n in range(count))
            for event in reported(driver, reports):
                journal.append(event, 1.0)
    limit = 3 * (WHOLE * TEXT_LIMIT + count * (LATER_TEXT + 512))
    assert path.stat().st_size < limit < 20 * MIB


def test_reports_that_wait_for_an_adoption_are_bounded() -> None:
    driver = JobDriver(min_nodes=1, max_nodes=1)
    adoption = driver.machine.adoption
    adoption.begin([0], 0.0, 15.0)
    for _ in range(2):
        for n in range(FIRST_TEXTS + 10):
            admitted = driver.machine.recovery.admitted(failure(n, float(n)))
            if admitted is not None:
                adoption.report(admitted)
    kept = [r.failure for r in adoption.reports.values() if isinstance(r, events.WorkerFailed)]
    assert len(kept) == FIRST_TEXTS + 10
    assert sum(size(f) > 3 * LATER_TEXT for f in kept) == FIRST_TEXTS


def test_old_failures_keep_less_in_memory_and_all_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "RECENT_TEXT", 20 * TEXT_LIMIT)
    assert RECENT_TEXT > 20 * TEXT_LIMIT
    path = tmp_path / "events.jsonl"
    chance = random.Random(1)
    verdict = JobDriver.running(max_restarts=0)
    list(reported(verdict, [failure(0, 1.0)]))
    (failed,) = verdict.emitted(events.WorkerFailed)
    with contextlib.closing(History(path)) as recorded:
        for n in range(30):
            report = failure(n, chance.random())
            recorded.add(events.WorkerFailed(report, failed.verdict), 1.0)
            recorded.add(events.NodeSucceeded(n), 1.0)
        kept = [e.body.failure for e in recorded.events if isinstance(e.body, events.WorkerFailed)]
        assert [e.seq for e in recorded.events] == list(range(1, 61))
        assert sum(size(f) for f in kept) < 20 * TEXT_LIMIT + 3 * 30 * OLD_TEXT
        assert size(kept[-1]) > 2.5 * TEXT_LIMIT
        assert len(kept[0].traceback) == OLD_TEXT
        stored = history.read(path)
        assert all(size(e.body.failure) > 2.5 * TEXT_LIMIT for e in stored[::2])


def test_a_later_journal_continues_the_numbers_of_the_events(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with contextlib.closing(History(path)) as lost:
        for node in range(3):
            lost.add(events.NodeSucceeded(node), 1.0)
    for _ in range(2):  # a second master replays what the first one had journalled
        with contextlib.closing(History(path)) as recorded:
            recorded.follow(3)
            recorded.add(events.NodeSucceeded(7), 2.0)
            assert [e.seq for e in recorded.events] == [1, 2, 3, 4]
        assert history.read(path) == recorded.events
