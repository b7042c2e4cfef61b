"""Simulated nodes on a virtual clock: real agent machines with simulated processes, workers and streams.

`tests.simulation.cluster` combines them into a whole job.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dlrover.agent.machine import node as agent_machine
from dlrover.agent.machine.node import AgentMachine, Stage
from dlrover.rpc import messages
from dlrover.spec.activities import Activity
from dlrover.spec.activity import WorkerActivity
from dlrover.spec.check import CheckOrder
from dlrover.spec.failure import Failure, FailureKind
from dlrover.spec.roles import SERVER, Size
from dlrover.spec.usage import NodeUsage
from dlrover.spec.world import Offer, World
from tests.simulation import ailments
from tests.simulation.ailments import Ailment

Range = tuple[float, float]
"""Bounds in seconds of a random time."""
USAGE_INTERVAL = 15.0
"""Seconds between two measurements of a node's resource usage."""


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of the simulated actions."""

    message: Range = (0.0005, 0.02)
    """Transit from one end of a stream to the other; messages of one stream keep their order."""
    notice: Range = (0.001, 0.3)
    """Until one end of a broken stream, or the platform, notices it."""
    reconnect: Range = (0.05, 1.0)
    """Between two attempts of an agent to reach its master."""
    launch: Range = (0.2, 3.0)
    """From the order of a node to its agent's first attempt to connect."""
    check: Range = (1.0, 4.0)
    """One round of the node check; a group whose network fails takes a third of its time limit."""
    start: Range = (0.05, 2.0)
    """From the order to start workers to their readiness for the first step."""
    stop: Range = (0.01, 1.0)
    """From the order to stop workers to their end."""
    step: Range = (0.5, 0.6)
    """One optimizer step of the whole world."""
    revive: Range | None = None
    """From the death of a node that joined on its own to its next process; None: it stays away."""


class Time:
    """Virtual clock with a queue of scheduled actions."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        """Seconds since the simulation began."""
        self.random = random.Random(seed)
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    @property
    def next_at(self) -> float:
        """Time of the next action; infinity if there is none."""
        return self._due[0][0] if self._due else float("inf")

    def after(self, delay: float | Range, action: Callable[..., None], *args: Any) -> None:
        """Schedule an action after ``delay``: seconds, or bounds of a random time."""
        seconds = self.random.uniform(*delay) if isinstance(delay, tuple) else delay
        heapq.heappush(self._due, (self.now + seconds, next(self._order), action, args))

    def advance(self) -> None:
        """Move to the next scheduled action and run it."""
        self.now, _, action, args = heapq.heappop(self._due)
        action(*args)


class Run:
    """Workers of one round. They step together, once those of every node are up."""

    def __init__(self, program: Program, size: Size, store: str = "") -> None:
        self.store = store
        """Address of its store; a master that lost its journal may reuse a round's number."""
        self.nodes: list[SimulatedNode] = []
        """Nodes whose workers are up."""
        self.steps = 0
        self.first_step = program.steps_done
        self.first_step_at: float | None = None
        """Time at which the first step was completed."""
        self.last_step_at = 0.0
        self.broken = False
        """True if a worker is gone: the others wait for it until they are stopped."""
        self.compute = None if program.law is None else program.law(size.nodes)[1]
        """Seconds of a step in which a worker does not wait for others."""
        self._program = program
        self._size = size

    def add(self, node: SimulatedNode) -> None:
        """Add a node whose workers are up."""
        self.nodes.append(node)
        if len(self.nodes) == self._size.nodes:
            self._continue()

    def _continue(self) -> None:
        self._program.time.after(self._program.step_time(self._size), self._step)

    def _step(self) -> None:
        if self.broken:
            return
        self.steps += 1
        self.last_step_at = self._program.time.now
        if self.first_step_at is None:
            self.first_step_at = self.last_step_at
        self._program.steps_done += 1
        for node in self._tell():
            node.report_steps()
        if self._program.steps_done < self._program.steps:
            self._continue()
            return
        for node in self.nodes:
            if not node.serves:
                node.succeed(self)

    def _tell(self) -> list[SimulatedNode]:
        """Return the nodes that report a step; without ``served_law``, only that of rank 0."""
        if self._program.served_law is not None:
            return self.nodes
        return [min(self.nodes, key=lambda n: n.first_rank)]


