"""The streams of a job's agents: reports and heartbeats come in, orders go out, and silence is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import msgspec

from dlrover.errors import InfrastructureError, ProtocolError
from dlrover.master.journal.writing import JournalWriter
from dlrover.master.machine import inputs
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.watches.activities import Activities
from dlrover.rpc import messages

logger = logging.getLogger(__name__)

SILENCE_CHECKS = 4
"""Number of checks for silent nodes within one heartbeat timeout."""
PROGRESS_JOURNAL_INTERVAL = 5.0
"""Seconds between two journal entries that only record more steps or what workers do."""
FLUSH_INTERVAL = 1.0
"""The same for entries made before an input that may end the round; new steps are always journalled."""

_Orders = asyncio.Queue[messages.MasterMessage | None]


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


class Handlers(NamedTuple):
    """What a master does with what agents say."""

    greet: Callable[[messages.Hello], None]
    """Processes the first message of a stream."""
    take: Callable[[int, messages.AgentMessage], None]
    """Processes a later message of the node with this id."""
    report: Callable[[inputs.Input], None]
    """Journals and handles an input that no peer will resend."""


class AgentStreams:
    """The streams of one job's agents, and the orders that wait to be sent.

    Args:
        machine: the job; read only.
        journal: gives the master's epoch, and notices another master.
        heartbeats: the steps of the nodes.
        handlers: what the master does with what agents say.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        machine: JobMachine,
        journal: JournalWriter,
        heartbeats: Heartbeats,
        handlers: Handlers,
        clock: Callable[[], float],
    ) -> None:
        self.begun = asyncio.Event()
        """Set once the master has a job; agents that come earlier wait."""
        self.dismissed: set[int] = set()
        """Nodes that were sent the job's end."""
        self._machine = machine
        self._journal = journal
        self._heartbeats = heartbeats
        self._handlers = handlers
        self._clock = clock
        self._started = clock()
        self._queues: dict[int, _Orders] = {}
        self._greeted: dict[str, _Orders] = {}
        self._last_seen: dict[int, float] = {}
        self._modules = b""  # what the program loads, for spares; each master hears it again

    def has(self, node_id: int) -> bool:
        """Return whether a node is connected."""
        return node_id in self._last_seen

    # ---- orders

    def say(self, node_id: int, message: messages.MasterMessage) -> None:
        """Send a message to a node, if it is connected."""
        if isinstance(message, messages.AssignWorld):
            self._heartbeats.steps[node_id] = 0
        elif isinstance(message, messages.Dismiss):
            self.dismissed.add(node_id)
        elif isinstance(message, messages.StandBy):
            message = messages.StandBy(self._modules)
        queue = self._queues.get(node_id)
        if queue is not None:
            queue.put_nowait(message)

    def welcome(self, command: inputs.Greet) -> None:
        """Answer an agent's first message; an older stream of its node ends."""
        queue = self._greeted[command.uid]
        welcome = msgspec.structs.replace(command.message, epoch=self._journal.epoch)
        older = self._queues.get(welcome.node_id)
        if older is not None and older is not queue:
            older.put_nowait(None)
        self._queues[welcome.node_id] = queue
        queue.put_nowait(welcome)

    def prepare_spares(self, modules: bytes) -> None:
        """Send spares the list of modules that the program loads, if it is new."""
        if modules == self._modules:
            return
        self._modules = modules
        for spare in (*self._machine.spares.offers, *self._machine.spares.standing):
            self.say(spare, messages.StandBy())

    # ---- streams

    async def attend(
        self, incoming: AsyncIterator[messages.AgentMessage]
    ) -> AsyncIterator[messages.MasterMessage]:
        """Serve an agent's stream: its reports come in, its orders go out."""
        hello = await anext(aiter(incoming), None)
        if not isinstance(hello, messages.Hello):
            raise ProtocolError("An agent's stream must begin with a Hello; this one does not.")
        await self.begun.wait()  # the platform may take some time to list its nodes
        self._meet(hello)
        queue: _Orders = asyncio.Queue()
        self._greeted[hello.uid] = queue
        self._handlers.greet(hello)
        node_id = self._machine.fleet.by_uid[hello.uid]
        self._queues[node_id] = queue
        self._last_seen[node_id] = self._clock()
        if hello.held is not None:
            self._heartbeats.steps.setdefault(node_id, hello.held.steps)
        reader = asyncio.create_task(self._listen(node_id, incoming))
        reader.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (message := await queue.get()) is not None:
                yield message
            if reader.done():
                reader.result()  # raises if the stream did not end by itself
        finally:
            reader.cancel()
            self._hang_up(hello.uid, node_id, queue)

    def _meet(self, hello: messages.Hello) -> None:
        since = self._clock() - self._started
        self._journal.meet(
            hello.epoch,
            known=hello.uid in self._machine.fleet.by_uid,
            starting=since <= self._machine.job.limits.recovery_grace,
        )

    async def _listen(self, node_id: int, incoming: AsyncIterator[messages.AgentMessage]) -> None:
        async for message in incoming:
            if node_id in self._last_seen:
                self._last_seen[node_id] = self._clock()
            self._handlers.take(node_id, message)

    def _hang_up(self, uid: str, node_id: int, queue: _Orders) -> None:
        if self._greeted.get(uid) is queue:
            del self._greeted[uid]
        if self._queues.get(node_id) is queue:
            del self._queues[node_id]
            self._last_seen.pop(node_id, None)
            self._handlers.report(inputs.NodeDisconnected(node_id))

    async def watch_silence(self) -> None:
        """Report nodes that are connected but silent; run until cancelled."""
        while True:
            timeout = self._machine.job.limits.heartbeat_timeout
            due = self._clock() + timeout / SILENCE_CHECKS
            await asyncio.sleep(timeout / SILENCE_CHECKS)
            with contextlib.suppress(InfrastructureError):  # the next append reports it
                self._journal.check()
            now = self._clock()
            if now - due > timeout / SILENCE_CHECKS:
                # This process itself was stopped: the messages of that time are still unread.
                self._last_seen = dict.fromkeys(self._last_seen, now)
            for node_id, seen in list(self._last_seen.items()):
                if now - seen > timeout:
                    del self._last_seen[node_id]
                    self._handlers.report(inputs.NodeSilent(node_id, now - seen))
                    # If the node wakes up, it learns from the end of its stream that it was given up.
                    self._queues[node_id].put_nowait(None)

    def close(self) -> None:
        """End every stream before the master exits."""
        for queue in self._queues.values():
            queue.put_nowait(None)
