"""The agent's shell: holds the stream to the master and carries out the state machine's commands."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from dlrover._util import backoff, tasks
from dlrover.agent import savers
from dlrover.agent.checking import Checker
from dlrover.agent.machine import node as agent_machine
from dlrover.agent.machine.waits import Waits
from dlrover.agent.ports import StorePort
from dlrover.agent.usage import UsageMeter
from dlrover.agent.workers.workers import WorkerGroup
from dlrover.errors import DLRoverError, ExitCode, InfrastructureError
from dlrover.rpc import messages
from dlrover.rpc.client import MasterClient
from dlrover.spec.check import CheckOrder, CheckReport
from dlrover.spec.events import StepStored
from dlrover.spec.failure import Failure, FailureKind
from dlrover.spec.jobdir import AgentConfig
from dlrover.spec.outcome import Outcome
from dlrover.spec.requests.membership import Members
from dlrover.spec.world import Offer, World

logger = logging.getLogger(__name__)

PROGRESS_REPORT = 1.0
"""Seconds between two progress reports of the node with node rank 0; other nodes report with heartbeats."""
RECONNECT = 0.05, 1.0
"""Seconds until the first retry after the master could not be reached, and between later ones."""
SPAWN_RETRY = 1.0, 60.0
"""Seconds, at first and at most, until a worker that could not be started is started again beside the others."""
FLUSH_WAIT = 10.0
"""Most seconds that the stop of workers waits until the savers know that they are to store what ends."""
_SIGNALS = signal.valid_signals()


class NodeControls(NamedTuple):
    """What an agent controls and measures on its node."""

    hostname: str
    workers: WorkerGroup
    checker: Checker
    usage: UsageMeter
    port: StorePort


class Agent:
    """The agent of one node. Create and run it on an event loop, whose clock it uses."""

    def __init__(  # noqa: PLR0913 - each is needed once
        self,
        client: MasterClient,
        node: NodeControls,
        settings: AgentConfig,
        *,
        node_id: int = -1,
        node_rank: int = -1,
        locate: Callable[[], str] | None = None,
        notify: Callable[[str], None] = lambda _: None,
        shows_waits: bool = False,
        chance: random.Random | None = None,
    ) -> None:
        """Create an agent.

        ``locate`` returns the master's current address, if it may change. ``notify`` shows lines to the user of
        this machine: at the end, what became of the steps that were in memory, and with ``shows_waits`` what the
        node waits for, which the machine with the master shows by itself.
        ``chance`` is the source of unique ids and random delays; None: the system's.
        """
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._chance = chance or random.SystemRandom()
        self._client = client
        self._locate = locate
        self._hostname, self._workers, self._checker, self._usage, self._port = node
        self._workers.on_exit = self.worker_ended
        self._launch = settings.launch
        self._limits = settings.limits
        self._address = settings.address
        self._claimed_id = node_id
        self._node_rank = node_rank
        self._uid = self._draw()
        self._salt = self._draw()
        self._machine = agent_machine.AgentMachine(settings.launch.nproc_per_node)
        self._outgoing: asyncio.Queue[messages.AgentMessage] | None = None
        self._heartbeat_interval = settings.limits.heartbeat_interval
        self._waits = Waits(settings.limits, self._clock())
        self._notify, self._shows_waits = notify, shows_waits
        self._left: asyncio.Future[Outcome] = loop.create_future()
        self._stopping: asyncio.Task[None] | None = None
        self._flushes: set[asyncio.Task[None]] = set()
        self._stores_until = 0.0
        """Until when the savers may store what is in memory: after the last order for it."""
        self._storing: asyncio.Task[None] | None = None
        """Waits for what they store after this order; None until the workers have ended."""
        self._news = asyncio.Event()
        """Set when a heartbeat may be due earlier than expected."""
        self._listed = b""
        """List of modules that the master has got."""
        self._looks: set[asyncio.Task[None]] = set()
        self._spawn_delays: dict[int, Iterator[float]] = {}
        """Pauses before each worker that could not be started is started again, by local rank."""

    def _draw(self) -> str:
        """Return a random text, which is unique and cannot be guessed."""
        return f"{self._chance.getrandbits(128):032x}"

    # ---- life

    async def run(self) -> Outcome:
        """Serve until the job is over for this node; return its outcome.

        Raises:
            ConfigurationError: The master refuses the token.
        """
        self._workers.prepare()
        parts = [
            asyncio.create_task(self._stay_connected()),
            asyncio.create_task(self._report_progress()),
            asyncio.create_task(self._workers.watch(self._news.set)),
            asyncio.create_task(self._show_waits()),
        ]
        waits: list[asyncio.Future[Any]] = [*parts, self._left]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # the background tasks end only with an error
            return await self._left
        finally:
            try:
                await self._close()
            finally:
                for task in parts:  # the end of the connection tells the master that all is done
                    task.cancel()

    async def _close(self) -> None:
        """End workers, zygotes and savers; these may take longer if they are to store what is in memory."""
        self._checker.stop()
        await self._workers.stop(signal.SIGTERM, 0.0)
        await self._savers_know()
        try:
            await (self._storing or self._say_stored())
        finally:
            await self._workers.close(max(savers.WAIT, self._stores_until - self._clock()))

    async def _say_stored(self) -> None:
        """Wait for what savers store once the workers have ended; show it to the user of this machine and the master."""
        left = self._stores_until - self._clock()
        places = await self._workers.stored_at_end(left) if left > 0 else ()
        known = tuple(place for place in places if place.step >= 0 or place.problem)
        for place in known:
            stored = StepStored(place.directory, place.step, messages.WORKERS_ENDED, place.problem)
            logger.info("%s", stored.sentence())
            self._notify(stored.sentence())
        if known:
            self._say(messages.MemoryStored("", known))

    def abandon(self, exit_code: int, reason: str) -> None:
        """Stop the workers and leave without the master's order."""
        outcome = Outcome(exit_code=exit_code, reason=reason)
        # Ranks that survive others go on: they do not store with this node what is in memory.
        self._handle(agent_machine.Abandon(outcome, store=not self._launch.survive))

    def worker_ended(self, local_rank: int, failure: Failure | None) -> None:
        """Handle the end of a worker; called by the worker group."""
        if failure is None or failure.kind is not FailureKind.SPAWN:
            self._spawn_delays.pop(local_rank, None)
        elif local_rank not in self._spawn_delays:
            delays = backoff.delays(*SPAWN_RETRY, chance=self._chance)
            self._spawn_delays[local_rank] = delays
        self._handle(agent_machine.WorkerEnded(local_rank, failure))

    # ---- the stream

    async def _stay_connected(self) -> None:
        delays = backoff.delays(*RECONNECT, chance=self._chance)
        while not self._left.done() or self._clock() < self._stores_until:
            try:
                await self._attend()
            except InfrastructureError as error:
                logger.debug("%s", error)
            if self._outgoing is not None:
                delays = backoff.delays(*RECONNECT, chance=self._chance)
            self._outgoing = None
            self._check_master_absence()
            await self._client.pause(next(delays))

    async def _attend(self) -> None:
        outgoing: asyncio.Queue[messages.AgentMessage] = asyncio.Queue()
        claimed = self._machine.node_id if self._machine.node_id >= 0 else self._claimed_id
        outgoing.put_nowait(
            messages.Hello(
                self._uid,
                claimed,
                self._node_rank,
                self._hostname,
                self._machine.running_round,
                self._machine.holding(self._workers.steps()),
                self._machine.epoch,
            )
        )

        async def said() -> AsyncIterator[messages.AgentMessage]:
            while True:
                yield await outgoing.get()

        if self._locate is not None:
            await self._client.move(self._locate())
        async with contextlib.aclosing(self._client.attend(said())) as incoming:
            async for message in incoming:
                if self._machine.refuses(message):
                    logger.error("%s is refused: another master has taken over", message)
                    return
                self._show(self._waits.answered(self._clock(), self._client.address))
                self._outgoing = outgoing
                if isinstance(message, messages.Welcome):
                    self._heartbeat_interval = message.heartbeat_interval
                    self._news.set()
                    self._workers.node_id = message.node_id
                    self._say_progress()  # a new master must not count from zero
                    self._listed = b""
                if isinstance(message, messages.CollectEvidence):
                    tasks.start(self._look(message.id), self._looks)
                elif isinstance(message, messages.StoreMemory):
                    tasks.start(self._save_now(message.id), self._looks)
                else:
                    self._handle(message)

    def _check_master_absence(self) -> None:
        """Note the missing connection, and leave if the master has been away too long."""
        now = self._clock()
        self._waits.lost(now)
        outcome = self._waits.expired(now, self._client.address)
        if outcome is not None:
            self.abandon(outcome.exit_code, outcome.reason)

    async def _show_waits(self) -> None:
        while True:
            await asyncio.sleep(self._waits.quiet(self._clock()))
            machine, now = self._machine, self._clock()
            address = self._client.address
            self._show(self._waits.notice(now, machine.stage, machine.node_id, address))

    def _show(self, line: str) -> None:
        if line:
            logger.info("%s", line)
        if line and self._shows_waits:
            self._notify(line)

    def _say(self, message: messages.AgentMessage) -> None:
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    def _say_progress(self) -> None:
        self._say(self._heartbeat(self._machine.running_round, self._workers.steps()))

    def _say_modules(self) -> None:
        """Tell the master what the program loads, so that spares can load it, too."""
        world, listed = self._machine.world, self._workers.listed_modules
        if listed != self._listed and world is not None and world.node_rank == 0:
            self._listed = listed
            self._say(messages.ModulesListed(listed))

    def _heartbeat(self, round_: int, steps: int) -> messages.Heartbeat:
        return messages.Heartbeat(round_, steps, self._workers.activities())

    async def _look(self, id_: int) -> None:
        """Collect evidence of the workers and send it to the master."""
        round_ = self._machine.running_round
        self._say(messages.Evidence(id_, round_, await self._workers.evidence()))

    async def _save_now(self, id_: str) -> None:
        """Have the newest memory checkpoint stored and tell the master what came of it."""
        self._say(messages.MemoryStored(id_, await self._workers.save_now(id_)))

    async def _look_at_devices(self) -> None:
        """Measure how busy the accelerators are, for the next usage report."""
        self._usage.busy = await self._workers.devices_busy()

    # ---- progress

    async def _report_progress(self) -> None:
        """Send heartbeats: at once at the first step of a round, later at intervals."""
        reported_round, reported_steps, reported_at = 0, 0, 0.0
        while True:
            now = self._clock()
            world = self._machine.world
            round_ = world.round if world is not None else 0
            steps = self._workers.steps() if world is not None else 0
            if round_ != reported_round:
                reported_round, reported_steps = round_, 0
            first = steps > 0 and reported_steps == 0
            often = world is not None and world.node_rank == 0 and steps > reported_steps
            due = reported_at + (PROGRESS_REPORT if often else self._heartbeat_interval)
            if first or now >= due:
                reported_steps, reported_at = steps, now
                due = now + self._heartbeat_interval
                usage = self._usage.look(self._workers.pids())
                if usage is not None:
                    tasks.start(self._look_at_devices(), self._looks)
                beat = self._heartbeat(round_, steps)
                self._say(msgspec.structs.replace(beat, usage=usage))
                self._say_modules()
            self._news.clear()
            await tasks.signalled(self._news, due - now)

    # ---- commands

    def _handle(self, event: agent_machine.Input) -> None:
        for command in self._machine.handle(event):
            self._carry_out(command)

    def _carry_out(self, command: agent_machine.Command) -> None:  # noqa: C901, PLR0912 - one case per command
        match command:
            case agent_machine.JoinRound():
                self._join(command.round)
            case messages.Failed() | messages.Leaving() | messages.Succeeded() | CheckReport():
                self._say_progress()
                self._say(command)
            case CheckOrder():
                self._checker.start(command, self._machine.node_id, self._handle)
            case messages.AssignWorld():
                self._checker.stop()
                self._waits.started()
                if command.place >= 0:
                    self._workers.take_place(command.place)
                self._start(command.world, command.fresh)
            case messages.StartAgain(round_, attempts, fresh):
                loop = asyncio.get_running_loop()
                for local_rank, attempt in attempts.items():
                    delays = self._spawn_delays.get(local_rank, itertools.repeat(0.0))
                    again = round_, local_rank, attempt, fresh
                    loop.call_later(next(delays), self._start_again, *again)
            case agent_machine.EndWorker(local_rank) if not self._workers.end(local_rank):
                self._handle(agent_machine.WorkerEnded(local_rank, None))
            case Members():
                self._workers.tell(command)
            case messages.StandBy():
                self._waits.started()
                self._workers.preload(command.modules)
            case agent_machine.FlushMemory(partial):
                longest = self._launch.shutdown_timeout + self._limits.release_grace
                self._stores_until, self._storing = self._clock() + longest, None
                tasks.start(self._workers.store_at_end(partial=partial), self._flushes)
            case agent_machine.StopWorkers():
                self._stopping = asyncio.create_task(self._stop_workers())
            case messages.Dismiss() if not self._left.done():
                self._left.set_result(command.outcome)

    def _join(self, round_: int) -> None:
        port = self._port.reserve()
        offer = Offer(self._launch.nproc_per_node, self._address, port, self._salt)
        self._waits.joined(self._clock())
        self._say(messages.Join(round_, offer))

    def _start(self, world: World, fresh: bool) -> None:
        self._port.use()
        try:
            if fresh:
                self._workers.discard_zygotes()
            self._workers.start(world)
        except (OSError, DLRoverError) as error:
            failure = self._spawn_failure(world, error, 0, world.attempt)
            asyncio.get_running_loop().call_soon(self.worker_ended, 0, failure)

    def _start_again(self, round_: int, local_rank: int, attempt: int, fresh: bool) -> None:
        """Start a worker again, unless it is not wanted any more after a pause."""
        world = self._machine.world
        if world is None or not self._machine.awaits(round_, local_rank, attempt):
            return
        try:
            self._workers.start_again(local_rank, attempt, fresh=fresh)
        except (OSError, DLRoverError) as error:
            failure = self._spawn_failure(world, error, local_rank, attempt)
            asyncio.get_running_loop().call_soon(self.worker_ended, local_rank, failure)

    def _spawn_failure(
        self, world: World, error: Exception, local_rank: int, attempt: int
    ) -> Failure:
        return Failure(
            id=self._draw(),
            kind=FailureKind.SPAWN,
            node_id=self._machine.node_id,
            rank=world.first_rank + local_rank,
            local_rank=local_rank,
            round=world.round,
            attempt=attempt,
            time=time.time(),
            message=str(error),
            hostname=self._hostname,
        )

    async def _stop_workers(self) -> None:
        outcome = self._machine.outcome
        number = signal.SIGTERM
        requested = 0 if outcome is None else outcome.exit_code - ExitCode.SIGNAL_BASE
        if requested in _SIGNALS:
            number = signal.Signals(requested)
        await self._savers_know()
        await self._workers.stop(number, self._launch.shutdown_timeout)
        self._storing = tasks.start(self._say_stored(), self._looks)
        self._handle(agent_machine.WorkersStopped())

    async def _savers_know(self) -> None:
        """Wait until the savers know that they are to store what ends; one that does not answer is not waited for."""
        if self._flushes:
            await asyncio.wait(self._flushes, timeout=FLUSH_WAIT)