@dataclass
class Program:
    """Program of the job's workers. After a fault they resume from the last checkpoint."""

    time: Time
    delays: Delays
    #: optimizer steps until the workers end with exit code 0
    steps: int
    #: steps between two checkpoints; with 1, no step is repeated
    checkpoint_every: int = 1
    #: seconds of a step by number of nodes, in all and for computation; None: ``delays.step``
    law: Callable[[int], tuple[float, float]] | None = None
    #: seconds of a step by numbers of workers and servers
    served_law: Callable[[Size], float] | None = None
    #: resource usage of a node, reported every `USAGE_INTERVAL`
    usage: Callable[[SimulatedNode], NodeUsage] | None = None
    #: largest relative deviation of a step from its law
    noise: float = 0.0
    steps_done: int = 0
    runs: dict[int, Run] = field(default_factory=dict)
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
        run = self.runs.get(world.round)
        if run is None or run.store != world.store_addr:
            self.steps_done -= self.steps_done % self.checkpoint_every
            size = Size(world.node_count - world.servers, world.servers)
            run = self.runs[world.round] = Run(self, size, world.store_addr)
        return run


class Link:
    """One stream between an agent and a master. Messages in transit when it breaks may be lost."""

    def __init__(
        self,
        node: SimulatedNode,
        time: Time,
        delays: Delays,
        take: Callable[[Link, messages.AgentMessage], None],
        lost: Callable[[Link], None],
    ) -> None:
        """Make a stream.

        Args:
            node: The agent's end.
            time: Virtual time.
            delays: Durations of the simulated actions.
            take: Called at the master's end with each message.
            lost: Called once when the master notices that the stream is broken.
        """
        self.node = node
        self.node_id = -1
        """Id of the agent's node for the master."""
        self.open = True
        self.greeted = False
        """True once the agent has heard from the master; it says nothing before."""
        self._time = time
        self._delays = delays
        self._take = take
        self._lost = lost
        self._noticed = False
        self._up_at = 0.0
        self._down_at = 0.0

    def up(self, message: messages.AgentMessage) -> None:
        """Send a message from the agent."""
        self._up_at = self._arrival(self._up_at)
        self._time.after(self._up_at - self._time.now, self._arrive_up, message)

    def down(self, message: messages.MasterMessage) -> None:
        """Send a message from the master."""
        self._down_at = self._arrival(self._down_at)
        self._time.after(self._down_at - self._time.now, self._arrive_down, message)

    def cut(self) -> None:
        """Break the stream; each end notices it later."""
        if self.open:
            self.open = False
            self._time.after(self._delays.notice, self._notice)
            self._time.after(self._delays.notice, self.node.reconnect, self)

    def forget(self) -> None:
        """Break the stream of a dead master: nothing arrives there any more."""
        self._noticed = True
        self.cut()

    def _arrival(self, previous: float) -> float:
        return max(previous, self._time.now + self._time.random.uniform(*self._delays.message))

    def _arrive_up(self, message: messages.AgentMessage) -> None:
        # Messages sent before the stream broke may still arrive until the master notices.
        if not self._noticed and (self.open or self._time.random.random() < 0.5):
            self._take(self, message)

    def _arrive_down(self, message: messages.MasterMessage) -> None:
        if self.open:
            self.node.when_awake(self._receive, message)

    def _receive(self, message: messages.MasterMessage) -> None:
        if self.open and self.node.alive:
            assert not self.node.machine.refuses(message), "the master of a lower epoch is alive"
            self.greeted = True
            self.node.handle(message)

    def _notice(self) -> None:
        if not self._noticed:
            self._noticed = True
            self._lost(self)


