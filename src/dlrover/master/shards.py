"""The data sets of a job: each request is journalled before it is handled, as everything is."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dlrover.errors import ProtocolError
from dlrover.master.machine import inputs
from dlrover.sharding.machine import Shards
from dlrover.sharding.queue import Answer, Report
from dlrover.spec.shards import LookShards, ShardReply, ShardRequest

logger = logging.getLogger(__name__)


class ShardsService:
    """Answers the requests of one job's workers. ``append`` adds to the journal, at a time in seconds."""

    def __init__(self, append: Callable[[ShardRequest, float], None]) -> None:
        self.shards = Shards()
        self._append = append

    def replay(self, request: ShardRequest, time: float) -> None:
        """Handle a request of the journal."""
        self._handled(request, time)

    def note(self, event: inputs.Input, now: float) -> None:
        """Take in what happened to the job: a master's absence is not the workers' silence."""
        if isinstance(event, inputs.MasterStarted):
            self.shards.forgive(now)

    def answer(self, request: ShardRequest, now: float, ended: bool) -> ShardReply:
        """Answer a worker.

        Raises:
            InfrastructureError: the journal cannot be written; nothing has changed.
        """
        if ended:
            return ShardReply(refused="The job has ended.")
        if not isinstance(request, LookShards):
            self._append(request, now)
        return self._handled(request, now)

    def _handled(self, request: ShardRequest, now: float) -> ShardReply:
        try:
            commands = self.shards.handle(request, now)
        except ProtocolError as error:
            return ShardReply(refused=str(error))
        reply = ShardReply()
        for command in commands:
            if isinstance(command, Answer):
                reply = command.reply
            elif isinstance(command, Report):
                span, why = command.what.span, command.what.error
                logger.warning(
                    "Samples %d to %d of lane %d of the data set %s are set aside: %s",
                    span.start, span.stop, span.lane, command.data, why,
                )  # fmt: skip
        return reply
