"""The datasets of a job. Each request is journalled before it is handled, like every other input."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

from dlrover.data.machine.datasets import Shards
from dlrover.data.machine.queue import Answer, Command, ReportSkipped
from dlrover.errors import ConfigurationError, ProtocolError
from dlrover.master.machine import inputs
from dlrover.spec.events import Event, EventBody, SamplesSkipped, WorkerFailed
from dlrover.spec.failure import Failure
from dlrover.spec.requests import Unanswered
from dlrover.spec.requests.shards import ShardReply, ShardRequest

logger = logging.getLogger(__name__)

MAX_KEPT = 1000
"""Maximum number of sentences kept about skipped samples."""
NAMED = 3
"""Maximum number of those sentences in a summary."""
OWN_DEATHS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP}
)
"""Signals that a process brings upon itself, perhaps because of what it has just read."""


class ShardsService:
    """Service for one job's workers. ``record`` adds to the job's events, at a time in seconds.

    A replay for people to read is ``quiet``: it logs nothing.
    """

    def __init__(self, record: Callable[[EventBody, float], Event], *, quiet: bool = False) -> None:
        self.shards = Shards()
        self._record = record
        self._level = logging.NOTSET if quiet else logging.WARNING
        self._skipped: dict[str, None] = {}

    def note(self, event: inputs.Input, now: float) -> None:
        """Process an input of the job's machine.

        A master's absence does not count as the workers' silence. A worker that died by itself may have died
        because of the samples that it read.
        """
        if isinstance(event, inputs.MasterStarted):
            self.shards.forgive(now)
        elif isinstance(event, WorkerFailed) and _own_death(event.failure):
            self._report(self.shards.crashed(event.failure, _words(event.failure)), now)

    def summary(self) -> tuple[str, ...]:
        """Return sentences about skipped samples, for the end of the job."""
        named = tuple(self._skipped)[:NAMED]
        more = len(self._skipped) - len(named)
        return (*named, f"And {more} more: dlrover events.") if more else named

    def handle(self, request: ShardRequest, now: float) -> ShardReply | Unanswered:
        """Answer a request that is in the journal or changes nothing.

        A request that fails is refused alone: the journal has it, and a replay must not end each later master.
        """
        try:
            commands = self.shards.handle(request, now)
        except (ProtocolError, ConfigurationError) as error:
            return Unanswered(refused=str(error), wrong=isinstance(error, ConfigurationError))
        except Exception as error:
            logger.exception("The master cannot handle a request of a worker: %.1000r", request)
            return Unanswered(refused=f"The master cannot handle the request: {error!r}.")
        self._report(commands, now)
        return next((c.reply for c in commands if isinstance(c, Answer)), ShardReply())

    def _report(self, commands: list[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, ReportSkipped):
                span, why = command.what.span, command.what.error
                body = SamplesSkipped(command.data, span.partition, span.start, span.stop, why)
                event = self._record(body, now)
                logger.log(self._level, "%s", event.sentence())
                if len(self._skipped) < MAX_KEPT:
                    self._skipped[event.sentence()] = None  # a replay reports it again


def _own_death(failure: Failure) -> bool:
    return failure.oom_killed or failure.signal in OWN_DEATHS


def _words(failure: Failure) -> str:
    if failure.oom_killed:
        return "the kernel's out-of-memory killer ended the worker"
    return f"the worker was killed by {signal.Signals(failure.signal or 0).name}"
