"""A whole job on a virtual clock: the real master, real agents, and faults by seed.

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

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from dlrover.errors import ExitCode, FencedError, InfrastructureError
from dlrover.master.journal.history import History
from dlrover.master.journal.journal import Entry, fenced
from dlrover.master.machine import inputs
from dlrover.master.machine.goodput.ledger import Ledger
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.waiting import waiting_for
from dlrover.master.service import Master
from dlrover.rpc.messages import StopRequest
from dlrover.spec.brain import Similar
from dlrover.spec.events import Event
from dlrover.spec.failure import FailureKind
from dlrover.spec.job import JobSpec
from dlrover.spec.node import WORKER, FoundNode, LaunchNode, is_server
from dlrover.spec.outcome import Outcome
from dlrover.spec.requests.membership import MembershipRequest
from tests.simulation.clock import Time
from tests.simulation.nodes import Delays, Link, Program, SimulatedNode

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


class Store:
    """The disk of the master's journal, which outlives a master."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, inputs.Input]] = []
        self.epoch = 0


class SimulatedJournal:
    """A master's access to a store; see `Journal`."""

    def __init__(self, store: Store) -> None:
        store.epoch += 1
        self.epoch = store.epoch
        self.dead = False
        """True once its master's process is dead: it writes nothing any more."""
        self._store = store

    def append_all(self, entries: Sequence[Entry], now: float) -> None:
        self.check()
        self._store.entries += [(now, entry) for entry in entries]

    def entries(self) -> Iterator[tuple[float, Entry]]:
        return iter(self._store.entries)

    def check(self) -> None:
        if self.dead or self.epoch != self._store.epoch:
            raise fenced(self.epoch, self._store.epoch)

    def raise_epoch(self, above: int) -> None:
        self.check()
        self.epoch = self._store.epoch = max(above, self.epoch) + 1


class SimulatedPlatform:
    """One master's access to the platform; see `Platform`."""

    def __init__(self, cluster: Cluster, master: Master) -> None:
        self.watched: dict[str, int] = {}
        self._cluster = cluster
        self._master = master

    def launch(self, node: LaunchNode) -> str:
        started = self._cluster.start_node(node.node_rank, node.node_id)
        self.watched[started.name] = node.node_id
        return started.name

    def adopt(self, node_id: int, handle: str) -> None:
        self.watched[handle] = node_id
        if handle not in self._cluster.alive:
            self.ended(handle, "its agent ended while the master was away")

    def find(self) -> list[FoundNode]:
        launched = [n for n in self._cluster.alive.values() if n.launched_as >= 0]
        return [FoundNode(n.launched_as, n.node_rank, n.name) for n in launched]

    def kill(self, handle: str) -> None:
        doomed = self._cluster.alive.get(handle)
        if doomed is not None:
            delay = self._cluster.program.delays.notice
            self._cluster.time.after(delay, doomed.end, "killed by SIGKILL")
        else:
            self.ended(handle, "it was called off before its start")

    def ended(self, handle: str, reason: str) -> None:
        """Report the end of a node to the master, which is given."""
        node_id = self.watched.pop(handle, None)
        if node_id is not None:
            delay = self._cluster.program.delays.notice
            self._cluster.time.after(delay, self._master.platform.on_node_exit, node_id, reason)


class SimulatedBrain:
    """A Brain that may know a similar past job, and plans no sizes; see `JobBrain`."""

    cluster = False

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def similar(self) -> Similar | None:
        return self._cluster.similar

    def measured(self, *_measurement: Any) -> None:
        """Do nothing."""


