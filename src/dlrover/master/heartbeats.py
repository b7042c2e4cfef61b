"""The nodes' heartbeats: their steps, and what workers do. The journal gets them now and then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dlrover.errors import InfrastructureError
from dlrover.master.machine import inputs
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.watches.activities import Activities
from dlrover.rpc import messages

logger = logging.getLogger(__name__)

PROGRESS_JOURNAL_INTERVAL = 5.0
"""Seconds between two journal entries that only record more steps or what workers do."""
FLUSH_INTERVAL = 1.0
"""The same for entries made before an input that may end the round; new steps are always journalled."""


class Heartbeats:
    """The latest steps of all nodes, and the activities of the running round's workers.

    Args:
        machine: the job; read only.
        submit: journals and handles an input of the machine.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        machine: JobMachine,
        submit: Callable[[inputs.Input], None],
        clock: Callable[[], float],
    ) -> None:
        self.steps: dict[int, int] = {}
        """Latest number of steps of each node in its round."""
        self.activities = Activities()
        self._machine = machine
        self._submit = submit
        self._clock = clock
        self._journalled = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def take(self, node_id: int, message: messages.Heartbeat) -> None:
        """Record what workers do; journal the first steps of a round at once, the others now and then."""
        machine, now = self._machine, self._clock()
        if node_id in machine.rendezvous.servers:
            return  # its optimizer's steps are not training steps
        self.activities.note(node_id, message, now)
        new = message.steps > machine.progress.steps
        first = new and (machine.state.awaits_step or machine.progress.steps == 0)
        if first or self._shows_first_step(message):
            self._journal()
        elif (new or message.workers) and self._timer is None:
            wait = self._journalled + PROGRESS_JOURNAL_INTERVAL - now
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, wait), self._on_timer)

    def _shows_first_step(self, message: messages.Heartbeat) -> bool:
        """Return whether a worker reports the running world's first step and the journal lacks it."""
        machine = self._machine
        lacks = machine.progress.first_step < 0 and not machine.rendezvous.collecting
        found = lacks and any(worker.first_step >= 0 for worker in message.workers)
        return found and machine.outcome is None and self.activities.first_step >= 0

    def _on_timer(self) -> None:
        self._timer = None
        try:
            self.flush()
        except InfrastructureError as error:
            logger.error("%s The next heartbeat tries again.", error)  # noqa: TRY400

    def flush(self) -> None:
        """Journal the latest steps and activities: the next input is judged by them."""
        machine, latest = self._machine, self.activities
        if latest.round != machine.rendezvous.round or machine.outcome is not None:
            return
        waited = self._clock() - self._journalled
        if latest.steps > machine.progress.steps or (latest.known and waited >= FLUSH_INTERVAL):
            self._journal()

    def _journal(self) -> None:
        self._journalled = self._clock()
        members = self._machine.rounds.training()
        self._submit(self.activities.progress(members, self._journalled))

    def close(self) -> None:
        """Journal nothing by itself any more."""
        if self._timer is not None:
            self._timer.cancel()
