"""Drivers for the state machines: inputs in, commands out, invariants checked after every input."""

from __future__ import annotations

from typing import Any

from dlrover.master.diagnosis_rules import built_in
from dlrover.master.machine import inputs
from dlrover.master.machine.goodput.ledger import Ledger
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.state import Phase
from dlrover.rpc.messages import Hello, Join
from dlrover.spec.events import EventBody
from dlrover.spec.failure import Failure
from dlrover.spec.job import JobSpec
from dlrover.spec.node import NodeStatus
from dlrover.spec.world import Offer


class JobDriver:
    """Job machine with a clock that the caller sets.

    Node numbers name the nodes: the agent of node 2 has the unique id ``agent 2``.
    """

    def __init__(self, min_nodes: int = 1, max_nodes: int = 3, **spec: Any) -> None:
        """Submit a job at time 0; ``spec`` holds further fields of its `JobSpec`."""
        self.now = 0.0
        self.machine = JobMachine()
        self.ledger = Ledger()
        self.events: list[EventBody] = []
        """All emitted events."""
        job = JobSpec(name="job", min_nodes=min_nodes, max_nodes=max_nodes, **spec)
        self.submitted = self.give(inputs.Submitted(job, "/jobs/1", rules=built_in()))
        """Commands from the submission."""

    @classmethod
    def running(
        cls, count: int = 3, min_nodes: int = 1, max_nodes: int = 3, **spec: Any
    ) -> JobDriver:
        """Return a job whose unmanaged nodes 0, 1, ... joined at time 10 and run round 1."""
        driver = cls(min_nodes, max_nodes, **spec)
        for node in range(count):
            driver.connect(node)
        driver.join(*range(count), at=10.0)
        if count < max_nodes:
            driver.give(inputs.DeadlinePassed(), at=driver.machine.deadline())
        assert driver.machine.state.phase is Phase.RUNNING
        return driver

    @classmethod
    def launched(cls, min_nodes: int = 3, max_nodes: int = 3, **spec: Any) -> JobDriver:
        """Return a running job with as many nodes as it may have, launched by the platform."""
        driver = cls(min_nodes, max_nodes, managed_nodes=max_nodes, **spec)
        for node in range(max_nodes):
            driver.give(inputs.NodePlaced(node, f"process {node}"))
            driver.connect(node, claims=node)
        driver.join(*range(max_nodes), at=10.0)
        assert driver.machine.state.phase is Phase.RUNNING
        return driver

    def give(self, *events: inputs.Input, at: float | None = None) -> list[inputs.Command]:
        """Give the machine inputs, record their events, and return the last one's other commands."""
        self.now = self.now if at is None else at
        commands: list[inputs.Command] = []
        for event in events:
            commands = list(self.machine.handle(event, self.now))
            self.machine.validate()
            self.ledger.handle(event, self.now, self.machine)
            self.ledger.validate()
            self.events += [c.body for c in commands if isinstance(c, inputs.Emit)]
        return [c for c in commands if not isinstance(c, inputs.Emit)]

    def connect(self, node: int, *, claims: int = -1, runs: int = 0) -> list[inputs.Command]:
        """Open an agent's stream; the agent claims a node id and runs the workers of a round."""
        hello = Hello(f"agent {node}", claims, -1, f"host{node}", runs)
        return self.give(hello)

    def join(
        self, *nodes: int, round_: int | None = None, at: float | None = None
    ) -> list[inputs.Command]:
        """Join nodes to a round with two workers each; by default, the next round."""
        number = self.machine.rendezvous.next_round if round_ is None else round_
        offers = {node: Offer(2, f"host{node}", 29400 + node) for node in nodes}
        return self.give(*(inputs.Reported(i, Join(number, offers[i])) for i in nodes), at=at)

    def fail(
        self, node: int, details: dict[str, Any], *, at: float | None = None, **facts: Any
    ) -> list[inputs.Command]:
        """Fail a node's first worker in the latest world; ``details`` and ``facts`` go into the record."""
        self.now = self.now if at is None else at
        record: dict[str, Any] = {
            "id": f"node {node}: {details}",
            "node_id": node,
            "rank": 2 * node,
            "local_rank": 0,
            "round": self.machine.rendezvous.last_round,
            "time": self.now,
        }
        failure = Failure(**(record | details | facts))
        return self.give(self.machine.state.table.failed(failure))

    def spent(self) -> dict[str, float]:
        """Return all nodes' time until now in seconds, by cause, without zeros."""
        seconds = self.ledger.goodput(self.now).seconds
        return {cause: spent for cause, spent in seconds.items() if spent}

    def emitted(self, kind: type[EventBody]) -> list[EventBody]:
        """Return the events of one kind."""
        return [body for body in self.events if isinstance(body, kind)]

    def status(self, node: int) -> NodeStatus:
        """Return a node's status."""
        return self.machine.nodes[node].status
