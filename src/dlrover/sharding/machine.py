"""All data sets of a job: one queue each, by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover.errors import ProtocolError
from dlrover.sharding.queue import Answer, Command, ShardQueue
from dlrover.spec.failure import Failure
from dlrover.spec.shards import (
    ForgetWorker,
    Incarnation,
    OpenShards,
    ShardReply,
    ShardRequest,
    data_key,
)

MAX_DATA_SETS = 1000
"""Data sets of one job."""
_NEVER = Incarnation(-1, 0)


@dataclass
class Shards:
    """What is dealt out in one job. `handle` is the only way to change it."""

    queues: dict[str, ShardQueue] = field(default_factory=dict)

    def handle(self, event: ShardRequest, now: float) -> list[Command]:
        """Take in one request at time ``now`` (seconds); what is to be done about it.

        Raises:
            ProtocolError: it contradicts what is known; nothing has changed.
        """
        if isinstance(event, ForgetWorker):
            commands: list[Command] = [Answer(ShardReply())]
            for queue in self.queues.values():
                commands += queue.handle(event, now)
            return commands
        if isinstance(event, OpenShards):
            return self._open(event, now)
        known = self.queues.get(event.data)
        if known is None:
            raise ProtocolError(
                f"The master knows no data set {event.data}: it has lost its journal, or the worker has not"
                " opened it."
            )
        return known.handle(event, now)

    def _open(self, event: OpenShards, now: float) -> list[Command]:
        name = event.spec.name
        queue = self.queues.get(name)
        if queue is None:
            if len(self.queues) >= MAX_DATA_SETS:
                raise ProtocolError(f"The data set {name} is one more than {MAX_DATA_SETS}.")
            queue = ShardQueue(event.spec, _NEVER)
        commands = queue.handle(event, now)
        self.queues[name] = queue
        return commands

    def crashed(self, failure: Failure, how: str) -> list[Command]:
        """A worker died of itself; what is to be done about the shard that it read."""
        if failure.reading is None:
            return []
        key, lane, position = failure.reading
        for name, queue in self.queues.items():
            if data_key(name) == key:
                return queue.crashed(failure.rank, failure.round, (lane, position), how)
        return []

    def forgive(self, now: float) -> None:
        """Whoever deals was away until now: nobody was silent meanwhile."""
        for queue in self.queues.values():
            queue.forgive(now)

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first that is broken."""
        for name, queue in self.queues.items():
            assert queue.spec.name == name
            queue.validate()
