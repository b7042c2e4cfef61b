"""What the events of a role's own job mean for the other roles."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover.roles.machine.inputs import InstanceDown, InstanceUp
from dlrover.roles.spec import RoleKind, RoleSpec
from dlrover.spec import events
from dlrover.spec.events import Event


class EventReader:
    """Reads the events of one attempt of a role, from the first on."""

    def __init__(self, role: RoleSpec, attempt: int) -> None:
        self._role, self._attempt = role.name, attempt
        self._elastic = role.kind is RoleKind.ELASTIC
        self._index: dict[int, int] = {}  # by node
        self._world = 0

    def read(self, event: Event) -> Iterator[InstanceUp | InstanceDown]:
        """Yield what an event means."""
        match event.body:
            case events.InstanceStarted(node, _, index, start):
                self._index[node] = index
                yield self._up(index, start, event, node)
            case events.InstanceRestarts(_, _, index, _, reason):
                yield self._down(index, reason, event)
            case events.RoundOpened(_, reason):
                yield from self._world_ends(reason, event)
            case events.RoundCompleted(round_, _, world_size):
                self._world = world_size
                for index in range(world_size):
                    yield self._up(index, round_, event)
            case events.NodeSucceeded(node) if not self._elastic:
                yield self._down(self._index[node], "it has succeeded", event, failed=False)

    def _world_ends(self, reason: str, event: Event) -> Iterator[InstanceDown]:
        for index in range(self._world):
            yield self._down(index, reason, event)
        self._world = 0

    def _up(self, index: int, round_: int, event: Event, node: int = -1) -> InstanceUp:
        return InstanceUp(self._role, self._attempt, index, round_, event.seq, node)

    def _down(self, index: int, reason: str, event: Event, *, failed: bool = True) -> InstanceDown:
        return InstanceDown(self._role, self._attempt, index, reason, event.seq, failed)
