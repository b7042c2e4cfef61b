"""A whole job on a virtual clock: a real job machine, real agent machines, and faults by seed.

Everything else is simulated: messages take a random time and are lost with their connection, a platform
starts and kills nodes, workers start, step together, fail and stop. Nothing waits, sleeps or opens a
socket, and a seed gives the same run every time. Every machine is validated after every input, and a
master that comes back must find in its journal exactly the state that the last one had.

::

    cluster = Cluster(JobSpec(name="job", min_nodes=3, max_nodes=4), nodes=4, steps=50, seed=7)
    cluster.run_until(lambda: cluster.training)
    cluster.kill_agent(cluster.nodes[2])
    outcome = cluster.finish()
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dlrover.agent import machine as agent_machine
from dlrover.agent.machine import AgentMachine, Stage
from dlrover.master.machine import inputs
from dlrover.master.machine.job import JobMachine
from dlrover.rpc import messages
from dlrover.spec.events import Event
from dlrover.spec.failure import Failure, FailureKind
from dlrover.spec.job import JobSpec
from dlrover.spec.outcome import Outcome
from dlrover.spec.world import Offer, World

Range = tuple[float, float]
"""Bounds in seconds between which a random time is drawn."""


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """How long things take."""

    message: Range = (0.0005, 0.02)
    """From one end of a stream to the other; messages of one stream keep their order."""
    notice: Range = (0.001, 0.3)
    """Until an end of a broken stream, or the platform, notices it."""
    reconnect: Range = (0.05, 1.0)
    """Between two attempts of an agent to reach its master."""
    launch: Range = (0.2, 3.0)
    """From the order of a node to its agent's first attempt to connect."""
    start: Range = (0.05, 2.0)
    """From the order to start workers to their readiness for the first step."""
    stop: Range = (0.01, 1.0)
    """From the order to stop workers to their end."""
    step: Range = (0.5, 0.6)
    """One optimizer step of the whole world."""


@dataclass(eq=False)
class Run:
    """The workers of one round, which step together once all nodes' workers are up."""

    round: int
    node_count: int
    #: nodes whose workers are up
    up: list[SimulatedNode] = field(default_factory=list)
    steps: int = 0
    #: a worker is gone: the others wait for it until they are stopped
    broken: bool = False


@dataclass(eq=False)
class Link:
    """One stream between an agent and a master."""

    node: SimulatedNode
    #: which master process it leads to
    master: int
    node_id: int = -1
    open: bool = True
    #: the master has answered; agents say nothing before
    greeted: bool = False
    #: when the latest message of each direction arrives
    up_at: float = 0.0
    down_at: float = 0.0


@dataclass(eq=False)
class SimulatedNode:
    """A node: a real agent machine, whose process and workers are simulated."""

    uid: str
    machine: AgentMachine
    node_rank: int = -1
    #: the node id that it was launched with; -1 for a node that comes by itself
    claimed: int = -1
    alive: bool = True
    link: Link | None = None
    #: nothing reaches it before
    unreachable_until: float = 0.0
    #: its process does nothing before
    stopped_until: float = 0.0
    #: its workers' run; None without workers
    run: Run | None = None

    @property
    def training(self) -> bool:
        """Whether its workers are up and none has ended."""
        return self.machine.stage is Stage.RUNNING and self.run is not None and self in self.run.up


