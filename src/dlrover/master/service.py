"""The master's shell: receives messages, journals and handles them, and carries out the commands."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from dlrover.errors import FencedError, InfrastructureError, ProtocolError
from dlrover.master import migrate, scale
from dlrover.master.hangwatch import HangWatch
from dlrover.master.journal.commits import Commits
from dlrover.master.journal.history import History
from dlrover.master.journal.journal import Entry, Journal, fenced
from dlrover.master.machine import inputs
from dlrover.master.machine.cluster import TaskCluster
from dlrover.master.machine.goodput.ledger import Ledger
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.state import Node
from dlrover.master.machine.strategies import Strategies
from dlrover.master.machine.watches.activities import Activities
from dlrover.master.meeting import Meeting
from dlrover.master.placement import PlacementService
from dlrover.master.relayed import Begun, answers
from dlrover.master.saves import UserSaves
from dlrover.master.scaling.autoscale import AutoScaler
from dlrover.master.shards import ShardsService
from dlrover.master.storeside import StoreService, waited
from dlrover.master.views.status import status_of
from dlrover.platform.base import PlacedNode, Platform, Progress, RoleSize, scaled_by
from dlrover.rpc import messages
from dlrover.rpc.server import Server
from dlrover.spec.check import CheckReport
from dlrover.spec.cluster import ClusterRequest, LookCluster
from dlrover.spec.events import NodeWaits
from dlrover.spec.membership import LookMembers, Meet, MembershipChange, MembersNow
from dlrover.spec.node import CHIEF, SERVER, WORKER, LaunchNode
from dlrover.spec.placement import LookPlacement, PlacementRequest
from dlrover.spec.requests import Unanswered, WorkerReply, WorkerRequest
from dlrover.spec.shards import LookShards, ShardRequest
from dlrover.spec.strategies import ChooseStrategy, StrategyRequest

logger = logging.getLogger(__name__)

PROGRESS_JOURNAL_INTERVAL = 5.0
"""Seconds between two journal entries that only record more steps or what workers do."""
FLUSH_INTERVAL = 1.0
"""The same for entries made before an input that may end the round; new steps are always journalled."""
WATCH_INTERVAL = 0.2
"""Minimum seconds between two notices to one watcher."""
NOTICE_BYTES = 1024 * 1024
"""Maximum size of the events in one notice, in bytes; a large job's status needs room beside them."""
WATCH_REFRESH = 1.0
"""Seconds after which a watcher gets a notice even if no event has happened."""


REASON_LIMIT = 500
"""Maximum length of the reason for another number of nodes, in characters."""
JOURNAL_RETRY = 1.0
"""Seconds between attempts to journal an input that no peer will resend: the disk may be full."""
SILENCE_CHECKS = 4
"""Number of checks for silent nodes within one heartbeat timeout."""


