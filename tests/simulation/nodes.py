"""Simulated nodes on a virtual clock: real agents, with simulated processes, workers and streams.

`tests.simulation.cluster` combines them into a whole job.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dlrover.agent.machine.node import AgentMachine, Stage
from dlrover.agent.shell import Agent, NodeControls
from dlrover.errors import DLRoverError
from dlrover.master.service import Master
from dlrover.rpc import messages
from dlrover.spec.activity import Activity
from dlrover.spec.check import CheckOrder, CheckReport
from dlrover.spec.failure import Failure, FailureKind
from dlrover.spec.job import Entry, JobSpec, LaunchSpec
from dlrover.spec.jobdir import AgentConfig
from dlrover.spec.measurements import NodeUsage, WorkerActivity
from dlrover.spec.node import SERVER, Size
from dlrover.spec.requests.membership import Members, MembershipRequest
from dlrover.spec.world import World
from tests.simulation import ailments
from tests.simulation.ailments import Ailment
from tests.simulation.clock import Range, Time
from tests.simulation.replicas import Replicas

REPORT_INTERVAL = 1.0
"""Minimum seconds between two steps after which agents look at their workers' progress."""


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of the simulated actions."""

    message: Range = (0.0005, 0.02)
    """Transit from one end of a stream to the other; messages of one stream keep their order."""
    notice: Range = (0.001, 0.3)
    """Until one end of a broken stream, or the platform, notices it."""
    launch: Range = (0.2, 3.0)
    """From the order of a node to its agent's first attempt to connect."""
    check: Range = (1.0, 4.0)
    """One round of the node check; a group whose network fails takes a third of its time limit."""
    start: Range = (0.05, 2.0)
    """From the order to start workers to their readiness for the first step."""
    stop: Range = (0.01, 1.0)
    """From the order to stop workers to their end."""
    store: Range = (0.1, 3.0)
    """From the end of a node's workers until what they had in memory is stored."""
    step: Range = (0.5, 0.6)
    """One optimizer step of the whole world."""
    heal: Range = (0.05, 0.5)
    """Until a rank that joins has the others' state."""
    revive: Range | None = None
    """From the death of a node that joined on its own to its next process; None: it stays away."""


class Run:
    """Workers of one round. They step together, once those of every node are up."""

    def __init__(self, program: Program, size: Size, store: str = "", round_: int = 0) -> None:
        self.program, self.round, self.store = program, round_, store
        """Address of its store; a master that lost its journal may reuse a round's number."""
        self.nodes: list[SimulatedNode] = []
        """Nodes whose workers are up."""
        self.steps = 0
        self.first_step = program.steps_done
        self.first_step_at: float | None = None
        """Time at which the first step was completed."""
        self.last_step_at = 0.0
        self.seen_at = 0.0
        """Time of the last step that agents have looked at."""
        self.broken = False
        """True if a worker is gone: the others wait for it until they are stopped."""
        self.compute = None if program.law is None else program.law(size.nodes)[1]
        """Seconds of a step in which a worker does not wait for others."""
        self.over = False
        """True once the program has ended."""
        self.replicas = Replicas(self) if program.job.survive else None
        """Its ranks, where losses are survived: they step without each other."""
        self._size = size
        self._awaited = size.nodes
        self._begun = False

    def add(self, node: SimulatedNode) -> None:
        """Add a node whose workers are up."""
        self.nodes.append(node)
        if self.replicas is not None:
            for local_rank in sorted(node.machine.running):
                self.replicas.start(node, local_rank, node.machine.attempts[local_rank])
        elif self.over:
            node.workers.succeed(self)
        else:
            self._begin()

    def _begin(self) -> None:
        if not self._begun and 0 < self._awaited <= len(self.nodes):  # servers await nobody
            self._begun = True
            self._continue()

    def lose(self, node: SimulatedNode) -> None:
        """Lose all workers of a node."""
        self.nodes = [other for other in self.nodes if other is not node]
        if self.replicas is not None:
            self.replicas.kill(node)
        else:
            self.broken = True

    def left(self, position: int) -> bool:
        """Return whether there are steps to do after ``position`` ones of this run."""
        return self.first_step + position < self.program.steps

    def made(self, position: int) -> None:
        """Count a step that a replica has made."""
        if position > self.steps:
            assert position == self.steps + 1, "a step is missing"
            self._count()
            self.over = not self.left(position)

    def step_time(self) -> float | Range:
        """Return the seconds of one step."""
        return self.program.step_time(self._size)

    def _continue(self) -> None:
        self.program.time.after(self.step_time(), self._step)

    def _step(self) -> None:
        if self.broken:
            return
        self._count()
        if self.program.steps_done < self.program.steps:
            self._continue()
            return
        self.over = True
        for node in self.nodes:
            if not node.serves:
                node.workers.succeed(self)

    def _count(self) -> None:
        self.steps += 1
        self.last_step_at = self.program.time.now
        if self.first_step_at is None:
            self.first_step_at = self.last_step_at
        self.program.steps_done += 1
        if self.steps == 1 or self.last_step_at - self.seen_at >= REPORT_INTERVAL:
            self.seen_at = self.last_step_at
            for node in self.nodes if self.steps == 1 else self._reporters():
                node.workers.progressed()

    def _reporters(self) -> list[SimulatedNode]:
        """Return the nodes whose agents report steps before their next heartbeat."""
        return [min(self.nodes, key=lambda n: n.first_rank)]


