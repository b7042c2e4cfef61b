"""Objects with ``commit_rank_states`` are told what is stored, and only that."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path

import pytest

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.engine import notifier
from dlrover.checkpoint.storage.storage import steps

pytestmark = [pytest.mark.torch, pytest.mark.slow]


class Committing:
    """Remembers what it is told, and whether it was stored by then."""

    def __init__(self, value: int = 0, wants: bool = True) -> None:
        self.value, self.commits = value, wants
        self.told: list[object] = []
        self.changed = threading.Event()

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_rank_states(self, states: list[object]) -> None:
        pass

    def commit_rank_states(self, states: list[object]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.told += states
        self.changed.set()


@pytest.fixture
def checkpointer(directory: Path, monkeypatch):
    monkeypatch.setattr(notifier, "POLL", 0.02)
    with contextlib.closing(Checkpointer(directory, linger=0.0)) as made:
        yield made
    assert not [t for t in threading.enumerate() if t.name == "dlrover-notifier"]


def test_what_is_stored_is_told_and_what_is_in_memory_only_is_not(checkpointer) -> None:
    one, other, silent = Committing(), Committing(), Committing(wants=False)
    state = {"one": one, "more": [{"other": other}], "silent": silent}
    for step, to in enumerate(["memory", "storage", "memory"]):
        one.value, other.value = step, step + 10
        checkpointer.save(step, state, to=to)
    assert one.changed.wait(10), "it is told without a wait"
    checkpointer.wait()
    assert (one.told, other.told, silent.told) == ([{"value": 1}], [{"value": 11}], [])


def test_the_last_step_is_told_when_the_training_has_waited(checkpointer, monkeypatch) -> None:
    monkeypatch.setattr(notifier, "POLL", 60.0)
    one = Committing(7)
    checkpointer.save(3, {"one": one}, to="storage")
    checkpointer.wait()
    assert one.told == [{"value": 7}]


def test_a_step_is_told_when_it_is_durable(checkpointer) -> None:
    seen = []

    class Looking(Committing):
        def commit_rank_states(self, states: list[object]) -> None:
            seen.append(3 in steps(checkpointer._store))

    checkpointer.save(3, {"one": Looking()}, to="storage")
    checkpointer.wait()
    assert seen == [True]


def test_a_step_that_memory_has_no_room_for_is_told_too(checkpointer, monkeypatch) -> None:
    monkeypatch.setattr(checkpointer._saving.pool, "reserve", lambda _: False)
    one = Committing(5)
    checkpointer.save(2, {"one": one}, to="storage")
    checkpointer.wait()
    assert one.told == [{"value": 5}]


def test_a_step_that_cannot_be_read_again_stops_nobody(checkpointer, monkeypatch, caplog) -> None:
    caplog.set_level(logging.WARNING)
    one = Committing()
    monkeypatch.setattr(notifier, "step_folder", lambda step: f"elsewhere-{step}")
    checkpointer.save(2, {"one": one}, to="storage")
    checkpointer.wait()
    assert one.told == []
    assert "Objects are not notified of step 2" in caplog.text


def test_one_that_fails_does_not_keep_others_from_being_told(checkpointer, caplog) -> None:
    class Failing(Committing):
        def commit_rank_states(self, states: list[object]) -> None:
            raise RuntimeError("no way")

    failing, one = Failing(), Committing(1)
    checkpointer.save(2, {"a": {"failing": failing}, "b": one}, to="storage")
    checkpointer.wait()
    assert one.told == [{"value": 1}]
    assert "a.failing failed when it was notified of step 2" in caplog.text
    assert "no way" in caplog.text


def test_a_save_that_is_stored_while_the_saver_is_asked_is_told(checkpointer, monkeypatch) -> None:
    asked, answers = threading.Event(), threading.Event()
    newest = checkpointer._saving._notifier._newest

    def slow():
        asked.set()
        assert answers.wait(60)
        return newest()

    monkeypatch.setattr(checkpointer._saving._notifier, "_newest", slow)
    one = Committing(1)
    checkpointer.save(1, {"one": one}, to="storage")
    assert asked.wait(60)
    one.value = 2
    checkpointer.save(2, {"one": one}, to="storage")
    checkpointer._client.wait()
    answers.set()
    checkpointer.wait()
    assert one.told == [{"value": 2}]
