"""All datasets of a job: one queue each, by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover.data.machine.queue import Answer, Command, ShardQueue
from dlrover.errors import ProtocolError
from dlrover.spec.failure import Failure
from dlrover.spec.requests.shards import (
    ForgetWorker,
    Incarnation,
    OpenShards,
    ShardReply,
    ShardRequest,
    data_key,
)

MAX_DATA_SETS = 1000
"""Maximum number of datasets in one job."""
_NEVER = Incarnation(-1, 0)


@dataclass
class Shards:
    """Shard queues of one job. Only `handle` changes them."""

    queues: dict[str, ShardQueue] = field(default_factory=dict)

    def handle(self, event: ShardRequest, now: float) -> list[Command]:
        """Handle one request at time ``now`` (seconds); return the resulting commands.

        Raises:
            ProtocolError: the request contradicts the known state; nothing has changed.
            ConfigurationError: the worker describes the dataset in another way than the first worker.
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
        """Note the crash of a worker; return the commands for the shard that it was reading."""
        if failure.reading is None:
            return []
        key, partition, position = failure.reading
        for name, queue in self.queues.items():
            if data_key(name) == key:
                return queue.crashed(failure.rank, failure.round, (partition, position), how)
        return []

    def forgive(self, now: float) -> None:
        """The service was down until `now`; restart all silence timeouts."""
        for queue in self.queues.values():
            queue.forgive(now)

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first that is broken."""
        for name, queue in self.queues.items():
            assert queue.spec.name == name
            queue.validate()