@dataclass
class Program:
    """Program of the job's workers. After a fault they resume from the last checkpoint."""

    job: JobSpec
    time: Time
    delays: Delays
    #: optimizer steps until the workers end with exit code 0
    steps: int
    #: ranks that have a replica together, where losses are survived
    row: int = 1
    #: steps between two checkpoints; with 1, no step is repeated
    checkpoint_every: int = 1
    #: seconds of a step by number of nodes, in all and for computation; None: ``delays.step``
    law: Callable[[int], tuple[float, float]] | None = None
    #: seconds of a step by numbers of workers and servers
    served_law: Callable[[Size], float] | None = None
    #: resource usage of a node
    usage: Callable[[SimulatedNode], NodeUsage] | None = None
    #: largest relative deviation of a step from its law
    noise: float = 0.0
    steps_done: int = 0
    runs: dict[int, Run] = field(default_factory=dict)
    #: asks the master what a worker would ask; None while it is away
    ask: Callable[[MembershipRequest], Any] = lambda _request: None
    #: makes the run of a world whose processes do something else than steps
    make_run: Callable[[World], Run] | None = None
    #: nodes by id; a node check looks up the members of its group here
    nodes: dict[int, SimulatedNode] = field(default_factory=dict)

    def step_time(self, size: Size) -> float | Range:
        """Return the seconds of one step of a world."""
        if self.served_law is not None:
            step = self.served_law(size)
        elif self.law is not None:
            step, _ = self.law(size.nodes)
        else:
            return self.delays.step
        return step * self.time.random.uniform(1 - self.noise, 1 + self.noise)

    def run_of(self, world: World) -> Run:
        """Return the run of a world's round."""
        if world.index >= 0:  # a server makes no steps
            return Run(self, Size(0)) if self.make_run is None else self.make_run(world)
        run = self.runs.get(world.round)
        if run is None or run.store != world.store_addr:
            self.steps_done -= self.steps_done % self.checkpoint_every
            size = Size(world.node_count - world.servers, world.servers)
            run = Run(self, size, world.store_addr, world.round)
            if self.make_run is not None:
                run = self.make_run(world)
            self.runs[world.round] = run
        return run


class Link:
    """One stream between an agent and a master; a cut loses the messages under way."""

    def __init__(self, time: Time, delays: Delays, master: Master) -> None:
        self.open = True
        self._time = time
        self._delays = delays
        self._up: asyncio.Queue[messages.AgentMessage | None] = asyncio.Queue()
        self._down: asyncio.Queue[messages.MasterMessage | None] = asyncio.Queue()
        self._arrivals = {self._up: 0.0, self._down: 0.0}
        self._serving = time.loop.create_task(self._serve(master))

    async def _serve(self, master: Master) -> None:
        """Be the master's server for this stream."""
        with contextlib.suppress(DLRoverError):
            async for message in master.streams.attend(_items(self._up)):
                self._send(self._down, message)
        self._send(self._down, None)

    def say(self, message: messages.AgentMessage) -> None:
        """Send a message from the agent."""
        self._send(self._up, message)

    def heard(self) -> AsyncIterator[messages.MasterMessage]:
        """Return the messages that arrive at the agent, until it notices the end of the stream."""
        return _items(self._down)

    def hang_up(self) -> None:
        """Close the agent's end."""
        self.open = False
        self._time.after(self._delays.message, self._serving.cancel)

    def cut(self) -> None:
        """Break the stream; each end notices it later."""
        if self.open:
            self.open = False
            self._time.after(self._delays.notice, self._serving.cancel)
            self._time.after(self._delays.notice, self._down.put_nowait, None)

    def lose_master(self) -> None:
        """Break the stream of a master that is dead: nothing arrives there any more."""
        self._serving.cancel()
        self.cut()

    def _send(self, queue: asyncio.Queue[Any], message: Any) -> None:
        """Let a message arrive after a random time, but not before earlier ones."""
        arrival = self._time.now + self._time.draw(self._delays.message)
        arrival = self._arrivals[queue] = max(self._arrivals[queue], arrival)
        self._time.loop.call_at(arrival, self._arrive, queue, message)

    def _arrive(self, queue: asyncio.Queue[Any], message: Any) -> None:
        # Messages sent before the stream broke may still reach the master.
        if self.open or (queue is self._up and self._time.random.random() < 0.5):
            queue.put_nowait(message)


