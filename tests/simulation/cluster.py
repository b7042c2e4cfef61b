"""A whole job on a virtual clock: a real job machine, real agent machines, and faults by seed.

Everything else is simulated: messages take a random time and are lost with their connection, a platform
starts and kills nodes, workers start, step together, fail and stop. Nothing waits, sleeps or opens a
socket, and a seed gives the same run every time. Every machine is validated after every input, and a
master that takes over must restore exactly its predecessor's state from the journal.

::

    cluster = Cluster(JobSpec(name="job", min_nodes=3, max_nodes=4), nodes=4, steps=50, seed=7)
    cluster.run_until(lambda: cluster.training)
    cluster.kill_agent(cluster.nodes[2])
    outcome = cluster.finish()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from dlrover.errors import ExitCode
from dlrover.master.diagnosis_rules import built_in
from dlrover.master.machine import inputs
from dlrover.master.machine.goodput.ledger import Ledger
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.waiting import waiting_for
from dlrover.master.machine.watches.activities import Activities
from dlrover.master.scaling.autoscale import AutoScaler
from dlrover.rpc import messages
from dlrover.spec.brain import Similar
from dlrover.spec.check import CheckReport
from dlrover.spec.events import Event
from dlrover.spec.failure import FailureKind
from dlrover.spec.job import JobSpec
from dlrover.spec.node import FoundNode, LaunchNode
from dlrover.spec.outcome import Outcome
from dlrover.spec.roles import WORKER, is_server
from tests.simulation.nodes import Delays, Link, Program, SimulatedNode, Time

_DETAILS: dict[FailureKind, dict[str, Any]] = {
    FailureKind.SIGNAL: {"signal": 9},
    FailureKind.EXCEPTION: {"exception": "ValueError", "message": "bad value"},
    FailureKind.EXIT: {"exit_code": 3},
    FailureKind.SPAWN: {"message": "Resource temporarily unavailable"},
}
WORKER_KINDS = tuple(_DETAILS)
"""Ways in which `Cluster.kill_worker` can end a worker."""
_ECHO = {"exception": "RuntimeError", "message": "Connection closed by peer [10.0.0.1]:40404"}

_BROKEN_DEVICE = {
    "exception": "torch.AcceleratorError",
    "message": "CUDA error: unspecified launch failure",
    "node_facts": ("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus.",),
}


class Cluster:
    """One job: its master, its platform and its nodes.

    Faults are methods: call them between two runs, from ``time.after``, or leave them to `inject`.
    """

    def __init__(
        self,
        job: JobSpec,
        *,
        nodes: int = 0,
        nproc: int = 2,
        steps: int = 10,
        seed: int = 0,
        delays: Delays | None = None,
        validate_every: int = 1,
    ) -> None:
        """Submit a job.

        Args:
            job: Job to run; set ``managed_nodes`` to have the simulated platform launch its nodes.
            nodes: Nodes that join on their own.
            nproc: Workers of each node; a server's node has one process.
            steps: Optimizer steps until the program ends; those done before a fault are not repeated,
                unless ``program.checkpoint_every`` is set.
            seed: Seed of all random times and choices.
            delays: Durations of the simulated actions.
            validate_every: Inputs between two checks of the job machine; a check takes time in
                proportion to the number of nodes.
        """
        self.time = Time(seed)
        self.machine = JobMachine()
        self.ledger = Ledger()
        self.journal: list[tuple[float, inputs.Input]] = []
        """Every input of the job machine with its time; a master that takes over replays it."""
        self.events: list[Event] = []
        """Content of the job's event file."""
        self.nodes: list[SimulatedNode] = []
        """Every node that was ever started, in order."""
        self.alive: dict[str, SimulatedNode] = {}
        """Nodes whose agents are alive, by the agents' unique ids, in order."""
        self.master_away = False
        self.program = Program(self.time, delays or Delays(), steps)
        self.similar: Similar | None = None
        """Similar past job that the planner receives."""
        self._activities = Activities()
        self._scaler = AutoScaler(self.machine, self._submit)
        self._job = job
        self._nproc = nproc
        self._validate_every = validate_every
        self._master = 0  # counts master processes
        self.epoch = 1
        self._disk_lost = False
        self._recorded = 0  # events that masters with earlier journals have recorded
        self._crash: tuple[int, float] | None = None
        self._links: dict[int, Link] = {}
        self._greeted: dict[str, Link] = {}
        self._watched: dict[str, int] = {}
        self._timer: float | None = None
        self._submit(inputs.Submitted(job, rules=built_in()))
        for _ in range(nodes):
            self.add_node()

    # ---- time

    def run(self, seconds: float) -> None:
        """Advance time by ``seconds``."""
        until = self.time.now + seconds
        while self.time.next_at <= until:
            self.time.advance()
        self.time.now = until

    def run_until(self, condition: Callable[[], bool], limit: float = 3600.0) -> None:
        """Advance time until ``condition`` holds; check it after each happening.

        Raises:
            AssertionError: it does not hold within ``limit`` seconds.
        """
        until = self.time.now + limit
        while not condition():
            assert self.time.next_at <= until, f"not within {limit:g} s: {self.describe()}"
            self.time.advance()

    def finish(self, limit: float = 86_400.0) -> Outcome:
        """Advance time until the job has ended and every node has left; return the outcome.

        Raises:
            AssertionError: the job has not ended within ``limit`` seconds, or the nodes do not leave.
        """
        self.run_until(lambda: self.machine.outcome is not None, limit)
        self.run_until(lambda: not self.alive, 600.0)
        assert self.machine.outcome is not None
        return self.machine.outcome

    # ---- queries

    @property
    def training(self) -> bool:
        """True if the workers of the latest world are stepping."""
        run = self.program.runs.get(self.machine.rendezvous.round)
        return run is not None and run.steps > 0 and not run.broken

    def describe(self) -> str:
        """Return the state of the job and its agents, for the message of a failed test."""
        agents = [
            f"{n.machine.node_id}:{n.machine.stage.value}" for n in list(self.alive.values())[:20]
        ]
        waiting = waiting_for(self.machine, self.time.now)
        phase = self.machine.state.phase.value
        return f"t={self.time.now:.2f}: {phase} {waiting}; agents {' '.join(agents)}"

    # ---- faults

    def add_node(self, node_rank: int = -1) -> SimulatedNode:
        """Start a node that joins on its own; return it."""
        return self._start_node(node_rank, -1)

    def kill_worker(
        self, node: SimulatedNode, kind: FailureKind = FailureKind.SIGNAL, echoes: int = 0
    ) -> None:
        """End a worker: by SIGKILL, an exception, exit code 3, or a failed start.

        Workers of ``echoes`` other nodes then fail too, because they lose the connection to it.
        """
        others = node.peers()
        node.fail(kind, **_DETAILS[kind])
        for other in self.time.random.sample(others, min(echoes, len(others))):
            delay = self.program.delays.message
            self.time.after(delay, lambda n=other: n.fail(FailureKind.EXCEPTION, **_ECHO))

    def break_device(self, node: SimulatedNode) -> None:
        """Fail a worker through its device, with a line in the kernel's log of the node.

        If the node joined on its own and is dismissed, another one joins from another host.
        """
        revive = self.program.delays.revive
        if node.alive and node.launched_as < 0 and revive is not None:
            self.time.after(revive, self._stand_in, node)
        node.fail(FailureKind.EXCEPTION, **_BROKEN_DEVICE)

    def kill_agent(self, node: SimulatedNode) -> None:
        """Kill an agent and its workers with SIGKILL."""
        revive = self.program.delays.revive
        if node.alive and node.launched_as < 0 and revive is not None:
            self.time.after(revive, self._come_again, node.node_rank)
        node.end("its agent was killed by SIGKILL")

    def disconnect(self, node: SimulatedNode, seconds: float = 0.0) -> None:
        """Break a stream; the agent cannot reconnect before ``seconds`` have passed."""
        node.unreachable_until = self.time.now + seconds
        if node.link is not None:
            node.link.cut()

    def silence(self, node: SimulatedNode, seconds: float) -> None:
        """Stop an agent's process for ``seconds``; its workers keep running."""
        node.stopped_until = max(node.stopped_until, self.time.now + seconds)
        timeout = self._job.limits.heartbeat_timeout
        if seconds > timeout and node.link is not None:
            self.time.after(timeout, self._notice_silence, node.link)

    def kill_master(self, away: float = 1.0, *, after_commands: int | None = None) -> None:
        """Kill the master; another one takes over ``away`` seconds later.

        With ``after_commands``, the master dies at its next input: it journals and handles the input, but
        carries out only that many of the resulting commands.
        """
        if self.master_away:
            return
        if after_commands is not None:
            self._crash = (after_commands, away)
            return
        self.master_away = True
        self._master += 1
        self._crash = None
        self._links.clear()
        self._greeted.clear()
        self._watched.clear()
        for node in self.alive.values():
            if node.link is not None:
                node.link.forget()
        self.time.after(away, self._take_over)

    def lose_disk(self, away: float = 1.0) -> None:
        """Kill the master and delete its journal; its successor learns only from its nodes and platform.

        The file with the events is kept, as on a separate disk.
        """
        self.kill_master(away)
        self._disk_lost = True

    def stop(self, exit_code: int = ExitCode.STOPPED) -> None:
        """Stop the job as a user would."""
        self._submit(inputs.StopRequested("stopped", exit_code))

    def scale(
        self, nodes: int, source: Literal["user", "plan"] = "user", role: str = WORKER
    ) -> None:
        """Ask for another number of managed nodes of a role."""
        self._submit(inputs.ScaleAsked(nodes, "a test", source, role))

    def inject(
        self, faults: Sequence[Callable[[SimulatedNode], None]], *, every: float, until: float
    ) -> None:
        """Apply random ``faults`` to random nodes, about every ``every`` seconds, until time ``until``."""

        def strike() -> None:
            alive = list(self.alive.values())
            if alive:
                self.time.random.choice(faults)(self.time.random.choice(alive))
            plan()

        def plan() -> None:
            delay = self.time.random.expovariate(1 / every)
            if self.time.now + delay < until and self.machine.outcome is None:
                self.time.after(delay, strike)

        plan()

    # ---- the master's process

    def _submit(self, event: inputs.Input) -> None:
        """Act as the master's shell on an input."""
        if self.master_away:
            return
        now = self.time.now
        self.journal.append((now, event))
        commands = self.machine.handle(event, now)
        self.ledger.handle(event, now, self.machine)
        if len(self.journal) % self._validate_every == 0:
            self.machine.validate()
            self.ledger.validate()
        carried_out = len(commands) if self._crash is None else self._crash[0]
        for command in commands[:carried_out]:
            self._carry_out(command)
        if self._crash is not None:
            self.kill_master(self._crash[1])
        else:
            self._set_timer()

    def _set_timer(self) -> None:
        deadline = self.machine.deadline()
        if deadline is not None and (self._timer is None or deadline < self._timer):
            self._timer = deadline
            self.time.after(max(0.0, deadline - self.time.now), self._on_timer, deadline)

    def _on_timer(self, due: float) -> None:
        if due != self._timer or self.master_away:
            return
        self._timer = None
        deadline = self.machine.deadline()
        if deadline is not None and deadline <= self.time.now:
            self._submit(inputs.DeadlinePassed())
        self._set_timer()

    def _take_over(self) -> None:
        """Start another master process, which restores its state from the journal."""
        if self._disk_lost:
            self._begin_anew()
            return
        machine, ledger, recorded = JobMachine(), Ledger(), self.events[: self._recorded]
        for time, event in self.journal:
            for command in machine.handle(event, time):
                if isinstance(command, inputs.Emit):
                    recorded.append(Event(len(recorded) + 1, time, command.body))
            ledger.handle(event, time, machine)
        now = self.time.now
        assert ledger.goodput(now) == self.ledger.goodput(now), "the ledger does not replay"
        assert machine == self.machine, "the journal does not give the state back"
        assert recorded[: len(self.events)] == self.events, "the journal tells another story"
        self.machine, self.ledger, self.events = machine, ledger, recorded
        self._scaler = AutoScaler(machine, self._submit)
        self.master_away = False
        self._timer = None
        self.epoch += 1
        self._submit(inputs.MasterStarted(len(self.journal)))
        self._watch_all()

    def _begin_anew(self) -> None:
        """Start a master process with an empty journal."""
        over = self.machine.outcome
        self._disk_lost = False
        self.machine, self.ledger, self.journal = JobMachine(), Ledger(), []
        self._scaler = AutoScaler(self.machine, self._submit)
        self._recorded = len(self.events)
        self.master_away = False
        self._timer = None
        self.epoch = 1
        launched = [n for n in self.alive.values() if n.launched_as >= 0]
        found = tuple(FoundNode(n.launched_as, n.node_rank, n.uid) for n in launched)
        self._submit(inputs.Submitted(self._job, "", found, self._recorded, built_in()))
        if over is not None:
            self._submit(inputs.StopRequested(over.reason, over.exit_code))
        self._watch_all()

    def _watch_all(self) -> None:
        for node in list(self.machine.nodes.values()):
            if node.handle and not node.status.final:
                self._watch(node.handle, node.id)

    def _carry_out(self, command: inputs.Command) -> None:
        if isinstance(command, inputs.Emit):
            self.events.append(Event(len(self.events) + 1, self.time.now, command.body))
        elif isinstance(command, LaunchNode):
            self._launch(command)
        elif isinstance(command, inputs.KillNode):
            doomed = self.alive.get(self.machine.nodes[command.node_id].handle)
            if doomed is not None:
                self.time.after(self.program.delays.notice, doomed.end, "killed by SIGKILL")
        elif isinstance(command, inputs.Welcome):
            link = self._greeted[command.uid]
            self._register(link, command.node_id)
            link.down(messages.Welcome(command.node_id, command.round, 15.0, self.epoch))
        elif isinstance(command, inputs.Say) and command.node_id in self._links:
            self._links[command.node_id].down(command.message)

    # ---- the platform

    def _start_node(self, node_rank: int, node_id: int) -> SimulatedNode:
        node = SimulatedNode(
            f"agent {len(self.nodes)}",
            self.program,
            self._dial,
            self._ended,
            nproc=1 if is_server(node_rank) else self._nproc,
            node_rank=node_rank,
            node_id=node_id,
        )
        self.nodes.append(node)
        self.alive[node.uid] = node
        self.time.after(self.program.delays.launch, node.reconnect)
        return node

    def _ended(self, node: SimulatedNode, reason: str) -> None:
        del self.alive[node.uid]
        self._report_end(node.uid, reason)

    def _come_again(self, node_rank: int) -> None:
        if self.machine.outcome is None:
            self.add_node(node_rank)

    def _stand_in(self, node: SimulatedNode) -> None:
        if node.alive and node.machine.outcome is None:
            return  # the node was kept
        self._come_again(node.node_rank)

    def _launch(self, command: LaunchNode) -> None:
        node = self._start_node(command.node_rank, command.node_id)
        self._watch(node.uid, command.node_id)
        self._soon(0.0, inputs.NodePlaced(command.node_id, node.uid))

    def _watch(self, handle: str, node_id: int) -> None:
        self._watched[handle] = node_id
        if handle not in self.alive:
            self._report_end(handle, "its agent ended while the master was away")

    def _report_end(self, handle: str, reason: str) -> None:
        node_id = self._watched.pop(handle, None)
        if node_id is not None:
            delay = self.time.random.uniform(*self.program.delays.notice)
            self._soon(delay, inputs.NodeExited(node_id, reason))

    def _soon(self, delay: float, event: inputs.Input) -> None:
        """Submit an input later, unless this master process has died by then."""
        master = self._master

        def submit() -> None:
            if master == self._master:
                self._submit(event)
                if isinstance(event, inputs.NodeExited):
                    self._hang_up(event.node_id)

        self.time.after(delay, submit)

    # ---- streams

    def _dial(self, node: SimulatedNode) -> Link | None:
        if self.master_away:
            return None
        return Link(node, self.time, self.program.delays, self._take, self._lost)

    def _take(self, link: Link, message: messages.AgentMessage) -> None:
        if isinstance(message, messages.Hello):
            self._greet(link, message)
        elif isinstance(message, messages.Heartbeat):
            if message.round == self.machine.rendezvous.round:
                if link.node_id not in self.machine.rendezvous.servers:
                    self._activities.note(
                        link.node_id, message.round, message.steps, message.workers
                    )
                if self._activities.steps > self.machine.progress.steps:
                    self._submit(self._activities.progress(self.machine.rounds.training()))
                self._scaler.heard(link.node_id, message, self.time.now)
                self._auto_scale()
        elif isinstance(message, messages.Join):
            self._submit(inputs.NodeJoined(link.node_id, message.round, message.offer))
        elif isinstance(message, CheckReport):
            self._submit(inputs.NodeChecked(link.node_id, message))
        elif isinstance(message, messages.Failed):
            failed = self.machine.recovery.admitted(message.failure)
            if failed is not None:
                self._submit(failed)
        else:
            self._submit(inputs.NodeSucceeded(link.node_id, message.round))

    def _auto_scale(self) -> None:
        """Act as the master's auto-scaler, which runs now and then."""
        if not self.machine.autoscaling.active:
            return
        self._scaler.measure(self.time.now)
        self._scaler.watch_servers()
        asked = self._scaler.question(self.time.now)
        if asked is not None and not self.master_away:
            from dlrover.master.machine.scaling.planner import decide

            round_ = self.machine.rendezvous.round
            self._submit(inputs.ScalePlanned(round_, decide(asked, self.similar)))

    def _greet(self, link: Link, hello: messages.Hello) -> None:
        self._greeted[hello.uid] = link
        if hello.epoch >= self.epoch + (hello.uid in self.machine.fleet.by_uid):
            self.epoch = hello.epoch + 1
        self._submit(
            inputs.NodeConnected(
                hello.uid, hello.node_id, hello.node_rank, hello.hostname, hello.round, hello.held
            )
        )
        if not self.master_away:
            self._register(link, self.machine.fleet.by_uid[hello.uid])

    def _register(self, link: Link, node_id: int) -> None:
        link.node_id = node_id
        self._links[node_id] = link

    def _lost(self, link: Link) -> None:
        if self._links.get(link.node_id) is link:
            del self._links[link.node_id]
            self._submit(inputs.NodeDisconnected(link.node_id))

    def _notice_silence(self, link: Link) -> None:
        still = self._links.get(link.node_id) is link and link.open
        if still and self.time.now < link.node.stopped_until:
            seconds = self._job.limits.heartbeat_timeout
            self._submit(inputs.NodeSilent(link.node_id, seconds))
            self._hang_up(link.node_id)

    def _hang_up(self, node_id: int) -> None:
        """Close the stream of a node that was given up: if it returns, it is a new node."""
        link = self._links.get(node_id)
        if link is not None:
            link.cut()