class SimulatedNode:
    """A real agent machine whose process, stream and workers are simulated."""

    def __init__(
        self,
        uid: str,
        program: Program,
        dial: Callable[[SimulatedNode], Link | None],
        ended: Callable[[SimulatedNode, str], None],
        *,
        nproc: int,
        node_rank: int = -1,
        node_id: int = -1,
    ) -> None:
        """Make a node; `reconnect` lets it look for its master.

        Args:
            uid: Unique id of the agent process.
            program: Program of its workers.
            dial: Returns a new stream to the master; None if it cannot be reached.
            ended: Called once, when the agent has ended, with the reason.
            nproc: Workers of the node.
            node_rank: Rank that it asks for, -1 for none.
            node_id: Id that it was launched with, -1 for a node that joins on its own.
        """
        self.uid = uid
        self.node_rank = node_rank
        self.launched_as = node_id
        self.machine = AgentMachine(nproc)
        self.alive = True
        self.link: Link | None = None
        self.unreachable_until = 0.0
        """Time before which it cannot connect."""
        self.stopped_until = 0.0
        """Time before which its process does nothing."""
        self.hostname = f"machine of {uid}"
        self.ailment = Ailment.NOTHING
        """What a check of the node finds."""
        self._program = program
        self._time = program.time
        self._delays = program.delays
        self._dial = dial
        self._ended = ended
        self._run: Run | None = None
        self._run_since = 0.0
        self._looks_at = 0.0
        self._failures = itertools.count()

    @property
    def training(self) -> bool:
        """True if its workers are up and none has ended."""
        run = self._run
        return run is not None and self in run.nodes and self.machine.stage is Stage.RUNNING

    @property
    def serves(self) -> bool:
        """True if it is a parameter server of its world: it steps with the others, and never ends."""
        return self.machine.world is not None and self.machine.world.role == SERVER

    @property
    def first_rank(self) -> int:
        """Rank of its first worker; -1 without workers."""
        return self.machine.world.first_rank if self.machine.world is not None else -1

    # ---- faults

    def fail(self, kind: FailureKind, **details: Any) -> None:
        """End a worker in failure, if one runs."""
        run, world = self._run, self.machine.world
        if world is None or run is None or self.machine.stage is not Stage.RUNNING:
            return
        run.broken = True
        local_rank = self._time.random.choice(sorted(self.machine.running))
        failure = Failure(
            id=f"{self.uid}, failure {next(self._failures)}",
            kind=kind,
            node_id=self.machine.node_id,
            rank=world.first_rank + local_rank,
            local_rank=local_rank,
            round=world.round,
            time=self._time.now,
            steps=run.steps,
            hostname=self.hostname,
            **details,
        )
        self.when_awake(self._worker_ended, run, local_rank, failure)

    def peers(self) -> list[SimulatedNode]:
        """Return the other nodes whose workers are up in the same run."""
        return [n for n in self._run.nodes if n is not self] if self._run is not None else []

    def end(self, reason: str) -> None:
        """End the agent, and its workers with it."""
        if not self.alive:
            return
        self.alive = False
        self._break_run()
        if self.link is not None:
            self.link.cut()
        self._ended(self, reason)

    # ---- the process

    def when_awake(self, action: Callable[..., None], *args: Any) -> None:
        """Call ``action`` now, or later if the process is stopped."""
        if self.alive and self._time.now < self.stopped_until:
            self._time.after(self.stopped_until - self._time.now, self.when_awake, action, *args)
        elif self.alive:
            action(*args)

    def reconnect(self, broken: Link | None = None) -> None:
        """Look for the master until it is reached, unless another stream has replaced ``broken``."""
        if self.link is broken:
            self.when_awake(self._connect)

    def _connect(self) -> None:
        if self.link is not None and self.link.open:
            return
        self.link = self._dial(self) if self._time.now >= self.unreachable_until else None
        if self.link is None:
            self._time.after(self._delays.reconnect, self.reconnect)
            return
        machine = self.machine
        known = machine.node_id if machine.node_id >= 0 else self.launched_as
        steps = self._run.steps if self._run is not None else 0
        self.link.up(
            messages.Hello(
                self.uid,
                known,
                self.node_rank,
                self.hostname,
                machine.running_round,
                machine.holding(steps),
                machine.epoch,
            )
        )

    def handle(self, event: agent_machine.Input) -> None:
        """Give the machine an input and carry out its commands."""
        commands = self.machine.handle(event)
        self.machine.validate()
        self._program.nodes[self.machine.node_id] = self
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: agent_machine.Command) -> None:
        if isinstance(command, agent_machine.JoinRound):
            self._say(messages.Join(command.round, Offer(self.machine.nproc, self.uid, 29400)))
        elif isinstance(command, agent_machine.Say):
            self.report_steps()
            self._say(command.message)
        elif isinstance(command, agent_machine.RunCheck):
            self._begin_check(command.order)
        elif isinstance(command, agent_machine.StartWorkers):
            self._run = self._program.run_of(command.world)
            self._run_since = self._time.now
            self._time.after(self._delays.start, self._started, self._run)
        elif isinstance(command, agent_machine.StopWorkers):
            self._break_run()
            self._time.after(self._delays.stop, self.when_awake, self._stopped)
        else:
            self.end("its agent left")

    # ---- the check

    def _begin_check(self, order: CheckOrder) -> None:
        failing = ailments.fails(self.ailment, self._others(order))
        self._time.after(
            order.seconds / 3 if failing else self._delays.check,
            self.when_awake,
            self._answer,
            order,
            self._time.now,
        )

    def _answer(self, order: CheckOrder, began: float) -> None:
        others, chance = self._others(order), self._time.random
        answer = ailments.report(order, self.ailment, others, chance, self._time.now)
        self.handle(agent_machine.Checked(msgspec.structs.replace(answer, received_at=began)))

    def _others(self, order: CheckOrder) -> list[Ailment | None]:
        nodes = [self._program.nodes.get(i) for i in order.members if i != self.machine.node_id]
        return [node.ailment if node is not None and node.alive else None for node in nodes]

    def _say(self, message: messages.AgentMessage) -> None:
        if self.link is not None and self.link.greeted:
            self.link.up(message)

    # ---- the workers

    def report_steps(self) -> None:
        """Report to the master the workers' completed steps and activities."""
        run = self._run
        steps = run.steps if run is not None else 0
        workers = (self._activity(run),) * self.machine.nproc if run is not None else ()
        usage = None
        if self._program.usage is not None and self._time.now >= self._looks_at:
            self._looks_at = self._time.now + USAGE_INTERVAL
            usage = self._program.usage(self)
        round_ = self.machine.running_round
        self._say(messages.Heartbeat(round_, steps, workers, usage=usage))

    def _activity(self, run: Run) -> WorkerActivity:
        """Return one worker's activity: starting until the first step, then training."""
        now, first = self._time.now, run.first_step_at
        doing = Activity.START if first is None else Activity.STEP
        start = (now if first is None else first) - self._run_since
        step = 0.0 if first is None else now - first
        since = start if first is None else now - run.last_step_at
        seconds = (start, step, 0.0, 0.0, 0.0, 0.0)
        compute = step if run.compute is None else run.compute * run.steps
        return WorkerActivity(run.steps, doing, since, seconds, compute, run.first_step)

    def succeed(self, run: Run) -> None:
        """End the workers at the end of the program."""
        for local_rank in range(self.machine.nproc):
            self._time.after(
                self._delays.start, self.when_awake, self._worker_ended, run, local_rank, None
            )

    def _worker_ended(self, run: Run, local_rank: int, failure: Failure | None) -> None:
        if run is self._run and local_rank in self.machine.running:
            self.handle(agent_machine.WorkerEnded(local_rank, failure))

    def _started(self, run: Run) -> None:
        if self.alive and run is self._run:
            run.add(self)

    def _stopped(self) -> None:
        self.handle(agent_machine.WorkersStopped())

    def _break_run(self) -> None:
        if self._run is not None:
            self._run.broken = True
            self._run = None