class Clock:
    """Wall clock in seconds that never runs backwards: the wall time at the start plus monotonic time."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def __call__(self) -> float:
        """Return the seconds since the epoch."""
        return self._offset + time.monotonic()


class Master:
    """One job's master. All methods run on one event loop; nothing here blocks it."""

    def __init__(
        self,
        journal: Journal,
        history: History,
        clock: Callable[[float], Callable[[], float]] = Clock,
    ) -> None:
        """Restore the job from its journal.

        ``clock`` makes a clock in seconds that is not before a given time; timers use the running loop.
        """
        self.machine = JobMachine()
        self.ledger = Ledger()
        self.store = StoreService()
        self.shards = ShardsService(history.add)
        self.placement = PlacementService()
        self.cluster = TaskCluster()
        self.meeting = Meeting()
        self.strategies = Strategies()
        self.ended = asyncio.Event()
        self._begun = asyncio.Event()
        self.fenced = asyncio.Event()
        """Set once another master has taken over: this one must exit."""
        self._journal = journal
        self._history = history
        self._platform: Platform | None = None
        self._queues: dict[int, asyncio.Queue[messages.MasterMessage | None]] = {}
        self._greeted: dict[str, asyncio.Queue[messages.MasterMessage | None]] = {}
        self._dealing: set[asyncio.Task[object]] = set()
        self._last_seen: dict[int, float] = {}
        self._steps: dict[int, int] = {}
        self._dismissed: set[int] = set()
        self._modules = b""  # what the program loads, for spares; each master hears it again
        self._activities = Activities()
        self.hangs = HangWatch(self.machine, self._say, self._submit_finding)
        self.saves = UserSaves(self.machine, self._say, self._submit_finding)
        self.scaler = AutoScaler(self.machine, self._submit_finding, self.hangs.held_up)
        self._progress_journalled = 0.0
        self._progress_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unwritten = ""  # error of the last journal write; empty if it succeeded
        self._backlog: collections.deque[tuple[float, inputs.Input]] = collections.deque()
        """Inputs that took effect while the disk was full, oldest first; journalled before anything else."""
        self._changed = asyncio.Event()
        self.replayed = 0
        self.last_entry = self._replay()
        self.clock = clock(self.last_entry)
        self._commits = Commits(self._append, self.clock)
        self._started = self.clock()

    def _replay(self) -> float:
        """Replay the journal into the machines; return the time of its last entry, 0.0 if it is empty."""
        last = 0.0
        for last, entry in self._journal.entries():
            self.replayed += 1
            if isinstance(entry, inputs.Submitted):
                self._history.follow(entry.earlier_events)
            if isinstance(entry, inputs.Input):
                for command in self.machine.handle(entry, last):
                    if isinstance(command, inputs.Emit):
                        self._history.add(command.body, last)
                self.ledger.handle(entry, last, self.machine)
                self.shards.note(entry, last)
            elif isinstance(entry, ShardRequest):
                self.shards.handle(entry, last)
            elif isinstance(entry, PlacementRequest):
                self.placement.handle(entry)
            elif isinstance(entry, ClusterRequest | StrategyRequest):
                self._answer(entry, last)
            else:
                with contextlib.suppress(ProtocolError):  # it was refused the first time, too
                    self.store.apply(entry)
        return last

    # ---- life

    def use_platform(self, platform: Platform | None) -> None:
        """Launch nodes on a platform; take over nodes that an earlier master process launched."""
        self._platform = platform
        for node in self.machine.nodes.values():
            if platform is not None and node.handle and not node.status.final:
                platform.adopt(node.id, node.handle)

    def register(self, server: Server) -> None:
        """Register this master's methods with a server."""
        server.stream("Attend", messages.AgentMessage, self.attend)
        server.unary("Status", messages.StatusRequest, self.status)
        server.server_stream("Watch", messages.WatchRequest, self.watch)
        server.unary("Stop", messages.StopRequest, self.stop)
        server.unary("Scale", messages.ScaleRequest, self.scale)
        server.unary("Drain", messages.DrainRequest, self.drain)
        server.unary("Save", messages.SaveRequest, self.saves.save)
        server.unary("Ranks", messages.RanksRequest, self.hangs.ranks)
        server.unary("Stacks", messages.StacksRequest, self.hangs.stacks)
        server.unary("Store", messages.StoreRequest, self.use_store)
        server.stream("Deal", messages.RequestFrame, self.deal)

    async def run(self) -> bool:
        """Watch the job until it has ended and its nodes have left; False if another master takes over."""
        watches = [
            asyncio.create_task(self._watch_silence()),
            asyncio.create_task(self.hangs.run(self.clock)),
            asyncio.create_task(self.scaler.run(self.clock)),
        ]
        fenced = asyncio.create_task(self.fenced.wait())
        ending = asyncio.create_task(self._nodes_left())
        try:
            await asyncio.wait([fenced, ending], return_when=asyncio.FIRST_COMPLETED)
            if not fenced.done():
                ending.result()
            return not fenced.done()
        finally:
            for task in (*watches, fenced, ending):
                task.cancel()

    async def _watch_silence(self) -> None:
        """Report nodes that are connected but silent; run until cancelled."""
        while True:
            timeout = self.machine.job.limits.heartbeat_timeout
            due = self.clock() + timeout / SILENCE_CHECKS
            await asyncio.sleep(timeout / SILENCE_CHECKS)
            with contextlib.suppress(InfrastructureError):  # the next append reports it
                self._check_fence()
            now = self.clock()
            if now - due > timeout / SILENCE_CHECKS:
                # This process itself was stopped: the messages of that time are still unread.
                self._last_seen = dict.fromkeys(self._last_seen, now)
            for node_id, seen in list(self._last_seen.items()):
                if now - seen > timeout:
                    del self._last_seen[node_id]
                    self._submit_with_retry(inputs.NodeSilent(node_id, now - seen))
                    # If the node wakes up, it learns from the end of its stream that it was given up.
                    self._queues[node_id].put_nowait(None)

    async def _nodes_left(self) -> None:
        """Wait until the job has ended and all nodes have left; in the end, kill those that have not."""
        await self.ended.wait()
        job, limits = self.machine.job, self.machine.job.limits
        ended = self.clock()
        grace = limits.recovery_grace if self.replayed else limits.reconnect_grace
        await self._wait_while(self._uninformed, ended + grace)
        self._kill(filter(self._uninformed, self.machine.nodes.values()))
        await self._wait_while(self._remains, ended + job.shutdown_timeout + limits.end_grace)
        self._kill(filter(self._remains, self.machine.nodes.values()))

    def _kill(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if self._platform is not None and node.handle:
                self._platform.kill(node.handle)

    async def _wait_while(self, holds: Callable[[Node], bool], until: float) -> None:
        """Wait while ``holds`` for any node; look at one at a time, as thousands leave one by one."""
        while node := next(filter(holds, self.machine.nodes.values()), None):
            while holds(node):
                if self.clock() >= until:
                    return
                await waited(self._changed, until - self.clock())

    def _uninformed(self, node: Node) -> bool:
        """Return whether a node is disconnected, may come back and does not know of the job's end."""
        away = node.uid and not (node.connected or node.gone or node.status.final)
        return bool(away) and node.id not in self._dismissed

    def _remains(self, node: Node) -> bool:
        """Return whether a node is connected or the platform still runs it."""
        return node.connected or bool(node.handle and not node.status.final and not node.gone)

    def close(self) -> None:
        """End every agent's streams before the master exits."""
        if self._progress_timer is not None:
            self._progress_timer.cancel()
        for queue in self._queues.values():
            queue.put_nowait(None)
        for dealing in self._dealing:
            dealing.cancel()
        self._wake_watchers()

    def on_node_exit(
        self, node_id: int, reason: str, /, *, exit_code: int = 0, refused: bool = False
    ) -> None:
        """Process the platform's report of a node's end."""
        self._submit_with_retry(inputs.NodeExited(node_id, reason, exit_code, refused))

    def on_node_wait(self, node_id: int, reason: str) -> None:
        """Process the platform's report of what keeps a node from starting; empty: nothing any more."""
        self._submit_with_retry(NodeWaits(node_id, reason))

    def _submit_with_retry(self, event: inputs.Input) -> None:
        """Submit an input that no peer will resend; retry while the journal is unwritable."""
        if isinstance(event, inputs.NodeDisconnected) and event.node_id in self._last_seen:
            return  # the node has come back meanwhile
        try:
            self._flush_progress()
            self.submit(event)
        except FencedError:
            return
        except InfrastructureError as error:
            logger.error("%s Trying again in %g s.", error, JOURNAL_RETRY)  # noqa: TRY400
            asyncio.get_running_loop().call_later(JOURNAL_RETRY, self._submit_with_retry, event)

    def submit(self, event: inputs.Input) -> None:
        """Journal an input, handle it, and carry out the machine's commands."""
        now = self.clock()
        self._journal_or_keep(event, now)
        if isinstance(event, inputs.Submitted | inputs.MasterStarted):
            self._begun.set()
        commands = self.machine.handle(event, now)
        self.ledger.handle(event, now, self.machine)
        self.shards.note(event, now)
        for command in commands:
            self._carry_out(command, now)
        self._set_timer()
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        """Wake all tasks that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _submit_finding(self, event: inputs.Input) -> None:
        """Submit a finding of the hang watch or the auto-scaler."""
        self._flush_progress()
        self._submit_with_retry(event)

    # ---- journal and fencing

    def _journal_or_keep(self, event: inputs.Input, now: float) -> None:
        """Journal an input; while the disk is full, keep it in memory so that the job can still end."""
        try:
            self._append([event], now)
        except FencedError:
            raise
        except InfrastructureError as error:
            self._check_fence()  # this needs no disk space
            if not self._backlog:
                logger.warning("%s The job goes on; its state is kept in memory.", error)
            self._backlog.append((now, event))

    def _append(self, entries: Sequence[Entry], now: float) -> None:
        with self._leave_if_fenced():
            try:
                while self._backlog:
                    at, older = self._backlog[0]
                    self._journal.append_all([older], at)
                    self._backlog.popleft()
                self._journal.append_all(entries, now)
            except InfrastructureError as error:
                self._unwritten = str(error)
                raise
            self._unwritten = ""

    def _check_fence(self) -> None:
        with self._leave_if_fenced():
            self._journal.check()

    def _meet(self, hello: messages.Hello) -> None:
        """Handle an agent that has met another master: exceed that master's epoch, or leave if it took over.

        A lost store counts again from 1. So shortly after its start, this master takes a higher epoch if it
        is still the store's latest; later on, another master must have taken over. An agent that this master's
        journal does not know has its epoch from another master, even if both epochs are the same.
        """
        epoch = hello.epoch
        if epoch < self._journal.epoch + (hello.uid in self.machine.fleet.by_uid) or not epoch:
            return
        with self._leave_if_fenced():
            if self.clock() - self._started > self.machine.job.limits.recovery_grace:
                raise fenced(self._journal.epoch, epoch)
            self._journal.raise_epoch(epoch)

    @contextlib.contextmanager
    def _leave_if_fenced(self) -> Iterator[None]:
        try:
            if self.fenced.is_set():
                raise fenced(self._journal.epoch, self._journal.epoch + 1)
            yield
        except FencedError as error:
            if not self.fenced.is_set():
                logger.error("%s It leaves.", error)  # noqa: TRY400
            self.fenced.set()
            raise

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.machine.deadline()
        if deadline is not None:
            loop = asyncio.get_running_loop()
            delay = max(0.0, deadline - self.clock())
            self._timer = loop.call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        deadline = self.machine.deadline()
        if deadline is not None and deadline <= self.clock():
            self._submit_with_retry(inputs.DeadlinePassed())
        else:
            self._set_timer()  # the loop's clock may be a little early

    # ---- commands

    def _carry_out(self, command: inputs.Command, now: float) -> None:
        match command:
            case inputs.Emit(body):
                logger.info("%s", self._history.add(body, now).sentence())
            case LaunchNode():
                self._launch(command)
            case inputs.KillNode(node_id):
                self._kill([self.machine.nodes[node_id]])
            case inputs.Greet():
                self._welcome(command)
            case inputs.Say(node_id, message):
                self._say(node_id, message)
            case inputs.EndJob():
                self.ended.set()

    def _launch(self, command: LaunchNode) -> None:
        loop = asyncio.get_running_loop()
        if self._platform is None:
            return
        try:
            handle = self._platform.launch(command)
        except InfrastructureError as error:
            loop.call_soon(self.on_node_exit, command.node_id, str(error))
        else:
            loop.call_soon(self._submit_with_retry, inputs.NodePlaced(command.node_id, handle))

    def _welcome(self, command: inputs.Greet) -> None:
        queue = self._greeted[command.uid]
        welcome = msgspec.structs.replace(command.message, epoch=self._journal.epoch)
        older = self._queues.get(welcome.node_id)
        if older is not None and older is not queue:
            older.put_nowait(None)
        self._queues[welcome.node_id] = queue
        queue.put_nowait(welcome)

    def _say(self, node_id: int, message: messages.MasterMessage) -> None:
        if isinstance(message, messages.AssignWorld):
            self._steps[node_id] = 0
        elif isinstance(message, messages.Dismiss):
            self._dismissed.add(node_id)
        elif isinstance(message, messages.StandBy):
            message = messages.StandBy(self._modules)
        queue = self._queues.get(node_id)
        if queue is not None:
            queue.put_nowait(message)

    # ---- methods on the wire

    async def attend(
        self, incoming: AsyncIterator[messages.AgentMessage]
    ) -> AsyncIterator[messages.MasterMessage]:
        """Serve an agent's stream: its reports come in, its orders go out."""
        hello = await anext(aiter(incoming), None)
        if not isinstance(hello, messages.Hello):
            raise ProtocolError("An agent's stream must begin with a Hello; this one does not.")
        await self._begun.wait()  # the platform may take some time to list its nodes
        self._meet(hello)
        queue: asyncio.Queue[messages.MasterMessage | None] = asyncio.Queue()
        self._greeted[hello.uid] = queue
        self.submit(hello)
        node_id = self.machine.fleet.by_uid[hello.uid]
        self._queues[node_id] = queue
        self._last_seen[node_id] = self.clock()
        if hello.held is not None:
            self._steps.setdefault(node_id, hello.held.steps)
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

    async def _listen(self, node_id: int, incoming: AsyncIterator[messages.AgentMessage]) -> None:
        async for message in incoming:
            if node_id in self._last_seen:
                self._last_seen[node_id] = self.clock()
            self._take(node_id, message)

    def _take(self, node_id: int, message: messages.AgentMessage) -> None:
        match message:
            case messages.Heartbeat():
                self._take_heartbeat(node_id, message)
            case messages.Join():
                self.submit(inputs.Reported(node_id, message))
            case CheckReport():
                self.submit(inputs.Reported(node_id, message.bounded()))
            case messages.Failed(failure):
                failed = self.machine.recovery.admitted(failure)
                if failed is not None:
                    self._flush_progress()
                    self.submit(failed)
            case messages.Succeeded():
                self._flush_progress()
                self.submit(inputs.Reported(node_id, message))
            case messages.Evidence() | messages.MemoryStored():
                self._take_answer(node_id, message)
            case messages.ModulesListed(modules) if modules != self._modules:
                self._modules = modules
                for spare in (*self.machine.spares.offers, *self.machine.spares.standing):
                    self._say(spare, messages.StandBy())

    def _take_answer(
        self, node_id: int, message: messages.Evidence | messages.MemoryStored
    ) -> None:
        if isinstance(message, messages.Evidence):
            self.hangs.answered(node_id, message)
        else:
            self.saves.answered(node_id, message)

    def _take_heartbeat(self, node_id: int, message: messages.Heartbeat) -> None:
        """Record a node's steps; journal the first ones of a round at once, the others now and then."""
        if self.machine.instances.owns(node_id):
            self.scaler.take_usage(node_id, message)
            return
        if message.round != self.machine.rendezvous.round:
            return
        self._steps[node_id] = message.steps
        self.hangs.take_heartbeat(node_id, message, self.clock())
        self.scaler.take_heartbeat(node_id, message, self.clock())
        if node_id in self.machine.rendezvous.servers:
            return  # its optimizer's steps are not training steps
        self._activities.note(node_id, message, self.clock())
        new = message.steps > self.machine.progress.steps
        first = new and (self.machine.state.awaits_step or self.machine.progress.steps == 0)
        if first or self._shows_first_step(message):
            self._journal_progress()
        elif (new or message.workers) and self._progress_timer is None:
            wait = self._progress_journalled + PROGRESS_JOURNAL_INTERVAL - self.clock()
            loop = asyncio.get_running_loop()
            self._progress_timer = loop.call_later(max(0.0, wait), self._on_progress_timer)

    def _shows_first_step(self, message: messages.Heartbeat) -> bool:
        """Return whether a worker reports the running world's first step and the journal lacks it."""
        machine = self.machine
        lacks = machine.progress.first_step < 0 and not machine.rendezvous.collecting
        found = lacks and any(worker.first_step >= 0 for worker in message.workers)
        return found and machine.outcome is None and self._activities.first_step >= 0

    def _on_progress_timer(self) -> None:
        self._progress_timer = None
        try:
            self._flush_progress()
        except InfrastructureError as error:
            logger.error("%s The next heartbeat tries again.", error)  # noqa: TRY400

    def _flush_progress(self) -> None:
        """Journal the latest steps and activities: the next input is judged by them."""
        machine, latest = self.machine, self._activities
        if latest.round != machine.rendezvous.round or machine.outcome is not None:
            return
        waited = self.clock() - self._progress_journalled
        if latest.steps > machine.progress.steps or (latest.known and waited >= FLUSH_INTERVAL):
            self._journal_progress()

    def _journal_progress(self) -> None:
        self._progress_journalled = self.clock()
        members = self.machine.rounds.training()
        self.submit(self._activities.progress(members, self._progress_journalled))

    def _hang_up(
        self, uid: str, node_id: int, queue: asyncio.Queue[messages.MasterMessage | None]
    ) -> None:
        if self._greeted.get(uid) is queue:
            del self._greeted[uid]
        if self._queues.get(node_id) is queue:
            del self._queues[node_id]
            self._last_seen.pop(node_id, None)
            self._submit_with_retry(inputs.NodeDisconnected(node_id))

    async def status(self, _request: messages.StatusRequest) -> messages.Status:
        """Return the status of the job."""
        status = status_of(
            self.machine, self.clock(), self._steps, self.hangs.doing(), self.scaler.usage
        )
        unwritten = (
            self._unwritten and f"{self._unwritten} The workers train on; it is tried again."
        )
        waiting_for = unwritten or status.waiting_for or self.hangs.waiting_for(self.clock())
        left = self._activities.seconds_left()
        return msgspec.structs.replace(
            status,
            slow=self.hangs.slow(),
            waiting_for=waiting_for,
            rate=self._activities.rate(self.clock()),
            seconds_left=-1.0 if left is None or status.outcome is not None else left,
        )

    def progress(self) -> Progress:
        """Return how far the training is."""
        now = self.clock()
        status = status_of(self.machine, now, self._steps)
        goodput = self.ledger.goodput(now).goodput_ratio
        left = self._activities.seconds_left()
        return Progress(status.total_steps, status.restarts, goodput, left)

    def size(self, role: str) -> RoleSize:
        """Return how many nodes of a role the job wants, and whether it has them."""
        return scale.size(self.machine, self.clock(), role)

    async def watch(self, request: messages.WatchRequest) -> AsyncIterator[messages.Notice]:
        """Yield the events after ``request.since`` and, for a follower, those to come."""
        since = max(0, request.since)
        while True:
            fresh = self._history.batch(since, NOTICE_BYTES)
            since += len(fresh)
            yield messages.Notice(fresh, await self.status(messages.StatusRequest()))
            if since < len(self._history.events):
                continue
            if not request.follow:
                return
            await asyncio.sleep(WATCH_INTERVAL)
            if since >= len(self._history.events):
                await waited(self._changed, WATCH_REFRESH)

    async def stop(self, request: messages.StopRequest) -> messages.Done:
        """End the job."""
        self._flush_progress()
        self.submit(request)
        return messages.Done()

    async def scale(self, request: messages.ScaleRequest) -> messages.ScaleReply:
        """Change the number of nodes, as a user asks for."""
        await self._begun.wait()
        command = scaled_by(self._platform)
        if command:
            return messages.ScaleReply(f"The job's nodes are scaled by: {command}.", refused=True)
        return self.ask_scale(request.nodes, request.reason, "user", request.role)

    def ask_scale(
        self,
        nodes: int,
        reason: str,
        source: Literal["user", "plan"],
        role: str = WORKER,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> messages.ScaleReply:
        """Change the number of nodes of a role if that is possible; return what follows."""
        request = inputs.ScaleRequested(nodes, reason[:REASON_LIMIT], source, role, factors)
        refused = scale.refusal(self.machine, request)
        if refused:
            return messages.ScaleReply(refused, refused=True)
        wanted = self.machine.scaling.roles[role]
        before = wanted.nodes
        if scale.changes(self.machine, request):
            self._flush_progress()
            self.submit(request)
        alone = role == SERVER and self.machine.job.server_failover == "instance"
        role_name = self.machine.scaling.role_name(role)
        return scale.reply(before, wanted.nodes, role_name, alone=alone)

    def placed(self) -> dict[str, PlacedNode]:
        """Return the nodes that the platform was requested to make, by handle."""
        return migrate.placed(self.machine)

    def ask_migrate(self, handle: str, cpu_factor: float, memory_factor: float, reason: str) -> str:
        """Replace a node that trains; return why that is not possible now, else an empty text."""
        factors = (cpu_factor, memory_factor)
        return self._migrate(
            migrate.requested(self.machine, handle, factors, reason[:REASON_LIMIT])
        )

    def _migrate(self, request: inputs.MigrationRequested) -> str:
        refused = self.machine.resizer.migration_refusal(request)
        if not refused:
            self._flush_progress()
            self.submit(request)
        return refused

    async def drain(self, request: messages.DrainRequest) -> messages.ScaleReply:
        """Put another node in the place of one, as a user asks for."""
        await self._begun.wait()
        node = self.machine.nodes.get(request.node)
        factors = (node.cpu_factor, node.memory_factor) if node is not None else (1.0, 1.0)
        reason = request.reason[:REASON_LIMIT]
        refused = self._migrate(inputs.MigrationRequested(request.node, *factors, reason))
        sentence = f"Node {request.node} trains on until another one takes its place."
        return messages.ScaleReply(refused or sentence, refused=bool(refused))

    async def use(self, request: WorkerRequest) -> WorkerReply:
        """Answer a worker's request, once it is in the journal if it changes anything."""
        reply = self._use(request)
        return await reply if isinstance(reply, asyncio.Future) else reply

    def _use(self, request: WorkerRequest) -> Begun:
        if self.machine.outcome is not None:
            return Unanswered(refused="The job has ended.")
        if isinstance(request, Meet):
            return self.meeting.handle(request, self._journal.epoch, self.machine.state.membership)
        if isinstance(request, MembershipChange | LookMembers):
            return self._members(request)
        if isinstance(request, LookShards | LookPlacement | LookCluster):
            return self._answer(request, self.clock())
        if isinstance(request, ChooseStrategy):
            if self.strategies.has_chosen(request):
                return self._answer(request, self.clock())
            left = self._activities.seconds_left()
            request = msgspec.structs.replace(request, seconds_left=left)
        return self._commits.begin(request, lambda now: self._answer(request, now))

    def _members(self, request: MembershipChange | LookMembers) -> WorkerReply:
        membership = self.machine.state.membership
        if not isinstance(request, LookMembers):
            try:
                self._flush_progress()
                self.submit(inputs.MemberReported(request))
            except InfrastructureError as error:
                return Unanswered(away=f"The master failed: {error}")
        steps = self.machine.progress.steps
        if self._activities.round == membership.round:
            steps = max(steps, self._activities.steps)
        now = membership.members(steps)
        return MembersNow(now if request.round == membership.round else None)

    def _answer(self, request: WorkerRequest, now: float) -> WorkerReply:
        if isinstance(request, PlacementRequest):
            return self.placement.handle(request)
        if isinstance(request, ClusterRequest):
            return self._clustered(request)
        if isinstance(request, StrategyRequest):
            return self._strategy(request, now)
        assert isinstance(request, ShardRequest)
        return self.shards.handle(request, now)

    def _strategy(self, request: StrategyRequest, now: float) -> WorkerReply:
        try:
            reply, event = self.strategies.handle(request)
        except ProtocolError as error:
            return Unanswered(refused=str(error))
        if event is not None:
            self._history.add(event, now)
        return reply

    def _clustered(self, request: ClusterRequest) -> WorkerReply:
        try:
            reply = self.cluster.handle(request)
        except ProtocolError as error:
            return Unanswered(refused=str(error))
        wanted = {role: of_role.nodes for role, of_role in self.machine.scaling.roles.items()}
        wanted[CHIEF] = int(self.machine.job.chief)
        return msgspec.structs.replace(reply, wanted=wanted)

    async def deal(
        self, frames: AsyncIterator[messages.RequestFrame]
    ) -> AsyncIterator[messages.RequestFrame]:
        """Serve the requests of an agent's workers, one frame at a time."""
        task = asyncio.current_task()
        assert task is not None
        self._dealing.add(task)
        try:
            async for frame in frames:
                for replies in await answers(frame, self._use):
                    yield replies
        finally:
            self._dealing.discard(task)

    async def use_store(self, request: messages.StoreRequest) -> messages.StoreReply:
        """Apply a request to the key-value store, waiting no longer than it asks for."""
        return await self.store.answer(request, self._commits, self.clock)
