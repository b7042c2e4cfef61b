"""The events of a job's masters as the command that started the job keeps them, without a cluster."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dlrover.master.journal.history import read
from dlrover.ray.copying import CopiedEvents
from dlrover.spec import events
from dlrover.spec.events import Event


def history(begun: float, *rounds: int) -> list[bytes]:
    """The lines of a master that began at a time."""
    bodies = [events.JobSubmitted("j", 1, 1), *(events.RoundOpened(n, "why", 1) for n in rounds)]
    return [
        msgspec.json.encode(Event(seq, begun + seq, body)) + b"\n"
        for seq, body in enumerate(bodies, 1)
    ]


def rounds(path: Path) -> list[int]:
    known = read(path)
    assert [event.seq for event in known] == list(range(1, len(known) + 1))
    return [one.body.round for one in known if isinstance(one.body, events.RoundOpened)]


@pytest.mark.parametrize("again", [False, True])
def test_a_master_that_begins_anew_goes_on_in_the_same_history(
    tmp_path: Path, *, again: bool
) -> None:
    """Also for a process that is started ``again`` after each of its answers."""
    path = tmp_path / "events.jsonl"
    copied = CopiedEvents(path)
    first, second = history(10.0, 1, 2, 3), history(20.0, 4, 5, 6)
    for whole, start, end in ((first, 0, 2), (first, 2, 4), (second, 0, 1), (second, 1, 4)):
        if again:  # it knows no position, and gets all
            copied.close()
            copied = CopiedEvents(path)
        copied.add(whole[0], b"".join(whole[0 if again else start : end]))
    copied.close()
    assert rounds(path) == [1, 2, 3, 4, 5, 6]
    assert (copied.of, copied.position) == (second[0], sum(map(len, second)))


def test_an_answer_without_events_changes_nothing(tmp_path: Path) -> None:
    copied = CopiedEvents(tmp_path / "events.jsonl")
    first, second = history(10.0, 1), history(20.0)
    copied.add(first[0], b"".join(first))
    copied.add(second[0], b"")
    copied.close()
    assert (copied.of, copied.position) == (first[0], sum(map(len, first)))
