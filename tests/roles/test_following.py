"""What the events of a role's own job mean for the other roles."""

from __future__ import annotations

from dlrover.roles.coordinator.following import EventReader
from dlrover.roles.machine.inputs import InstanceDown, InstanceUp
from dlrover.roles.spec import EntryForm, EntryPoint, RoleKind, RoleSpec
from dlrover.spec import events
from dlrover.spec.events import Event, EventBody


def read(kind: RoleKind, *bodies: EventBody) -> list[InstanceUp | InstanceDown]:
    reader = EventReader(
        RoleSpec(name="a", entry=EntryPoint(EntryForm.SCRIPT, "/a.py"), kind=kind), 2
    )
    return [
        found
        for seq, body in enumerate(bodies, 1)
        for found in reader.read(Event(seq, float(seq), body))
    ]


def test_instances_come_and_go_one_by_one() -> None:
    found = read(
        RoleKind.SIMPLE,
        events.InstanceStarted(0, "a", 0, 1),
        events.InstanceStarted(1, "a", 1, 1),
        events.InstanceRestarts(1, "a", 1, 1, "it was killed"),
        events.InstanceStarted(5, "a", 1, 2),
        events.NodeSucceeded(5),
    )
    assert found == [
        InstanceUp("a", 2, 0, 1, 1, 0),
        InstanceUp("a", 2, 1, 1, 2, 1),
        InstanceDown("a", 2, 1, "it was killed", 3),
        InstanceUp("a", 2, 1, 2, 4, 5),
        InstanceDown("a", 2, 1, "it has succeeded", 5, failed=False),
    ]


def test_the_workers_of_a_world_come_and_go_together() -> None:
    found = read(
        RoleKind.ELASTIC,
        events.RoundOpened(1, "the job starts", 1),
        events.RoundCompleted(1, 1, 2, 0.5),
        events.RestartDecided(1, "rank 0 was killed"),
        events.RoundOpened(2, "rank 0 was killed", 1),
        events.RoundCompleted(2, 1, 3, 0.5),
        events.NodeSucceeded(0),
    )
    assert found == [
        *(InstanceUp("a", 2, index, 1, 2) for index in (0, 1)),
        *(InstanceDown("a", 2, index, "rank 0 was killed", 4) for index in (0, 1)),
        *(InstanceUp("a", 2, index, 2, 5) for index in (0, 1, 2)),
    ]
