"""The master's shell: receives messages, journals and handles them, and carries out the commands."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from dlrover._util import tasks
from dlrover._util.clocks import Clock
from dlrover.errors import ConfigurationError, FencedError, InfrastructureError
from dlrover.master.diagnosis_rules import built_in
from dlrover.master.hangwatch import HangWatch
from dlrover.master.journal.history import History
from dlrover.master.journal.journal import Journal
from dlrover.master.journal.writing import JournalWriter
from dlrover.master.machine import inputs
from dlrover.master.machine.goodput.ledger import Ledger
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.state import Node
from dlrover.master.platformside import PlatformSide
from dlrover.master.requests import Requests, Services
from dlrover.master.saves import UserSaves
from dlrover.master.scaling.autoscale import AutoScaler
from dlrover.master.streams import AgentStreams, Handlers, Heartbeats
from dlrover.master.views.status import status_of
from dlrover.master.views.watchers import Watchers
from dlrover.platform.base import Platform
from dlrover.rpc import messages
from dlrover.rpc.server import Server
from dlrover.spec.check import CheckReport
from dlrover.spec.job import JobSpec
from dlrover.spec.node import LaunchNode

logger = logging.getLogger(__name__)

STALLED = 1.0
"""Lateness of a deadline in seconds which shows that this process did not run, or waited for its disk."""
JOURNAL_RETRY = 1.0
"""Seconds between attempts to journal an input that no peer will resend: the disk may be full."""


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
        self.machine = machine = JobMachine()
        self.ledger = Ledger()
        self.services = Services(machine, history)
        self.ended = asyncio.Event()
        self._history = history
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """When the timer is due."""
        self._resumes = 0.0
        """After this process has stalled, when deadlines count again."""
        self.watchers = Watchers(history, self._status)
        self._noting = False
        self._telling = False
        self.replayed = 0
        self.last_entry = self._replay(journal)
        self.clock = clock(self.last_entry)
        self.journal = JournalWriter(journal)
        self.heartbeats = Heartbeats(machine, self.submit, self.clock)
        handlers = Handlers(self.submit, self.take, self.report)
        self.streams = AgentStreams(machine, self.journal, self.heartbeats, handlers, self.clock)
        self.hangs = HangWatch(machine, self.streams.say, self.report)
        self.saves = UserSaves(machine, self.streams.say, self.report)
        self.scaler = AutoScaler(machine, self.report, self.hangs.held_up)
        self.platform = PlatformSide(
            machine, self.ledger, self.heartbeats, self.submit_with_steps, self.report, self.clock
        )
        self.requests = Requests(
            self.services,
            machine,
            self.journal,
            self.heartbeats,
            self.submit_with_steps,
            self.clock,
        )

    def _replay(self, journal: Journal) -> float:
        """Replay the journal into the machines; return the time of its last entry, 0.0 if it is empty."""
        last = 0.0
        for last, entry in journal.entries():
            self.replayed += 1
            if isinstance(entry, inputs.Submitted | inputs.MasterStarted):
                self._history.follow(entry.earlier_events)
            if isinstance(entry, inputs.Input):
                for command in self.machine.handle(entry, last):
                    if isinstance(command, inputs.Emit):
                        self._history.add(command.body, last)
                self.ledger.handle(entry, last, self.machine)
                self.services.shards.note(entry, last)
            else:
                self.services.answer(entry, last)
        return last

    # ---- life

    def begin(self, job: JobSpec, job_dir: str, platform: Platform | None) -> None:
        """Start with a new job, with the job of the journal, or with one that its nodes already run.

        An empty journal beside nodes that run, or beside events, has been lost.

        Raises:
            ConfigurationError: the journal is another job's.
        """
        theirs = self.machine.job.name
        if self.replayed and theirs not in ("", job.name):
            raise ConfigurationError(
                f"The journal is of the job {theirs}, not of {job.name}; each job takes a journal of its own."
            )
        self.platform.use(platform)
        earlier = self._history.recorded
        self._history.follow(earlier)
        if self.replayed:
            self.submit(inputs.MasterStarted(self.replayed, self.last_entry, earlier))
            if self.machine.outcome is not None:
                self.ended.set()
            return
        found = [] if platform is None else platform.find()
        self.submit(inputs.Submitted(job, job_dir, tuple(found), earlier, built_in()))
        for node in found:
            if platform is not None:
                platform.adopt(node.node_id, node.handle)

    def register(self, server: Server) -> None:
        """Register this master's methods with a server."""
        server.stream("Attend", messages.AgentMessage, self.streams.attend)
        server.unary("Status", messages.StatusRequest, self.status)
        server.server_stream("Watch", messages.WatchRequest, self.watchers.watch)
        server.unary("Stop", messages.StopRequest, self.stop)
        server.unary("Scale", messages.ScaleRequest, self.scale)
        server.unary("Drain", messages.DrainRequest, self.drain)
        server.unary("Save", messages.SaveRequest, self.saves.save)
        server.unary("Ranks", messages.RanksRequest, self.hangs.ranks)
        server.unary("Stacks", messages.StacksRequest, self.hangs.stacks)
        server.stream("Deal", messages.RequestFrame, self.requests.deal)

    async def run(self) -> bool:
        """Watch the job until it has ended and its nodes have left; False if another master takes over."""
        watches = [
            asyncio.create_task(self.streams.watch_silence()),
            asyncio.create_task(self.hangs.run(self.clock)),
            asyncio.create_task(self.scaler.run(self.clock)),
        ]
        fenced = asyncio.create_task(self.journal.fenced.wait())
        ending = asyncio.create_task(self._nodes_left())
        try:
            await asyncio.wait([fenced, ending], return_when=asyncio.FIRST_COMPLETED)
            if not fenced.done():
                ending.result()
            return not fenced.done()
        finally:
            for task in (*watches, fenced, ending):
                task.cancel()

    async def _nodes_left(self) -> None:
        """Wait until the job has ended and all nodes have left; in the end, kill those that have not."""
        await self.ended.wait()
        job, limits = self.machine.job, self.machine.job.limits
        ended = self.clock()
        grace = limits.recovery_grace if self.replayed else limits.reconnect_grace
        await self._wait_while(self._uninformed, ended + grace)
        self.platform.kill(filter(self._uninformed, self.machine.nodes.values()))
        stopped = ended + job.shutdown_timeout
        await self._wait_while(self._remains, stopped + limits.end_grace)
        if self.machine.state.dismissal.store:
            await self._wait_while(lambda node: node.connected, stopped + limits.release_grace)
        self.platform.kill(filter(self._remains, self.machine.nodes.values()))

    async def _wait_while(self, holds: Callable[[Node], bool], until: float) -> None:
        """Wait while ``holds`` for any node; look at one at a time, as thousands leave one by one."""
        while node := next(filter(holds, self.machine.nodes.values()), None):
            while holds(node):
                if self.clock() >= until:
                    return
                await tasks.signalled(self.watchers.changed, until - self.clock())

    def _uninformed(self, node: Node) -> bool:
        """Return whether a node is disconnected, may come back and does not know of the job's end."""
        away = node.uid and not (node.connected or node.gone or node.status.final)
        return bool(away) and node.id not in self.streams.dismissed

    def _remains(self, node: Node) -> bool:
        """Return whether a node is connected or the platform still runs it."""
        return node.connected or bool(node.handle and not node.status.final and not node.gone)

    def close(self) -> None:
        """End every agent's streams before the master exits."""
        self.heartbeats.close()
        self.streams.close()
        self.requests.close()
        self.watchers.wake()

    # ---- inputs

    def report(self, event: inputs.Input) -> None:
        """Submit an input that no peer will resend; retry while the journal is unwritable."""
        if isinstance(event, inputs.NodeDisconnected) and self.streams.has(event.node_id):
            return  # the node has come back meanwhile
        try:
            self.submit_with_steps(event)
        except FencedError:
            return
        except InfrastructureError as error:
            logger.error("%s Trying again in %g s.", error, JOURNAL_RETRY)  # noqa: TRY400
            asyncio.get_running_loop().call_later(JOURNAL_RETRY, self.report, event)

    def submit_with_steps(self, event: inputs.Input) -> None:
        """Submit an input after the latest steps, by which it is judged."""
        self.heartbeats.flush()
        self.submit(event)

    def submit(self, event: inputs.Input) -> None:
        """Journal an input, handle it, and carry out the machine's commands."""
        now = self.clock()
        self.journal.append_or_keep(event, now)
        if isinstance(event, inputs.Submitted | inputs.MasterStarted):
            self.streams.begun.set()
        commands = self.machine.handle(event, now)
        self.ledger.handle(event, now, self.machine)
        self.services.shards.note(event, now)
        for command in commands:
            self._carry_out(command, now)
        if not self._noting:  # thousands of inputs may come at once
            self._noting = True
            asyncio.get_running_loop().call_soon(self._note_changes)

    def _note_changes(self) -> None:
        """Do what is due once for all inputs that were handled together."""
        self._noting = False
        if self._telling:
            self._telling = False
            self._tell_members()
        self._set_timer()
        self.watchers.wake()

    def _tell_members(self) -> None:
        """Send the nodes of the world who trains: thousands of ranks may be lost at once."""
        membership = self.machine.state.membership
        members = membership.members(self.machine.progress.steps)
        for node_id in membership.ranks:
            self.streams.say(node_id, members)

    def _set_timer(self) -> None:
        now, deadline = self.clock(), self.machine.deadline()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if self._has_stalled(now, deadline):
                # What nodes have sent meanwhile is still unread, and they need time to connect again.
                self._resumes = now + self.machine.job.limits.reconnect_grace
        if deadline is not None:
            self._due = max(now, deadline, self._resumes)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._due - now, self._on_timer)

    def _on_timer(self) -> None:
        deadline, now = self.machine.deadline(), self.clock()
        # The loop's clock may be a little early.
        early = deadline is None or max(deadline, self._resumes) > now
        if early or self._has_stalled(now, deadline):
            self._set_timer()
        else:
            self.report(inputs.DeadlinePassed())

    def _has_stalled(self, now: float, deadline: float | None) -> bool:
        """Return whether the timer is late; a deadline waits for this once, as a busy master may always be late."""
        return deadline is not None and deadline >= self._resumes and now - self._due > STALLED

    def take(self, node_id: int, message: messages.AgentMessage) -> None:
        """Process a message of an agent."""
        match message:
            case messages.Heartbeat():
                self._take_heartbeat(node_id, message)
            case messages.Join() | messages.Leaving():
                self.submit(inputs.Reported(node_id, message))
            case CheckReport():
                self.submit(inputs.Reported(node_id, message.bounded()))
            case messages.Failed(failure):
                failed = self.machine.recovery.admitted(failure)
                if failed is not None:
                    self.submit_with_steps(failed)
            case messages.Succeeded():
                self.submit_with_steps(inputs.Reported(node_id, message))
            case messages.Evidence():
                self.hangs.answered(node_id, message)
            case messages.MemoryStored():
                self.saves.answered(node_id, message)
            case messages.ModulesListed(modules):
                self.streams.prepare_spares(modules)

    def _take_heartbeat(self, node_id: int, message: messages.Heartbeat) -> None:
        if self.machine.instances.owns(node_id):
            self.scaler.take_usage(node_id, message)
        elif message.round == self.machine.rendezvous.round:
            self.heartbeats.steps[node_id] = message.steps
            self.hangs.take_heartbeat(node_id, message, self.clock())
            self.scaler.take_heartbeat(node_id, message, self.clock())
            self.heartbeats.take(node_id, message)

    def _carry_out(self, command: inputs.Command, now: float) -> None:
        match command:
            case inputs.Emit(body):
                logger.info("%s", self._history.add(body, now).sentence())
            case LaunchNode():
                self.platform.launch(command)
            case inputs.KillNode(node_id):
                self.platform.kill([self.machine.nodes[node_id]])
            case inputs.Greet():
                self.streams.welcome(command)
                self.saves.greeted(command.message.node_id)
            case inputs.Say(node_id, message):
                self.streams.say(node_id, message)
            case inputs.TellMembers():
                self._telling = True
            case inputs.EndJob():
                self.ended.set()

    # ---- users

    async def status(self, _request: messages.StatusRequest) -> messages.Status:
        """Return the status of the job."""
        return self._status()

    def _status(self) -> messages.Status:
        now, activities = self.clock(), self.heartbeats.activities
        steps, doing = self.heartbeats.steps, self.hangs.doing()
        status = status_of(self.machine, now, steps, doing, self.scaler.usage)
        error = self.journal.unwritten
        unwritten = error and f"{error} The workers train on; it is tried again."
        left = activities.seconds_left()
        return msgspec.structs.replace(
            status,
            slow=self.hangs.slow(),
            waiting_for=unwritten or status.waiting_for or self.hangs.waiting_for(now),
            rate=activities.rate(now),
            seconds_left=-1.0 if left is None or status.outcome is not None else left,
        )

    async def stop(self, request: messages.StopRequest) -> messages.Done:
        """End the job."""
        self.submit_with_steps(request)
        return messages.Done()

    async def scale(self, request: messages.ScaleRequest) -> messages.ScaleReply:
        """Change the number of nodes."""
        await self.streams.begun.wait()
        return self.platform.scale(request)

    async def drain(self, request: messages.DrainRequest) -> messages.ScaleReply:
        """Put another node in the place of one."""
        await self.streams.begun.wait()
        return self.platform.drain(request)
