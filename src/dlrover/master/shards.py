"""The data sets of a job: each request is journalled before it is handled, as everything is."""

from __future__ import annotations

import logging

from dlrover.errors import ProtocolError
from dlrover.master.machine import inputs
from dlrover.sharding.machine import Shards
from dlrover.sharding.queue import Answer, Report
from dlrover.spec.shards import ShardReply, ShardRequest

logger = logging.getLogger(__name__)


class ShardsService:
    """Answers the requests of one job's workers."""

    def __init__(self) -> None:
        self.shards = Shards()

    def note(self, event: inputs.Input, now: float) -> None:
        """Take in what happened to the job: a master's absence is not the workers' silence."""
        if isinstance(event, inputs.MasterStarted):
            self.shards.forgive(now)

    def handle(self, request: ShardRequest, now: float) -> ShardReply:
        """Answer a request that is in the journal, or changes nothing."""
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