async def _items(queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (item := await queue.get()) is not None:
        yield item


class SimulatedClient:
    """An agent's connection to its master."""

    address = "the master"

    def __init__(self, node: SimulatedNode, dial: Callable[[SimulatedNode], Link]) -> None:
        self._node = node
        self._dial = dial

    async def pause(self, seconds: float) -> None:
        """Wait before the next attempt; see `MasterClient.pause`."""
        await asyncio.sleep(seconds)

    async def attend(
        self, outgoing: AsyncIterator[messages.AgentMessage]
    ) -> AsyncGenerator[messages.MasterMessage, None]:
        """Hold the stream; see `MasterClient.attend`."""
        node = self._node
        await node.awake()
        link = node.link = self._dial(node)
        sending = asyncio.create_task(self._send(link, outgoing))
        try:
            async for message in link.heard():
                await node.awake()
                yield message
            await node.awake()
        finally:
            sending.cancel()
            link.hang_up()

    async def _send(self, link: Link, outgoing: AsyncIterator[messages.AgentMessage]) -> None:
        async for message in outgoing:
            if not (self._node.stopped and isinstance(message, messages.Heartbeat)):
                await self._node.awake()
                link.say(message)


class SimulatedWorkers:
    """The workers of a node, as its agent uses them; also its usage meter and its port."""

    busy = -1.0
    listed_modules = b""
    place = -1

    def __init__(self, node: SimulatedNode, nproc: int) -> None:
        self.run: Run | None = None
        self._node = node
        self._program = node.program
        self._nproc = nproc
        self._time = node.program.time
        self._since = 0.0
        self._usage_at = 0.0
        self._failures = itertools.count()
        self.flushes = 0
        """Orders to store what is in memory."""
        self.progressed: Callable[[], None] = lambda: None
        self.on_exit: Callable[[int, Failure | None], None] = lambda _local_rank, _failure: None

    @property
    def node_id(self) -> int:
        return self._node.machine.node_id

    @node_id.setter
    def node_id(self, value: int) -> None:
        self._program.nodes[value] = self._node

    def prepare(self) -> None:
        """Do nothing."""

    def discard_zygotes(self) -> None:
        """Do nothing."""

    def preload(self, modules: bytes) -> None:
        """Do nothing."""

    def take_place(self, node_rank: int) -> None:
        """Keep the wanted rank."""
        self.place = node_rank

    def start(self, world: World) -> None:
        self.run = self._program.run_of(world)
        self._since = self._time.now
        self._time.after(self._program.delays.start, self._started, self.run)

    def _started(self, run: Run) -> None:
        if run is self.run:
            run.add(self._node)

    def start_again(self, local_rank: int, attempt: int, *, fresh: bool) -> None:
        if self.run is not None and self.run.replicas is not None:  # else the node is gone
            start = self.run.replicas.start
            self._time.after(self._program.delays.start, start, self._node, local_rank, attempt)

    def tell(self, members: Members) -> None:
        if self.run is not None and self.run.replicas is not None:
            self.run.replicas.tell(self._node, members)

    async def watch(self, progressed: Callable[[], None]) -> None:
        self.progressed = progressed
        await asyncio.Event().wait()

    async def store_at_end(self, *, partial: bool) -> None:
        """Count the order."""
        self.flushes += 1

    async def stored_at_end(self, _patience: float) -> tuple[messages.StoredPlace, ...]:
        """Store what is in memory."""
        await asyncio.sleep(self._time.draw(self._program.delays.store))
        return ()

    async def stop(self, _number: int, _grace: float) -> None:
        if self.run is not None:
            self.end_all()
            await asyncio.sleep(self._time.draw(self._program.delays.stop))
            await self._node.awake()

    async def close(self, _saver_wait: float = 0.0) -> None:
        """Nothing is left to end."""

    def end(self, local_rank: int) -> bool:
        """Kill one worker, which is started again; return False if there is none."""
        run = self.run
        if run is None or run.replicas is None:
            return False
        run.replicas.kill(self._node, local_rank)
        ended = (self._node.when_awake, self._ended, run, local_rank, None)
        self._time.after(self._program.delays.message, *ended)
        return True

    def end_all(self) -> None:
        """End the workers, so that the others wait for them."""
        if self.run is not None:
            self.run.lose(self._node)
            self.run = None

    def steps(self) -> int:
        return self.run.steps if self.run is not None else 0

    def activities(self) -> tuple[WorkerActivity, ...]:
        return (self._activity(self.run),) * self._nproc if self.run is not None else ()

    def _activity(self, run: Run) -> WorkerActivity:
        """Return one worker's activity: starting until the first step, then training."""
        now, first = self._time.now, run.first_step_at
        doing = Activity.START if first is None else Activity.STEP
        start = (now if first is None else first) - self._since
        step = 0.0 if first is None else now - first
        since = start if first is None else now - run.last_step_at
        seconds = (start, step, 0.0, 0.0, 0.0, 0.0)
        compute = step if run.compute is None else run.compute * run.steps
        return WorkerActivity(run.steps, doing, since, seconds, compute, run.first_step)

    def pids(self) -> list[int]:
        return []

    async def evidence(self) -> tuple[()]:
        return ()

    async def devices_busy(self) -> float:
        return -1.0

    def look(self, _pids: list[int]) -> NodeUsage | None:
        usage, interval = self._program.usage, self._program.job.limits.usage_interval
        if usage is None or self._time.now < self._usage_at + interval:
            return None
        self._usage_at = self._time.now
        return usage(self._node)

    def reserve(self) -> int:
        return 29400

    def use(self) -> None:
        """Do nothing."""

    def fail(self, kind: FailureKind, local_rank: int | None = None, **details: Any) -> None:
        """End a worker in failure, if it runs; any one without a number."""
        run, machine = self.run, self._node.machine
        world = machine.world
        at_work = (Stage.RUNNING, Stage.FAILED) if self._program.job.survive else (Stage.RUNNING,)
        if world is None or run is None or machine.stage not in at_work or not machine.running:
            return
        if local_rank is None:
            local_rank = self._time.random.choice(sorted(machine.running))
        elif local_rank not in machine.running:
            return
        if run.replicas is not None:
            run.replicas.kill(self._node, local_rank)
        else:
            run.broken = True
        failure = Failure(
            id=f"{self._node.name}, failure {next(self._failures)}",
            kind=kind,
            node_id=machine.node_id,
            rank=world.first_rank + local_rank,
            local_rank=local_rank,
            round=world.round,
            attempt=machine.attempts[local_rank],
            time=self._time.now,
            steps=run.steps,
            hostname=self._node.hostname,
            **details,
        )
        self._node.when_awake(self._ended, run, local_rank, failure)

    def succeed(self, run: Run) -> None:
        """End the workers at the end of the program."""
        for local_rank in range(self._nproc):
            ended = (self._node.when_awake, self._ended, run, local_rank, None)
            self._time.after(self._program.delays.start, *ended)

    def _ended(self, run: Run, local_rank: int, failure: Failure | None) -> None:
        if run is self.run and local_rank in self._node.machine.running:
            self.on_exit(local_rank, failure)


class SimulatedChecker:
    """The node check of a node, as its agent uses it."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node

    def start(
        self, order: CheckOrder, _node_id: int, report: Callable[[CheckReport], None]
    ) -> None:
        delays, began = self._node.program.delays, self._node.program.time.now
        failing = ailments.fails(self._node.ailment, self._others(order))
        answer = (self._node.when_awake, self._answer, order, began, report)
        self._node.program.time.after(order.seconds / 3 if failing else delays.check, *answer)

    def _answer(
        self, order: CheckOrder, began: float, report: Callable[[CheckReport], None]
    ) -> None:
        time, others = self._node.program.time, self._others(order)
        answer = ailments.report(order, self._node.ailment, others, time.random, time.now)
        report(msgspec.structs.replace(answer, received_at=began))

    def _others(self, order: CheckOrder) -> list[Ailment | None]:
        known = self._node.program.nodes
        nodes = [known.get(i) for i in order.members if i != self._node.machine.node_id]
        return [node.ailment if node is not None and node.alive else None for node in nodes]

    def stop(self) -> None:
        """Do nothing: the machine ignores the answer to an old order."""


class CheckedMachine(AgentMachine):
    """An agent's machine that is validated after each input."""

    def refuses(self, event: Any) -> bool:
        assert not super().refuses(event), "the master of a lower epoch is alive"
        return False

    def handle(self, event: Any) -> list[Any]:
        commands = super().handle(event)
        self.validate()
        return commands


class SimulatedNode:
    """A node with a real agent, whose process, stream and workers are simulated."""

    def __init__(
        self,
        name: str,
        program: Program,
        dial: Callable[[SimulatedNode], Link],
        ended: Callable[[SimulatedNode, str], None],
        *,
        nproc: int,
        node_rank: int = -1,
        node_id: int = -1,
    ) -> None:
        """Start a node.

        Args:
            name: Its handle on the platform.
            program: Program of its workers.
            dial: Returns a new stream to the master; raises `InfrastructureError` if it cannot be reached.
            ended: Called once, when the agent has ended, with the reason.
            nproc: Workers of the node.
            node_rank: Rank that it asks for, -1 for none.
            node_id: Id that it was launched with, -1 for a node that joins on its own.
        """
        self.name = name
        self.node_rank = node_rank
        self.launched_as = node_id
        self.program = program
        self.machine = CheckedMachine(nproc)
        self.workers = SimulatedWorkers(self, nproc)
        self.alive = True
        self.link: Link | None = None
        self.unreachable_until = 0.0
        """Time before which it cannot connect."""
        self.stopped_until = 0.0
        """Time before which its process does nothing."""
        self.hostname = f"machine of {name}"
        self.ailment = Ailment.NOTHING
        """What a check of the node finds."""
        self._time = program.time
        self._dial = dial
        self._ended = ended
        self._process = program.time.loop.create_task(self._live(nproc))

    async def _live(self, nproc: int) -> None:
        await asyncio.sleep(self._time.draw(self.program.delays.launch))
        workers = self.workers
        self.agent = Agent(
            SimulatedClient(self, self._dial),
            NodeControls(self.hostname, workers, SimulatedChecker(self), workers, workers),
            AgentConfig(
                launch=LaunchSpec(entry=Entry.SCRIPT, target="train.py", nproc_per_node=nproc),
                limits=self.program.job.limits,
                address=self.name,
            ),
            node_id=self.launched_as,
            node_rank=self.node_rank,
            chance=self._time.random,
        )
        self.agent._machine = self.machine
        await self.agent.run()
        self.end("its agent left")

    @property
    def uid(self) -> str:
        """Unique id of its agent."""
        return self.agent._uid

    @property
    def training(self) -> bool:
        """True if its workers are up and none has ended."""
        run = self.workers.run
        return run is not None and self in run.nodes and self.machine.stage is Stage.RUNNING

    @property
    def serves(self) -> bool:
        """True if it is a parameter server of its world: it steps with the others, and never ends."""
        return self.machine.world is not None and self.machine.world.role == SERVER

    @property
    def first_rank(self) -> int:
        """Rank of its first worker; -1 without workers."""
        return self.machine.world.first_rank if self.machine.world is not None else -1

    def peers(self) -> list[SimulatedNode]:
        """Return the other nodes whose workers are up in the same run."""
        run = self.workers.run
        return [n for n in run.nodes if n is not self] if run is not None else []

    def stop(self) -> None:
        """Tell the agent to end, once it is there."""
        if hasattr(self, "agent"):
            why = "The agent was stopped by SIGTERM."
            self._time.loop.call_soon(self.agent.abandon, 143, why)

    def end(self, reason: str) -> None:
        """End the agent, and its workers with it."""
        if not self.alive:
            return
        self.alive = False
        self.workers.end_all()
        if self.link is not None:
            self.link.cut()
        self._process.cancel()
        self._ended(self, reason)

    # ---- the process

    @property
    def stopped(self) -> bool:
        """True while the process does nothing."""
        return self._time.now < self.stopped_until

    async def awake(self) -> None:
        """Wait until the process is not stopped."""
        while self.stopped:
            await asyncio.sleep(self.stopped_until - self._time.now)

    def when_awake(self, action: Callable[..., None], *args: Any) -> None:
        """Call ``action`` now, or later if the process is stopped."""
        if self.alive and self.stopped:
            self._time.after(self.stopped_until - self._time.now, self.when_awake, action, *args)
        elif self.alive:
            action(*args)