class MasterProcess:
    """One process of the real master, beside what it uses."""

    def __init__(self, cluster: Cluster, store: Store) -> None:
        self.journal = SimulatedJournal(store)
        self.history = History(cluster.event_file)
        self.master = Master(self.journal, self.history, lambda _not_before: cluster.time.loop.time)
        self.platform = SimulatedPlatform(cluster, self.master)
        self.links: list[Link] = []
        self.alive = True
        self._cluster = cluster
        self._tasks: list[asyncio.Task[Any]] = []

    def begin(self) -> None:
        """Start with the first input."""
        cluster, master = self._cluster, self.master
        master.scaler.brain = SimulatedBrain(cluster)
        handle, handled = master.ledger.handle, len(cluster.journal)

        def checked(event: inputs.Input, now: float, machine: JobMachine) -> None:
            handle(event, now, machine)
            nonlocal handled
            handled += 1
            if handled % cluster.validate_every == 0:
                try:
                    machine.validate()
                    master.ledger.validate()
                except AssertionError as error:
                    cluster.time.fail({"exception": error})
                    raise

        master.ledger.handle = checked
        master.begin(cluster.job, "", self.platform)
        self._tasks.append(cluster.time.loop.create_task(self._run()))

    async def _run(self) -> None:
        ended = await self.master.run()
        self.master.close()
        if self.alive:
            self._cluster.master_left(ended)

    def die_after(self, commands: int, died: Callable[[], None]) -> None:
        """Die at the next input, after carrying out only some of its commands."""
        machine = self.master.machine
        handle = machine.handle

        def last(event: inputs.Input, now: float) -> list[inputs.Command]:
            found = handle(event, now)[:commands]
            self.journal.dead = True
            self._cluster.time.loop.call_soon(died)
            return found

        machine.handle = last

    def die(self) -> None:
        """End as by SIGKILL."""
        self.alive = False
        self.journal.dead = True
        self.platform.watched.clear()
        self.history.close()
        for task in self._tasks:
            task.cancel()
        for link in self.links:
            link.lose_master()


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
        time: Time | None = None,
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
            time: The clock of a larger simulation, which closes it; it has the seed.
        """
        self.time, self._owns_time = time or Time(seed), time is None
        self.job = job
        self.validate_every = validate_every
        self.nodes: list[SimulatedNode] = []
        """Every node that was ever started, in order."""
        self.alive: dict[str, SimulatedNode] = {}
        """Nodes whose agents are alive, by name, in order."""
        self.program = Program(job, self.time, delays or Delays(), steps)
        self.program.ask = self._ask
        self.similar: Similar | None = None
        """Similar past job that the planner receives."""
        self._nproc = nproc
        self._store = Store()
        self._disk_lost = self._moments_lost = False
        self._crashing = False
        self._events = os.memfd_create("events")
        self.event_file = Path(f"/proc/self/fd/{self._events}")
        _open.append(self)
        self.process = MasterProcess(self, self._store)
        """The master's latest process."""
        with self.time.inside():
            self.process.begin()
        for _ in range(nodes):
            self.add_node()

    # ---- time

    def run(self, seconds: float) -> None:
        """Advance time by ``seconds``."""
        self.time.run(self.time.now + seconds)

    def run_until(self, condition: Callable[[], bool], limit: float = 3600.0) -> None:
        """Advance time until ``condition`` holds; check it after each happening.

        Raises:
            AssertionError: it does not hold within ``limit`` seconds.
        """
        if not condition():
            self.time.run(self.time.now + limit, condition)
        assert condition(), f"not within {limit:g} s: {self.describe()}"

    def finish(self, limit: float = 86_400.0) -> Outcome:
        """Advance time until the job has ended and every node has left; return the outcome.

        Raises:
            AssertionError: the job has not ended within ``limit`` seconds, or the nodes do not leave.
        """
        self.run_until(lambda: self.machine.outcome is not None, limit)
        self.run_until(lambda: not self.alive, 600.0)
        assert self.machine.outcome is not None
        return self.machine.outcome

    def close(self) -> None:
        """Release what the simulation holds."""
        if self in _open:
            _open.remove(self)
        if self._owns_time:
            self.time.close()
        self.process.history.close()
        os.close(self._events)

    # ---- queries

    @property
    def master(self) -> Master:
        """The latest master."""
        return self.process.master

    @property
    def master_away(self) -> bool:
        """True while no master lives."""
        return not self.process.alive

    @property
    def machine(self) -> JobMachine:
        """The master's state."""
        return self.master.machine

    @property
    def ledger(self) -> Ledger:
        """The master's ledger."""
        return self.master.ledger

    @property
    def events(self) -> list[Event]:
        """Content of the job's event file."""
        return self.process.history.events

    @property
    def journal(self) -> list[tuple[float, inputs.Input]]:
        """Every input of the job machine with its time."""
        return self._store.entries

    @property
    def epoch(self) -> int:
        """The epoch of the latest master."""
        return self._store.epoch

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
        return self.start_node(node_rank, -1)

    def kill_worker(
        self,
        node: SimulatedNode,
        kind: FailureKind = FailureKind.SIGNAL,
        echoes: int = 0,
        local_rank: int | None = None,
    ) -> None:
        """End a worker, any one without a number: by SIGKILL, an exception, exit code 3, or a failed start.

        Workers of ``echoes`` other nodes then fail too, because they lose the connection to it.
        """
        others = node.peers()
        node.workers.fail(kind, local_rank, **_DETAILS[kind])
        for other in self.time.random.sample(others, min(echoes, len(others))):
            delay = self.program.delays.message
            self.time.after(delay, lambda n=other: n.workers.fail(FailureKind.EXCEPTION, **_ECHO))

    def break_device(self, node: SimulatedNode) -> None:
        """Fail a worker through its device, with a line in the kernel's log of the node.

        If the node joined on its own and is dismissed, another one joins from another host.
        """
        revive = self.program.delays.revive
        if node.alive and node.launched_as < 0 and revive is not None:
            self.time.after(revive, self._stand_in, node)
        node.workers.fail(FailureKind.EXCEPTION, **_BROKEN_DEVICE)

    def kill_agent(self, node: SimulatedNode) -> None:
        """Kill an agent and its workers with SIGKILL."""
        revive = self.program.delays.revive
        if node.alive and node.launched_as < 0 and revive is not None:
            self.time.after(revive, self._come_again, node.node_rank)
        node.end("its agent was killed by SIGKILL")

    def stop_agent(self, node: SimulatedNode) -> None:
        """Send an agent SIGTERM, as when its machine is drained."""
        revive = self.program.delays.revive
        if node.alive and node.launched_as < 0 and revive is not None:
            self.time.after(revive, self._come_again, node.node_rank)
        node.stop()

    def disconnect(self, node: SimulatedNode, seconds: float = 0.0) -> None:
        """Break a stream; the agent cannot reconnect before ``seconds`` have passed."""
        node.unreachable_until = self.time.now + seconds
        if node.link is not None:
            node.link.cut()

    def silence(self, node: SimulatedNode, seconds: float) -> None:
        """Stop an agent's process for ``seconds``; its workers keep running."""
        node.stopped_until = max(node.stopped_until, self.time.now + seconds)

    def kill_master(self, away: float = 1.0, *, after_commands: int | None = None) -> None:
        """Kill the master; another one takes over ``away`` seconds later.

        With ``after_commands``, the master dies at its next input: it journals and handles the input, but
        carries out only that many of the resulting commands.
        """
        if self.master_away or self._crashing:
            return
        if after_commands is not None:
            self._crashing = True
            self.process.die_after(after_commands, lambda: self._die(away))
        else:
            self._die(away)

    def _die(self, away: float) -> None:
        self._crashing = False
        self.process.die()
        self.time.after(away, self._take_over)

    def lose_disk(self, away: float = 1.0) -> None:
        """Kill the master and delete its journal; its successor learns only from its nodes and platform.

        The file with the events is kept, as on a separate disk.
        """
        self.kill_master(away)
        self._disk_lost = True

    def lose_moments(self, entries: int, away: float = 1.0) -> None:
        """Kill the master and delete the latest entries of its journal, as a crash of its machine may."""
        if entries and not self.master_away and not self._crashing:
            self._die(away)
            del self._store.entries[max(1, len(self._store.entries) - entries) :]
            self._moments_lost = True

    def stop(self, exit_code: int = ExitCode.STOPPED) -> None:
        """Stop the job as a user would."""
        self._submit(StopRequest("stopped", exit_code))

    def scale(
        self, nodes: int, source: Literal["user", "plan"] = "user", role: str = WORKER
    ) -> None:
        """Ask for another number of managed nodes of a role."""
        if not self.master_away:
            with self.time.inside(), contextlib.suppress(FencedError):
                self.master.platform.ask_scale(nodes, "a test", source, role)

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
        """Give the master an input, as its shell would."""
        if not self.master_away:
            with self.time.inside(), contextlib.suppress(FencedError):
                self.master.submit(event)

    def _take_over(self) -> None:
        """Start another master process, which restores its state from the journal."""
        if self._disk_lost:
            self._begin_anew()
            return
        last, now = self.process, self.time.now
        self.process = MasterProcess(self, self._store)
        if self._moments_lost:
            self._moments_lost = False
            self.process.begin()
            return
        goodputs = [each.master.ledger.goodput(now) for each in (last, self.process)]
        assert goodputs[0] == goodputs[1], "the ledger does not replay"
        assert self.machine == last.master.machine, "the journal does not give the state back"
        recorded = last.history.events
        assert self.events[: len(recorded)] == recorded, "the journal tells another story"
        self.process.begin()

    def _begin_anew(self) -> None:
        """Start a master process with an empty journal."""
        over = self.machine.outcome
        self._disk_lost = False
        self._store = Store()
        self.process = MasterProcess(self, self._store)
        self.process.begin()
        if over is not None:
            self._submit(StopRequest(over.reason, over.exit_code))

    def master_left(self, ended: bool) -> None:
        """Act as the supervisor of a master that has left: restart it, unless the job has ended."""
        if not ended:
            self._die(1.0)

    # ---- nodes

    def start_node(self, node_rank: int, node_id: int) -> SimulatedNode:
        """Start a node that joins on its own, or with the id with which it was launched."""
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
        self.alive[node.name] = node
        return node

    def _ended(self, node: SimulatedNode, reason: str) -> None:
        del self.alive[node.name]
        self.process.platform.ended(node.name, reason)

    def _come_again(self, node_rank: int) -> None:
        if self.machine.outcome is None:
            self.add_node(node_rank)

    def _stand_in(self, node: SimulatedNode) -> None:
        if node.alive and node.machine.outcome is None:
            return  # the node was kept
        self._come_again(node.node_rank)

    def _ask(self, request: MembershipRequest) -> Any:
        """Return the master's reply to what a worker asks by way of its agent; None if it is away."""
        if self.master_away or self._crashing:
            return None
        return self.master.requests.begin(request)

    def _dial(self, node: SimulatedNode) -> Link:
        if self.master_away or self.time.now < node.unreachable_until:
            raise InfrastructureError("The master cannot be reached.")
        link = Link(self.time, self.program.delays, self.master)
        self.process.links.append(link)
        return link


_open: list[Cluster] = []


def close_all() -> None:
    """Close the clusters of a test."""
    while _open:
        _open[-1].close()