class Cluster:
    """One job: its master, its platform and its nodes.

    Faults are methods: call them between two runs, from ``schedule``, or leave them to ``inject``.
    """

    def __init__(
        self,
        job: JobSpec,
        *,
        nodes: int = 0,
        nproc: int = 2,
        steps: int = 10,
        seed: int = 0,
        revive: float | None = None,
        delays: Delays | None = None,
        validate_every: int = 1,
    ) -> None:
        """Submit a job.

        Args:
            job: With ``managed_nodes`` if the simulated platform is to launch them.
            nodes: Nodes that come by themselves.
            nproc: Workers of each node.
            steps: Optimizer steps until the program ends; those done before a fault are not repeated.
            seed: Of all random times and choices.
            revive: Seconds until a node that came by itself comes again after it died; None for never.
            delays: How long things take.
            validate_every: Inputs between two checks of the job machine, which take time in proportion
                to the number of nodes.
        """
        self.machine = JobMachine()
        self.journal: list[tuple[float, inputs.Input]] = []
        """What a master that comes back learns from."""
        self.events: list[Event] = []
        """What the job's event file holds."""
        self.nodes: list[SimulatedNode] = []
        """Every node that was ever started, in order."""
        self.now = 0.0
        """Virtual time, seconds."""
        self.steps_done = 0
        self.master_away = False
        self.random = random.Random(seed)  # noqa: S311 - chance, no secret
        self._job = job
        self._nproc = nproc
        self._steps = steps
        self._revive = revive
        self._delays = delays or Delays()
        self._validate_every = validate_every
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._master = 0  # counts master processes
        self._crash_after: tuple[int, float] | None = None
        self._links: dict[int, Link] = {}
        self._greeted: dict[str, Link] = {}
        self._watched: dict[str, int] = {}
        self._handles: dict[str, SimulatedNode] = {}
        self._runs: dict[int, Run] = {}
        self._timer: float | None = None
        self._submit(inputs.Submitted(job))
        for _ in range(nodes):
            self.add_node()

    # ---- time

    def schedule(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """Do something ``delay`` seconds from now."""
        heapq.heappush(self._queue, (self.now + delay, next(self._order), action, args))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self._next()
        self.now = until

    def run_until(self, condition: Callable[[], bool], limit: float = 3600.0) -> None:
        """Let time pass until ``condition`` holds; it is asked after every event.

        Raises:
            AssertionError: it does not hold after ``limit`` seconds.
        """
        until = self.now + limit
        while not condition():
            assert self._queue, f"nothing happens any more: {self.describe()}"
            assert self._queue[0][0] <= until, f"not within {limit:g} s: {self.describe()}"
            self._next()

    def finish(self, limit: float = 86_400.0) -> Outcome:
        """Let time pass until the job has ended and every node has left; the outcome."""
        self.run_until(lambda: self.machine.outcome is not None, limit)
        outcome = self.machine.outcome
        assert outcome is not None
        self.run_until(lambda: not self.master_away and not self.alive(), 600.0)
        return outcome

    def describe(self) -> str:
        """Where everything stands, for the message of a failed test."""
        stages = [f"{n.machine.node_id}:{n.machine.stage.value}" for n in self.alive()]
        waiting = self.machine.waiting_for(self.now)
        return f"t={self.now:.2f} {self.machine.phase.value} {waiting} {' '.join(stages[:20])}"

    def _next(self) -> None:
        self.now, _, action, args = heapq.heappop(self._queue)
        action(*args)

    def _draw(self, bounds: Range) -> float:
        return self.random.uniform(*bounds)

    # ---- queries

    @property
    def training(self) -> bool:
        """Whether the workers of the latest world step."""
        run = self._runs.get(self.machine.rendezvous.round)
        return run is not None and not run.broken and run.steps > 0

    def alive(self) -> list[SimulatedNode]:
        """The nodes whose agents live."""
        return [node for node in self.nodes if node.alive]

    # ---- faults

    def add_node(self, node_rank: int = -1) -> SimulatedNode:
        """A node comes by itself."""
        return self._start_node(node_rank, -1)

    def kill_worker(
        self, node: SimulatedNode, kind: FailureKind = FailureKind.SIGNAL, echoes: int = 0
    ) -> None:
        """A worker of ``node`` ends: by SIGKILL, an exception or exit code 3.

        ``echoes`` workers of other nodes then fail too, because they lost the connection to it.
        """
        run = node.run
        if node.machine.stage is not Stage.RUNNING or run is None:
            return
        run.broken = True
        details = {
            FailureKind.SIGNAL: {"signal": 9},
            FailureKind.EXCEPTION: {"exception": "ValueError", "message": "bad value"},
            FailureKind.EXIT: {"exit_code": 3},
        }
        self._fail(node, run, kind, details[kind])
        lost_peer = {"exception": "ConnectionResetError", "message": "Connection reset by peer"}
        others = [other for other in run.up if other is not node]
        for other in self.random.sample(others, min(echoes, len(others))):
            delay = self._draw(self._delays.message)
            self.schedule(delay, self._fail, other, run, FailureKind.EXCEPTION, lost_peer)

    def kill_agent(self, node: SimulatedNode) -> None:
        """An agent and its workers die by SIGKILL."""
        if not node.alive:
            return
        self._end_agent(node, "its agent was killed by SIGKILL")
        if self._revive is not None and node.claimed < 0:
            self.schedule(self._revive, self._come_again, node)

    def disconnect(self, node: SimulatedNode, seconds: float = 0.0) -> None:
        """A stream breaks; the agent cannot connect again before ``seconds`` have passed."""
        node.unreachable_until = self.now + seconds
        self._cut(node.link)

    def silence(self, node: SimulatedNode, seconds: float) -> None:
        """An agent's process is stopped and continued after ``seconds``; its workers run on."""
        node.stopped_until = max(node.stopped_until, self.now + seconds)
        timeout = self._job.limits.heartbeat_timeout
        if seconds > timeout and node.link is not None:
            self.schedule(timeout, self._notice_silence, node.link)

    def kill_master(self, away: float = 1.0, *, carries_out: int | None = None) -> None:
        """The master dies; another one takes over ``away`` seconds later.

        With ``carries_out`` it dies at its next input, after so many of the commands that follow from it.
        """
        if self.master_away:
            return
        if carries_out is not None:
            self._crash_after = (carries_out, away)
            return
        self.master_away = True
        self._crash_after = None
        self._master += 1
        self._links.clear()
        self._greeted.clear()
        self._watched.clear()
        for node in self.alive():
            self._cut(node.link)
        self.schedule(away, self._take_over)

    def stop(self, exit_code: int = 5) -> None:
        """Somebody stops the job."""
        self._submit(inputs.StopRequested("stopped by a test", exit_code))

    def inject(
        self, faults: Sequence[Callable[[SimulatedNode], None]], *, every: float, until: float
    ) -> None:
        """Do one of ``faults`` to a random node, about ``every`` seconds, ``until`` a time has come."""

        def strike() -> None:
            alive = self.alive()
            if self.now > until or self.machine.outcome is not None:
                return
            if alive:
                self.random.choice(faults)(self.random.choice(alive))
            self.schedule(self.random.expovariate(1 / every), strike)

        self.schedule(self.random.expovariate(1 / every), strike)

    # ---- the master's process

    def _submit(self, event: inputs.Input) -> None:
        """What the master's shell does with an input."""
        if self.master_away:
            return
        self.journal.append((self.now, event))
        commands = self.machine.handle(event, self.now)
        if len(self.journal) % self._validate_every == 0:
            self.machine.validate()
        if self._crash_after is not None:
            count, away = self._crash_after
            for command in commands[:count]:
                self._carry_out(command)
            self.kill_master(away)
            return
        for command in commands:
            self._carry_out(command)
        self._set_timer()

    def _set_timer(self) -> None:
        deadline = self.machine.deadline()
        if deadline is not None and (self._timer is None or deadline < self._timer):
            self._timer = deadline
            self.schedule(max(0.0, deadline - self.now), self._on_timer, deadline)

    def _on_timer(self, due: float) -> None:
        if due != self._timer:
            return
        self._timer = None
        deadline = self.machine.deadline()
        if deadline is not None and deadline <= self.now:
            self._submit(inputs.DeadlinePassed())
        if not self.master_away:
            self._set_timer()

    def _take_over(self) -> None:
        """A new master process: its state comes from the journal."""
        machine, recorded = JobMachine(), list[Event]()
        for time, event in self.journal:
            for command in machine.handle(event, time):
                if isinstance(command, inputs.Emit):
                    recorded.append(Event(len(recorded) + 1, time, command.body))
        assert machine == self.machine, "the journal does not give the state back"
        assert recorded[: len(self.events)] == self.events, "the journal tells another story"
        self.machine, self.events = machine, recorded
        self.master_away = False
        self._timer = None
        self._submit(inputs.MasterStarted(len(self.journal)))
        for node in list(self.machine.nodes.values()):
            if node.handle and not node.status.final:
                self._watch(node.handle, node.id)

    def _carry_out(self, command: inputs.Command) -> None:
        if isinstance(command, inputs.Emit):
            self.events.append(Event(len(self.events) + 1, self.now, command.body))
        elif isinstance(command, inputs.LaunchNode):
            self._launch(command)
        elif isinstance(command, inputs.KillNode):
            doomed = self._handles.get(self.machine.nodes[command.node_id].handle)
            if doomed is not None:
                self.schedule(self._draw(self._delays.notice), self._end_agent, doomed, "killed")
        elif isinstance(command, inputs.Welcome):
            self._register(self._greeted[command.uid], command.node_id)
            self._say(
                command.node_id, messages.Welcome(command.node_id, command.round, 15.0)
            )
        elif not isinstance(command, inputs.EndJob):
            self._say(command.node_id, _message(command))

    # ---- the platform

    def _launch(self, command: inputs.LaunchNode) -> None:
        handle = f"process {len(self.nodes)}"
        node = self._start_node(command.node_rank, command.node_id)
        self._handles[handle] = node
        self._watch(handle, command.node_id)
        self._later(0.0, inputs.NodePlaced(command.node_id, handle))

    def _watch(self, handle: str, node_id: int) -> None:
        self._watched[handle] = node_id
        if not self._handles[handle].alive:
            self._report_exit(handle, "its agent ended while the master was away")

    def _report_exit(self, handle: str, reason: str) -> None:
        node_id = self._watched.pop(handle, None)
        if node_id is not None:
            self._later(self._draw(self._delays.notice), inputs.NodeExited(node_id, reason))

    def _later(self, delay: float, event: inputs.Input) -> None:
        """Submit an input that dies with this master process."""
        self.schedule(delay, self._submit_by, self._master, event)

    def _submit_by(self, master: int, event: inputs.Input) -> None:
        if master == self._master:
            self._submit(event)
            if isinstance(event, inputs.NodeExited):
                self._hang_up(self._links.get(event.node_id))

    def _start_node(self, node_rank: int, claimed: int) -> SimulatedNode:
        uid = f"agent {len(self.nodes)}"
        node = SimulatedNode(uid, AgentMachine(self._nproc), node_rank, claimed)
        self.nodes.append(node)
        self.schedule(self._draw(self._delays.launch), self._connect, node)
        return node

    def _come_again(self, node: SimulatedNode) -> None:
        if self.machine.outcome is None:
            self.add_node(node.node_rank)

    # ---- streams
